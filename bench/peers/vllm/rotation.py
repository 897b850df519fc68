#!/usr/bin/env python3
"""Two engines behind `poorwill rotate`, of which the card holds one.

Every answer has to be right, whatever happened to an engine or to the rotation meanwhile. Prints JSON lines,
one for each step.

    rotation.py --mode poorwill                    # vLLM with poorwill's sleep mode
    rotation.py --mode cumem                       # vLLM with its own
    rotation.py --mode stand-in --poorwill target/release/poorwill      # poorwill's stand-ins, without a GPU

vLLM serves checkpoints of random numbers that are written before, with a tokenizer that is made up as well.
The first engine keeps its weights in host memory (level 1), the second drops them and reads them again
(level 2). `--poorwill` is the program that rotates; it is looked for on PATH if it is not said.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import time
import traceback
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import (
    GIB,
    Ballast,
    conclude_in_a_folder,
    descendants,
    emit,
    environment,
    every_line_says,
    gib,
    name_of,
    parents,
)
from web import Answer, Client, free_port, server_command

MODES = ["poorwill", "cumem", "stand-in"]
NAMES = ["amber", "birch"]
LEVELS = {"amber": 1, "birch": 2}
PROMPT = "w11 w23 w31 w47 w53 w61 w79 w83"
TOKENS = 24
CARD_SHARE = 0.6  # of the card, for each: one fits, two do not
ANSWER_S = 200  # an answer may wait for a start
UP_S, END_S = 20, 90
LOOK_S = 2  # how often the rotation looks at ready engines
NO_EVENT_S = 0.5  # no event for so long: there are no more
STAND_IN_MIB = 512
SLACK_BYTES = GIB // 4
LEAVING = ["draining", "measuring before sleep", "falling asleep", "releasing memory"]
# What an engine does in a swap, and the canary; the rest is the rotation's.
ENGINES_OWN = ["falling asleep", "waking", "starting", "stopping", "canary"]


def quoted(value: object) -> str:
    """A value as TOML has it; strings and lists of them are written as in JSON."""
    return json.dumps(value)


def configuration(
    options: argparse.Namespace,
    folder: Path,
    ports: dict[str, int],
    commands: dict,
    levels: dict[str, int] = LEVELS,
    more: str = "",
) -> str:
    """rotate.toml for these engines."""
    played = options.mode == "stand-in"
    memory = f'measure = "processes"\ngpu = "{STAND_IN_MIB * 3 // 2}MiB"' if played else 'measure = "devices"'
    text = [
        f"state = {quoted(str(folder / 'state'))}",
        f"[memory]\n{memory}",
        f'[front]\nlisten = "127.0.0.1:{ports["front"]}"',
        f'[control]\nlisten = "127.0.0.1:{ports["control"]}"',
        f'[every_model]\nstart_max = "170s"\nwait_max = "{ANSWER_S}s"\nlook_every = "{LOOK_S}s"',
        'residence_min = "0s"\ngrace = "0s"\nturn_max = "1s"',
        more,
    ]
    for name, level in levels.items():
        text += [
            f"[[model]]\nname = {quoted(name)}\nurl = {quoted(f'http://127.0.0.1:{ports[name]}')}",
            f"served_as = {quoted(name if played else 'bench')}\nlevel = {level}",
            f"command = {quoted(commands[name])}\nlog = {quoted(str(folder / f'{name}.log'))}",
            'environment = { VLLM_SERVER_DEV_MODE = "1" }',
        ]
    return "\n".join(text) + "\n"


class Rotation:
    """A rotation that runs, and what its models say when all is well."""

    levels = LEVELS
    more = ""  # tables of rotate.toml

    def __init__(self, options: argparse.Namespace, folder: Path, models: dict[str, Path], card_bytes: int):
        self.options, self.folder = options, folder
        self.names = list(self.levels)
        self.ports = {name: free_port() for name in ["front", "control", *self.names]}
        self.front, self.control = Client(self.ports["front"]), Client(self.ports["control"])
        self.engines = {name: Client(self.ports[name]) for name in self.names}
        self.truth: dict[str, str] = {}
        self.log = folder / "rotation.log"
        self.config = folder / "rotate.toml"
        self.commands = {name: self.command(name, models.get(name), card_bytes) for name in self.names}
        text = configuration(options, folder, self.ports, self.commands, self.levels, self.more)
        self.config.write_text(text)
        self.process: subprocess.Popen | None = None

    def command(self, name: str, model: Path | None, card_bytes: int) -> list[str]:
        """What starts an engine."""
        port = self.ports[name]
        if model is None:
            listen = ["--listen", f"127.0.0.1:{port}", "--tokens-per-s", "2000"]
            size = ["--model", name, "--bytes", f"{STAND_IN_MIB}MiB"]
            return [self.options.poorwill, "mock-engine", *listen, *size]
        cache = self.cache_bytes(model, card_bytes)
        more = ["--kv-cache-memory-bytes", str(cache), "--gpu-memory-utilization", "0.8"]
        return server_command(model, port, more, tokenizer=True)

    def cache_bytes(self, model: Path, card_bytes: int) -> int:
        """The KV cache of an engine: the rest of its share of the card."""
        weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        return max(GIB, int(card_bytes * CARD_SHARE) - weights)

    def start(self) -> float:
        """Starts the rotation; the seconds until it answers operators."""
        begun = environment(self.options.mode, dict(os.environ))
        began = time.monotonic()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [self.options.poorwill, "rotate", "--config", str(self.config)],
                env=begun,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while not self.control.get("/health", limit_s=5).good:
            if self.process.poll() is not None or time.monotonic() - began > UP_S:
                raise RuntimeError(f"no rotation: {self.last_words()}")
            time.sleep(0.02)
        return round(time.monotonic() - began, 3)

    def last_words(self, size: int = 4000) -> str:
        """What it warned of, and the end of what it said."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        warnings = [line for line in text.splitlines() if " WARN " in line or " ERROR " in line]
        return "\n".join([*warnings[-20:], text[-size:]])

    def stop(self) -> int | None:
        """Asks it to end; its exit code, or None if it had to be made to."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def ask(self, name: str, *, stream: bool = False, limit_s: float = ANSWER_S) -> Answer:
        body = {"model": name, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "stream": stream}
        return self.front.ask("/v1/completions", body, limit_s=limit_s)

    def right(self, name: str, answer: Answer) -> bool:
        return answer.good and text_of(answer) == self.truth[name]

    def status(self) -> dict:
        answer = self.control.get("/rotate/status")
        if not answer.good:
            raise RuntimeError(f"no status: {answer.brief()}")
        return answer.json()

    def model(self, name: str) -> dict:
        return next(model for model in self.status()["models"] if model["name"] == name)

    def until(self, name: str, *stages: str, limit_s: float = 60) -> str:
        """The stage that it comes to, of these; the one it is in when the time is up."""
        end = time.monotonic() + limit_s
        while (stage := self.model(name)["stage"]) not in stages and time.monotonic() < end:
            time.sleep(0.05)
        return stage

    def order(self, name: str, what: str) -> Answer:
        return self.control.ask(f"/rotate/models/{name}/{what}")

    def events(self) -> list[dict]:
        """What has happened until now, as far as it is kept."""
        found = []
        url = f"{self.control.base}/rotate/events?past=1024"
        # A socket that says nothing for a while says no more.
        with contextlib.suppress(TimeoutError), urllib.request.urlopen(url, timeout=NO_EVENT_S) as stream:
            for line in stream:
                if line.startswith(b"data: "):
                    found.append(json.loads(line[len(b"data: ") :]))
        return found

    def roots(self, name: str) -> list[int]:
        """The processes whose command line is exactly this model's."""
        words = " " + " ".join(self.commands[name][1:])
        return [pid for pid in parents() if name_of(pid).rstrip().endswith(words)]

    def engine_pids(self) -> list[int]:
        """All processes of the engines."""
        of = parents()
        roots = [pid for name in self.names for pid in self.roots(name)]
        return sorted({pid for root in roots for pid in [root, *descendants(root, of)]})

    def engine_of(self, name: str) -> int | None:
        """The process that has the GPU for a model: vLLM names it so; a mock engine is a single process."""
        of = parents()
        for root in self.roots(name):
            below = [pid for pid in descendants(root, of) if "EngineCore" in name_of(pid)]
            return below[0] if below else root
        return None


def text_of(answer: Answer) -> str | None:
    """The text of an answer, streamed or not; None where it is none or not whole."""
    if "data: " not in answer.text:
        try:
            return answer.json()["choices"][0]["text"]
        except (KeyError, IndexError, TypeError):
            return None
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    if not lines or lines[-1] != "[DONE]":
        return None
    try:
        return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])
    except (ValueError, KeyError, IndexError, TypeError):
        return None


def phases(swaps: list[dict]) -> dict[str, float]:
    """The median seconds of each phase of some swaps, and of the whole."""
    found: dict[str, list[float]] = {"total": [swap["total_s"] for swap in swaps]}
    for swap in swaps:
        for phase, seconds in swap["phases"]:
            found.setdefault(phase, []).append(seconds)
    return {phase: round(statistics.median(seconds), 4) for phase, seconds in found.items() if seconds}


def leaving(events: list[dict]) -> dict[str, float]:
    """The median seconds that models were in the stages through which they leave."""
    found: dict[str, list[float]] = {}
    for event in events:
        if event["event"] == "stage" and event["before"] in LEAVING:
            found.setdefault(event["before"], []).append(event["before_s"])
    return {stage: round(statistics.median(seconds), 4) for stage, seconds in found.items()}


def ours(events: list[dict]) -> list[float]:
    """Overhead of each swap in seconds: its time without the engines' own sleep and wake and without the
    canary.
    """
    found: list[float] = []
    began_ms, own_s = None, 0.0
    for event in events:
        if event["event"] == "stage" and event["stage"] == "draining":
            began_ms, own_s = event["at_unix_ms"], 0.0
        elif event["event"] == "stage" and event["before"] in ENGINES_OWN:
            own_s += event["before_s"]
        elif event["event"] == "ready" and began_ms is not None:
            found.append((event["at_unix_ms"] - began_ms) / 1000 - own_s)
            began_ms = None
    return found


def spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    middle = statistics.median(ordered)
    return {"p50": round(middle, 4), "least": round(ordered[0], 4), "most": round(ordered[-1], 4)}


# Each step takes the rotation, and returns whether all was well and what was seen.


def first_answers(rotation: Rotation) -> tuple[bool, dict]:
    """Both engines are started, one behind the other, and what they say now is the truth."""
    seen, good = {}, True
    for name in NAMES:
        answer = rotation.ask(name)
        text = text_of(answer)
        good = good and answer.good and bool(text)
        rotation.truth[name] = text or ""
        seen[name] = {"seconds": answer.seconds, "status": answer.status, "text": (text or answer.text)[:200]}
    seen["held_gib"] = {
        model["name"]: [gib(held) for held in model["held_bytes"] or []]
        for model in rotation.status()["models"]
    }
    return good and rotation.truth[NAMES[0]] != rotation.truth[NAMES[1]], seen


def swaps(rotation: Rotation) -> tuple[bool, dict]:
    """They take turns, one request each, and no engine is started again."""
    before = {name: rotation.model(name)["starts"] for name in NAMES}
    waited: dict[str, list[float]] = {name: [] for name in NAMES}
    rights = 0
    for _ in range(rotation.options.rounds):
        for name in NAMES:
            answer = rotation.ask(name)
            waited[name].append(answer.seconds)
            rights += rotation.right(name, answer)
    status, events = rotation.status(), rotation.events()
    asked = 2 * rotation.options.rounds
    hot = [swap for swap in status["swaps"][:asked] if swap["path"] in ("hot", "warm")]
    after = {model["name"]: model["starts"] for model in status["models"]}
    by_model = {
        name: {
            "request_s": spread(waited[name]),
            "level": LEVELS[name],
            "coming_s": phases([swap for swap in hot if swap["model"] == name]),
            "leaving_s": leaving([event for event in events if event["model"] == name]),
        }
        for name in NAMES
    }
    seen = {
        "right": rights,
        "asked": asked,
        "hot": len(hot),
        "ours_s": spread(own) if (own := ours(events)[-asked:]) else None,
        "models": by_model,
        "gpus": status["gpus"],
        "other_events": [event for event in events if event["event"] not in ("stage", "ready")],
    }
    return rights == asked and len(hot) == asked and before == after, seen


def many_at_once(rotation: Rotation) -> tuple[bool, dict]:
    """Requests for both from several clients, half of them as streams. In a batch a model may say another
    thing than alone, so equal texts are counted only."""

    def one(nth: int) -> tuple[Answer, bool]:
        name = NAMES[nth % 3 % 2]
        answer = rotation.ask(name, stream=nth % 2 == 0)
        return answer, rotation.right(name, answer)

    began, first = time.monotonic(), rotation.status()["uptime_s"]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(one, range(rotation.options.requests)))
    whole = [answer for answer, _ in answers if answer.good and text_of(answer)]
    took = time.monotonic() - began
    status = rotation.status()
    swapped = [
        swap
        for swap in status["swaps"]
        if swap["at_unix_ms"] / 1000 > time.time() - (status["uptime_s"] - first)
    ]
    seen = {
        "requests": len(answers),
        "whole": len(whole),
        "equal": sum(right for _, right in answers),
        "swaps": len(swapped),
        "seconds": round(took, 2),
        "others": [answer.brief() for answer, _ in answers if answer not in whole][:3],
    }
    return len(whole) == len(answers), seen


def slept_by_others(rotation: Rotation) -> tuple[bool, dict]:
    """Another client puts the ready engine to sleep."""
    name = NAMES[0]
    first = rotation.right(name, rotation.ask(name))
    answer = rotation.engines[name].ask("/sleep?level=1")
    stage = rotation.until(name, "asleep", "cold", limit_s=LOOK_S + 15)
    then = rotation.ask(name)
    seen = {
        "slept": answer.brief(),
        "stage": stage,
        "then": then.brief(),
        "right": rotation.right(name, then),
    }
    return first and answer.good and stage in ("asleep", "cold") and seen["right"], seen


def ordered_about(rotation: Rotation) -> tuple[bool, dict]:
    """Operators put one to sleep, and wake the other."""
    one, other = NAMES
    rotation.ask(one)
    orders = [rotation.order(one, "sleep")]
    asleep = rotation.until(one, "asleep") == "asleep"
    orders.append(rotation.order(other, "wake"))
    ready = rotation.until(other, "ready") == "ready"
    right = all(rotation.right(name, rotation.ask(name)) for name in [other, one])
    taken = [order.status for order in orders]
    seen = {"taken": taken, "asleep": asleep, "ready": ready, "right": right}
    return asleep and ready and right and all(200 <= status < 300 for status in taken), seen


def validated(rotation: Rotation) -> tuple[bool, dict]:
    """The command that walks all models through a sleep and a wake."""
    began = time.monotonic()
    command = [rotation.options.poorwill, "rotate", "validate", "--config", str(rotation.config), "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=3 * ANSWER_S, check=False)
    try:
        said = json.loads(ran.stdout)
    except ValueError:
        said = ran.stdout[-1000:]
    seen = {"code": ran.returncode, "said": said, "complaints": ran.stderr[-1000:]}
    return ran.returncode == 0, {**seen, "seconds": round(time.monotonic() - began, 2)}


def engine_killed(rotation: Rotation) -> tuple[bool, dict]:
    """The process that has the GPU is killed while its model is ready. Until that is seen, requests are
    refused, by the engine's server or by the rotation."""
    name = NAMES[0]
    rotation.ask(name)
    before, pid = rotation.model(name)["starts"], rotation.engine_of(name)
    if pid is None:
        return False, {"error": "no engine to kill"}
    os.kill(pid, signal.SIGKILL)
    answers, end = [], time.monotonic() + ANSWER_S
    while True:
        answers.append(rotation.ask(name))
        if answers[-1].good or time.monotonic() > end:
            break
        time.sleep(0.2)
    refused = sorted({answer.status for answer in answers[:-1]})
    seen = {
        "refused_with": refused,
        "refused": len(answers) - 1,
        "seconds": answers[-1].seconds,
        "starts": rotation.model(name)["starts"] - before,
        "right": rotation.right(name, answers[-1]),
    }
    return seen["right"] and seen["starts"] == 1 and all(code >= 500 for code in refused), seen


def rotation_killed(rotation: Rotation) -> tuple[bool, dict]:
    """The rotation is killed, and the next one goes on with the engines that it finds."""
    rotation.ask(NAMES[1])
    rotation.kill()
    left = len(rotation.engine_pids())
    up_s = rotation.start()
    answers = {name: rotation.ask(name) for name in [NAMES[1], *NAMES]}
    right = all(rotation.right(name, answer) for name, answer in answers.items())
    starts = {name: rotation.model(name)["starts"] for name in NAMES}
    seen = {"processes_left": left, "up_s": up_s, "right": right, "starts": starts}
    return right and left > 0 and not any(starts.values()), seen


def ended(rotation: Rotation) -> tuple[bool, dict]:
    """It ends on request, with all of its engines."""
    code = rotation.stop()
    end = time.monotonic() + 20
    while (left := rotation.engine_pids()) and time.monotonic() < end:
        time.sleep(0.1)
    return code == 0 and not left, {"code": code, "left": [name_of(pid)[:200] for pid in left]}


STEPS: list[Callable[[Rotation], tuple[bool, dict]]] = [
    first_answers,
    swaps,
    many_at_once,
    ordered_about,
    slept_by_others,
    validated,
    engine_killed,
    rotation_killed,
    ended,
]


def take(rotation: Rotation, step: Callable[[Rotation], tuple[bool, dict]], free: Callable[[], int]) -> bool:
    began = time.monotonic()
    try:
        good, seen = step(rotation)
    except Exception as error:
        traceback.print_exc()
        good, seen = False, {"error": f"{type(error).__name__}: {error}"[:2000]}
    took = round(time.monotonic() - began, 2)
    emit("step", step=step.__name__, ok=good, step_s=took, free_gib=gib(free()), **seen)
    if not good:
        emit("log", step=step.__name__, rotation=rotation.last_words())
    return good


def run(options: argparse.Namespace, folder: Path) -> bool:
    models: dict[str, Path] = {}
    with contextlib.ExitStack() as stack:
        card, free = 0, lambda: 0
        if options.mode != "stand-in":
            from models import layers_for, write_checkpoint, write_tokenizer

            ballast = stack.enter_context(Ballast())
            card, free = ballast.total(), ballast.free
            for seed, name in enumerate(NAMES):
                models[name] = write_checkpoint(folder / name, layers_for(options.gib), seed)
                write_tokenizer(models[name])
        at_first = free()
        rotation = Rotation(options, folder, models, card)
        emit("begin", up_s=rotation.start(), free_gib=gib(at_first), gib_each=options.gib)
        good = False
        try:
            chosen = [step for step in STEPS if step.__name__ not in options.skip]
            results = [take(rotation, step, free) for step in chosen]
            good = all(results)
        finally:
            if rotation.process.poll() is None:
                rotation.kill()
            for pid in rotation.engine_pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if options.mode != "stand-in":
            at_last = ballast.settled(at_first, slack=SLACK_BYTES)
            good = good and at_last >= at_first - SLACK_BYTES
            emit("end", free_gib=gib(at_last), missing_gib=gib(at_first - at_last))
            if not good:
                for name in NAMES:
                    log = folder / f"{name}.log"
                    emit(
                        "log",
                        model=name,
                        text=log.read_text(errors="replace")[-3000:] if log.exists() else "",
                    )
    return good


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--poorwill", default="poorwill", help="the program that rotates")
    parser.add_argument("--gib", type=float, default=4, help="weights of each model")
    parser.add_argument("--rounds", type=int, default=8, help="of swaps, there and back")
    parser.add_argument("--requests", type=int, default=48, help="at once")
    parser.add_argument(
        "--skip", default="", type=lambda names: names.split(","), help="steps, with commas between"
    )
    options = parser.parse_args()
    if not (program := shutil.which(options.poorwill)):
        parser.error(f"there is no program {options.poorwill}: build it, and say where with --poorwill")
    if options.rounds < 1 or options.requests < 1 or options.gib <= 0:
        parser.error("--rounds, --requests and --gib are more than 0")
    known = [step.__name__ for step in STEPS]
    if unknown := [name for name in options.skip if name and name not in known]:
        parser.error(f"no step {', '.join(unknown)}: there are {', '.join(known)}")
    options.poorwill = str(Path(program).resolve())
    every_line_says(mode=options.mode)
    conclude_in_a_folder(lambda folder: run(options, folder))


if __name__ == "__main__":
    main()
