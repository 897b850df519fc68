"""A signal ends a call that waits: it is undone, and what the handler raised is raised."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import poorwill
import pytest
from helpers import DEVICE, MIB, STUCK_S, filled

Handler = Callable[[], None]


class Reported(BaseException):
    """What a handler raises, as for Ctrl-C."""


def tell() -> None:
    raise Reported


def is_called() -> bool:
    """Whether a call of the main thread is being carried out."""
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text() == "poorwill-call\n":
                return True
        except OSError:
            # It has ended.
            continue
    return False


@pytest.fixture
def signalled() -> Iterator[Callable[[Handler], None]]:
    """Once there is a call, this process is signalled, and the handler runs."""
    before = signal.getsignal(signal.SIGUSR1)
    ended, threads = threading.Event(), []

    def wait() -> None:
        while not is_called() and not ended.is_set():
            time.sleep(0.001)
        if not ended.is_set():
            signal.raise_signal(signal.SIGUSR1)

    def once(handler: Handler) -> None:
        signal.signal(signal.SIGUSR1, lambda number, frame: handler())
        threads.append(threading.Thread(target=wait))
        threads[-1].start()

    yield once
    ended.set()
    for thread in threads:
        thread.join(STUCK_S)
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def lacking() -> Iterator[tuple[poorwill.Arena, poorwill.Arena]]:
    """An arena that sleeps, and another one on the same device that has the memory."""
    with poorwill.arena(DEVICE, "lacks") as lacks, poorwill.arena(DEVICE, "holds") as holds:
        yield lacks, holds


def test_a_wake_that_waits_for_memory_is_undone(
    signalled: Callable[[Handler], None], lacking: tuple[poorwill.Arena, poorwill.Arena]
) -> None:
    lacks, holds = lacking
    array = filled(lacks, "weights", 100 * MIB)
    expected = array.copy()
    lacks.sleep()
    held = holds.empty(200 * MIB)
    before = lacks.stats().as_dict()
    signalled(tell)
    with pytest.raises(Reported):
        lacks.wake(timeout=STUCK_S)
    assert lacks.state() == {"weights": "asleep_backed_up"}
    assert lacks.stats().as_dict() == before
    assert held is not None
    holds.close()
    lacks.wake(timeout=STUCK_S)
    assert np.array_equal(array, expected)


def test_a_handler_that_raises_nothing_ends_no_call(
    signalled: Callable[[Handler], None], lacking: tuple[poorwill.Arena, poorwill.Arena]
) -> None:
    lacks, holds = lacking
    array = filled(lacks, "weights", 100 * MIB)
    expected = array.copy()
    lacks.sleep()
    held = holds.empty(200 * MIB)
    # It may use the library, too.
    signalled(lambda: assert_slept(holds))
    assert lacks.wake(timeout=STUCK_S).tags == ["weights"]
    assert np.array_equal(array, expected)
    assert held is not None


def assert_slept(arena: poorwill.Arena) -> None:
    assert arena.sleep(level=2).tags == ["weights"]


@pytest.mark.parametrize("call", ["sleep", "wake"])
def test_a_rank_that_waits_for_the_others_undoes_it_for_all(
    signalled: Callable[[Handler], None], arena: poorwill.Arena, tmp_path: Path, call: str
) -> None:
    array = filled(arena, "weights")
    expected = array.copy()
    if call == "wake":
        arena.sleep()
    before = arena.state()
    made = poorwill.Decision.create(str(tmp_path))
    rank = poorwill.Decision.join(made.path, 0, 2)
    signalled(tell)
    with pytest.raises(Reported):
        getattr(arena, call)(decision=rank, undo_after=STUCK_S)
    assert (arena.state(), made.verdict) == (before, "undo")
    arena.wake()
    assert np.array_equal(array, expected)


def test_a_call_that_waits_for_another_is_undone(
    signalled: Callable[[Handler], None], arena: poorwill.Arena, tmp_path: Path
) -> None:
    array = filled(arena, "weights")
    expected = array.copy()
    made = poorwill.Decision.create(str(tmp_path))
    rank = poorwill.Decision.join(made.path, 0, 2)

    def undone() -> None:
        with pytest.raises(poorwill.UndoneError):
            arena.sleep(decision=rank, undo_after=STUCK_S)

    other = threading.Thread(target=undone)
    other.start()
    for call in (arena.sleep, arena.wake, lambda: arena.discard("weights")):
        signalled(tell)
        with pytest.raises(Reported):
            call()
    made.decide("undo")
    other.join(STUCK_S)
    arena.sleep()
    arena.wake()
    assert np.array_equal(array, expected)
