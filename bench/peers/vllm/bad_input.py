#!/usr/bin/env python3
"""Give vLLM with poorwill what it has to refuse, each in a fresh process, and print what came of it.

A refusal is good when it comes as an error with a sentence that names the setting; what is to be named is
looked for, and the whole sentence printed for whoever judges it. Prints one JSON line a case.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from common import adopt, conclude, emit, environment, every_line_says
from models import write_model

LIMIT_S = 120
LAST_LINES = 12
LAYERS = 4  # of the dense model: 3.8 GiB


@dataclass(frozen=True)
class Case:
    """What is wrong, when it is to be refused, and what the refusal has to name."""

    name: str
    refused: str  # "start", "later", or "never"
    names: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    settings: dict = field(default_factory=dict)
    actions: list[tuple] = field(default_factory=list)


SLEEP, WAKE = ("sleep", {"level": 1}), ("wake_up", {})
CASES = [
    Case("good", "never", [], actions=[SLEEP, WAKE]),
    Case("sleep-mode-off", "start", ["POORWILL_SLEEP_MODE", "sleep"], settings={"enable_sleep_mode": False}),
    Case(
        "expandable-segments",
        "start",
        ["expandable_segments", "PYTORCH_CUDA_ALLOC_CONF"],
        environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    ),
    Case(
        "expandable-segments-new-name",
        "start",
        ["expandable_segments", "PYTORCH_ALLOC_CONF"],
        environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    ),
    Case(
        "host-budget-too-small",
        "later",
        ["POORWILL_HOST_BUDGET"],
        environment={"POORWILL_HOST_BUDGET": "256MiB"},
        actions=[SLEEP],
    ),
    Case(
        "host-budget-nonsense",
        "start",
        ["POORWILL_HOST_BUDGET", "nonsense"],
        environment={"POORWILL_HOST_BUDGET": "nonsense"},
    ),
    Case(
        "budget-nonsense",
        "start",
        ["POORWILL_BUDGET", "nonsense"],
        environment={"POORWILL_BUDGET": "nonsense"},
    ),
    Case("budget-too-small", "start", ["POORWILL_BUDGET"], environment={"POORWILL_BUDGET": "1GiB"}),
    Case("budget-beyond-card", "start", ["POORWILL_BUDGET"], environment={"POORWILL_BUDGET": "9000GiB"}),
    Case("budget-share", "never", [], environment={"POORWILL_BUDGET": "0.3"}, actions=[SLEEP, WAKE]),
    Case(
        "switch-nonsense",
        "start",
        ["POORWILL_SLEEP_MODE", "maybe"],
        environment={"POORWILL_SLEEP_MODE": "maybe"},
    ),
    Case(
        "prepare-nonsense",
        "start",
        ["POORWILL_PREPARE", "maybe"],
        environment={"POORWILL_PREPARE": "maybe"},
    ),
    Case(
        "tag-unknown",
        "later",
        ["nonsense", "weights", "kv_cache"],
        actions=[SLEEP, ("wake_up", {"tags": ["nonsense"]})],
    ),
    Case("level-unknown", "later", ["7"], actions=[("sleep", {"level": 7})]),
    Case("level-changed", "later", ["level"], actions=[SLEEP, ("sleep", {"level": 2})]),
]


def child(case: Case) -> None:
    """Starts the engine of a case, and does what is to be done; says how far it came."""
    import engine as engines

    with tempfile.TemporaryDirectory(prefix="poorwill-bench-") as folder:
        chosen = engines.settings(
            write_model(Path(folder), "dense", LAYERS), mode="poorwill", kv_gib=1, utilization=0.5
        )
        try:
            engine = engines.start("poorwill", {**chosen, **case.settings})
        except engines.WrongAllocatorError as error:  # it did start
            emit("outcome", at="never", error_type=type(error).__name__, error=str(error))
            return
        except Exception as error:
            traceback.print_exc()
            emit("outcome", at="start", error_type=type(error).__name__, error=str(error)[:3000])
            return
        reference = engine.tokens()
        for what, named in case.actions:
            try:
                getattr(engine.llm, what)(**named)
            except Exception as error:
                traceback.print_exc()
                emit("outcome", at="later", error_type=type(error).__name__, error=str(error)[:3000])
                break
        else:
            emit("outcome", at="never")
        # Whatever was refused, it has to be as good as before.
        engine.llm.wake_up()
        emit("afterwards", tokens_equal=engine.tokens() == reference)


def last_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()][-LAST_LINES:]


def judged(case: Case, lines: list[dict], code: int | None, complaints: str) -> dict:
    """What came of a case, and whether the error itself names what it has to."""
    outcomes = [line for line in lines if line.get("event") == "outcome"]
    outcome = outcomes[-1] if outcomes else {"at": "ended without a word"}
    said = outcome.get("error", "")
    missing = [name for name in case.names if name not in said]
    afterwards = [line["tokens_equal"] for line in lines if line.get("event") == "afterwards"]
    good = outcome["at"] == case.refused and not missing and all(afterwards)
    return {
        "case": case.name,
        "expected": case.refused,
        "seen": outcome["at"],
        "error_type": outcome.get("error_type"),
        "error": said,
        "does_not_name": missing,
        "only_the_log_names": [name for name in missing if name in complaints],
        "tokens_equal_afterwards": afterwards[-1] if afterwards else None,
        "exit_code": code,
        "last_lines": last_lines(complaints),
        "ok": good,
    }


def run(case: Case) -> dict:
    start = time.monotonic()
    command = [sys.executable, "-B", __file__, "--case", case.name]
    begun = environment("poorwill", dict(os.environ), VLLM_ENABLE_V1_MULTIPROCESSING="0")
    try:
        ran = subprocess.run(
            command,
            env={**begun, **case.environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
        )
        out, complaints, code = ran.stdout, ran.stderr, ran.returncode
    except subprocess.TimeoutExpired as late:
        out, complaints = ((part or b"").decode(errors="replace") for part in (late.stdout, late.stderr))
        code = None
    lines = []
    for text in out.splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return {**judged(case, lines, code, complaints), "seconds": round(time.monotonic() - start, 1)}


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--only", help="names of cases, with commas between")
    arguments.add_argument("--case", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    by_name = {case.name: case for case in CASES}
    every_line_says(mode="poorwill", label="bad-input")
    if options.case:
        # The case's environment is this process's already: what is wrong in it shall stay wrong.
        adopt({**environment("none", {}), **dict(os.environ)})

        def whole() -> bool:
            child(by_name[options.case])
            return True

        conclude(whole)
    names = options.only.split(",") if options.only else list(by_name)
    if unknown := [name for name in names if name not in by_name]:
        arguments.error(f"no case {', '.join(unknown)}: there are {', '.join(by_name)}")
    good = True
    for name in names:
        record = run(by_name[name])
        emit("case", **record)
        good = good and record["ok"]
    emit("done", ok=good)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
