"""Releases and resumes a real SGLang server over HTTP, by tag: greedy tokens, GPU memory, seconds.

The model is made up, as in `engine.py`. `--saver tms` is SGLang's own memory saver. Each third turn takes
one tag at a time. With Poorwill calls are repeated, too. Prints one JSON object a line, and fails where
tokens differ.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine import ALL, GIB, PROMPTS, SHAPES, checkpoint, say, used_bytes

START_S = 300
ANSWER_S = 60
ARGUMENTS = (
    *(
        "--load-format",
        "dummy",
        "--skip-tokenizer-init",
        "--enable-memory-saver",
        "--enable-weights-cpu-backup",
    ),
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--disable-radix-cache", "--disable-prefill-cuda-graph", "--max-total-tokens", "32768"),
    *("--max-running-requests", "16", "--cuda-graph-max-bs-decode", "8", "--random-seed", "7"),
)


class Server:
    """SGLang's, until the block ends."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def call(self, path: str, body: object = None) -> tuple[int, Any]:
        """The status and the answer of a request; a POST where it has a body."""
        data = None if body is None else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, headers=kind)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")

    def seconds(self, path: str, tags: list[str] | None) -> float:
        started = time.monotonic()
        status, answer = self.call(path, {} if tags is None else {"tags": tags})
        if status != 200:
            raise SystemExit(f"{path} of {tags} answered {status}: {answer}")
        return time.monotonic() - started

    def tokens(self, count: int) -> list[list[int]]:
        """Each prompt alone, so that it is computed the same way each time."""
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        answers = [self.call("/generate", {"input_ids": ids, "sampling_params": sampling}) for ids in PROMPTS]
        return [list(answer["output_ids"]) for _, answer in answers]


@contextlib.contextmanager
def serving(given: argparse.Namespace, folder: Path) -> Iterator[Server]:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        port = int(any_port.getsockname()[1])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}
    environment["POORWILL_SLEEP_MODE"] = "1" if given.saver == "poorwill" else "0"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder), *ARGUMENTS]
    process = subprocess.Popen(
        [*command, "--port", str(port)], env=environment, stdout=sys.stderr, start_new_session=True
    )
    try:
        server, started = Server(port), time.monotonic()
        while process.poll() is None and time.monotonic() - started < START_S:
            with contextlib.suppress(OSError):
                if server.call("/health")[0] == 200:
                    break
            time.sleep(0.5)
        else:
            raise SystemExit(f"the server ended with {process.poll()}, or did not start within {START_S} s")
        # What /health has asked for has to end: a release needs an idle scheduler.
        time.sleep(1)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def turn(server: Server, given: argparse.Namespace, number: int) -> dict[str, Any]:
    parts = [[tag] for tag in ALL] if number % 3 == 2 else [None]
    twice = 2 if given.saver == "poorwill" and number % 2 == 1 else 1
    # A response leaves the server just before the scheduler is idle.
    time.sleep(0.2)
    released = [server.seconds("/release_memory_occupation", tags) for tags in parts for _ in range(twice)]
    asleep = used_bytes(1)[0]
    resumed = [server.seconds("/resume_memory_occupation", tags) for tags in parts for _ in range(twice)]
    return {"release_s": released, "released_gib": asleep / GIB, "resume_s": resumed}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--saver", choices=["poorwill", "tms"], required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(given, checkpoint(given.shape, Path(folder))) as server,
    ):
        expected = server.tokens(given.tokens)
        say(saver=given.saver, awake_gib=used_bytes(1)[0] / GIB)
        equal = True
        for number in range(given.turns):
            figures = turn(server, given, number)
            figures["equal"] = server.tokens(given.tokens) == expected
            equal &= figures["equal"]
            say(turn=number, **figures)
        unknown = server.call("/release_memory_occupation", {"tags": ["nonsense"]})[0]
        typed = server.call("/release_memory_occupation", {"tags": "weights"})[0]
        equal &= server.tokens(given.tokens) == expected
        say(unknown_tag_status=unknown, wrong_type_status=typed, equal=equal)
    raise SystemExit(0 if equal else "other tokens than before")


if __name__ == "__main__":
    main()
