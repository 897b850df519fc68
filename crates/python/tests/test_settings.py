"""`poorwill._settings`: options of PyTorch's allocator change for a while, and nothing else does."""

import json
import os
import random
import sys
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_torch.settings import INTERVALS, MIB, AllocatorSettings
from helpers import STUCK_S, cases, together
from poorwill import PoorwillError, _settings
from poorwill._settings import _open, allocator_settings

# What sets everything that a text resets.
FULL = "max_split_size_mb:64,roundup_power2_divisions:[256:1,512:2,>:4],garbage_collection_threshold:0.7"


class Torch:
    """The part of PyTorch that has to do with settings; it keeps every text that it is given."""

    def __init__(self, conf: str | None = None) -> None:
        self.__version__ = "2.11.0"
        self.version = SimpleNamespace(cuda="13.0", hip=None)
        self.settings = AllocatorSettings(conf)
        self.available = True
        self.texts: list[str] = []
        self.cuda = SimpleNamespace(is_available=lambda: self.available)
        self._C = SimpleNamespace(
            _accelerator_setAllocatorSettings=self._set, _cuda_memorySnapshot=self._snapshot
        )

    def _set(self, text: str) -> None:
        self.texts.append(text)
        self.settings.parse(text)

    def _snapshot(self, pool: tuple[int, int, bool] | None) -> dict[str, Any]:
        return {"segments": [], "allocator_settings": self.settings.snapshot()}


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    fake = Torch()
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


def conf_of(torch: Torch, conf: str) -> dict[str, Any]:
    torch.settings = AllocatorSettings(conf)
    return torch.settings.everything()


def recorded() -> list[dict[str, Any]]:
    """What a real PyTorch made of one text after the other on a GPU, and reported afterwards."""
    lines = (Path(__file__).parent / "calls" / "settings.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines[1:]]
    for step in steps:
        divisions = step["settings"]["roundup_power2_divisions"]
        step["settings"]["roundup_power2_divisions"] = dict(zip(INTERVALS, divisions, strict=True))
    return steps


def test_the_fake_makes_of_texts_what_a_real_pytorch_made(torch: Torch) -> None:
    for step in recorded():
        if step["error"] is None:
            torch._set(step["text"])
        else:
            # A backend that is not the one in use is an assertion of PyTorch's, and a refusal here.
            with pytest.raises((ValueError, RuntimeError)):
                torch._set(step["text"])
        assert torch.settings.snapshot() == step["settings"], step["text"]


@pytest.mark.parametrize("step", recorded(), ids=lambda step: step["text"])
def test_what_a_real_pytorch_reported_is_written_back_as_it_was(torch: Torch, step: dict[str, Any]) -> None:
    torch.settings.snapshot = lambda: dict(step["settings"])  # type: ignore[method-assign]
    options = _settings._live(torch)
    restored = AllocatorSettings()
    restored.parse(options.text(frozenset({"expandable"})))
    reported = restored.snapshot()
    for key in (
        *("max_split_size", "garbage_collection_threshold"),
        *("expandable_segments", "roundup_power2_divisions"),
    ):
        assert reported[key] == step["settings"][key]


CONFS = [
    "",
    FULL,
    "expandable_segments:True",
    "max_split_size_mb:20",
    "max_split_size_mb:17592186044415",
    "max_split_size_mb:99999999999999999",
    "garbage_collection_threshold:0.00001",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:[1:2,2:0,32768:16]",
    "max_non_split_rounding_mb:200,max_split_size_mb:300",
    "pinned_num_register_threads:8,pinned_use_background_threads:True,per_process_memory_fraction:0.5",
    "large_segment_size_mb:64,max_split_size_mb:128, max_non_split_rounding_mb:96",
    "backend:native,pinned_use_cuda_host_register:True,release_lock_on_cudamalloc:True",
]


def test_what_is_so_already_is_not_written(torch: Torch) -> None:
    conf_of(torch, FULL)
    with allocator_settings(max_split_size_mb=64, expandable_segments=False), allocator_settings():
        pass
    assert torch.texts == []


def test_the_texts_name_what_a_text_resets_and_what_is_changed(torch: Torch) -> None:
    conf_of(torch, "expandable_segments:True," + FULL)
    with allocator_settings(max_split_size_mb=20):
        pass
    rounded = ",".join(
        f"{size}:{divisions}" for size, divisions in zip(INTERVALS, [1] * 9 + [2] + [4] * 6, strict=True)
    )
    kept = f"roundup_power2_divisions:[{rounded}],garbage_collection_threshold:0.7"
    assert torch.texts == [f"max_split_size_mb:20,{kept}", f"max_split_size_mb:64,{kept}"]


def random_conf(rng: random.Random) -> str:
    large = rng.choice([16, 20, 20, 64])
    options = [
        f"max_split_size_mb:{rng.choice([large, 128, rng.randint(64, 1 << 44)])}",
        f"max_non_split_rounding_mb:{rng.randint(64, 9999)}",
        f"garbage_collection_threshold:{rng.uniform(1e-9, 1 - 1e-9)!r}",
        f"roundup_power2_divisions:{1 << rng.randint(0, 5)}",
        f"roundup_power2_divisions:[{rng.choice([2, 64])}:0,128:{1 << rng.randint(0, 3)},>:2]",
        f"expandable_segments:{rng.random() < 0.5}",
        "pinned_use_background_threads:True",
        f"pinned_num_register_threads:{1 << rng.randint(0, 7)}",
    ]
    chosen = [f"large_segment_size_mb:{large}", *rng.sample(options, rng.randint(0, len(options)))]
    rng.shuffle(chosen)
    return rng.choice([",", " , "]).join(chosen)


def random_wish(rng: random.Random) -> dict[str, Any]:
    wishes: dict[str, Any] = {
        "max_split_size_mb": rng.choice([None, 64, rng.randint(64, 1 << 43)]),
        "expandable_segments": rng.random() < 0.5,
    }
    return {name: wish for name, wish in wishes.items() if rng.random() < 0.7}


@pytest.mark.parametrize("seed", cases(200, least=20))
def test_whatever_is_live_comes_back_from_any_depth(torch: Torch, seed: int) -> None:
    rng = random.Random(seed)
    states = [conf_of(torch, CONFS[seed] if seed < len(CONFS) else random_conf(rng))]
    with ExitStack() as blocks:
        for _depth in range(rng.randint(1, 4)):
            wish = random_wish(rng)
            state = dict(states[-1])
            if "max_split_size_mb" in wish:
                mb = wish["max_split_size_mb"]
                state["max_split_bytes"] = (1 << 64) - 1 if mb is None else mb * MIB
            state["expandable_segments"] = wish.get("expandable_segments", state["expandable_segments"])
            blocks.enter_context(allocator_settings(**wish))
            blocks.callback(check, torch, state)  # what the deeper blocks leave
            assert torch.settings.everything() == state
            states.append(state)
    assert torch.settings.everything() == states[0]
    assert _open == []


def check(torch: Torch, state: dict[str, Any]) -> None:
    assert torch.settings.everything() == state


def test_it_comes_back_after_an_exception(torch: Torch) -> None:
    before = conf_of(torch, FULL)
    with pytest.raises(ZeroDivisionError), allocator_settings(max_split_size_mb=None):
        raise ZeroDivisionError
    assert torch.settings.everything() == before


def test_of_what_was_changed_inside_the_own_options_come_back_and_others_stay(torch: Torch) -> None:
    conf_of(torch, FULL)
    with allocator_settings(max_split_size_mb=20):
        torch.settings.parse(
            "garbage_collection_threshold:0.25,expandable_segments:True,max_split_size_mb:999"
        )
        inside = torch.settings.everything()
    assert torch.settings.everything() == {**inside, "max_split_bytes": 64 * MIB}


def test_blocks_of_threads_that_overlap_end_as_it_began(torch: Torch) -> None:
    before = conf_of(torch, FULL)
    entered, ended = threading.Event(), threading.Event()

    def first() -> None:
        with allocator_settings(max_split_size_mb=20, expandable_segments=True):
            entered.set()
            assert ended.wait(STUCK_S)

    thread = threading.Thread(target=first)
    thread.start()
    assert entered.wait(STUCK_S)
    with allocator_settings(max_split_size_mb=200):
        ended.set()
        thread.join()
        # The first is gone: what only it changed is back, the rest is this block's.
        assert torch.settings.everything() == {**before, "max_split_bytes": 200 * MIB}
    assert torch.settings.everything() == before


def test_many_threads_leave_nothing_behind(torch: Torch) -> None:
    before = conf_of(torch, FULL)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _turn in range(100):
            with allocator_settings(
                max_split_size_mb=rng.randint(20, 99), expandable_segments=rng.random() < 0.5
            ):
                pass

    together(*(partial(work, seed) for seed in range(4)))
    assert torch.settings.everything() == before
    assert _open == []


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        (
            {"max_split_size_mb": 19},
            ValueError,
            "max_split_size_mb is 19; PyTorch takes 20 to 17592186044415",
        ),
        ({"max_split_size_mb": 0}, ValueError, "None stands for no limit"),
        ({"max_split_size_mb": -1}, ValueError, "takes 20"),
        ({"max_split_size_mb": 1 << 44}, ValueError, "17592186044415"),
        ({"max_split_size_mb": True}, TypeError, "whole number of MiB"),
        ({"max_split_size_mb": 20.0}, TypeError, "whole number of MiB"),
        ({"max_split_size_mb": "20"}, TypeError, "whole number of MiB"),
        ({"expandable_segments": 1}, TypeError, "True or False"),
        ({"expandable_segments": None}, TypeError, "True or False"),
        ({"device_type": None}, TypeError, "text like"),
        ({"device_type": "cuda:0"}, ValueError, "without a number"),
        ({"device_type": ""}, ValueError, "without a number"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_changes(
    torch: Torch, wrong: dict[str, Any], error: type[Exception], says: str
) -> None:
    for available in (True, False):
        torch.available = available
        with pytest.raises(error, match=says):
            allocator_settings(**wrong)
    assert torch.texts == []


def without(torch: Torch, case: str) -> str:
    if case == "no GPU":
        torch.available = False
    elif case == "built without":
        torch.version = SimpleNamespace(cuda=None, hip=None)
    return "cuda" if case in ("no GPU", "built without") else case


@pytest.mark.parametrize("case", ["cpu", "xpu", "mps", "no GPU", "built without"])
def test_where_there_are_no_such_settings_it_does_nothing(torch: Torch, case: str) -> None:
    device_type = without(torch, case)
    torch._C = SimpleNamespace()
    with allocator_settings(max_split_size_mb=20, expandable_segments=True, device_type=device_type):
        pass


def test_amd_has_them_too(torch: Torch) -> None:
    torch.version = SimpleNamespace(cuda=None, hip="7.0")
    for device_type in ("cuda", "hip"):
        with allocator_settings(max_split_size_mb=20, device_type=device_type):
            assert torch.settings.max_split_bytes == 20 * MIB


def test_what_pytorch_refuses_changes_nothing(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    before = conf_of(torch, "large_segment_size_mb:64," + FULL)
    with pytest.raises(PoorwillError, match=r"2\.11\.0 refuses 'max_split_size_mb:20,.*must be >= 64"):
        allocator_settings(max_split_size_mb=20).__enter__()
    assert torch.settings.everything() == before

    def unknown(text: str) -> None:
        torch.settings.parse(text.replace("expandable_segments", "expanding_segments"))

    # Keys that this version does not know raise after the resets, too.
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", unknown)
    with pytest.raises(PoorwillError, match="Unrecognized key 'expanding_segments'"):
        allocator_settings(expandable_segments=True).__enter__()
    assert _open == []


def test_what_pytorch_does_not_take_over_is_an_error(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    before = conf_of(torch, FULL)
    settings = torch.settings.snapshot

    def fixed() -> dict[str, Any]:
        return {**settings(), "expandable_segments": False}

    monkeypatch.setattr(torch.settings, "snapshot", fixed)
    with pytest.raises(PoorwillError, match="has expandable False instead of True after"):
        allocator_settings(expandable_segments=True).__enter__()
    monkeypatch.undo()
    assert torch.settings.everything() == before


def test_an_option_that_a_later_version_resets_as_well_is_noticed(
    torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(text: str) -> None:
        torch.settings.parse(text)
        torch.settings.pinned_num_register_threads = 1

    conf_of(torch, "pinned_num_register_threads:8")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", forgetful)
    with pytest.raises(PoorwillError, match=r"rest .*pinned_num_register_threads': 1.* instead of"):
        allocator_settings(max_split_size_mb=20).__enter__()


def test_an_allocator_that_tells_nothing_is_an_error(torch: Torch) -> None:
    def refuse(pool: object) -> None:
        raise RuntimeError("Calling snapshot with backend:cudaMallocAsync is not meaningful")

    torch._C._cuda_memorySnapshot = refuse
    with pytest.raises(
        PoorwillError, match=r"reading the allocator settings: PyTorch 2\.11\.0 .*native allocator"
    ):
        allocator_settings(max_split_size_mb=20).__enter__()
    assert torch.texts == []


def test_older_snapshots_take_no_pool(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_settings, "_ASKED", (1, 1, False))

    def older(pool: object) -> dict[str, Any]:
        if pool is not None:
            raise TypeError("expected None")
        return torch._snapshot(None)

    before = conf_of(torch, FULL)
    torch._C._cuda_memorySnapshot = older
    with allocator_settings(max_split_size_mb=20):
        assert torch.settings.max_split_bytes == 20 * MIB
    assert torch.settings.everything() == before


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_while_another_thread_rewrites_does_not_hang(torch: Torch) -> None:

    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with _settings._lock:
            held.set()
            assert forked.wait(STUCK_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(STUCK_S)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with allocator_settings(max_split_size_mb=20):
                code = 7
        finally:
            os._exit(code)
    forked.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
