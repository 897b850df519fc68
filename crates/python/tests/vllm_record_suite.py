"""What a rank's start allocates, recorded phase by phase; `test_vllm_suites.py` runs it."""

import gc
import importlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import poorwill
import pytest
from vllm_engines import MIB, Engine, Shape, Start

torch: Any = importlib.import_module("torch")

PHASES = ["load", "profile", "cache", "capture"]
# Sizes that nothing else has.
SHAPE = Shape(weights=(33 * MIB, 21 * MIB), transient=MIB)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "made" / "records"
    monkeypatch.setenv("POORWILL_RECORD", str(folder))
    return folder


@pytest.fixture
def recording(start: Start) -> Iterator[Any]:
    """The module that records, which ends what a test began."""
    recording = importlib.import_module("poorwill.vllm._recording")
    yield recording
    if recording._start is not None:
        recording._start[1].finish(None)
    assert not is_on()


@pytest.fixture
def records(start: Start, recording: Any) -> Start:
    """Makes engines whose starts are recorded, as where vLLM's worker is imported with the hook."""
    recording.install(importlib.import_module("vllm.v1.worker.gpu_worker"))
    return start


def is_on() -> bool:
    return bool(torch._C._cuda_isHistoryEnabled())


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def phases(path: Path) -> dict[str, list[tuple[str, int]]]:
    """What came of each phase, in their order."""
    snapshot = pickle.loads(path.read_bytes())
    found: dict[str, list[tuple[str, int]]] = {}
    marks = [(mark["name"], mark["time_us"]) for mark in snapshot["poorwill"]["phases"]]
    for (name, begin), (_, end) in zip(marks, [*marks[1:], ("", float("inf"))], strict=True):
        entries = [entry for entry in snapshot["device_traces"][0] if begin <= entry["time_us"] < end]
        found[name] = [(entry["action"], entry["size"]) for entry in entries]
    return found


def events(path: Path) -> list[tuple[str, int]]:
    trace = pickle.loads(path.read_bytes())["device_traces"][0]
    return [(entry["action"], entry["size"]) for entry in trace]


def test_a_start_is_one_file_with_its_phases(records: Start, folder: Path) -> None:
    path = folder / "rank0.pickle"
    engine = records(SHAPE).load()
    # After each phase there is what came so far.
    assert list(phases(path)) == PHASES[:1]
    between = torch.empty(37 * MIB, dtype=torch.uint8, device="cuda:0")
    engine.start_cache()
    assert list(phases(path)) == PHASES[:3]
    assert is_on()
    engine.worker.compile_or_warm_up_model()
    assert not is_on()
    assert names(folder) == {path.name}
    found = phases(path)
    assert list(found) == PHASES
    for size in SHAPE.weights:
        assert [name for name in PHASES if ("alloc", size) in found[name]] == ["load"]
    assert ("alloc", between.nbytes) in found["load"]
    assert ("alloc", SHAPE.activations) in found["profile"]
    caches = [tensor.nbytes for tensor in engine.runner.every_cache()]
    assert all(("alloc", size) in found["cache"] for size in caches)
    assert events(path) == [event for name in PHASES for event in found[name]]
    # A call after the start is none of it.
    was = path.read_bytes()
    engine.worker.compile_or_warm_up_model()
    assert path.read_bytes() == was
    # What sleeps and wakes is not affected.
    engine.use_cache()
    engine.worker.sleep(1)
    engine.worker.wake_up()
    assert engine.is_awake()


def test_vllms_own_worker_is_recorded(records: Start, folder: Path) -> None:
    gpu_worker = importlib.import_module("vllm.v1.worker.gpu_worker")
    engine = records(SHAPE)
    model = engine.config.model_config
    model.enable_sleep_mode = model.enable_cumem_allocator = False
    worker = gpu_worker.Worker(engine.config, 0, 3, "nowhere")
    worker.init_device()
    worker.load_model()
    assert names(folder) == {"rank3.pickle"}
    assert ("alloc", SHAPE.weights[0]) in events(folder / "rank3.pickle")
    worker.__dict__.clear()


class Worker:
    """One that allocates, and has not all that is recorded."""

    def __init__(self, rank: int, engine: int = 0) -> None:
        self.rank = rank
        parallel = SimpleNamespace(data_parallel_index=engine) if engine else SimpleNamespace()
        self.vllm_config = SimpleNamespace(parallel_config=parallel)

    def load_model(self, mib: int = 20) -> Any:
        return torch.empty((mib + self.rank) * MIB, dtype=torch.uint8, device="cuda:0")

    def initialize_from_config(self, mib: int) -> int:
        return int(torch.empty(mib * MIB, dtype=torch.uint8, device="cuda:0").nbytes)


@pytest.fixture
def worker(recording: Any, folder: Path) -> type[Worker]:
    recorded: type[Worker] = type("Worker", (Worker,), {})
    module = ModuleType("gpu_worker")
    module.__dict__["Worker"] = recorded
    recording.install(module)
    return recorded


def test_ranks_and_engines_of_one_server_have_their_own_files(worker: type[Worker], folder: Path) -> None:
    for rank, engine, name in ((0, 0, "rank0"), (1, 0, "rank1"), (0, 2, "dp2-rank0")):
        starting = worker(rank, engine)
        kept = starting.load_model()
        # This vLLM has two of the four, and the second is the last one.
        assert is_on()
        assert starting.initialize_from_config(64) == 64 * MIB
        assert not is_on()
        found = phases(folder / f"{name}.pickle")
        assert list(found) == ["load", "cache"]
        assert ("alloc", kept.nbytes) in found["load"]
        assert ("alloc", 64 * MIB) in found["cache"]
        del kept
    assert names(folder) == {"rank0.pickle", "rank1.pickle", "dp2-rank0.pickle"}


def test_a_start_that_ends_between_phases_gives_way_to_the_next(worker: type[Worker], folder: Path) -> None:
    dead, starting = worker(0), worker(1)
    dead.load_model()
    kept = starting.load_model()
    dead.initialize_from_config(64)
    starting.initialize_from_config(48)
    assert list(phases(folder / "rank0.pickle")) == ["load"]
    found = phases(folder / "rank1.pickle")
    assert list(found) == ["load", "cache"]
    assert ("alloc", kept.nbytes) in found["load"]
    assert ("alloc", 48 * MIB) in found["cache"]


def test_a_dead_start_without_its_file_costs_the_next_nothing(
    worker: type[Worker], folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dead, starting = worker(0), worker(1)
    dead.load_model()
    dump, fails = pickle.dump, [True]

    def dump_once_in_vain(*args: Any, **kwargs: Any) -> None:
        if fails.pop():
            fails.append(False)
            raise OSError(28, "No space left on device")
        dump(*args, **kwargs)
        fails.append(False)

    monkeypatch.setattr(pickle, "dump", dump_once_in_vain)
    starting.load_model()
    starting.initialize_from_config(48)
    assert "without a record of the earlier start: " in caplog.text
    assert list(phases(folder / "rank1.pickle")) == ["load", "cache"]


@pytest.mark.parametrize("is_cycle", [False, True])
def test_a_record_ends_with_its_worker(
    worker: type[Worker], folder: Path, tmp_path: Path, is_cycle: bool
) -> None:
    dead: Any = worker(0)
    kept = dead.load_model()
    path = tmp_path / "mine.pickle"
    with pytest.raises(poorwill.PoorwillError, match="or drop the engine whose start it records"):
        poorwill.record(path).__enter__()
    was = (folder / "rank0.pickle").read_bytes()
    gc.disable()
    try:
        if is_cycle:
            dead.itself = dead
        del dead
        assert is_on() == is_cycle
        with poorwill.record(path):
            mine = torch.empty(29 * MIB, dtype=torch.uint8, device="cuda:0")
    finally:
        gc.enable()
    assert not is_on()
    assert (folder / "rank0.pickle").read_bytes() == was
    found = events(path)
    assert ("alloc", mine.nbytes) in found
    assert ("alloc", kept.nbytes) not in found


def test_later_starts_of_a_process_have_their_own_files(worker: type[Worker], folder: Path) -> None:
    sizes = [48, 56, 72]
    for size in sizes:
        starting = worker(0)
        starting.load_model()
        starting.initialize_from_config(size)
    for name, size in zip(["rank0", "rank0-2", "rank0-3"], sizes, strict=True):
        assert ("alloc", size * MIB) in phases(folder / f"{name}.pickle")["cache"]
    assert len(names(folder)) == 3


def test_a_file_of_another_process_is_replaced(worker: type[Worker], folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "rank0.pickle").write_text("another's")
    failing = worker(0)
    with pytest.raises(torch.OutOfMemoryError):
        failing.load_model(1 << 30)
    worker(0).load_model()
    assert names(folder) == {"rank0.pickle", "rank0-2.pickle"}
    assert ("oom", 1 << 50) in events(folder / "rank0.pickle")


def test_a_history_that_is_turned_off_leaves_what_came_before(
    worker: type[Worker], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    starting = worker(0)
    starting.load_model()
    was = (folder / "rank0.pickle").read_bytes()
    torch.cuda.memory._record_memory_history(None)
    starting.initialize_from_config(64)
    assert (folder / "rank0.pickle").read_bytes() == was
    assert "without a record of the cache: " in caplog.text
    assert "PyTorch's memory history was turned off meanwhile: the file has what came before" in caplog.text
    with poorwill.record(folder / "mine.pickle"):
        pass


def test_a_start_keeps_four_million_events(
    worker: type[Worker], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, given = torch.cuda.memory._record_memory_history, []

    def recorded(**settings: Any) -> None:
        given.append(settings)
        record(**settings)

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", recorded)
    starting = worker(0)
    starting.load_model()
    starting.initialize_from_config(64)
    assert [settings.get("max_entries") for settings in given] == [4_000_000, None]


def test_a_phase_that_fails_leaves_what_came_before(
    worker: type[Worker], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    starting = worker(0)
    kept = starting.load_model()
    with pytest.raises(torch.OutOfMemoryError) as refused:
        starting.initialize_from_config(1 << 30)
    assert not is_on()
    path = folder / "rank0.pickle"
    # Before Python 3.11 notes are in the log.
    assert f"poorwill replay {path}" in " ".join(getattr(refused.value, "__notes__", [])) + caplog.text
    found = phases(path)
    assert ("alloc", kept.nbytes) in found["load"]
    assert ("oom", 1 << 50) in found["cache"]


def test_a_load_that_does_not_fit_is_recorded(
    records: Start, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = records(Shape(weights=(64 * MIB, 80 * MIB), transient=MIB), POORWILL_BUDGET="128MiB")
    engine.worker.init_device()
    with pytest.raises(poorwill.BudgetError) as refused:
        engine.worker.load_model()
    path = folder / "rank0.pickle"
    said = str(refused.value)
    assert said.startswith("the weights do not fit in the 0.12 GiB")
    # Before Python 3.11 notes are in the log.
    assert f"`poorwill replay {path}` says what would fit" in said + caplog.text
    assert "POORWILL_RECORD" not in said
    assert "poorwill.record(PATH)" not in said
    assert ("oom", 80 * MIB) in events(path)
    assert not is_on()


def started(engine: Engine) -> None:
    engine.start()
    engine.worker.sleep(1)
    engine.worker.wake_up()
    assert engine.is_awake()


def test_no_start_fails_over_its_folder(
    records: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("POORWILL_RECORD", str(tmp_path / "file" / "records"))
    started(records(SHAPE))
    assert caplog.text.count("the start goes on without a record of the start: ") == 1


def test_no_start_fails_over_a_record_that_cannot_be_written(
    records: Start, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def dump(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pickle, "dump", dump)
    started(records(SHAPE))
    for phase in PHASES:
        assert f"without a record of the {phase}: " in caplog.text
    assert "No space left on device" in caplog.text
    assert names(folder) == set()
    assert not is_on()


def test_no_start_fails_within_a_record(
    records: Start, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "all.pickle"
    with poorwill.record(path):
        started(records(SHAPE))
    assert f"the record to {path} has not ended" in caplog.text
    assert names(folder) == set()
    assert ("alloc", SHAPE.weights[0]) in events(path)


def test_a_history_of_vllms_stays_on(records: Start, folder: Path) -> None:
    torch.cuda.memory._record_memory_history()
    try:
        started(records(SHAPE))
        assert is_on()
    finally:
        torch.cuda.memory._record_memory_history(None)
    assert ("alloc", SHAPE.weights[0]) in phases(folder / "rank0.pickle")["load"]


def test_nothing_is_recorded_without_the_variable(records: Start, tmp_path: Path) -> None:
    started(records(SHAPE))
    assert list(tmp_path.rglob("*.pickle")) == []
