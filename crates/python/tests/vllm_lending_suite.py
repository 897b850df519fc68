"""An engine that lends what sleeps, at a broker in a process of its own; `test_vllm_suites.py` runs it.

The fake GPU's memory can be had by other processes.
"""

import importlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import poorwill
import pytest
from lent_places import end_broker
from vllm_engines import MIB, Engine, Start, addresses, contents

torch: Any = importlib.import_module("torch")

OTHERS_BYTES = 160 * MIB


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


def test_a_start_has_what_others_lend(start: Start, broker: str) -> None:
    with poorwill.arena("cuda:0", "other", limit=OTHERS_BYTES, peers=(), lend=broker) as other:
        block = other.empty(OTHERS_BYTES - 8 * MIB)
        assert other.sleep(1).lent_bytes == block.nbytes
        engine = lending(start, broker)
        engine.worker.init_device()
        assert engine.worker.init_snapshot.free_memory >= engine.free_at_start + block.nbytes
        woken = other.wake()
        assert (woken.returned_bytes, woken.copied_bytes) == (0, block.nbytes)


def test_without_the_setting_nothing_is_lent(start: Start) -> None:
    engine = start().start()
    engine.worker.sleep(1)
    [slept] = engine.events("sleep")
    assert (slept["lent_bytes"], slept["lend_refused"]) == (0, None)
    assert slept["released_bytes"] > sum(engine.shape.weights)
    engine.worker.wake_up()
