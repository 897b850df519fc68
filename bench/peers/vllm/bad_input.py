#!/usr/bin/env python3
"""Give vLLM with poorwill what it has to refuse, and print what came of it.

A refusal is good when it is an error that names the setting: the name is checked, and the message printed.
An engine that has refused something has to give the same tokens afterwards. Settings that vLLM refuses before
it starts anything are tried in one process, and those that one engine can refuse with one engine. Every other
case has a process of its own. Prints one JSON line a case.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common import ERROR_CHARACTERS, EXPANDABLE, adopt, conclude, emit, environment, every_line_says
from models import write_model

LIMIT_S = 120
LAST_LINES = 12
LAYERS = 4  # of the dense model: 3.8 GiB
KV_GIB = 1
BEGINS = "==== case "  # in the log, before the name


@dataclass(frozen=True)
class Case:
    """What is wrong, when it is to be refused, and what the refusal has to name."""

    name: str
    refused: str  # "start", "later", or "never"
    names: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    settings: dict = field(default_factory=dict)
    actions: list[tuple] = field(default_factory=list)
    process: str = ""  # which it shares with all that say the same: SETTINGS, ENGINE, or none


SETTINGS, ENGINE = "settings", "engine"
SLEEP, WAKE = ("sleep", {"level": 1}), ("wake_up", {})


def setting(name: str, names: list[str], environment: dict[str, str], **settings) -> Case:
    """What is refused while vLLM reads its settings."""
    return Case(name, "start", names, environment, settings, process=SETTINGS)


def action(name: str, refused: str, names: list[str], *actions: tuple) -> Case:
    """What a healthy engine is asked to do."""
    return Case(name, refused, names, actions=list(actions), process=ENGINE)


BUDGET, CACHE = "POORWILL_BUDGET", "kv_cache_memory_bytes"
CASES = [
    action("good", "never", [], SLEEP, WAKE),
    action(
        "tag-unknown",
        "later",
        ["nonsense", "weights", "kv_cache"],
        SLEEP,
        ("wake_up", {"tags": ["nonsense"]}),
    ),
    action("level-unknown", "later", ["level is 7"], ("sleep", {"level": 7})),
    action("level-changed", "later", ["level 1", "level 2"], SLEEP, ("sleep", {"level": 2})),
    setting("sleep-mode-off", ["POORWILL_SLEEP_MODE", "sleep"], {}, enable_sleep_mode=False),
    *(
        setting(name, [variable, value], {variable: value})
        for name, variable, value in [
            ("host-budget-nonsense", "POORWILL_HOST_BUDGET", "nonsense"),
            ("budget-nonsense", BUDGET, "nonsense"),
            ("switch-nonsense", "POORWILL_SLEEP_MODE", "maybe"),
            ("prepare-nonsense", "POORWILL_PREPARE", "maybe"),
        ]
    ),
    Case(
        "host-budget-too-small",
        "later",
        ["POORWILL_HOST_BUDGET"],
        {"POORWILL_HOST_BUDGET": "256MiB"},
        actions=[SLEEP],
    ),
    # The KV cache alone is as large; and it is not, but does not fit beside the weights.
    Case("budget-too-small", "start", [BUDGET, CACHE], {BUDGET: f"{KV_GIB}GiB"}),
    Case("budget-without-room", "start", [BUDGET, CACHE, "weights"], {BUDGET: "4.5GiB"}),
    Case("budget-beyond-card", "start", [BUDGET], {BUDGET: "9000GiB"}),
    Case("budget-share", "never", [], {BUDGET: "0.3"}, actions=[SLEEP, WAKE]),
    Case("expandable-segments", "never", [], EXPANDABLE, actions=[SLEEP, WAKE]),
]


def child(cases: list[Case]) -> None:
    """Goes through the cases of one process, and says of each how far it came. Ends where a case has left
    something that would be in the way of the next."""
    begun, engine, reference = dict(os.environ), None, None
    with tempfile.TemporaryDirectory(prefix="poorwill-bench-") as folder:
        path = write_model(Path(folder), "dense", LAYERS)
        for case in cases:
            adopt({**begun, **case.environment})
            every_line_says(case=case.name)
            print(f"{BEGINS}{case.name}", file=sys.stderr, flush=True)
            if engine is None:
                engine = started(case, path)
            if case.refused == "start":
                if engine is not None:
                    emit("outcome", at="never")
                    return
                continue
            if engine is None:
                return
            reference = reference or engine.tokens()
            act(case, engine)
            # Whatever was refused, it has to be as good as before.
            engine.llm.wake_up()
            emit("afterwards", tokens_equal=engine.tokens() == reference)


def started(case: Case, path: Path):
    """The engine of a case; None, with a report, if it did not start."""
    import engine as engines

    chosen = engines.settings(path, mode="poorwill", kv_gib=KV_GIB, utilization=0.5)
    try:
        return engines.start("poorwill", {**chosen, **case.settings})
    except Exception as error:
        traceback.print_exc()
        at = "never" if isinstance(error, engines.WrongAllocatorError) else "start"
        emit("outcome", at=at, error_type=type(error).__name__, error=str(error)[:ERROR_CHARACTERS])
        return None


def act(case: Case, engine) -> None:
    """Does what is to be done, and says whether it was refused."""
    for what, named in case.actions:
        try:
            getattr(engine.llm, what)(**named)
        except Exception as error:
            traceback.print_exc()
            emit("outcome", at="later", error_type=type(error).__name__, error=str(error)[:ERROR_CHARACTERS])
            return
    emit("outcome", at="never")


def last_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()][-LAST_LINES:]


def judged(case: Case, lines: list[dict], code: int | None, complaints: str) -> dict:
    """What came of a case, and whether the error itself names what it has to."""
    outcomes = [line for line in lines if line.get("event") == "outcome"]
    outcome = outcomes[-1] if outcomes else {"at": "ended without a word"}
    said = outcome.get("error", "")
    missing = [name for name in case.names if name not in said]
    afterwards = [line["tokens_equal"] for line in lines if line.get("event") == "afterwards"]
    loaded = any(line.get("event") == "load" for line in lines)
    good = outcome["at"] == case.refused and not missing
    if case.refused == "start":
        good = good and not (loaded and case.process == SETTINGS)
    else:
        good = good and afterwards == [True]
    return {
        "case": case.name,
        "expected": case.refused,
        "seen": outcome["at"],
        "error_type": outcome.get("error_type"),
        "error": said,
        "does_not_name": missing,
        "only_the_log_names": [name for name in missing if name in complaints],
        "loaded": loaded,
        "tokens_equal_afterwards": afterwards[-1] if afterwards else None,
        "exit_code": code,
        "last_lines": last_lines(complaints),
        "ok": good,
    }


def complaints_of(case: Case, log: str) -> str:
    """What of a process's log is about a case; all of it where that is not known."""
    _, begins, rest = log.partition(f"{BEGINS}{case.name}\n")
    return rest.partition(BEGINS)[0] if begins else log


def together(cases: list[Case]) -> list[list[Case]]:
    """The cases by the process that they have."""
    processes: dict[str, list[Case]] = {}
    for case in cases:
        processes.setdefault(case.process or case.name, []).append(case)
    return list(processes.values())


def command(cases: list[Case]) -> list[str]:
    return [sys.executable, "-B", __file__, "--cases", ",".join(case.name for case in cases)]


def run(cases: list[Case]) -> Iterator[dict]:
    """What came of the cases of one process; of two, if it ends before it has come to all of them."""
    start = time.monotonic()
    try:
        ran = subprocess.run(
            command(cases),
            env=environment("poorwill", dict(os.environ), VLLM_ENABLE_V1_MULTIPROCESSING="0"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
        )
        out, log, code = ran.stdout, ran.stderr, ran.returncode
    except subprocess.TimeoutExpired as late:
        out, log = ((part or b"").decode(errors="replace") for part in (late.stdout, late.stderr))
        code = None
    seconds = round(time.monotonic() - start, 1)
    lines: dict[str, list[dict]] = {}
    for text in out.splitlines():
        try:
            line = json.loads(text)
            lines.setdefault(line["case"], []).append(line)
        except (ValueError, TypeError, KeyError):
            continue
    # One that ended the process without a word has been tried as well.
    tried = [case for case in cases if f"{BEGINS}{case.name}\n" in log] or cases[:1]
    for case in tried:
        record = judged(case, lines.get(case.name, []), code, complaints_of(case, log))
        yield {**record, "process": [other.name for other in tried], "seconds": seconds}
    left = [case for case in cases if case not in tried]
    if left:
        yield from run(left)


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--only", help="names of cases, with commas between")
    arguments.add_argument("--cases", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    by_name = {case.name: case for case in CASES}
    every_line_says(mode="poorwill", label="bad-input")
    if options.cases:

        def whole() -> bool:
            child([by_name[name] for name in options.cases.split(",")])
            return True

        conclude(whole)
    names = options.only.split(",") if options.only else list(by_name)
    if unknown := [name for name in names if name not in by_name]:
        arguments.error(f"no case {', '.join(unknown)}: there are {', '.join(by_name)}")
    good = True
    for cases in together([by_name[name] for name in names]):
        for record in run(cases):
            emit("case", **record)
            good = good and record["ok"]
    emit("done", ok=good)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
