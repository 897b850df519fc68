#!/usr/bin/env python3
"""Many engines behind `poorwill rotate` on one GPU, of which one is awake and the others hibernate.

Every engine has to answer right after its turn. After each turn the card may hold what the awake engine
holds and 100 MiB more. Then an engine, the helper and the rotation are killed, and all answer right again.
Prints JSON lines, one for each step.

    hibernate_rotation.py --mode poorwill --engines 10           # vLLM with poorwill's sleep mode
    hibernate_rotation.py --mode poorwill --engines 10 --plain   # beside it: asleep, and not hibernating
    hibernate_rotation.py --mode stand-in --poorwill target/release/poorwill     # mock engines, without a GPU
"""

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import time
from pathlib import Path

import rotation as rotations
from common import MIB, Ballast, conclude_in_a_folder, emit, every_line_says, gib, host_memory
from rotation import Rotation, spread, take, text_of

MODES = ["poorwill", "stand-in"]
REST_MIB = 100  # on the card beside the awake engine, at most
SETTLE_S = 30
RESIDUE_MIB = 24  # of a mock engine


def used_mib() -> int:
    """What the card has in use, as nvidia-smi says; 0 without one."""
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return 0


def used_by_process_mib() -> dict[int, int]:
    """What each process holds on the cards."""
    words = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    rows = [line.split(",") for line in said.splitlines() if line.count(",") == 1]
    found: dict[int, int] = {}
    for pid, size in rows:
        with contextlib.suppress(ValueError):
            found[int(pid)] = found.get(int(pid), 0) + int(size)
    return found


class Sleepers(Rotation):
    """A rotation over many engines."""

    def command(self, name: str, model: Path | None, card_bytes: int) -> list[str]:
        more = ["--residue", f"{RESIDUE_MIB}MiB"] if model is None else []
        return super().command(name, model, card_bytes) + more

    def rests(self) -> list[str]:
        """The stage of each model that is not ready."""
        return [model["stage"] for model in self.status()["models"] if model["stage"] != "ready"]

    def settled(self, rest: str) -> bool:
        """Waits until all others rest so."""
        end = time.monotonic() + SETTLE_S
        while (stages := self.rests()) != [rest] * len(stages) and time.monotonic() < end:
            time.sleep(0.05)
        return stages == [rest] * len(stages)


def rest_of(rotation: Sleepers) -> str:
    return "asleep" if rotation.options.plain else "hibernating"


def first_answers(rotation: Sleepers) -> tuple[bool, dict]:
    """All engines are started, one behind the other, and what they say now is the truth."""
    took, good = {}, True
    for name in rotation.names:
        answer = rotation.ask(name)
        text = text_of(answer)
        good = good and answer.good and bool(text)
        rotation.truth[name] = text or ""
        took[name] = answer.seconds
        emit("started", model=name, seconds=answer.seconds, right=good, used_mib=used_mib())
        if not good:
            return False, {"model": name, "answer": answer.brief()}
    different = len(set(rotation.truth.values()))
    return different == len(rotation.names), {"start_s": took, "different": different, "host": host_memory()}


def turns(rotation: Sleepers) -> tuple[bool, dict]:
    """Each has its turn, in order; what the card and the host hold after each."""
    before = {name: rotation.model(name)["starts"] for name in rotation.names}
    waited, rights, over_mib, used, rested, awake = [], 0, [], [], 0, []
    played = rotation.options.mode == "stand-in"
    for _ in range(rotation.options.rounds):
        for name in rotation.names:
            answer = rotation.ask(name)
            waited.append(answer.seconds)
            rights += rotation.right(name, answer)
            rested += rotation.settled(rest_of(rotation))
            held = used_by_process_mib()
            mine = held.get(rotation.engine_of(name) or 0, 0)
            awake.append(mine)
            used.append(used_mib())
            over_mib.append(used[-1] - mine)
    asked = rotation.options.rounds * len(rotation.names)
    events = rotation.events()
    stages: dict[str, list[float]] = {}
    for event in events:
        if event["event"] == "stage":
            stages.setdefault(event["before"], []).append(event["before_s"])
    after = {name: rotation.model(name)["starts"] for name in rotation.names}
    seen = {
        "asked": asked,
        "right": rights,
        "rested": rested,
        "request_s": spread(waited),
        "used_mib": {"least": min(used), "most": max(used)},
        "awake_mib": {"least": min(awake), "most": max(awake)},
        "over_awake_mib": {"p50": statistics.median(over_mib), "most": max(over_mib)},
        "stage_s": {stage: round(statistics.median(seconds), 3) for stage, seconds in stages.items()},
        "host": host_memory(),
        "starts_again": {name: after[name] - before[name] for name in after if after[name] != before[name]},
        "other_events": [event for event in events if event["event"] not in ("stage", "ready")][-10:],
    }
    small = played or rotation.options.plain or max(over_mib) <= REST_MIB
    return rights == asked and rested == asked and before == after and small, seen


def engine_killed(rotation: Sleepers) -> tuple[bool, dict]:
    """An engine is killed while it hibernates. Its next request starts it again, and the others go on."""
    one, other = rotation.names[:2]
    rotation.ask(other)
    rotation.settled(rest_of(rotation))
    pid = rotation.engine_of(one)
    if pid is None:
        return False, {"error": "no engine to kill"}
    os.kill(pid, signal.SIGKILL)
    answers = [rotation.ask(name) for name in (one, other, one)]
    right = [rotation.right(name, answer) for name, answer in zip((one, other, one), answers, strict=True)]
    seen = {"right": right, "answers": [answer.brief() for answer in answers if not answer.good]}
    return all(right), {**seen, "starts": rotation.model(one)["starts"], "used_mib": used_mib()}


def helpers(rotation: Sleepers) -> list[int]:
    """The helpers that take processes off the card."""
    of = rotations.parents()
    below = [pid for pid, parent in of.items() if parent == rotation.process.pid]
    return [pid for pid in below if "hibernate" in rotations.name_of(pid)]


def helper_killed(rotation: Sleepers) -> tuple[bool, dict]:
    """The helper is killed while engines come and go."""
    rights, killed = [], 0
    for number, name in enumerate(rotation.names):
        for pid in helpers(rotation):
            os.kill(pid, signal.SIGKILL)
            killed += 1
        time.sleep(0.13 * (number % 4))
        rights.append(rotation.right(name, rotation.ask(name)))
    again = [rotation.right(name, rotation.ask(name)) for name in rotation.names]
    rested = rotation.settled(rest_of(rotation))
    stages = {model["name"]: model["stage"] for model in rotation.status()["models"]}
    seen = {"right": rights, "again": again, "killed": killed, "rested": rested, "used_mib": used_mib()}
    seen |= {} if rested else {"stages": stages, "events": rotation.events()[-40:]}
    return all(rights) and all(again) and rested and killed > 0, seen


def rotation_killed(rotation: Sleepers) -> tuple[bool, dict]:
    """The rotation is killed while engines hibernate, and the next one goes on with them."""
    rotation.ask(rotation.names[0])
    rotation.settled(rest_of(rotation))
    rotation.kill()
    left = len(rotation.engine_pids())
    up_s = rotation.start()
    answers = {name: rotation.ask(name) for name in reversed(rotation.names)}
    right = {name: rotation.right(name, answer) for name, answer in answers.items()}
    starts = {name: rotation.model(name)["starts"] for name in rotation.names}
    seen = {"processes_left": left, "up_s": up_s, "right": right, "starts": starts}
    wrong = {name: answers[name].brief() for name in right if not right[name]}
    return all(right.values()) and left > 0 and not any(starts.values()), {**seen, "wrong": wrong}


def checkpoints(folder: Path, names: list[str], layers: int) -> dict[str, Path]:
    """A checkpoint for each, with the same layers and other words."""
    from models import write_checkpoint, write_tokenizer

    first = write_checkpoint(folder / names[0], layers)
    write_tokenizer(first)
    found = {names[0]: first}
    for seed, name in enumerate(names[1:], 100):
        found[name] = folder / name / "checkpoint"
        shutil.copytree(first, found[name], copy_function=os.link)
        for path in write_checkpoint(folder / "other", 1, seed).glob("outer.safetensors"):
            (found[name] / path.name).unlink()
            shutil.move(path, found[name] / path.name)
        shutil.rmtree(folder / "other")
    return found


STEPS = [first_answers, turns, engine_killed, helper_killed, rotation_killed]


def run(options: argparse.Namespace, folder: Path) -> bool:
    names = [f"model-{number:02}" for number in range(options.engines)]
    Sleepers.levels = dict.fromkeys(names, 1)
    Sleepers.more = "" if options.plain else options.table
    models: dict[str, Path] = {}
    card = 0
    if options.mode == "stand-in":
        os.environ["POORWILL_HOST_PROCESSES"] = str(folder / "processes")
        (folder / "processes").mkdir()
    if options.mode != "stand-in":
        from models import layers_for

        with Ballast() as ballast:
            card = ballast.total()
        models = checkpoints(folder, names, layers_for(options.gib))

    def free() -> int:
        return card - used_mib() * MIB

    rotation = Sleepers(options, folder, models, card)
    at_first = used_mib()
    emit("begin", up_s=rotation.start(), used_mib=at_first, gib_each=options.gib, host=host_memory())
    results = []
    try:
        for step in STEPS:
            if step.__name__ not in options.skip:
                results.append(take(rotation, step, free))
                if not results[-1] and step is first_answers:
                    break
        results.append(take(rotation, rotations.ended, free))
    finally:
        if rotation.process.poll() is None:
            rotation.kill()
        for pid in rotation.engine_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if options.logs:
            options.logs.mkdir(parents=True, exist_ok=True)
            for log in folder.glob("*.log"):
                shutil.copy(log, options.logs)
    end = time.monotonic() + SETTLE_S
    while used_mib() > at_first + REST_MIB and time.monotonic() < end:
        time.sleep(0.25)
    emit("end", used_mib=used_mib(), at_first_mib=at_first, free_gib=gib(free()))
    if not all(results):
        for name in names[:2]:
            log = folder / f"{name}.log"
            emit("log", model=name, text=log.read_text(errors="replace")[-3000:] if log.exists() else "")
    return all(results) and used_mib() <= at_first + REST_MIB


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--poorwill", default="poorwill", help="the program that rotates")
    parser.add_argument("--engines", type=int, default=10)
    parser.add_argument("--gib", type=float, default=3, help="weights of each model")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each engine")
    parser.add_argument("--plain", action="store_true", help="asleep only, without hibernation")
    parser.add_argument("--table", default='[hibernate]\nafter = "0s"', help="of rotate.toml")
    parser.add_argument("--logs", type=Path, help="a folder that gets the logs")
    parser.add_argument(
        "--skip", default="", type=lambda names: names.split(","), help="steps, with commas between"
    )
    options = parser.parse_args()
    if not (program := shutil.which(options.poorwill)):
        parser.error(f"there is no program {options.poorwill}: build it, and say where with --poorwill")
    if options.engines < 2 or options.rounds < 1 or options.gib <= 0:
        parser.error("--engines is 2 or more, --rounds and --gib more than 0")
    options.poorwill = str(Path(program).resolve())
    every_line_says(mode=options.mode)
    conclude_in_a_folder(lambda folder: run(options, folder))


if __name__ == "__main__":
    main()
