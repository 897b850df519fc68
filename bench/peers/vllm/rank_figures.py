"""Figures of an engine over several GPUs: what the two phases cost, what ranks cost each other and hold.

The engine's core is in this process, and the ranks are not, so that a decision can be left away and nothing
else changes.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import rank_worker
from common import HERE, emit, gib
from hibernate_rotation import used_by_process_mib
from rank_engine import Limit, Ranks, all_gib, opened

STEP_S = 120


def spread(took: list[float]) -> dict[str, float]:
    """In milliseconds."""
    quarters = statistics.quantiles(took, n=4) if len(took) > 1 else [took[0]] * 3
    figures = {"median": statistics.median(took), "min": min(took), "max": max(took)}
    figures |= {"quarter": quarters[0], "three_quarters": quarters[2]}
    return {f"{name}_ms": round(seconds * 1000, 3) for name, seconds in figures.items()}


@contextlib.contextmanager
def each_by_itself() -> Iterator[None]:
    """The ranks sleep and wake without a decision."""
    from poorwill.vllm import _together

    with mock.patch.object(_together, "METHODS", frozenset()):
        yield


def two_phases(ranks: Ranks, turns: int) -> dict:
    """Sleeps and wakes of unchanged weights, in turns with and without a decision."""
    methods = {"together": contextlib.nullcontext, "each_by_itself": each_by_itself}
    took: dict[str, dict[str, list[float]]] = {way: {"sleep": [], "wake": []} for way in methods}
    for turn in range(turns + 1):
        # Neither way always comes first; the first turn makes the backups, and does not count.
        for way in methods if turn % 2 else reversed(methods):
            with methods[way]():
                slept, woken = ranks.timed(ranks.llm.sleep, level=1), ranks.timed(ranks.llm.wake_up)
            if turn:
                took[way]["sleep"].append(slept)
                took[way]["wake"].append(woken)
    figures = {f"{op}_{way}": spread(each) for way, of_way in took.items() for op, each in of_way.items()}
    return {"turns": turns, **figures, **ranks.checks()}


def at_once(ranks: Ranks, turns: int) -> dict:
    """Sleeps and wakes of one rank alone, and of all at the same time, by the ranks' own clocks."""
    every = list(range(len(ranks.about)))
    took: dict[str, list[dict]] = {}
    for turn in range(turns + 1):
        for awake in [[rank] for rank in every] + [every]:
            seen = ranks.each(rank_worker.alone, awake)
            for rank in awake if turn else ():
                name = f"rank_{rank}_{'alone' if awake != every else 'with_the_others'}"
                took.setdefault(name, []).append(seen[rank])
    figures = {
        f"{op}_{name}": spread([one[f"{op}_s"] for one in each])
        for name, each in took.items()
        for op in ("sleep", "wake")
    }
    weights = [gib(rank["weight_bytes"]) for rank in ranks.about]
    return {"turns": turns, "weights_gib": weights, **figures, **ranks.checks()}


def empty_contexts(cards, count: int) -> list[int]:
    """What a process with nothing but a context holds, on each GPU."""
    before = cards.used()
    command = [sys.executable, "-B", str(HERE / "rank_context.py"), "--ordinal"]
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([*command, str(ordinal)], **piped) for ordinal in range(count)]
    try:
        for process in started:
            json.loads(process.stdout.readline())
        return [now - was for now, was in zip(cards.used(), before, strict=True)]
    finally:
        for process in started:
            process.stdin.close()
            process.wait()


def holdings(ranks: Ranks, at_first: list[int], empty: list[int]) -> dict:
    """What each rank holds of its GPU awake and asleep, beside what any process has to hold."""
    pids = [rank["pid"] for rank in ranks.about]

    def look() -> tuple[list[int], dict]:
        ranks.each(rank_worker.synchronize)
        used = [now - was for now, was in zip(ranks.cards.used(), at_first, strict=True)]
        by_process = used_by_process_mib()
        communicators = [rank["communicators"] for rank in ranks.status()]
        shared = [rank["shared"] for rank in ranks.status()]
        seen = {"by_process_mib": [by_process.get(pid) for pid in pids]}
        return used, {**seen, "communicators": communicators, "shared": shared}

    ranks.each(rank_worker.settle)
    awake, seen_awake = look()
    ranks.llm.sleep(level=1)
    asleep, seen_asleep = look()
    ranks.llm.wake_up()
    shares = [
        round(1 - (slept - own) / (woken - own), 5) if woken > own else None
        for woken, slept, own in zip(awake, asleep, empty, strict=True)
    ]
    return {
        "empty_gib": all_gib(empty),
        "awake_gib": all_gib(awake),
        "asleep_gib": all_gib(asleep),
        "asleep_beyond_empty_gib": all_gib([slept - own for slept, own in zip(asleep, empty, strict=True)]),
        "given_back": shares,
        "when_awake": seen_awake,
        "when_asleep": seen_asleep,
        **ranks.checks(),
    }


def run(options: argparse.Namespace, folder: Path, cards) -> bool:
    with Limit("empty contexts", STEP_S):
        empty = empty_contexts(cards, options.count)
    at_first = cards.used()
    emit("empty", empty_gib=all_gib(empty), used_gib=all_gib(at_first))
    ranks = opened(options, folder, cards)
    good = True
    try:
        steps = {"holdings": lambda: holdings(ranks, at_first, empty)}
        if ranks.is_ours:
            steps["two phases"] = lambda: two_phases(ranks, options.turns)
            steps["at once"] = lambda: at_once(ranks, options.turns)
        for name, step in steps.items():
            with Limit(name, STEP_S):
                record = step()
            ok = all(record["bytes_equal"]) and record["tokens_equal"]
            emit("step", step=name, suspend_nccl=options.suspend_nccl, **record, ok=ok)
            good = good and ok
    finally:
        ranks.llm.shutdown()
    return good
