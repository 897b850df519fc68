"""A resume waits for memory that others are about to release; `test_suites.py` runs it."""

import gc
import itertools
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import poorwill
import pytest
from poorwill.compat.torch_memory_saver import SaverError, TorchMemorySaver, _pools

torch: Any = import_module("torch")

MIB = 1 << 20
NAMES = map("waits-{}".format, itertools.count())


class Watched:
    """An arena that says when a wake begins."""

    def __init__(self, arena: poorwill.Arena) -> None:
        self.arena = arena
        self.begins = threading.Event()
        self.timeouts: list[float | None] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.arena, name)

    def wake(self, *tags: Any, timeout: float | None = None, **others: Any) -> Any:
        self.timeouts.append(timeout)
        self.begins.set()
        return self.arena.wake(*tags, timeout=timeout, **others)


class Paused:
    """Paused weights, which another holder's memory leaves no room for."""

    def __init__(self) -> None:
        self.saver = TorchMemorySaver()
        with self.saver.region("weights", enable_cpu_backup=True):
            self.weights = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda").fill_(5)
        self.saver.pause("weights")
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info()
        self.others = [torch.empty(free_bytes - 32 * MIB, dtype=torch.uint8, device="cuda")]
        pools: Any = self.saver._used()
        self.arena = Watched(pools._arenas[0])
        pools._arenas[0] = self.arena

    def release(self) -> None:
        """What a trainer does with its memory."""
        self.others.clear()
        torch.cuda.empty_cache()

    def is_kept(self) -> bool:
        return bool(torch.equal(self.weights, torch.empty_like(self.weights).fill_(5)))


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> Iterator[Paused]:
    monkeypatch.setattr(_pools, "ARENA", next(NAMES))
    made = Paused()
    yield made
    made.release()
    gc.collect()
    made.arena.arena.wake()
    made.arena.arena.close()


def test_it_resumes_once_the_memory_is_there(paused: Paused, monkeypatch: pytest.MonkeyPatch) -> None:
    # More than a stalled machine takes.
    monkeypatch.setenv("POORWILL_WAKE_TIMEOUT", "3600")

    def release_late() -> None:
        paused.arena.begins.wait()
        # A resume that does not wait has failed by then; one that does is none the worse for more.
        time.sleep(0.2)
        paused.release()

    trainer = threading.Thread(target=release_late)
    trainer.start()
    try:
        paused.saver.resume("weights")
    finally:
        trainer.join()
    assert paused.is_kept()


@pytest.mark.parametrize(
    ("given", "timeout"), [(None, 2.0), ("0.01", 0.01), ("0", None)], ids=["unset", "set", "not at all"]
)
def test_it_waits_as_long_as_the_variable_says(
    paused: Paused, monkeypatch: pytest.MonkeyPatch, given: str | None, timeout: float | None
) -> None:
    if given is None:
        monkeypatch.delenv("POORWILL_WAKE_TIMEOUT", raising=False)
    else:
        monkeypatch.setenv("POORWILL_WAKE_TIMEOUT", given)
    with pytest.raises(poorwill.OutOfMemoryError):
        paused.saver.resume("weights")
    assert paused.arena.timeouts == [timeout]
    paused.release()
    paused.saver.resume("weights")
    assert paused.is_kept()


def test_a_value_that_is_wrong_changes_nothing(paused: Paused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POORWILL_WAKE_TIMEOUT", "soon")
    with pytest.raises(SaverError, match="POORWILL_WAKE_TIMEOUT='soon' is no number of seconds"):
        paused.saver.resume("weights")
    assert paused.arena.timeouts == []
