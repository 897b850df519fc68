"""A rotation of vLLM's engines, or of simulated ones: its configuration, process, requests, sums and end.

Whatever it has started ends with it, or is named and killed.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

from common import GIB, descendants, emit, environment, name_of, parents
from taken import Taken, copies, said
from web import Answer, Client, families, free_port, server_command

STAND_IN_MIB, STAND_IN_BESIDE_MIB = 128, 16
START_S, ANSWER_S, STATUS_S = 170, 200, 5
UP_S, LEFT_S = 20, 5
FAILURES = ["failures", "shortfalls", "quarantines", "looks_failed"]


def configuration(options: argparse.Namespace, folder: Path, ports: dict[str, int], commands: dict) -> str:
    """rotate.toml for these engines; strings and lists of them are written as in JSON."""
    memory = (
        f'measure = "processes"\ngpu = "{options.gpu_mib}MiB"' if options.plays else 'measure = "devices"'
    )
    if options.plays and options.lends:
        memory += f"\nfolder = {json.dumps(str(folder / 'gpus'))}"
    text = [
        f"state = {json.dumps(str(folder / 'state'))}",
        f'[front]\nlisten = "127.0.0.1:{ports["front"]}"',
        f'[control]\nlisten = "127.0.0.1:{ports["control"]}"',
        f"[memory]\n{memory}",
        f"[lend]\nbroker = {json.dumps(str(folder / 'broker.sock'))}" if options.lends else "",
        f'[every_model]\nstart_max = "{START_S}s"\nwait_max = "{ANSWER_S}s"',
        f'residence_min = "0s"\ngrace = "0s"\n{options.rules}',
        'slack = "4MiB"' if options.plays else "",
    ]
    for name, command in commands.items():
        text += [
            f'[[model]]\nname = "{name}"\nurl = "http://127.0.0.1:{ports[name]}"\nlevel = 1',
            f'served_as = "{name if options.plays else "bench"}"\ncommand = {json.dumps(command)}',
            f"log = {json.dumps(str(folder / f'{name}.log'))}",
            canary(options),
        ]
    return "\n".join(filter(None, text)) + "\n"


def canary(options: argparse.Namespace) -> str:
    """A canary asks with text, for which engines need a tokenizer."""
    kind = '"none"' if options.canary == "none" else '"completion"'
    when = "" if options.canary == "none" else f'\nwhen = "{options.canary}"'
    return f"[model.canary]\nkind = {kind}{when}"


class Rotation:
    """A rotation with its engines, what they say when all is well, and what was seen of it."""

    def __init__(self, options: argparse.Namespace, folder: Path, models: list[Path], share: float):
        self.options, self.folder, self.share = options, folder, share
        self.models = models
        self.names = [f"m{nth}" for nth in range(options.engines)]
        self.ports = {name: free_port() for name in ["front", "control", *self.names]}
        self.front, self.control = Client(self.ports["front"]), Client(self.ports["control"])
        commands = {name: self.command(name, model) for name, model in zip(self.names, models, strict=True)}
        self.config = folder / "rotate.toml"
        self.config.write_text(configuration(options, folder, self.ports, commands))
        self.process: subprocess.Popen | None = None
        self.below: set[int] = set()  # its processes
        self.truth: dict[str, list[int] | str] = {}
        self.taken: list[Taken] = []
        self.wrong: list[dict] = []
        self.swaps: dict[tuple, dict] = {}

    def command(self, name: str, model: Path | None) -> list[str]:
        """What starts an engine."""
        if model is not None:
            words = ["--kv-cache-memory-bytes", str(int(self.options.kv_gib * GIB))]
            words += ["--gpu-memory-utilization", str(self.share), *self.options.engine_words]
            has_text = self.options.canary != "none"
            return server_command(model, self.ports[name], words, has_text=has_text)
        words = ["--listen", f"127.0.0.1:{self.ports[name]}", "--model", name]
        words += ["--bytes", f"{STAND_IN_MIB}MiB", "--tokens-per-s", str(self.options.stand_in_tokens_per_s)]
        if self.options.lends:
            words += ["--device", f"host:{self.options.gpu_mib}MiB@{self.folder / 'gpus' / 'gpu0'}"]
        return [self.options.poorwill, "mock-engine", *words]

    def start(self) -> None:
        sleep_mode = self.options.mode.removesuffix("-lending")
        began = time.monotonic()
        with (self.folder / "rotation.log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.options.poorwill, "rotate", "--config", str(self.config)],
                env=environment(sleep_mode, dict(os.environ), VLLM_SERVER_DEV_MODE="1"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while not self.control.get("/health", limit_s=STATUS_S).good:
            if self.process.poll() is not None or time.monotonic() - began > UP_S:
                raise RuntimeError("the rotation does not answer operators")
            time.sleep(0.02)

    def slice(self, seconds: float) -> None:
        """Turns are cut after so long from now on; 0: they end with their requests."""
        text = re.sub(r'slice_max = "[^"]*"', f'slice_max = "{seconds}s"', self.config.read_text())
        self.config.write_text(text)
        answer = self.control.ask("/rotate/reload", limit_s=STATUS_S)
        if not answer.good:
            raise RuntimeError(f"no other slice: {answer.brief()}")

    def look(self) -> dict:
        """The status; what it has of processes and swaps is kept."""
        self.below.update(descendants(self.process.pid, parents()))
        answer = self.control.get("/rotate/status", limit_s=STATUS_S)
        if not answer.good:
            raise RuntimeError(f"no status: {answer.brief()}")
        status = answer.json()
        self.swaps.update({(swap["at_unix_ms"], swap["model"]): swap for swap in status["swaps"]})
        return status

    def counts(self) -> dict:
        """Sums since the start: of engines, of the broker, and of the rotation."""
        status, control = self.look(), families(self.control.get("/metrics", limit_s=STATUS_S).text)
        answers = [Client(self.ports[name]).get("/metrics", limit_s=STATUS_S) for name in self.names]
        return {
            "engines": copies(answer.text for answer in answers) if all(a.good for a in answers) else None,
            "broker": status["lending"],
            "starts": {model["name"]: model["starts"] for model in status["models"]},
            "failed": {name: control.get(f"poorwill_rotate_{name}_total", 0) for name in FAILURES},
        }

    def ask(self, name: str) -> Answer:
        ask = self.front.stream if self.options.stream else self.front.complete
        return ask(more={"model": name}, limit_s=ANSWER_S)

    def take(self, name: str) -> None:
        """One request, held against the first answer."""
        began_ms = time.time_ns() // 1_000_000
        answer = self.ask(name)
        right = said(answer) == self.truth[name]
        self.taken.append(Taken(name, began_ms, time.time_ns() // 1_000_000, right, answer.first_s))
        if not right:
            self.wrong.append({"model": name, **answer.brief()})
        self.look()

    def end(self, grace_s: float) -> bool:
        """Ends it and its engines; whether it ended well and nothing is left."""
        if self.process is None:
            return False
        self.below.update(descendants(self.process.pid, parents()))
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        code = self.process.poll()
        self.process.kill()
        self.process.wait()
        until = time.monotonic() + LEFT_S
        while (left := [pid for pid in self.below if name_of(pid)]) and time.monotonic() < until:
            time.sleep(0.1)
        emit("ended", code=code, processes=len(self.below), left=[name_of(pid)[:200] for pid in left])
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return code == 0 and not left
