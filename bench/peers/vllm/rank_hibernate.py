"""The ranks of a sleeping engine leave their GPUs as one set, and come back.

`--hibernate poorwill` has the library do it, which refuses what it knows to fail. `--hibernate driver` calls
the driver itself, to find out what it can restore. Either way it is printed what is known, and where nothing
was taken off, the engine has to wake with its bytes and tokens.
"""

import argparse
import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path

from common import HERE, descendants, driver, emit, is_running, name_of, parents
from rank_engine import all_gib
from rank_host import Hosted, LostError

STEP_S, WAIT_MS = 60, 5000
GONE_GIB = 0.1  # what all ranks of a GPU may hold while they are away
SMI = (
    ["nvidia-smi", "--query-gpu=index,uuid,driver_version,memory.used", "--format=csv"],
    ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv"],
)
LIBRARY = """
import json, sys
import poorwill
op, suspended, *pids = sys.argv[1], *(int(number) for number in sys.argv[2:])
try:
    if op == "inspect":
        seen = {pid: poorwill.hibernation(pid).as_dict() for pid in pids}
    elif op == "hibernate":
        seen = poorwill.hibernate(pids, wait_max=5, suspended_communicators=suspended).as_dict()
    else:
        seen = poorwill.resume(pids).as_dict()
    print(json.dumps({"report": seen}, default=str))
except poorwill.HibernateError as error:
    known = {name: getattr(error, name, None) for name in ("kind", "pid", "left")}
    print(json.dumps({"error": str(error), **known}, default=str))
"""


class LockArguments(ctypes.Structure):
    """The driver's `CUcheckpointLockArgs`."""

    _fields_ = (
        ("timeout_ms", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    )


def by_driver(op: str, pids: list[int]) -> dict:
    """Calls the driver for one process after the other, phase by phase, and stops at the first error."""
    cuda = driver()
    cuda.cuInit(0)
    calls: list[dict] = []

    def phase(name: str, of: list[int], arguments=None) -> bool:
        for pid in of:
            begin = time.monotonic()
            given = None if arguments is None else ctypes.byref(arguments)
            code = getattr(cuda, f"cuCheckpointProcess{name}")(ctypes.c_int(pid), given)
            took = round(time.monotonic() - begin, 3)
            calls.append({"call": name, "pid": pid, "error": error_name(cuda, code), "seconds": took})
            if code:
                return False
        return True

    def standing(state: str) -> list[int]:
        return [pid for pid in pids if state_of(cuda, pid) == state]

    before = {pid: state_of(cuda, pid) for pid in pids}
    if op == "hibernate":
        done = phase("Lock", pids, LockArguments(WAIT_MS)) and phase("Checkpoint", pids)
    elif op == "resume":
        done = phase("Restore", standing("checkpointed")) and phase("Unlock", standing("locked"))
    else:
        done = True
    answer = {"calls": calls, "before": before, "after": {pid: state_of(cuda, pid) for pid in pids}}
    return {**answer, "report": len(calls)} if done else {**answer, "error": calls[-1]["error"]}


def error_name(cuda, code: int) -> str | None:
    if not code:
        return None
    text = ctypes.c_char_p()
    cuda.cuGetErrorName(code, ctypes.byref(text))
    return f"{code} {(text.value or b'unknown').decode()}"


def state_of(cuda, pid: int) -> str:
    state = ctypes.c_int()
    code = cuda.cuCheckpointProcessGetState(ctypes.c_int(pid), ctypes.byref(state))
    names = ("running", "locked", "checkpointed", "failed")
    return f"error {code}" if code else names[state.value] if state.value < len(names) else str(state.value)


def called(way: str, op: str, pids: list[int], suspended: int = 0) -> dict:
    """In a process of its own, which the driver may end."""
    words = [str(pid) for pid in pids]
    command = ["-c", LIBRARY] if way == "poorwill" else [str(HERE / "rank_hibernate.py")]
    if way == "poorwill":
        words.insert(0, str(suspended))
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-B", *command, op, *words], capture_output=True, text=True, timeout=STEP_S
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        answer = {"error": f"no answer in {STEP_S} s"}
    except (IndexError, ValueError):
        answer = {"error": f"ended with code {done.returncode}: {done.stderr[-2000:]}"}
    return {**answer, "seconds": round(time.monotonic() - begin, 3)}


def suspended_of(ranks: list[dict]) -> int:
    """How many communicators each rank has suspended, by its own word."""
    of_rank = [[each["is_suspended"] for each in rank.get("communicators", ())] for rank in ranks]
    return min((sum(each) for each in of_rank), default=0)


def known(pids: list[int], core: int) -> dict:
    """What this machine says of its GPUs and of the engine's processes."""
    said = {}
    for command in SMI:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=STEP_S)
            said[command[1]] = (done.stdout + done.stderr).splitlines()
        except (OSError, subprocess.TimeoutExpired) as error:
            said[command[1]] = [str(error)]
    of = parents()
    processes = {pid: name_of(pid)[:80] for pid in [core, *descendants(core, of)]}
    return {"nvidia_smi": said, "processes": processes, "ranks": {pid: is_running(pid) for pid in pids}}


def run(options: argparse.Namespace, folder: Path, cards, host=Hosted, call=called) -> bool:
    way, at_first = options.hibernate, cards.used()
    engine = host(options)
    try:
        started = engine.answer(options.start_limit_s)
        pids = [rank["pid"] for rank in started["ranks"]]
        core = parents().get(pids[0], 0)
        emit("started", **started)

        def held() -> list[float | None]:
            return all_gib([now - was for now, was in zip(cards.used(), at_first, strict=True)])

        record: dict = {"way": way, "pids": pids, "awake_gib": held()}
        record["sleep"] = engine.ask("sleep", STEP_S)
        record["asleep"] = engine.ask("status", STEP_S)["ranks"]
        record["asleep_gib"] = held()
        record["inspected"] = call(way, "inspect", pids)
        away = record["hibernate"] = call(way, "hibernate", pids, suspended_of(record["asleep"]))
        record["away_gib"], record["known"] = held(), known(pids, core)
        is_away = "report" in away
        if is_away or away.get("left") or way == "driver":
            # What was locked or taken off before a failure comes back as well.
            record["resume"] = call(way, "resume", pids)
            record["after_resume"] = call(way, "inspect", pids)
        record["back_gib"] = held()
        try:
            record["wake"] = engine.ask("wake", STEP_S)
            record |= engine.ask("check", STEP_S)
        except LostError as error:
            record |= {"lost": str(error), "is_late": error.is_late, "known_then": known(pids, core)}
    finally:
        engine.end()
    record["hibernated"] = is_away and all((size or 0) <= GONE_GIB for size in record["away_gib"])
    well = all(record.get("bytes_equal", [False])) and record.get("tokens_equal") is True
    steps = [record["sleep"], record.get("wake", {"refused": True})]
    ok = well and not any(step["refused"] for step in steps) and "error" not in record.get("resume", {})
    emit("step", step="hibernated", **record, ok=ok)
    return ok


if __name__ == "__main__":
    print(json.dumps(by_driver(sys.argv[1], [int(pid) for pid in sys.argv[2:]])))
