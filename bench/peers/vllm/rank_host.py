"""An engine over several GPUs in a process of its own, which can be killed when it hangs, and as a whole.

The process is ranks.py with `--child`. Each line of its input is what it has to do, as JSON, and it answers
with a line.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

from common import HERE, emit, gib
from reload import attempt

END_S = 30  # how long an engine may take to end by itself
# What the process is given again, by the names that its options have.
PASSED_ON = ("mode", "tp", "pp", "dp", "kind", "layers", "kv_gib", "seed", "start_limit_s")


class LostError(Exception):
    """The engine's process has ended, or was killed because it was late."""

    def __init__(self, message: str, is_late: bool):
        super().__init__(message)
        self.is_late = is_late


def words_of(options: argparse.Namespace) -> list[str]:
    words = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in PASSED_ON]
    switches = {"--suspend-nccl": options.suspend_nccl, "--graphs": options.graphs}
    return [*words, *(name for name, is_on in switches.items() if is_on)]


class Hosted:
    """The process, and all that it has started, in a group of their own."""

    def __init__(self, options: argparse.Namespace, sees: bool = False, **environment: str):
        """With `sees` it looks at the GPUs, for which it has processes on them."""
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-B",
                str(HERE / "ranks.py"),
                "--child",
                "seeing" if sees else "blind",
                *words_of(options),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    def answer(self, limit_s: float) -> dict:
        """Its next answer; other lines are passed on. Where it is late, all of it is killed."""
        is_late = threading.Event()

        def late() -> None:
            is_late.set()
            self.kill()

        timer = threading.Timer(limit_s, late)
        timer.start()
        try:
            for text in self.process.stdout:
                try:
                    line = json.loads(text)
                except ValueError:
                    line = None
                if not isinstance(line, dict):
                    print(text, file=sys.stderr, end="")
                elif line.pop("event", None) == "answer":
                    if "failed" in line:
                        self.kill()
                        raise LostError(line["failed"], False)
                    return line
                else:
                    print(text, end="", flush=True)
        finally:
            timer.cancel()
        if is_late.is_set():
            raise LostError(f"it did not answer in {limit_s:.0f} s and was killed", True)
        raise LostError(f"it ended with code {self.process.wait()}", False)

    def tell(self, what: str, **arguments) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"what": what, **arguments}) + "\n")
            self.process.stdin.flush()

    def ask(self, what: str, limit_s: float, **arguments) -> dict:
        self.tell(what, **arguments)
        return self.answer(limit_s)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Lets it end, and kills what is left."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        self.kill()
        self.process.wait()
        self.process.stdout.close()


def end_with(parent: int) -> None:
    """Ends this process's group once its parent has ended, which may have been killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def serve(options: argparse.Namespace, folder: Path) -> None:
    """What the process does."""
    import rank_breaking
    import rank_faults
    from rank_engine import Cards, opened

    threading.Thread(target=end_with, args=[os.getppid()], daemon=True).start()
    with Cards(options.count if options.child == "seeing" else 0) as cards:
        ranks = opened(options, folder, cards)
        calls = {
            "calibrate": rank_faults.calibrate,
            "fault": rank_faults.carry_out,
            "stock fault": rank_faults.written_down,
            "hold back": lambda ranks, **given: {
                "done": ranks.each(rank_breaking.hold_back, *(given[name] for name in ("held", "when", "at")))
            },
            "sleep": lambda ranks: attempt(lambda: ranks.llm.sleep(level=1)),
            "wake": lambda ranks: attempt(ranks.llm.wake_up),
            "status": lambda ranks: {"ranks": ranks.status(), "used_gib": list(map(gib, cards.used()))},
            "check": lambda ranks: ranks.checks(),
        }
        emit("answer", ranks=ranks.about, pid=os.getpid())
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                answer = calls[asked.pop("what")](ranks, **asked)
            except Exception as error:
                traceback.print_exc()
                answer = {"failed": f"{type(error).__name__}: {error}"[:2000]}
            emit("answer", **answer)
        with contextlib.suppress(Exception):
            ranks.llm.shutdown()
