#!/usr/bin/env python3
"""Engines of vLLM behind `poorwill rotate` take turns on one card, of which not all fit.

Each request goes to an engine that is drawn by Zipf's law. Every answer has to be the engine's first one.
Prints JSON lines; the line `turns` has the figures.

    turns.py --mode poorwill-lending --models FOLDER   # what sleeps stays on the card until others need it
    turns.py --mode poorwill --models FOLDER           # what sleeps is released
    turns.py --mode cumem --models FOLDER              # vLLM's own sleep mode
    turns.py --mode poorwill --models FOLDER --stream --canary beside   # until the first token
    turns.py --mode stand-in-lending --seconds 10      # simulated engines, without a GPU; stand-in as well

Engines serve checkpoints of random numbers. FOLDER keeps them for the next run.
"""

import argparse
import contextlib
import json
import re
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from common import GIB, Ballast, conclude_in_a_folder, emit, every_line_says, gib, utilization
from models import layers_for, write_checkpoint
from rotation import STAND_IN_BESIDE_MIB, STAND_IN_MIB, Rotation
from taken import draws, grown, said, summary

MODES = ["poorwill-lending", "poorwill", "cumem", "stand-in", "stand-in-lending"]
GRAPHS = [
    *("--no-enforce-eager", "--compilation-config"),
    json.dumps({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}),
]
BESIDE_GIB = 1.2  # what an engine takes beside weights and KV cache
END_S, SETTLED_S = 40, 10
RESERVE_S = 30  # of the limit, for an end in a hurry
SLACK_BYTES = GIB // 4


def first_answers(rotation: Rotation) -> None:
    """Engines are started, one after the other; what they say is the truth."""
    for name in rotation.names:
        answer = rotation.ask(name)
        emit("first", model=name, seconds=answer.seconds, status=answer.status)
        if not (truth := said(answer)):
            raise RuntimeError(f"{name} has no first answer: {answer.brief()}")
        rotation.truth[name] = truth
        rotation.look()
    if len({str(truth) for truth in rotation.truth.values()}) < len(rotation.names):
        raise RuntimeError(f"engines say the same, so a wrong one would not be seen: {rotation.truth}")
    # A start has all lent memory given up, which no later turn does.
    for name in rotation.names:
        rotation.ask(name)


def first_answers_and_turns(rotation: Rotation, until: float) -> bool:
    first_answers(rotation)
    return turns(rotation, until)


def turns(rotation: Rotation, until: float) -> bool:
    """Requests until the time is up, and their line; whether all were right."""
    options, before, began_ms = rotation.options, rotation.counts(), time.time_ns() // 1_000_000
    began, after = time.monotonic(), None
    end = min(until, began + options.seconds)

    def client(nth: int) -> None:
        for name in draws(rotation.names, options.zipf, options.seed + nth):
            rotation.take(name)
            if time.monotonic() >= end:
                return

    # Left behind where the time is up: the process ends with them.
    pool = ThreadPoolExecutor(options.clients)
    try:
        for done in [pool.submit(client, nth) for nth in range(options.clients)]:
            done.result()
        after = rotation.counts()
    finally:
        swaps = [swap for (at_ms, _), swap in sorted(rotation.swaps.items()) if at_ms >= began_ms]
        figures = summary(rotation.taken, swaps)
        grew = {of: grown(after[of], before[of]) for of in ["engines", "broker"]} if after else {}
        seen = {"starts": after["starts"], "failed": after["failed"]} if after else {}
        took = {"seconds": round(time.monotonic() - began, 2), "is_cut": end < began + options.seconds}
        emit("turns", **took, **figures, **grew, **seen)
        if rotation.wrong:
            emit("wrong", count=len(rotation.wrong), first=rotation.wrong[:3])
    once = set(after["starts"].values()) == {1}
    return once and figures["right"] == figures["requests"] and not took["is_cut"]


def checkpoint(options: argparse.Namespace, folder: Path, seed: int) -> Path:
    """One that is there already, or a new one."""
    layers = layers_for(options.gib)
    own = folder / f"layers-{layers}-seed-{seed}"
    # Its last file.
    is_there = (own / "checkpoint" / "config.json").exists()
    return own / "checkpoint" if is_there else write_checkpoint(own, layers, seed)


def run(options: argparse.Namespace, folder: Path, measure: Callable[[Rotation, float], bool]) -> bool:
    """Rotates engines for `measure`, which has until a time, and ends them; whether all was well."""
    until = time.monotonic() + options.limit_s - RESERVE_S
    stop_at_the_limit(options.limit_s - RESERVE_S)
    kept = options.models or folder
    models = [None if options.plays else checkpoint(options, kept, seed) for seed in range(options.engines)]
    size = options.gib + options.kv_gib + BESIDE_GIB
    with contextlib.ExitStack() as stack:
        card = None if options.plays else stack.enter_context(Ballast(options.fit * size))
        at_first = card.free() if card else 0
        share = utilization(at_first, card.total(), gib(at_first), size * GIB / card.total()) if card else 0
        rotation = Rotation(options, folder, models, share)
        emit("begin", **vars(options), free_gib=gib(at_first), share=share)
        good = False
        try:
            rotation.start()
            good = measure(rotation, until - END_S)
        finally:
            good = rotation.end(min(END_S, max(0, until - time.monotonic()) + 10)) and good
            if card:
                at_last = card.settled(at_first, SETTLED_S, SLACK_BYTES)
                emit("card", free_gib=gib(at_last), missing_gib=gib(at_first - at_last))
                good = good and at_last >= at_first - SLACK_BYTES
            for log in [] if good else sorted(folder.glob("*.log")):
                text = log.read_text(errors="replace")
                warnings = [line for line in text.splitlines() if re.search(r" (WARN|ERROR) ", line)]
                emit("log", of=log.stem, warnings=warnings[-20:], text=text[-4000:])
    return good


def stop_at_the_limit(seconds: float) -> None:
    def stop(number: int, _) -> NoReturn:
        raise SystemExit(f"stopped by {signal.Signals(number).name}; SIGALRM is the limit of {seconds:.0f} s")

    for number in [signal.SIGALRM, signal.SIGTERM]:
        signal.signal(number, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def parsed(given: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--poorwill", default="poorwill", help="the program that rotates")
    parser.add_argument("--models", type=Path, help="folder for checkpoints; without it they are removed")
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--gib", type=float, default=8, help="weights of each")
    parser.add_argument("--kv-gib", type=float, default=5, help="KV cache of each")
    parser.add_argument("--fit", type=float, default=2.5, help="how many engines the free memory is for")
    parser.add_argument("--seconds", type=float, default=300, help="of turns")
    parser.add_argument("--zipf", type=float, default=1.0, help="the law's exponent; 0 draws evenly")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--canary", choices=["none", "before", "beside"], default="none")
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs")
    parser.add_argument("--stream", action="store_true", help="answers come token by token")
    parser.add_argument("--limit-s", type=float, default=560, help="for everything; turns are cut before it")
    options = parser.parse_args(given)
    if options.engines < 1 or options.clients < 1 or min(options.gib, options.kv_gib, options.fit) <= 0:
        parser.error("--engines, --clients, --gib, --kv-gib and --fit are more than 0")
    options.plays, options.lends = options.mode.startswith("stand-in"), options.mode.endswith("-lending")
    # One request of an engine at a time: in a batch its tokens may be others.
    options.rules, options.engine_words = 'running_max = 1\nturn_max = "1s"', GRAPHS if options.graphs else []
    options.stand_in_tokens_per_s = 2000
    options.gpu_mib = int(options.fit * (STAND_IN_MIB + STAND_IN_BESIDE_MIB))
    return options


def main() -> None:
    options = parsed()
    if not (program := shutil.which(options.poorwill)):
        raise SystemExit(f"there is no program {options.poorwill}: build it, and say where with --poorwill")
    options.poorwill = str(Path(program).resolve())
    every_line_says(mode=options.mode, label="turns")
    conclude_in_a_folder(lambda folder: run(options, folder, first_answers_and_turns))


if __name__ == "__main__":
    main()
