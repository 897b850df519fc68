#!/usr/bin/env python3
"""Two engines in two processes on one GPU, of which one is awake at a time, alternating.

A ballast leaves less of the card free than both need (`--free-gib`), so that each can only wake because the
other sleeps. After every wake the tokens have to be those from before. After both have ended, as much is free
as at the start. Prints JSON lines.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

from common import (
    Ballast,
    adopt,
    conclude,
    emit,
    environment,
    every_line_says,
    gib,
    host_memory,
    install_entry_point,
    utilization,
)
from models import write_model

START_S, STEP_S, END_S = 200, 60, 30
SLACK_GIB = 0.1  # of free memory, between the start and the end


class Child:
    """An engine in a process of its own, with commands over a pipe."""

    def __init__(self, name: str, arguments: list[str], script: str = __file__):
        self.name = name
        command = [sys.executable, "-B", script, "--child", name, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self, limit_s: float) -> dict:
        """Its next answer; other lines are passed on. Raises when it ends, or is late and is killed then."""
        timer = threading.Timer(limit_s, self.process.kill)
        timer.start()
        try:
            for text in self.process.stdout:
                try:
                    line = json.loads(text)
                except ValueError:
                    print(text, file=sys.stderr, end="")
                    continue
                if line.get("event") == "answer":
                    return line
                print(text, end="", flush=True)
        finally:
            timer.cancel()
        raise RuntimeError(
            f"engine {self.name} ended with code {self.process.wait()} before it answered ({limit_s:.0f} s)"
        )

    def ask(self, what: str, limit_s: float = STEP_S) -> dict:
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        answer = self.answer(limit_s)
        if "error" in answer:
            raise RuntimeError(f"engine {self.name} cannot {what}: {answer['error']}")
        return answer

    def end(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def serve(options: argparse.Namespace, folder: Path) -> None:
    """What a child does: starts its engine, and then what each line of its input says."""
    import engine as engines

    if options.mode == "cumem":
        install_entry_point(folder / "plugin")
    chosen = engines.settings(
        write_model(folder, options.kind, options.layers),
        mode=options.mode,
        kv_gib=options.kv_gib,
        utilization=options.utilization,
    )
    engine = engines.start(options.mode, chosen)
    # Other weights in each, so that the tokens of one are not those of the other.
    engines.fill_weights(engine.model, 100 + ord(options.child[0]))
    reference = engine.tokens()
    emit("answer", tokens=reference)
    for line in sys.stdin:
        what = line.strip()
        try:
            if what == "sleep":
                seconds = engines.timed(engine.llm.sleep, level=1)
                emit("answer", seconds=round(seconds, 4), reported=engine.reported(), host=host_memory())
            elif what == "wake":
                seconds = engines.timed(engine.llm.wake_up)
                emit("answer", seconds=round(seconds, 4), reported=engine.reported())
            elif what == "check":
                emit("answer", tokens_equal=engine.tokens() == reference)
            else:
                emit("answer", error=f"there is no {what!r}")
        except Exception as error:
            traceback.print_exc()
            emit("answer", error=f"{type(error).__name__}: {error}"[:2000])


def alternate(children: list, rounds: int, free) -> bool:
    """The first of two is asleep and the second awake; each round wakes and checks both. Whether all was as
    it should be."""
    sleeping, awake = children
    good = True
    for turn in range(1, rounds + 1):
        for _ in range(2):
            slept, woke = awake.ask("sleep"), sleeping.ask("wake")
            sleeping, awake = awake, sleeping
            equal = awake.ask("check")["tokens_equal"]
            emit(
                "turn",
                round=turn,
                awake=awake.name,
                sleep_s=slept["seconds"],
                wake_s=woke["seconds"],
                slept=slept,
                woke=woke,
                free_gib=gib(free()),
                ok=equal,
            )
            good = good and equal
    return good


def run(options: argparse.Namespace) -> bool:
    with Ballast(options.free_gib) as ballast:
        before, total = ballast.free(), ballast.total()
        emit("card", free_gib=gib(before), total_gib=gib(total))
        children: list[Child] = []
        try:
            for name in ["A", "B"]:
                share = utilization(ballast.free(), total, options.free_gib, 0.9)
                words = ["--mode", options.mode, "--kind", options.kind, "--layers", str(options.layers)]
                words += ["--kv-gib", str(options.kv_gib), "--utilization", str(share)]
                children.append(Child(name, words))
                started = children[-1].answer(START_S)
                emit("started", engine=name, tokens=started["tokens"], free_gib=gib(ballast.free()))
                if name == "A":
                    slept = children[0].ask("sleep")
                    emit("first_sleep", sleep_s=slept["seconds"], free_gib=gib(ballast.free()))
            good = alternate(children, options.rounds, ballast.free)
        finally:
            for child in children:
                child.end()
        after = ballast.settled(before)
        given_back = before - after <= SLACK_GIB * (1 << 30)
        emit("end", free_before_gib=gib(before), free_after_gib=gib(after), ok=given_back)
        return good and given_back


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--mode", choices=["cumem", "poorwill"], required=True)
    arguments.add_argument("--kind", default="dense")
    arguments.add_argument("--layers", type=int, default=0)
    arguments.add_argument("--kv-gib", type=float, default=8)
    arguments.add_argument("--rounds", type=int, default=10)
    arguments.add_argument("--free-gib", type=float, default=36, help="what the two have to share")
    arguments.add_argument("--child", help=argparse.SUPPRESS)
    arguments.add_argument("--utilization", type=float, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    adopt(environment(options.mode, dict(os.environ), VLLM_ENABLE_V1_MULTIPROCESSING="0"))
    every_line_says(mode=options.mode, label=f"two-{options.child}" if options.child else "two")

    def whole() -> bool:
        if options.child:
            with tempfile.TemporaryDirectory(prefix="poorwill-bench-") as folder:
                serve(options, Path(folder))
            return True
        good = run(options)
        emit("done", ok=good)
        return good

    conclude(whole)


if __name__ == "__main__":
    main()
