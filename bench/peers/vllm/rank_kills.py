"""A process of an engine over several GPUs is killed in the midst of a sleep: what is left has to end, and to
give all memory back.

The victim is the last rank, its engine's core, or the process that has called sleep. Of data parallel
engines, the other ones have to end as well. It is killed before any rank is ready, while one is ready and
waits for the other, or after all have committed. Each kill has an engine of its own.
"""

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import GIB, descendants, emit, is_running, kill_all, name_of, parents
from rank_engine import all_gib
from rank_host import Hosted, LostError

VICTIMS, PHASES = ("rank", "core", "coordinator"), ("before", "staged", "after")
REACHED_S, ENDED_S, ORPHANED_S = 30, 60, 15
SLACK_GIB = 0.1
GO_AFTER_S = 0.2  # from the kill until the ranks that are held back go on


def every() -> list[str]:
    return [f"{victim}:{phase}" for victim in VICTIMS for phase in PHASES]


def parsed(given: str) -> list[tuple[str, str]]:
    """Victims and phases; raises an error that argparse shows for others."""
    names = every() if given == "all" else given.split(",")
    wrong = [name for name in names if name not in every()]
    if wrong:
        raise argparse.ArgumentTypeError(
            f"there is no {', '.join(wrong)}: there are all, {', '.join(every())}"
        )
    return [(name.split(":")[0], name.split(":")[1]) for name in names]


def wait_for(condition: Callable[[], bool], seconds: float) -> float | None:
    """Seconds until it holds; None where it does not in that time."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > seconds:
            return None
        time.sleep(0.02)
    return round(time.monotonic() - begin, 2)


def held_back(phase: str, count: int) -> dict:
    """Which ranks wait in the sleep, and when. Where one is ready, the last is held back."""
    if phase == "staged":
        return {"held": [count - 1], "when": "before"}
    return {"held": list(range(count)), "when": phase}


def run(options: argparse.Namespace, folder: Path, cards, host=Hosted) -> bool:
    good = True
    for victim, phase in options.kills:
        record = killed(options, folder, cards, victim, phase, host)
        emit("step", step="killed", victim=victim, phase=phase, **record)
        good = good and record["ok"]
    return good


def killed(options: argparse.Namespace, folder: Path, cards, victim: str, phase: str, host=Hosted) -> dict:
    before = cards.free()
    place = Path(tempfile.mkdtemp(prefix=f"{victim}-{phase}-", dir=folder))
    decisions = place / "decisions"
    decisions.mkdir(mode=0o700)
    engine = host(options, POORWILL_RANKS_FOLDER=str(decisions))
    try:
        started = engine.answer(options.start_limit_s)
        ranks = [rank["pid"] for rank in started["ranks"]]
        of = parents()
        cores = cores_of(ranks, of, engine.process.pid)
        watched = {pid: name_of(pid)[:80] for core in cores for pid in [core, *descendants(core, of)]}
        held = held_back(phase, len(ranks))
        engine.ask("hold back", REACHED_S, at=str(place), **held)
        engine.tell("sleep")
        reached_s = wait_for(
            lambda: has_reached(place, decisions, phase, held["held"], len(ranks)), REACHED_S
        )
        pid = {"rank": ranks[-1], "core": cores[-1], "coordinator": engine.process.pid}[victim]
        os.kill(pid, signal.SIGKILL)
        begin = time.monotonic()
        time.sleep(GO_AFTER_S)
        (place / "go").touch()
        seen = {} if victim == "coordinator" else answered(engine, begin)
        orphaned = None
        if victim == "coordinator":
            orphaned = orphans(watched, cores, cards)
        ended_s = wait_for(lambda: not any(map(is_running, watched)), ENDED_S)
        left = {pid: name for pid, name in watched.items() if is_running(pid)}
        back_s = wait_for(lambda: not is_short(cards, before), ENDED_S) if not left else None
        total_s = round(time.monotonic() - begin, 2)
    finally:
        engine.end()
    missing = [was - now for was, now in zip(before, cards.settled(before), strict=True)]
    undecided = [path.parent.name for path in decisions.glob("decision-*/undecided")]
    record = {
        "killed": pid,
        "processes": len(watched),
        "reached_s": reached_s,
        "caller": seen,
        "orphaned": orphaned,
        "ended_s": ended_s,
        "left": left,
        "memory_back_s": back_s,
        "total_s": total_s,
        "missing_gib": all_gib(missing),
        "verdicts": sorted(path.name for path in decisions.glob("decision-*/*") if path.name != "undecided"),
        "undecided": undecided,
    }
    has_heard = victim == "coordinator" or seen.get("refused", False)
    is_back = all(size <= SLACK_GIB * GIB for size in missing)
    agree = orphaned is None or orphaned["agree"]
    is_over = reached_s is not None and ended_s is not None and is_back
    record["ok"] = is_over and has_heard and agree and not undecided
    return record


def cores_of(ranks: list[int], of: dict[int, int], caller: int) -> list[int]:
    """The processes of the engines' cores, in the order of their ranks. One may be its only rank itself."""
    return list(dict.fromkeys(rank if of[rank] == caller else of[rank] for rank in ranks))


def orphans(watched: dict[int, str], cores: list[int], cards) -> dict | None:
    """What vLLM itself leaves where the caller is killed: its cores may go on.

    All ranks have to be in one state then, and end once the cores do. None where all have ended.
    """
    if wait_for(lambda: not any(map(is_running, watched)), ORPHANED_S) is not None:
        return None
    left, used = [name for pid, name in watched.items() if is_running(pid)], cards.used()
    kill_all(cores)
    return {"left": left, "used_gib": all_gib(used), "agree": max(used) - min(used) <= SLACK_GIB * GIB}


def has_reached(place: Path, decisions: Path, phase: str, held: list[int], count: int) -> bool:
    if not all((place / f"at-{rank}").exists() for rank in held):
        return False
    ready = [rank for rank in range(count) if rank not in held]
    return all(any(decisions.glob(f"decision-*/staged-{rank}")) for rank in ready)


def answered(engine: Hosted, begin: float) -> dict:
    """What the caller of the sleep was answered, and how long after the kill."""
    try:
        seen = engine.answer(ENDED_S)
    except LostError as error:
        return {"refused": False, "lost": str(error), "is_late": error.is_late}
    named = {name: seen.get(name) for name in ("refused", "error_type", "error")}
    return {**named, "told_s": round(time.monotonic() - begin, 2)}


def is_short(cards, before: list[int]) -> bool:
    """Whether a GPU has less free memory than there was."""
    return any(was - now > SLACK_GIB * GIB for was, now in zip(before, cards.free(), strict=True))
