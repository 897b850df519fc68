"""vLLM's HTTP server in processes of its own: starting it, asking it, and ending it, or one of them."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common import descendants, name_of, parents

PROMPT = list(range(100, 164))
NEW_TOKENS = 24
REQUEST_S = 60  # how long an answer may take before it counts as none
START_S, END_S = 150, 40


@dataclass(frozen=True)
class Answer:
    """What the server said; status 0 where it said nothing, and `text` says why then."""

    status: int
    text: str
    seconds: float
    first_s: float | None = None
    """Until the first token of a stream."""

    @property
    def good(self) -> bool:
        return self.status == 200

    @property
    def refused(self) -> bool:
        return self.status >= 400

    @property
    def hung(self) -> bool:
        """No answer within the time, and the connection still there."""
        return self.status == 0 and "timed out" in self.text

    def json(self):
        """What it says as JSON; None where it is none."""
        try:
            return json.loads(self.text)
        except ValueError:
            return None

    def tokens(self) -> list[int] | None:
        body = self.json()
        try:
            return body["choices"][0]["token_ids"]
        except (KeyError, IndexError, TypeError):
            return None

    def finish(self) -> str | None:
        body = self.json()
        try:
            return body["choices"][0]["finish_reason"]
        except (KeyError, IndexError, TypeError):
            return None

    def brief(self) -> dict:
        """As it is printed."""
        return {"status": self.status, "seconds": self.seconds, "text": self.text[:600]}


class Pending(threading.Thread):
    """A request that is under way."""

    def __init__(self, action):
        super().__init__(daemon=True)
        self.action = action
        self.answer: Answer | None = None
        self.start()

    def run(self) -> None:
        self.answer = self.action()

    def waits(self, seconds: float) -> bool:
        """Whether it has no answer yet, so many seconds from now."""
        self.join(seconds)
        return self.answer is None

    def result(self, seconds: float = REQUEST_S) -> Answer:
        self.join(seconds)
        return self.answer or Answer(0, f"timed out after {seconds:.0f} s more", seconds)


def completion(tokens: int, more: dict | None) -> dict:
    """What is asked for greedy tokens of the prompt."""
    asked = {"model": "bench", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
    return {**asked, "ignore_eos": True, "return_token_ids": True, **(more or {})}


class Client:
    """Asks a server at a port of this machine."""

    def __init__(self, port: int):
        self.base = f"http://127.0.0.1:{port}"

    def ask(self, path: str, body: dict | None = None, *, post: bool = True, limit_s=REQUEST_S) -> Answer:
        data = json.dumps(body or {}).encode() if post else None
        request = urllib.request.Request(
            self.base + path, data=data, headers={"Content-Type": "application/json"}
        )
        start = time.monotonic()

        def answer(status: int, text: str) -> Answer:
            return Answer(status, text, round(time.monotonic() - start, 3))

        try:
            with urllib.request.urlopen(request, timeout=limit_s) as response:
                return answer(response.status, response.read().decode(errors="replace"))
        except urllib.error.HTTPError as error:
            return answer(error.code, error.read().decode(errors="replace"))
        except OSError as error:  # a lost or refused connection, or none that answers in time
            return answer(0, f"{type(error).__name__}: {error}")
        except Exception as error:  # half an answer
            return answer(0, f"{type(error).__name__}: {error}")

    def get(self, path: str, limit_s: float = REQUEST_S) -> Answer:
        return self.ask(path, post=False, limit_s=limit_s)

    def complete(
        self, tokens: int = NEW_TOKENS, *, stream: bool = False, limit_s=REQUEST_S, more: dict | None = None
    ) -> Answer:
        """Greedy tokens of the prompt; `more` is what else is asked."""
        return self.ask("/v1/completions", completion(tokens, more) | {"stream": stream}, limit_s=limit_s)

    def stream(
        self,
        tokens: int = NEW_TOKENS,
        *,
        limit_s=REQUEST_S,
        more: dict | None = None,
        on_event: Callable[[], object] = lambda: None,
    ) -> Answer:
        """The same in a stream; its answer is what one without a stream would be."""
        body = completion(tokens, more) | {"stream": True}
        request = urllib.request.Request(
            self.base + "/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        start, first_s, whole = time.monotonic(), None, {"text": "", "token_ids": [], "finish_reason": None}
        try:
            with urllib.request.urlopen(request, timeout=limit_s) as response:
                for line in response:
                    event = json.loads(line[5:]) if line.startswith(b"data: {") else None
                    if event is None:
                        continue
                    if "error" in event:
                        return Answer(503, line.decode(), round(time.monotonic() - start, 3), first_s)
                    on_event()
                    first_s = first_s or round(time.monotonic() - start, 4)
                    choice = event["choices"][0] if event["choices"] else {}
                    whole["text"] += choice.get("text", "")
                    whole["token_ids"] += choice.get("token_ids") or []
                    whole["finish_reason"] = choice.get("finish_reason") or whole["finish_reason"]
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.read().decode(errors="replace"), time.monotonic() - start)
        except Exception as error:  # a connection that is lost, or half an answer
            return Answer(0, f"{type(error).__name__}: {error}", round(time.monotonic() - start, 3), first_s)
        whole["token_ids"] = whole["token_ids"] or None
        return Answer(200, json.dumps({"choices": [whole]}), round(time.monotonic() - start, 3), first_s)

    def sleep(self, level: int | str = 1, mode: str | None = None, limit_s=REQUEST_S) -> Answer:
        return self.ask(f"/sleep?level={level}" + (f"&mode={mode}" if mode else ""), limit_s=limit_s)

    def wake(self, *tags: str) -> Answer:
        return self.ask(
            "/wake_up" + "".join(f"{'&' if at else '?'}tags={tag}" for at, tag in enumerate(tags))
        )

    def rpc(self, method: str, **named) -> Answer:
        return self.ask("/collective_rpc", {"method": method, "kwargs": named})

    def sleeps(self) -> bool | None:
        """Whether it says that it sleeps; None where it does not say."""
        body = self.get("/is_sleeping").json()
        return body.get("is_sleeping") if isinstance(body, dict) else None

    def metrics(self) -> dict[str, float]:
        return families(self.get("/metrics").text)


def families(text: str, prefix: str = "poorwill_") -> dict[str, float]:
    """The metrics whose names begin so, each the sum over its labels. Buckets are left out."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith(prefix):
            continue
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0]
        if not name.endswith(("_bucket", "_created")):
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def free_port() -> int:
    """An unused port outside of the range of connections, since a server comes back to it."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def server_command(model: Path, port: int, more: list[str], *, has_text: bool = False) -> list[str]:
    """`vllm serve` without what that needs beyond the server: its other commands import more."""
    return [
        *[sys.executable, "-m", "vllm.entrypoints.openai.api_server"],
        *["--model", str(model), "--served-model-name", "bench"],
        *["--host", "127.0.0.1", "--port", str(port)],
        *["--enable-sleep-mode", "--generation-config", "vllm"],
        *([] if has_text else ["--skip-tokenizer-init"]),
        *["--dtype", "bfloat16", "--seed", "0", "--max-model-len", "2048", "--max-num-seqs", "16"],
        *["--no-enable-prefix-caching", "--enforce-eager"],
        *more,
    ]


class Server:
    """A server that is running, in a process group of its own."""

    def __init__(self, command: list[str], environment: dict[str, str], port: int, log: Path):
        self.client, self.log = Client(port), log
        self.stopped: int | None = None
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait_until_ready(self, limit_s: float = START_S) -> float:
        """The seconds until it says that it is well."""
        start = time.monotonic()
        while time.monotonic() - start < limit_s:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"the server ended with code {self.process.returncode}: {self.last_words()}"
                )
            if self.client.get("/health", limit_s=5).good:
                return time.monotonic() - start
            time.sleep(0.25)
        raise RuntimeError(f"the server is not ready after {limit_s:.0f} s: {self.last_words()}")

    def last_words(self, size: int = 3000) -> str:
        return self.log.read_bytes()[-size:].decode(errors="replace")

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def engine(self) -> int | None:
        """The process that has the GPU: vLLM calls it so, as long as it may."""
        below = descendants(self.process.pid, parents())
        for wanted in ["EngineCore", "spawn_main", ""]:
            for pid in below:
                if wanted in name_of(pid) and "resource_tracker" not in name_of(pid):
                    return pid
        return None

    def stop(self) -> float:
        """Asks it to end, and makes it when it does not; the seconds that took."""
        start = time.monotonic()
        if self.runs:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                pass
        self.stopped = self.process.poll()
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # what it left behind, or itself
        except ProcessLookupError:
            pass
        self.process.wait()
        return time.monotonic() - start
