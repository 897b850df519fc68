#!/usr/bin/env python3
"""Run plans of measurements one after the other, each run in its own process.

The files grow as it goes: DIR/PLAN.jsonl has what the runs printed, DIR/PLAN.log the end of each log.

    visit.py --out DIR dense            # one plan
    visit.py --out DIR dense moe        # several
    visit.py --out DIR --go-on dense    # what of it has not been run yet, by what is in DIR
    visit.py --list                     # what there is

A run that fails or takes too long is recorded, and the rest goes on. One that the deadline has cut short, or
kept from beginning, counts as not run.
"""

import argparse
import contextlib
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from common import HERE, descendants, parents, touch_host_memory
from plans import PLANS, Run

LOG_BYTES = 24_000  # how much of a run's log is kept
ENDING_S = 20  # how long a killed run may take to end


def command(run: Run) -> list[str]:
    return [sys.executable, "-B", str(HERE / run.script), *run.arguments]


def tagged(run: Run, text: str) -> dict:
    """A line of a run's output, as it is kept."""
    try:
        line = json.loads(text)
    except ValueError:
        return {"run": run.name, "text": text.rstrip("\n")}
    return {"run": run.name, "line": line}


def tail(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LOG_BYTES))
        return file.read().decode(errors="replace")


def end(process: subprocess.Popen) -> None:
    """Kills a run with all that it started, what has a session of its own included."""
    below = descendants(process.pid, parents()) if process.poll() is None else []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # a session of its own: nothing else is in the group
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def execute(run: Run, limit_s: float, keep, log: Path) -> dict:
    """Runs one; every line of its output goes to `keep` as it comes. Returns how it ended."""
    start = time.monotonic()
    late = threading.Event()
    with log.open("wb") as complaints:
        process = subprocess.Popen(
            command(run),
            env={**os.environ, "PYTHONUNBUFFERED": "1", **run.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def overdue() -> None:
        late.set()
        end(process)

    def clear() -> None:
        """Ends what the run leaves behind, at once: it has the output open, which is read to its end."""
        process.wait()
        end(process)

    timer = threading.Timer(limit_s, overdue)
    timer.start()
    clearing = threading.Thread(target=clear, daemon=True)
    clearing.start()
    try:
        for text in process.stdout:
            keep(tagged(run, text))
        code = process.wait(timeout=limit_s + ENDING_S)
    except subprocess.TimeoutExpired:
        code = None
    except BaseException:
        end(process)
        raise
    finally:
        timer.cancel()
        process.stdout.close()
    clearing.join(ENDING_S)
    failed = None
    if late.is_set():
        failed = f"still running after {limit_s:.0f} s"
    elif code != 0:
        failed = f"killed by signal {-code}" if code and code < 0 else f"exit code {code}"
    return {"failed": failed, "seconds": round(time.monotonic() - start, 2)}


def chosen(names: list[str], only: str | None) -> dict[str, list[Run]]:
    """The plans by name, of them the runs whose names begin so."""
    wanted = tuple(only.split(",")) if only else ("",)
    plans = {name: [run for run in PLANS[name] if run.name.startswith(wanted)] for name in names}
    return {name: runs for name, runs in plans.items() if runs}


def done(file: Path) -> set[str]:
    """The runs that have ended, well or not, by what is kept of them; not those that the deadline has."""
    ended: dict[str, bool] = {}
    for text in file.read_text().splitlines() if file.exists() else []:
        record = json.loads(text)
        if how := record.get("ended"):
            ended[record["run"]] = not how.get("by_deadline")
    return {name for name, whole in ended.items() if whole}


def left(plans: dict[str, list[Run]], out: Path) -> dict[str, list[Run]]:
    """What of the plans has not been run yet."""
    rest = {}
    for name, runs in plans.items():
        ended = done(out / f"{name}.jsonl")
        rest[name] = [run for run in runs if run.name not in ended]
    return {name: runs for name, runs in rest.items() if runs}


def visit(plans: dict[str, list[Run]], out: Path, deadline_s: float) -> int:
    """Runs all; returns how many failed."""
    begin, failures = time.monotonic(), 0
    out.mkdir(parents=True, exist_ok=True)
    for name, runs in plans.items():
        with (out / f"{name}.jsonl").open("a") as lines, (out / f"{name}.log").open("a") as logs:

            def keep(record: dict, lines=lines) -> None:
                lines.write(json.dumps(record) + "\n")
                lines.flush()

            for run in runs:
                at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
                typed = shlex.join([f"bench/peers/vllm/{run.script}", *run.arguments])
                keep({"run": run.name, "command": typed, "at": at})
                left_s = deadline_s - (time.monotonic() - begin)
                if left_s <= run.about_s:
                    failed = f"{left_s:.0f} s were left, and it takes about {run.about_s} s"
                    ended = {"failed": failed, "seconds": 0.0, "by_deadline": True}
                else:
                    with tempfile.TemporaryDirectory() as folder:
                        log = Path(folder) / "log"
                        ended = execute(run, min(run.limit_s, left_s), keep, log)
                        if ended["failed"] and left_s < run.limit_s and ended["seconds"] >= left_s:
                            ended["by_deadline"] = True
                        logs.write(f"==== {run.name}: {ended}\n{tail(log)}\n")
                        logs.flush()
                keep({"run": run.name, "ended": ended})
                failures += bool(ended["failed"])
                print(f"{run.name}: {ended['failed'] or 'done'} ({ended['seconds']} s)", flush=True)
    return failures


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("plans", nargs="*", help="names of plans")
    arguments.add_argument("--out", type=Path, help="folder for what comes out")
    arguments.add_argument("--only", help="names of runs, or how they begin, with commas between")
    arguments.add_argument("--go-on", action="store_true", help="leave out what --out has as run")
    arguments.add_argument("--deadline-s", type=float, default=570, help="when nothing may run any more")
    arguments.add_argument(
        "--touch-gib", type=int, default=0, help="host memory to touch first, where that is slow at first"
    )
    arguments.add_argument("--list", action="store_true", help="print what there is, and run nothing")
    options = arguments.parse_args()
    if unknown := [name for name in options.plans if name not in PLANS]:
        arguments.error(f"no plan {', '.join(unknown)}: there are {', '.join(PLANS)}")
    plans = chosen(options.plans or list(PLANS), options.only)
    if options.list:
        for name, runs in plans.items():
            print(name)
            for run in runs:
                about = f" (about {run.about_s} s)" if run.about_s else ""
                print(f"  {run.name}: {shlex.join([run.script, *run.arguments])}{about}")
        return
    if not options.out or not options.plans:
        arguments.error("plans and --out DIR are needed")
    if not plans:
        arguments.error("no such run in these plans")
    if options.go_on:
        plans = left(plans, options.out)
    begin = time.monotonic()
    if options.touch_gib and plans:
        seconds = touch_host_memory(options.touch_gib)
        print(f"touched {options.touch_gib} GiB of host memory ({seconds:.1f} s)", flush=True)
    failures = visit(plans, options.out, options.deadline_s - (time.monotonic() - begin))
    print(f"{sum(map(len, plans.values())) - failures} runs done, {failures} failed", flush=True)


if __name__ == "__main__":
    main()
