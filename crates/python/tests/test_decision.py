"""Ranks that sleep and wake together: threads here, each with an arena, and processes that end."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import poorwill
import pytest
from poorwill import Decision, PoorwillError, UndoneError

MIB = 1 << 20
# Longer than any test takes.
NEVER = 3600.0


@pytest.fixture
def arenas() -> Any:
    opened = [poorwill.arena("host", f"rank-{rank}", limit=64 * MIB) for rank in range(3)]
    blocks = [arena.empty(8 * MIB) for arena in opened]
    yield opened
    del blocks
    for arena in opened:
        arena.close()


def together(arenas: list[Any], tmp_path: Path, act: Callable[[Any, Decision], Any]) -> list[Any]:
    """What each rank's call returns or raises."""
    made = Decision.create(tmp_path)
    results: list[Any] = [None] * len(arenas)

    def rank(number: int) -> None:
        try:
            results[number] = act(arenas[number], Decision.join(made.path, number, len(arenas)))
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=rank, args=[number]) for number in range(len(arenas))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made.verdict is not None
    made.remove()
    return results


def states(arenas: list[Any]) -> set[str]:
    return {arena.state()["weights"] for arena in arenas}


def test_all_sleep_and_wake(arenas: list[Any], tmp_path: Path) -> None:
    slept = together(
        arenas, tmp_path, lambda arena, decision: arena.sleep(decision=decision, undo_after=NEVER)
    )
    assert [report.released_bytes for report in slept] == [8 * MIB] * 3
    assert states(arenas) == {"asleep_backed_up"}
    woken = together(arenas, tmp_path, lambda arena, decision: arena.wake(decision=decision))
    assert [report.mapped_bytes for report in woken] == [8 * MIB] * 3
    assert states(arenas) == {"awake"}
    assert list(tmp_path.iterdir()) == []


def test_one_that_cannot_leaves_all_as_they_were(arenas: list[Any], tmp_path: Path) -> None:
    hold = arenas[1].hold("weights", "mlx5_0")
    results = together(
        arenas, tmp_path, lambda arena, decision: arena.sleep(decision=decision, undo_after=NEVER)
    )
    assert isinstance(results[1], poorwill.TagError)
    for undone in (results[0], results[2]):
        assert isinstance(undone, UndoneError)
        assert str(undone) == "the sleep was undone: its group decided so; everything is as it was"
    assert states(arenas) == {"awake"}
    hold.end()


def test_an_argument_that_is_wrong_lets_no_rank_wait(arenas: list[Any], tmp_path: Path) -> None:
    def sleep(arena: Any, decision: Decision) -> Any:
        return arena.sleep(3 if arena is arenas[2] else 1, decision=decision, undo_after=NEVER)

    results = together(arenas, tmp_path, sleep)
    assert [type(result) for result in results] == [UndoneError, UndoneError, ValueError]
    assert states(arenas) == {"awake"}


def test_a_rank_that_no_other_joins_goes_back(arenas: list[Any], tmp_path: Path) -> None:
    made = Decision.create(tmp_path)
    with pytest.raises(UndoneError, match="there was no verdict within 0ns"):
        arenas[0].sleep(decision=Decision.join(made.path, 0, 2), undo_after=0)
    assert (made.verdict, states(arenas)) == ("undo", {"awake"})
    # One that comes later does not begin.
    with pytest.raises(UndoneError, match="its group decided so"):
        arenas[1].sleep(decision=Decision.join(made.path, 1, 2))
    assert made.decide("commit") == "undo"


def test_one_without_anything_to_do_takes_part(arenas: list[Any], tmp_path: Path) -> None:
    def sleep(arena: Any, decision: Decision) -> Any:
        return decision.note_staged() if arena is arenas[0] else arena.sleep(decision=decision)

    results = together(arenas, tmp_path, sleep)
    assert results[0] is None
    assert [arena.state()["weights"] for arena in arenas] == ["awake", "asleep_backed_up", "asleep_backed_up"]


def test_what_is_wrong_is_said(arenas: list[Any], tmp_path: Path) -> None:
    made = Decision.create(tmp_path)
    with pytest.raises(ValueError, match="there is no rank 2 of 2: ranks are counted from 0"):
        Decision.join(made.path, 2, 2)
    with pytest.raises(ValueError, match='`maybe` is no verdict; it is "commit" or "undo"'):
        made.decide("maybe")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is no rank of it; join it"):
        made.note_staged()
    with pytest.raises(ValueError, match="undo_after is for ranks that share a decision"):
        arenas[0].sleep(undo_after=1.0)
    with pytest.raises(ValueError, match="is no timeout"):
        arenas[0].sleep(decision=made, undo_after=-1.0)
    made.remove()
    with pytest.raises(PoorwillError, match="there is no decision"):
        Decision.join(made.path, 0, 2)
    with pytest.raises(PoorwillError, match="it was removed"):
        made.verdict  # noqa: B018
    (tmp_path / "file").write_text("")
    with pytest.raises(PoorwillError, match="cannot make the folder"):
        Decision.create(tmp_path / "file" / "folder")
    assert states(arenas) == {"awake"}


def _rank(path: str, rank: int) -> None:
    arena = poorwill.arena("host", limit=64 * MIB)
    block = arena.empty(8 * MIB)
    decision = Decision.join(path, rank, 3)
    if rank == 2:
        decision.note_staged()
        os.kill(os.getpid(), signal.SIGKILL)
    arena.sleep(decision=decision, undo_after=NEVER)
    assert arena.state()["weights"] == "asleep_backed_up"
    del block


def test_a_process_that_ends_once_it_is_ready_changes_nothing(tmp_path: Path) -> None:
    made = Decision.create(tmp_path)
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=[str(made.path), rank]) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    # The one that ended had said that it was ready, and its memory is back.
    assert [rank.exitcode for rank in ranks] == [0, 0, -signal.SIGKILL]
    assert made.verdict == "commit"
    made.remove()
