#!/usr/bin/env python3
"""A vLLM engine that sleeps and then leaves the card altogether, many times, while its helper is killed.

The engine runs in a child process, since a process cannot take itself off its device. `poorwill hibernate
--serve` does that. After every wake tokens and bytes have to be those from before. Prints JSON lines.

    hibernate.py --mode poorwill --kind dense --kv-gib 8 --graphs --cycles 100
    hibernate.py --mode cumem --kind dense --kv-gib 8 --graphs --cycles 3      # vLLM's own sleep before
    hibernate.py --mode poorwill --ranks 2 --kind small                        # refused by name, and goes on
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from common import (
    MODES,
    adopt,
    conclude_in_a_folder,
    descendants,
    emit,
    environment,
    every_line_says,
    host_memory,
    install_entry_point,
    name_of,
    parents,
)
from hibernate_rotation import used_by_process_mib, used_mib
from models import write_model
from two_engines import Child

START_S, STEP_S = 240, 60
KILL_AFTER_S = [0.0, 0.05, 0.2, 0.4, 0.7]
RESIDUE_MIB = 8
GROWTH_GIB = 0.25  # of host memory over all cycles


class Helper:
    """`poorwill hibernate --serve`."""

    def __init__(self, program: str, journal: Path):
        words = [program, "hibernate", "--serve", "--journal", str(journal)]
        began = time.monotonic()
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.first = self.line()
        self.up_s = round(time.monotonic() - began, 3)
        self.number = 0

    def line(self) -> dict:
        timer = threading.Timer(STEP_S, self.process.kill)
        timer.start()
        try:
            text = self.process.stdout.readline()
        finally:
            timer.cancel()
        return json.loads(text) if text else {"ended": self.process.wait()}

    def send(self, op: str, pids: list[int], **more) -> None:
        self.number += 1
        self.process.stdin.write(json.dumps({"id": self.number, "op": op, "pids": pids, **more}) + "\n")
        self.process.stdin.flush()

    def ask(self, op: str, pids: list[int], **more) -> dict:
        """What it answers, and the seconds."""
        began = time.monotonic()
        self.send(op, pids, **more)
        answer = self.line()
        while "recovered" in answer and "id" not in answer:
            answer = self.line()
        return {**answer, "seconds": round(time.monotonic() - began, 4)}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def serve(options: argparse.Namespace, folder: Path) -> None:
    """What the child does: starts its engine, and then what each line of its input says."""
    if options.ranks > 1:
        serve_ranks(options, folder)
        return
    import engine as engines

    if options.mode == "cumem":
        install_entry_point(folder / "plugin")
    chosen = engines.settings(
        write_model(folder, options.kind, options.layers),
        mode=options.mode,
        kv_gib=options.kv_gib,
        graphs="compile" if options.graphs else "",
    )
    engine = engines.start(options.mode, chosen)
    engines.fill_weights(engine.model, 77)
    tokens, prints = engine.tokens(), engines.fingerprint(engine.model)
    emit("answer", pid=os.getpid(), tokens=tokens)
    for line in sys.stdin:
        what = line.strip()
        if what == "sleep":
            emit("answer", seconds=round(engines.timed(engine.llm.sleep, level=1), 4), host=host_memory())
        elif what == "wake":
            emit("answer", seconds=round(engines.timed(engine.llm.wake_up), 4))
        elif what == "check":
            equal = engines.same(prints, engines.fingerprint(engine.model))
            emit("answer", bytes_equal=equal, tokens_equal=engine.tokens() == tokens)
        else:
            emit("answer", error=f"there is no {what!r}")


def serve_ranks(options: argparse.Namespace, folder: Path) -> None:
    """The same with a worker process for each rank; bytes are not looked at there."""
    import engine as engines
    from vllm import LLM

    chosen = engines.settings(
        write_model(folder, options.kind, options.layers), mode=options.mode, kv_gib=options.kv_gib
    )
    more = {"distributed_executor_backend": "mp", "disable_custom_all_reduce": True}
    llm = LLM(**chosen, tensor_parallel_size=options.ranks, **more)
    tokens = engines.generated(llm)
    emit("answer", pid=os.getpid(), tokens=tokens)
    for line in sys.stdin:
        what, began = line.strip(), time.perf_counter()
        if what == "sleep":
            llm.sleep(level=1)
        elif what == "wake":
            llm.wake_up()
        equal = engines.generated(llm) == tokens if what == "check" else True
        emit("answer", seconds=round(time.perf_counter() - began, 4), tokens_equal=equal, bytes_equal=equal)


def cycle(engine: Child, helper: Helper, pid: int) -> dict:
    slept = engine.ask("sleep")
    asleep = used_by_process_mib().get(pid, 0)
    away = helper.ask("hibernate", [pid], wait_max_ms=5000)
    if "ok" not in away:
        raise RuntimeError(f"it did not hibernate: {away}")
    left = used_by_process_mib().get(pid, 0)
    used = used_mib()
    back = helper.ask("resume", [pid])
    if "ok" not in back:
        raise RuntimeError(f"it did not come back: {back}")
    woken = engine.ask("wake")
    checked = engine.ask("check")
    return {
        "sleep_s": slept["seconds"],
        "asleep_mib": asleep,
        "in_s": away["seconds"],
        "left_mib": left,
        "card_mib": used,
        "out_s": back["seconds"],
        "wake_s": woken["seconds"],
        "bytes_equal": checked["bytes_equal"],
        "tokens_equal": checked["tokens_equal"],
        "host": host_memory(pid),
    }


def summary(cycles: list[dict]) -> dict:
    figures: dict = {"cycles": len(cycles)}
    for name in ["sleep_s", "in_s", "out_s", "wake_s"]:
        took = [one[name] for one in cycles]
        figures[name] = {"median": statistics.median(took), "min": min(took), "max": max(took)}
    for name in ["asleep_mib", "left_mib", "card_mib"]:
        figures[name] = {"min": min(one[name] for one in cycles), "max": max(one[name] for one in cycles)}
    for name in ["bytes_equal", "tokens_equal"]:
        figures[name] = all(one[name] for one in cycles)
    figures["host_first_gib"] = cycles[0]["host"].get("VmRSS")
    figures["host_last_gib"] = cycles[-1]["host"].get("VmRSS")
    return figures


def killed(engine: Child, options: argparse.Namespace, journal: Path, pid: int) -> bool:
    """The helper is killed in every phase; the next finds what was left, and the engine goes on."""
    good = True
    for op in ["hibernate", "resume"]:
        for after_s in KILL_AFTER_S:
            engine.ask("sleep")
            helper = Helper(options.poorwill, journal)
            if op == "resume":
                helper.ask("hibernate", [pid], wait_max_ms=5000)
            helper.send(op, [pid])
            time.sleep(after_s)
            helper.kill()
            following = Helper(options.poorwill, journal)
            state = following.ask("state", [pid])
            back = None
            if "checkpointed" in json.dumps(state):
                back = following.ask("resume", [pid])
            engine.ask("wake")
            checked = engine.ask("check")
            following.close()
            well = checked["tokens_equal"] and checked["bytes_equal"]
            emit("killed", op=op, after_s=after_s, ready=following.first, state=state, back=back, well=well)
            good = good and well
    return good


def refused(engine: Child, helper: Helper, pid: int) -> bool:
    """An engine of several ranks is refused by name before anything is locked, and goes on."""
    of = parents()
    workers = [one for one in descendants(pid, of) if one in used_by_process_mib()]
    engine.ask("sleep")
    answer = helper.ask("hibernate", workers, wait_max_ms=5000)
    seen = [helper.ask("inspect", [one]) for one in workers]
    states = [helper.ask("state", [one]) for one in workers]
    engine.ask("wake")
    checked = engine.ask("check")
    names = {one: name_of(one)[:60] for one in workers}
    emit("refused", workers=names, answer=answer, inspected=seen, states=states, checked=checked)
    return "error" in answer and answer["error"]["kind"] == "obstacles" and checked["tokens_equal"]


def run(options: argparse.Namespace, folder: Path) -> bool:
    at_first = used_mib()
    names = ["mode", "kind", "kv_gib", "layers", "ranks"]
    words = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    began = time.monotonic()
    engine = Child("engine", [*words, *(["--graphs"] if options.graphs else [])], __file__)
    pid = engine.answer(START_S)["pid"]
    helper = Helper(options.poorwill, folder / "journal")
    emit("ready", start_s=round(time.monotonic() - began, 1), helper=helper.first, helper_s=helper.up_s)
    try:
        if options.ranks > 1:
            return refused(engine, helper, pid)
        inspected = helper.ask("inspect", [pid])
        cycles = []
        for number in range(options.cycles):
            cycles.append(cycle(engine, helper, pid))
            if number < 3 or number % 20 == 0:
                emit("cycle", cycle=number, **cycles[-1])
        figures = summary(cycles)
        emit("cycles", inspected=inspected, first=cycles[0], **figures)
        helper.close()
        good = figures["bytes_equal"] and figures["tokens_equal"]
        good = good and figures["left_mib"]["max"] <= RESIDUE_MIB
        good = good and figures["host_last_gib"] - figures["host_first_gib"] <= GROWTH_GIB
        if options.kills:
            good = killed(engine, options, folder / "journal", pid) and good
        # Killed while it is away: the card is free after it.
        engine.ask("sleep")
        last = Helper(options.poorwill, folder / "journal")
        last.ask("hibernate", [pid], wait_max_ms=5000)
        os.kill(pid, signal.SIGKILL)
        engine.process.wait()
        gone = last.ask("resume", [pid])
        last.close()
        emit("engine_killed", answer=gone, used_mib=used_mib(), at_first_mib=at_first)
        return good and "error" in gone and used_mib() <= at_first + RESIDUE_MIB
    finally:
        engine.process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", choices=MODES[:2], required=True)
    parser.add_argument("--poorwill", default="poorwill", help="the program that takes it off")
    parser.add_argument("--kind", default="dense")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--kv-gib", type=float, default=8)
    parser.add_argument("--graphs", action="store_true", help="with torch.compile and CUDA graphs")
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--kills", action="store_true", help="kill the helper in every phase")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if options.ranks > 1:
        from rank_engine import SURROUNDINGS

        more = SURROUNDINGS
    adopt(environment(options.mode, dict(os.environ), **more))
    if options.child:
        with tempfile.TemporaryDirectory(prefix="poorwill-bench-") as folder:
            serve(options, Path(folder))
        return
    if options.cycles < 1:
        parser.error("--cycles is 1 or more")
    if not (program := shutil.which(options.poorwill)):
        parser.error(f"there is no program {options.poorwill}: build it, and say where with --poorwill")
    options.poorwill = str(Path(program).resolve())
    every_line_says(mode=options.mode, kind=options.kind)
    conclude_in_a_folder(lambda folder: run(options, folder))


if __name__ == "__main__":
    main()
