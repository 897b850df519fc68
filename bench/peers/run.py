#!/usr/bin/env python3
"""Measure the machine, the peers and poorwill in one go, into one file of JSON lines.

Every line says which run and which round it comes from: `line` is what that run printed, `ended` says how
it ended. The order rotates from round to round, so that no peer always comes first. A run that fails, is
killed or takes too long is recorded and the rest goes on. table.py reads the file.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
STDERR_BYTES = 2000  # how much of a run's complaints is kept
TIGHT = "1.06"  # what is left of the card, over what lives at the peak, in runs that are called so
ENDING_S = 30  # how long a killed run may take to end


def runs(
    poorwill: str | None, device: str, gib: int, changed: str, seeds: int = 1, content: str | None = None
) -> dict[str, list[str]]:
    """Every run by name, with its command."""
    filled = ["--content", content] if content else []

    def script(name: str, *arguments: str) -> list[str]:
        return [sys.executable, str(HERE / name), *arguments]

    commands = {"machine": script("machine.py")}
    for allocator in ["cumem", "tms", "tms-retain", "poorwill"]:
        sleep = script("sleep_wake.py", "--allocator", allocator, "--gib", str(gib), *filled)
        commands[f"sleep-{allocator}"] = sleep
    for allocator in ["none", "cumem", "tms", "poorwill"]:
        for split in ["none", "20"]:
            for load in ["moe", "dense"]:
                churn = script("churn.py", "--allocator", allocator, "--split", split, "--load", load)
                commands[f"churn-{allocator}-{split}-{load}"] = churn
                commands[f"tight-{allocator}-{split}-{load}"] = [*churn, "--free-ratio", TIGHT]
                for seed in range(1, seeds):
                    commands[f"churn-{allocator}-{split}-{load}-{seed}"] = [*churn, "--seed", str(seed)]
    if poorwill:
        commands["poorwill-doctor"] = [poorwill, "doctor", "--json"]
        commands["poorwill-sleep"] = [
            poorwill,
            "bench",
            "sleep",
            "--json",
            "--device",
            device,
            "--size",
            f"{gib}GiB",
            "--changed",
            changed,
            *filled,
        ]
        if content:
            commands["poorwill-sleep-raw"] = [*commands["poorwill-sleep"], "--compress", "off"]
        for load in ["moe", "dense", "swizzle"]:
            commands[f"poorwill-churn-{load}"] = [
                poorwill,
                "bench",
                "churn",
                "--json",
                "--device",
                device,
                "--load",
                load,
            ]
    return commands


def rotated(names: list[str], turn: int, turns: int) -> list[str]:
    """The names in their order, beginning elsewhere in each turn."""
    first = turn * len(names) // turns
    return names[first:] + names[:first]


def execute(command: list[str], environment: dict[str, str], limit_s: float) -> tuple[str, dict]:
    """Standard output of a command, and how it ended."""
    start = time.monotonic()
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return "", {"failed": str(error), "seconds": 0.0}
    failed = None
    try:
        out, complaints = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        failed = f"still running after {limit_s:.0f} s"
        os.killpg(process.pid, signal.SIGKILL)  # a session of its own: nothing else is in the group
        try:
            out, complaints = process.communicate(timeout=ENDING_S)
        except subprocess.TimeoutExpired:  # stuck in the GPU's driver: leave it there and go on
            out, complaints = "", "it does not end"
    if failed is None and process.returncode:
        code = process.returncode
        failed = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    ended = {"failed": failed, "seconds": round(time.monotonic() - start, 3)}
    if failed:
        ended["stderr"] = complaints[-STDERR_BYTES:]
    return out, ended


def lines(out: str) -> list[dict]:
    """What a run printed: JSON as it is, other lines as text."""
    parsed = []
    for line in filter(None, map(str.strip, out.splitlines())):
        try:
            parsed.append({"line": json.loads(line)})
        except ValueError:
            parsed.append({"text": line})
    return parsed


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--out", type=Path, help="file to write; lines are added to one that is there")
    arguments.add_argument("--poorwill", help="poorwill's program; without it only the peers run")
    arguments.add_argument("--peers", help="folder that get_peers.py made; goes first on PYTHONPATH")
    arguments.add_argument("--device", default="cuda:0", help="poorwill's device")
    arguments.add_argument("--gib", type=int, default=24, help="size of the load that sleeps")
    arguments.add_argument("--changed", default="1%", help="part that changes before poorwill's last sleep")
    arguments.add_argument(
        "--content",
        choices=["weights"],
        help="what sleeps is normally distributed bf16, instead of constants (peers) and noise (poorwill)",
    )
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--seeds", type=int, default=1, help="how many seeds each load is run with")
    arguments.add_argument("--limit-s", type=float, default=300, help="longest that one run may take")
    arguments.add_argument(
        "--deadline-s", type=float, help="after how many seconds nothing is begun, and what runs is ended"
    )
    arguments.add_argument("--only", help="names of runs, or how they begin, with commas between")
    arguments.add_argument("--list", action="store_true", help="print the names of the runs, and run nothing")
    options = arguments.parse_args()

    commands = runs(
        options.poorwill, options.device, options.gib, options.changed, options.seeds, options.content
    )
    names = list(commands)
    if options.only:
        wanted = options.only.split(",")
        for part in wanted:
            if not any(name.startswith(part) for name in names):
                arguments.error(f"no run begins with `{part}`: {', '.join(names)}")
        names = [name for name in names if name.startswith(tuple(wanted))]
    if options.list:
        print("\n".join(names))
        return
    if not options.out:
        arguments.error("--out FILE is needed")
    environment = dict(os.environ)
    if options.peers:
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [options.peers, os.environ.get("PYTHONPATH")])
        )

    start, failures = time.monotonic(), 0
    with options.out.open("a") as file:
        for turn in range(options.rounds):
            for name in rotated(names, turn, options.rounds):
                tag = {"run": name, "round": turn + 1}
                left_s = (
                    options.deadline_s - (time.monotonic() - start) if options.deadline_s else options.limit_s
                )
                if left_s <= 0:
                    printed, ended = [], {"failed": "the deadline had passed", "seconds": 0.0}
                else:
                    out, ended = execute(commands[name], environment, min(options.limit_s, left_s))
                    printed = lines(out)
                for line in [*printed, {"ended": ended, "command": commands[name]}]:
                    file.write(json.dumps({**tag, **line}) + "\n")
                file.flush()
                failures += bool(ended["failed"])
                print(
                    f"{turn + 1} {name}: {ended['failed'] or 'done'} ({ended['seconds']} s)", file=sys.stderr
                )
    print(f"{options.rounds * len(names) - failures} runs done, {failures} failed", file=sys.stderr)


if __name__ == "__main__":
    main()
