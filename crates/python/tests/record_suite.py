"""`poorwill.record` over PyTorch's history: what is written, and what is left as it was.

`test_suites.py` runs it over the fakes, and on a GPU.
"""

import importlib
import logging
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import poorwill
import pytest
from helpers import MIB
from poorwill import _record

torch: Any = importlib.import_module("torch")
history: Any = torch.cuda.memory

pytestmark = pytest.mark.gpu

KINDS = {dict, list, tuple, str, int, float, bool, bytes, type(None)}


class Builtins(pickle.Unpickler):
    """Reads a file that names no code, as `poorwill replay` does."""

    def find_class(self, module: str, name: str) -> Any:
        raise AssertionError(f"the record names {module}.{name}")


@pytest.fixture(autouse=True)
def history_is_off() -> Iterator[None]:
    torch.cuda.init()
    torch.cuda.empty_cache()
    assert not is_on()
    yield
    assert not is_on()
    torch.cuda.empty_cache()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "load.pickle"


def is_on() -> bool:
    return bool(torch._C._cuda_isHistoryEnabled())


def turn_off() -> None:
    history._record_memory_history(enabled=None)


def taken(mib: int, device: int = 0) -> Any:
    return torch.empty(mib * MIB, dtype=torch.uint8, device=f"cuda:{device}")


def read(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        snapshot: dict[str, Any] = Builtins(file).load()
    left: list[Any] = [snapshot]
    while left:
        value = left.pop()
        assert type(value) in KINDS, type(value)
        if isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            left += value
    assert os.listdir(path.parent) == [path.name]
    return snapshot


def events(path: Path, device: int = 0) -> list[tuple[str, int]]:
    """What came of large blocks: what is done, and the bytes."""
    trace = read(path)["device_traces"][device]
    return [
        (entry["action"], entry["size"])
        for entry in trace
        if entry["size"] >= MIB and entry["action"] != "snapshot"
    ]


def notes(error: BaseException, caplog: pytest.LogCaptureFixture) -> str:
    """What was added to an error; before Python 3.11 it is in the log."""
    return " ".join(getattr(error, "__notes__", [])) + caplog.text


def test_a_record_has_each_event(path: Path) -> None:
    with poorwill.record(path):
        kept = taken(40)
        gone = taken(24)
        del gone
        torch.cuda.empty_cache()
    assert events(path) == [
        *(("segment_alloc", 40 * MIB), ("alloc", 40 * MIB)),
        *(("segment_alloc", 24 * MIB), ("alloc", 24 * MIB)),
        *(("free_requested", 24 * MIB), ("free_completed", 24 * MIB)),
        ("segment_free", 24 * MIB),
    ]
    snapshot = read(path)
    [segment] = [each for each in snapshot["segments"] if each["address"] == kept.data_ptr()]
    assert segment["total_size"] == 40 * MIB
    alloc = next(entry for entry in snapshot["device_traces"][0] if entry["action"] == "alloc")
    assert alloc["addr"] == kept.data_ptr()
    assert any(frame["name"] == "taken" for frame in alloc["frames"])
    # A call of `empty_cache` is seen by its stack alone.
    freed = next(entry for entry in snapshot["device_traces"][0] if entry["action"] == "segment_free")
    assert {"empty_cache", "test_a_record_has_each_event"} <= {frame["name"] for frame in freed["frames"]}
    assert "max_split_size" in snapshot["allocator_settings"]


def test_a_record_has_what_a_pool_allocates(path: Path) -> None:
    arena = poorwill.arena("cuda:0", "recorded", limit="256MiB")
    with arena.pool("weights"):
        # The first scope tests PyTorch with allocations of its own, and cuBLAS takes what it keeps.
        pass
    with poorwill.record(path), arena.pool("weights"):
        kept = taken(40)
        gone = taken(64)
        del gone
    for event in (("alloc", 40 * MIB), ("alloc", 64 * MIB), ("free_completed", 64 * MIB)):
        assert events(path).count(event) == 1
    [segment] = [each for each in read(path)["segments"] if each["address"] == kept.data_ptr()]
    assert tuple(segment["segment_pool_id"]) != (0, 0)
    del kept
    arena.close()


class Phase(str, Enum):
    """Names as programs have them."""

    SERVE = "serve"


def test_phases_are_on_the_clock_of_the_events(path: Path) -> None:
    with poorwill.record(path) as recorded:
        kept = [taken(24)]
        recorded.phase("load")
        kept.append(taken(40))
        recorded.phase("nothing")
        recorded.phase(Phase.SERVE)
        kept.append(taken(56))
    snapshot = read(path)
    assert list(snapshot["poorwill"]) == ["phases", "cards"]
    load, nothing, serve = snapshot["poorwill"]["phases"]
    assert [load["name"], nothing["name"], serve["name"]] == ["load", "nothing", "serve"]
    at = {
        entry["size"]: entry["time_us"]
        for entry in snapshot["device_traces"][0]
        if entry["action"] == "alloc" and entry["size"] >= MIB
    }
    times = [at[24 * MIB], load["time_us"], at[40 * MIB], nothing["time_us"], serve["time_us"], at[56 * MIB]]
    assert times == sorted(times)
    # Those of another record are none of this one.
    with poorwill.record(path):
        pass
    assert read(path)["poorwill"]["phases"] == []
    del kept


@pytest.mark.parametrize(
    ("name", "error"),
    [
        *((name, TypeError) for name in (None, 3, b"load")),
        *((name, ValueError) for name in ("", " ", "a\nb", "\x1b[2J", "\ud800")),
    ],
)
def test_names_of_phases_that_cannot_be(path: Path, name: Any, error: type[Exception]) -> None:
    with poorwill.record(path) as recorded:
        with pytest.raises(error, match="a phase's name is"):
            recorded.phase(name)
        recorded.phase("the load, 100 %")
    assert [phase["name"] for phase in read(path)["poorwill"]["phases"]] == ["the load, 100 %"]


def test_the_card_is_what_pytorch_does_not_hold(path: Path) -> None:
    cards, kept = [], []
    for mib in (24, 200):
        with poorwill.record(path):
            kept.append(taken(mib))
        card = read(path)["poorwill"]["cards"][0]
        assert (card["device"], card["total_bytes"]) == (0, torch.cuda.mem_get_info()[1])
        cards.append(card["taken_bytes"])
    assert abs(cards[1] - cards[0]) < 100 * MIB
    assert 0 <= cards[0] < torch.cuda.mem_get_info()[1] - 224 * MIB


def test_a_card_that_says_nothing_leaves_the_record(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(ordinal: int) -> None:
        raise RuntimeError(f"cuda:{ordinal} is lost")

    monkeypatch.setattr(history, "mem_get_info", fail)
    with poorwill.record(path):
        taken(24)
    assert read(path)["poorwill"]["cards"] == []
    assert "does not say how large the GPU is: cuda:0 is lost" in caplog.text
    assert events(path)


def test_phases_are_of_the_block(path: Path) -> None:
    with poorwill.record(path) as recorded:
        pass
    assert recorded.path == path
    with pytest.raises(poorwill.PoorwillError, match="phase 'load': nothing is recorded to") as refused:
        recorded.phase("load")
    assert f"to {path}: name phases within the record's block" in str(refused.value)
    with poorwill.record(path), pytest.raises(poorwill.PoorwillError, match="nothing is recorded"):
        recorded.phase("load")
    assert read(path)["poorwill"]["phases"] == []


def test_a_load_that_runs_out_of_memory_is_recorded(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    total = torch.cuda.mem_get_info()[1] // MIB
    kept = []

    def load() -> None:
        kept.append(taken(40))
        taken(2 * total)

    with pytest.raises(torch.OutOfMemoryError) as refused, poorwill.record(path):
        load()
    assert ("alloc", 40 * MIB) in events(path)
    assert events(path)[-1] == ("oom", 2 * total * MIB)
    oom = next(entry for entry in read(path)["device_traces"][0] if entry["action"] == "oom")
    assert oom["device_free"] > 0
    assert f"`poorwill replay {path}` says what would fit" in notes(refused.value, caplog)


def test_an_arena_that_is_full_says_what_to_record_and_then_where_it_is(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arena = poorwill.arena("cuda:0", "full", limit="64MiB")
    advice = "record the load with poorwill.record(PATH), and ask `poorwill replay PATH` what would fit"
    with pytest.raises(torch.OutOfMemoryError) as refused, arena.pool("weights"):
        taken(128)
    added = getattr(refused.value, "__notes__", refused.value.args[1:])
    assert added[0].startswith("poorwill: cannot allocate 128 MiB for `weights`")
    assert list(added[1:]) == [advice]
    with pytest.raises(torch.OutOfMemoryError) as again, poorwill.record(path), arena.pool("weights"):
        taken(128)
    said = " ".join(getattr(again.value, "__notes__", map(str, again.value.args))) + caplog.text
    assert "poorwill: cannot allocate 128 MiB" in said
    assert advice not in said
    assert f"the load is recorded in {path}" in said
    assert ("oom", 128 * MIB) in events(path)
    arena.close()


@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_any_error_goes_on_with_a_record(
    path: Path, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text("an earlier one")
    kept = []

    def load() -> None:
        kept.append(taken(40))
        raise error

    with pytest.raises(type(error)) as raised, poorwill.record(path):
        load()
    assert raised.value is error
    assert f"poorwill replay {path}" in notes(error, caplog)
    assert ("alloc", 40 * MIB) in events(path)


def test_a_record_is_complete_or_not_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text("an earlier one")

    def dump(snapshot: Any, file: Any, **_: Any) -> None:
        file.write(b"half")
        assert path.read_text() == "an earlier one"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pickle, "dump", dump)
    with pytest.raises(poorwill.PoorwillError, match=r"could not be written: .*No space left") as refused:
        with poorwill.record(path):
            pass
    assert str(path) in str(refused.value)
    assert not is_on()
    with pytest.raises(ZeroDivisionError) as raised, poorwill.record(path):
        raise ZeroDivisionError
    if sys.version_info >= (3, 11):
        assert "No space left" in raised.value.__notes__[0]
        assert "replay" not in raised.value.__notes__[0]
    assert path.read_text() == "an earlier one"
    assert os.listdir(path.parent) == [path.name]
    monkeypatch.undo()
    with poorwill.record(path):
        kept = taken(40)
    assert ("alloc", 40 * MIB) in events(path)
    del kept


def test_a_snapshot_that_fails_leaves_no_history_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("no snapshot for this test")

    monkeypatch.setattr(history, "_snapshot", fails)
    with pytest.raises(poorwill.PoorwillError, match="no snapshot for this test"), poorwill.record(path):
        pass
    assert not is_on()
    assert os.listdir(path.parent) == []


def test_one_gpu_alone(path: Path) -> None:
    kept = taken(24)
    with poorwill.record(path, device="cuda:0"):
        other = taken(40)
    assert {segment["device"] for segment in read(path)["segments"]} == {0}
    assert ("alloc", 40 * MIB) in events(path)
    if torch.cuda.device_count() > 1:
        with poorwill.record(path, device=1):
            more = [taken(40), taken(48, device=1)]
        assert events(path, 0) == []
        assert ("alloc", 48 * MIB) in events(path, 1)
        assert {segment["device"] for segment in read(path)["segments"]} == {1}
        with poorwill.record(path):
            more += [taken(56), taken(64, device=1)]
        assert ("alloc", 56 * MIB) in events(path, 0)
        assert ("alloc", 64 * MIB) in events(path, 1)
        del more
    del kept, other


@pytest.mark.parametrize("stacks", ["python", "all"])
def test_both_kinds_of_stacks(path: Path, stacks: Any) -> None:
    with poorwill.record(path, stacks=stacks):
        kept = taken(40)
    assert ("alloc", 40 * MIB) in events(path)
    del kept


# Another's history


def test_anothers_history_stays_on(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    history._record_memory_history(max_entries=1000)
    before = taken(24)
    with poorwill.record(path, max_entries=1):
        kept = taken(40)
    assert is_on()
    assert "is on already, and stays as it is" in caplog.text
    # As many events as its owner keeps, also from before.
    assert events(path)[-4:] == [
        *(("segment_alloc", 24 * MIB), ("alloc", 24 * MIB)),
        *(("segment_alloc", 40 * MIB), ("alloc", 40 * MIB)),
    ]
    with pytest.raises(ZeroDivisionError), poorwill.record(path):
        raise ZeroDivisionError
    assert is_on()
    more = taken(56)
    actions = [entry["action"] for entry in history._snapshot()["device_traces"][0]]
    assert actions.count("alloc") == 3
    turn_off()
    del before, kept, more


def test_anothers_history_without_events_is_logged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    history._record_memory_history(enabled="state")
    with poorwill.record(path):
        kept = [taken(40), taken(24)]
    assert is_on()
    assert "Turn it off before" in caplog.text
    turn_off()
    del kept


def test_a_history_that_is_turned_off_in_the_block_is_logged(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with poorwill.record(path):
        kept = taken(40)
        turn_off()
    assert "was turned off in the block" in caplog.text
    read(path)
    del kept


def test_what_a_record_lacks_is_logged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "poorwill.record"):
        with poorwill.record(path, max_entries=8):
            for _ in range(8):
                taken(24)
        assert "has only the last 8 events of cuda:0" in caplog.text
        assert "a larger max_entries, or with POORWILL_RECORD a model of fewer layers" in caplog.text
        assert len(read(path)["device_traces"][0]) == 8
        caplog.clear()
        with poorwill.record(path):
            kept = taken(24)
        assert caplog.text == ""
    del kept


# Refusals: each before the block


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"max_entries": 0}, ValueError, "max_entries is 0; a record keeps at least 1 event"),
        ({"max_entries": -5}, ValueError, "max_entries is -5"),
        ({"max_entries": 1.5}, TypeError, "it is a number of events"),
        ({"max_entries": True}, TypeError, "it is a number of events"),
        ({"stacks": "c++"}, ValueError, 'it is "python" or "all"'),
        ({"device": "cpu"}, ValueError, "cpu"),
        ({"device": 99}, ValueError, "recording cuda:99: PyTorch finds"),
    ],
)
def test_arguments_that_cannot_be(path: Path, given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as refused, poorwill.record(path, **given):
        raise AssertionError("the block has begun")
    assert words in str(refused.value)
    assert os.listdir(path.parent) == []


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, kind, words in (
        (tmp_path / "nowhere" / "load.pickle", FileNotFoundError, "name a folder that is there and writable"),
        (tmp_path / "file" / "load.pickle", NotADirectoryError, "name a folder that is there and writable"),
        (tmp_path, FileExistsError, "it is no file"),
        (tmp_path / ("long" * 100), OSError, "name a folder that is there and writable"),
        # Nothing can be written there, by root neither.
        (Path("/proc/load.pickle"), OSError, "name a folder that is there and writable"),
    ):
        with pytest.raises(kind) as refused, poorwill.record(path):
            raise AssertionError("the block has begun")
        assert f"recording to {path}: " in str(refused.value)
        assert words in str(refused.value)
    with pytest.raises(FileExistsError), poorwill.record("/dev/null"):
        raise AssertionError("the block has begun")
    assert os.listdir(tmp_path) == ["file"]


def test_a_path_is_where_it_was_when_the_record_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    monkeypatch.chdir(tmp_path / "first")
    with poorwill.record("load.pickle"):
        monkeypatch.chdir(tmp_path / "second")
    read(tmp_path / "first" / "load.pickle")


def test_records_within_each_other_are_refused(path: Path, tmp_path: Path) -> None:
    said: list[str] = []

    def try_another() -> None:
        with pytest.raises(poorwill.PoorwillError) as refused, poorwill.record(tmp_path / "other.pickle"):
            raise AssertionError("the block has begun")
        said.append(str(refused.value))

    with poorwill.record(path):
        try_another()
        thread = threading.Thread(target=try_another)
        thread.start()
        thread.join()
        kept = taken(40)
    assert len(said) == 2
    assert all(f"the record to {path} has not ended" in each for each in said)
    assert ("alloc", 40 * MIB) in events(path)
    # One after the other is fine, also by the same object.
    recording = poorwill.record(path)
    for _ in range(2):
        with recording:
            pass
    del kept


@pytest.mark.parametrize("backend", ["cudaMallocAsync", "pluggable"])
def test_another_allocator_has_no_history(path: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    with pytest.raises(poorwill.PoorwillError, match=f"{backend} here, which has no history"):
        with poorwill.record(path):
            raise AssertionError("the block has begun")


def test_a_pytorch_that_cannot_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, value, words in (
        (torch, "__version__", "2.3.1+cu121", "PyTorch 2.3.1.* is too old: install torch 2.4 or later"),
        (torch.cuda, "is_available", lambda: False, "PyTorch finds no GPU here"),
        (history, "_record_memory_history", fails_to_record, "keeps no history here: not supported"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            with pytest.raises(poorwill.PoorwillError, match=words), poorwill.record(path):
                raise AssertionError("the block has begun")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        with pytest.raises(
            poorwill.PoorwillError, match=r"cannot be imported .* install torch 2\.4 or later"
        ):
            with poorwill.record(path):
                raise AssertionError("the block has begun")
    assert os.listdir(path.parent) == []
    with poorwill.record(path):
        pass
    read(path)


class Owner:
    """What a record may end with."""


def test_a_record_ends_with_its_owner(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owners = [Owner()]
    recording = _record.Recording(path)
    recording.begin(owners[0])
    recording.write()
    was = path.read_bytes()
    owners.clear()
    assert not is_on()
    # What is called of it afterwards changes nothing.
    recording.finish(None)
    assert path.read_bytes() == was

    # The last reference may go anywhere, also in the midst of the record's own calls.
    def dump(*args: Any, **kwargs: Any) -> None:
        owners.clear()
        assert is_on()
        pickle_dump(*args, **kwargs)

    pickle_dump = pickle.dump
    monkeypatch.setattr(pickle, "dump", dump)
    owners.append(Owner())
    recording.begin(owners[0])
    kept = taken(40)
    recording.write()
    assert not is_on()
    assert ("alloc", 40 * MIB) in events(path)
    monkeypatch.undo()
    with poorwill.record(path):
        pass
    del kept


def test_an_owner_that_goes_raises_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    owners = [Owner()]
    recording = _record.Recording(path)
    recording.begin(owners[0])
    with monkeypatch.context() as patch:
        patch.setattr(history, "_record_memory_history", fails_to_record)
        owners.clear()
    assert said == []
    turn_off()
    with poorwill.record(path):
        pass


def fails_to_record(*_: Any, **__: Any) -> None:
    raise RuntimeError("not supported")


def test_a_child_writes_no_record_of_its_parent(path: Path) -> None:
    recording = poorwill.record(path)
    with recording:
        child = os.fork()
        if child == 0:
            recording.__exit__(None, None, None)
            os._exit(0 if os.listdir(path.parent) == [] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    read(path)
