"""What only a GPU shows of processes that are taken off it. A script, which prints one JSON object:

    PYTHONPATH=... python hibernate_gpu_suite.py --gib 4 --cycles 3

A target holds weights in a pool, and a CUDA graph that reads them. Callers take it off, put it back, and are
killed meanwhile. Without PyTorch the target has an arena alone. The exit status is 1 if anything differs.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from importlib import import_module, util
from typing import Any

import poorwill
from poorwill._native import process_state

RESIDUE_MAX_BYTES = 8 << 20
ANSWER_MAX_S = 5.0
MOMENTS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
"""When a caller is killed, as shares of the time that it takes."""


# The target: it answers each line of its input with a line.


class Model:
    """Weights in a pool, and a graph over them."""

    def __init__(self, gib: float) -> None:
        self.torch: Any = import_module("torch")
        self.side = 4096
        self.number = max(1, int(gib * (1 << 30)) // (2 * self.side * self.side))
        with poorwill.pool("weights"):
            self.weights = [self._made(number) for number in range(self.number)]
        self.x = self.torch.ones((64, self.side), dtype=self.torch.bfloat16, device="cuda")
        stream = self.torch.cuda.Stream()
        stream.wait_stream(self.torch.cuda.current_stream())
        with self.torch.cuda.stream(stream):
            for _ in range(3):
                self._product()
        self.torch.cuda.current_stream().wait_stream(stream)
        self.graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(self.graph, pool=poorwill.graph_pool()):
            self.y = self._product()
        self.addresses = self._addresses()
        self.result = self._replayed()

    def _made(self, number: int) -> Any:
        generator = self.torch.Generator(device="cuda").manual_seed(number)
        shape, torch = (self.side, self.side), self.torch
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda", generator=generator) / 64

    def _product(self) -> Any:
        return self.x @ self.weights[0] @ self.weights[-1]

    def _addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in (*self.weights, self.x, self.y)]

    def _replayed(self) -> Any:
        self.graph.replay()
        self.torch.cuda.synchronize()
        return self.y.clone()

    def check(self) -> dict[str, bool]:
        torch = self.torch
        return {
            "addresses": self._addresses() == self.addresses,
            "bytes": all(torch.equal(each, self._made(at)) for at, each in enumerate(self.weights)),
            "graph": bool(torch.equal(self._replayed(), self.result)),
        }


class Arena:
    """An arena alone. Its bytes are those that a wake compares."""

    def __init__(self, gib: float) -> None:
        self.arena = poorwill.arena("cuda:0", limit=int(gib * (1 << 30)) + (64 << 20))
        self.block = self.arena.empty(int(gib * (1 << 30)))
        self.address = self.block.address

    def check(self) -> dict[str, bool]:
        return {"addresses": self.block.address == self.address, "bytes": True}


def own_state() -> str:
    """What the driver says of this process, asked from within, also while it is off its GPU."""
    said = ["it does not answer"]

    def ask() -> None:
        try:
            said[0] = process_state(os.getpid())
        except poorwill.PoorwillError as error:
            said[0] = str(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(ANSWER_MAX_S)
    return said[0]


def target(gib: float) -> None:
    held: Any = (Model if util.find_spec("torch") is not None else Arena)(gib)
    sleep, wake = (poorwill, poorwill) if isinstance(held, Model) else (held.arena, held.arena)
    calls = {
        "check": held.check,
        "own_state": own_state,
        "sleep": lambda: sleep.sleep().as_dict(),
        "wake": lambda: wake.wake(verify="all").as_dict(),
    }
    print(json.dumps(os.getpid()), flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        answer = calls[line.strip()]()
        print(json.dumps([answer, time.perf_counter() - started]), flush=True)


# The caller


class Target:
    """A target in a process of its own."""

    def __init__(self, gib: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-B", __file__, "--target", "--gib", str(gib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid: int = self.answer()

    def ask(self, line: str) -> Any:
        self.send(line)
        return self.answer()

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def used_mib() -> float | None:
    """Memory of the first GPU that is in use, by all; None without NVIDIA's tool."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout)


def residue_bytes(pid: int) -> int | None:
    """What NVML lists for a process."""
    figures = [held.used_bytes for held in poorwill.hibernation(pid).held]
    return None if None in figures else sum(figure or 0 for figure in figures)


class Run:
    """A run's figures, and what was not as it should be."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {"used_mib": {}}
        self.wrong: list[str] = []

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)

    def use(self, moment: str) -> None:
        self.figures["used_mib"][moment] = used_mib()

    def expect_whole(self, target: Target, moment: str) -> None:
        checked, _ = target.ask("check")
        self.expect(all(checked.values()), f"{moment}: {checked}")


def cycles(run: Run, target: Target, number: int) -> None:
    """Sleeps, hibernates, resumes and wakes."""
    measured = []
    for cycle in range(number):
        slept, sleep_s = target.ask("sleep")
        run.use(f"asleep {cycle}")
        before = poorwill.hibernation(target.pid)
        off = poorwill.hibernate(target.pid)
        run.use(f"hibernating {cycle}")
        run.expect(process_state(target.pid) == "checkpointed", "it does not hibernate")
        residue = residue_bytes(target.pid)
        run.expect(residue is None or residue <= RESIDUE_MAX_BYTES, f"it leaves {residue} bytes")
        own, _ = target.ask("own_state")
        back = poorwill.resume(target.pid)
        woken, wake_s = target.ask("wake")
        run.expect_whole(target, f"cycle {cycle}")
        measured.append(
            {
                "before": before.as_dict(),
                "residue_bytes": residue,
                "own_state": own,
                "hibernate": off.as_dict(),
                "resume": back.as_dict(),
                "sleep_s": sleep_s,
                "released_bytes": slept["released_bytes"],
                "wake_s": wake_s,
                "verified_bytes": woken["verified_bytes"],
            }
        )
    run.figures["cycles"] = measured


def sets(run: Run, first: Target, gib: float) -> None:
    """Two processes go together, or not at all."""
    second = Target(gib)
    pids = (first.pid, second.pid)
    try:
        for each in (first, second):
            each.ask("sleep")
        try:
            poorwill.hibernate((*pids, os.getpid()))
        except poorwill.HibernateError as error:
            run.figures["set_refused"] = str(error)
        states = [process_state(pid) for pid in pids]
        run.expect(states == ["running"] * 2, f"a set that was refused left {states}")
        run.figures["set"] = [poorwill.hibernate(pids).as_dict(), poorwill.resume(pids).as_dict()]
        for each in (first, second):
            each.ask("wake")
            run.expect_whole(each, "the set")
    finally:
        second.end()


KILLED = """
import sys
import poorwill
from poorwill._native import process_state
[_, call, pid] = sys.argv
process_state(int(pid))
print("ready", flush=True)
getattr(poorwill, call)(int(pid))
"""


def kills(run: Run, target: Target, hibernate_s: float, resume_s: float) -> None:
    """A caller is killed at moments of each call, and the next one finds a process that it can bring back."""
    found = []
    for call, takes_s in (("hibernate", hibernate_s), ("resume", resume_s)):
        for share in MOMENTS:
            target.ask("sleep")
            if call == "resume":
                poorwill.hibernate(target.pid)
            caller = subprocess.Popen(
                [sys.executable, "-B", "-c", KILLED, call, str(target.pid)], stdout=subprocess.PIPE
            )
            assert caller.stdout is not None
            caller.stdout.readline()
            time.sleep(share * takes_s)
            caller.send_signal(signal.SIGKILL)
            caller.communicate()
            started = time.perf_counter()
            after, steps = brought_back(target.pid)
            found.append(
                {
                    "killed_in": call,
                    "after_s": share * takes_s,
                    "state": after,
                    "steps": steps,
                    "back_s": time.perf_counter() - started,
                }
            )
            target.ask("wake")
            run.expect_whole(target, f"killed in {call} at {share}")
    run.figures["kills"] = found


def state_of(pid: int) -> str:
    """Where a process stands, once the driver has ended what it does with it."""
    while True:
        try:
            return process_state(pid)
        except poorwill.HibernateError as error:
            if error.kind != "no_answer":
                raise


def brought_back(pid: int) -> tuple[str, list[str]]:
    """The state that was found, and what had to be done until it ran."""
    steps = []
    found = state = state_of(pid)
    while state != "running":
        try:
            poorwill.resume(pid)
            steps.append("resumed")
        except poorwill.HibernateError as error:
            # What the killed caller left was brought back before.
            steps.append(str(error))
            if state_of(pid) == state:
                raise
        state = state_of(pid)
    return found, steps


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.0, help="weights of a target")
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--target", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.target:
        target(given.gib)
        return 0
    run = Run()
    run.use("before")
    first = Target(given.gib)
    try:
        run.use("awake")
        cycles(run, first, given.cycles)
        last = run.figures["cycles"][-1]
        kills(run, first, last["hibernate"]["total_ms"] / 1e3, last["resume"]["total_ms"] / 1e3)
        sets(run, first, min(given.gib, 0.25))
    finally:
        first.end()
    run.use("after")
    figures = {"version": poorwill.__version__, "python": sys.version.split()[0], **run.figures}
    print(json.dumps({"ok": not run.wrong, "wrong": run.wrong, **figures}, indent=1))
    return 1 if run.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
