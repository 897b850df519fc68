"""An engine that lends what sleeps, at a broker in a process of its own; `test_vllm_suites.py` runs it.

The fake GPU's memory can be had by other processes.
"""

import importlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import poorwill
import pytest
from lent_places import end_broker
from vllm_engines import MIB, Engine, Start, acting, addresses, contents

torch: Any = importlib.import_module("torch")

BLOCK_BYTES = 64 * MIB


@pytest.fixture
def broker() -> Iterator[str]:
    """The path of a broker, which the first that lends starts."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "broker.sock")
        yield path
        end_broker(path)


def lending(start: Start, broker: str, **settings: Any) -> Engine:
    return start(POORWILL_LEND="1", POORWILL_BROKER=broker, **settings)


@pytest.mark.parametrize("level", [1, 2])
def test_what_sleeps_is_lent_and_comes_back(start: Start, broker: str, level: int) -> None:
    engine = lending(start, broker).start()
    engine.prepared()
    kept = engine.kept() if level == 1 else engine.runtime()
    before, where = contents(kept), addresses(kept)
    engine.worker.sleep(level)
    [slept] = engine.events("sleep")
    assert (slept["lend_refused"], slept["error"]) == (None, None)
    # Smaller pieces of memory are released.
    assert slept["lent_bytes"] >= max(engine.shape.weights)
    assert slept["released_bytes"] > 0
    assert engine.worker.poorwill_status()["lent_bytes"] == slept["lent_bytes"]
    engine.worker.wake_up()
    [woken] = engine.events("wake")
    # What was dropped has no bytes to find.
    assert (woken["returned_bytes"] >= max(engine.shape.weights)) == (level == 1)
    assert engine.worker.poorwill_status()["lent_bytes"] == 0
    assert (contents(kept), addresses(kept)) == (before, where)
    assert engine.cache_is_zero()


@pytest.fixture
def lender(broker: str) -> Iterator[poorwill.Arena]:
    """It lends four blocks of the fake's GiB."""
    with poorwill.arena("cuda:0", "other", limit=4 * BLOCK_BYTES, peers=(), lend=broker) as other:
        blocks = [other.empty(BLOCK_BYTES) for _ in range(4)]
        assert other.sleep(1).lent_bytes == 4 * BLOCK_BYTES
        yield other
        del blocks


@pytest.mark.parametrize(("share", "given_up"), [(0.5, 0), (0.75, 2), (0.9, 4)])
def test_a_start_has_what_it_lacks_of_what_others_lend(
    start: Start, broker: str, lender: poorwill.Arena, share: float, given_up: int
) -> None:
    engine = lending(start, broker, gpu_memory_utilization=share)
    engine.worker.init_device()
    assert engine.worker.init_snapshot.free_memory >= engine.worker.requested_memory
    woken = lender.wake()
    assert woken.returned_bytes == (4 - given_up) * BLOCK_BYTES
    assert woken.copied_bytes == given_up * BLOCK_BYTES


def test_a_start_waits_for_who_lends(
    start: Start, broker: str, lender: poorwill.Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    lender.wake()
    waits: list[float] = []

    def wait(pause_s: float) -> None:
        assert not waits, "what is lent is not asked for"
        waits.append(pause_s)
        lender.sleep(1)

    engine = lending(start, broker)
    starts = importlib.import_module("poorwill.vllm._starts")
    monkeypatch.setattr(starts, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=wait))
    engine.worker.init_device()
    assert waits


def test_a_lender_that_wakes_meanwhile_changes_no_profile(
    start: Start, broker: str, lender: poorwill.Arena
) -> None:
    available = []
    for wakes in (False, True):
        engine = lending(start, broker, gpu_memory_utilization=0.5).load()
        if wakes:
            acting(engine, "profile_run", lender.wake)
        available.append(engine.worker.determine_available_memory())
        engine.end()
    assert lender.stats().lent_bytes == 0
    assert available[0] == available[1] > 0


def test_what_a_pass_takes_stays_free(start: Start, broker: str, lender: poorwill.Arena) -> None:
    engine = lending(start, broker, gpu_memory_utilization=0.5)
    engine.load().start_cache()
    assert engine.worker.peak_activation_memory > 0
    # All of the fake's memory.
    engine.worker.peak_activation_memory = 16 * BLOCK_BYTES
    engine.worker.compile_or_warm_up_model()
    engine.worker.sleep(1)
    engine.worker.wake_up()
    assert lender.wake().copied_bytes == 4 * BLOCK_BYTES


def test_without_the_setting_nothing_is_lent(start: Start) -> None:
    engine = start().start()
    engine.worker.sleep(1)
    [slept] = engine.events("sleep")
    assert (slept["lent_bytes"], slept["lend_refused"]) == (0, None)
    assert slept["released_bytes"] > sum(engine.shape.weights)
    engine.worker.wake_up()
