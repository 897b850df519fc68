"""Two models of which one fits: what a swap takes beside what the engines and the canary take of it."""

import http.client
import json
import threading
import time

from figures import of_swap, of_swaps
from programs import (
    Children,
    Failed,
    ask,
    end,
    free_ports,
    rotation_toml,
    stand_in,
    start_rotation,
)

MODELS = ("amber", "birch")
SIZE = "512MiB"
GPU = "800MiB"  # a sleeping engine keeps what its program takes, some tens of MiB
NEED = "600MiB"
TOKENS_PER_S = 200
# No minimum residence and no grace, so that each request forces its swap at once.
RULES = '[every_model]\nresidence_min = "0s"\ngrace = "0s"\nslack = "24MiB"\n'
ANSWERS = 5  # requests at a model that is ready, for what an answer takes
REST_S = 0.1


class Follower:
    """Takes down what the service tells."""

    def __init__(self, control: int):
        self.events: list[dict] = []
        self.changed = threading.Condition()
        connection = http.client.HTTPConnection("127.0.0.1", control, timeout=3600)
        connection.request("GET", "/rotate/events")
        self.answer = connection.getresponse()
        threading.Thread(target=self.follow, daemon=True).start()

    def follow(self) -> None:
        try:
            for line in self.answer:
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    with self.changed:
                        self.events.append(event)
                        self.changed.notify_all()
        except (OSError, http.client.HTTPException, ValueError):
            return  # The service has ended.

    def count(self) -> int:
        with self.changed:
            return len(self.events)

    def until_ready(self, model: str, since: int) -> list[dict]:
        """Events since then, once this model was ready."""

        def is_ready() -> bool:
            events = self.events[since:]
            return any(event.get("event") == "ready" and event["model"] == model for event in events)

        with self.changed:
            if not self.changed.wait_for(is_ready, timeout=10):
                raise Failed(f"{model} answered, and no event says that it was ready: {self.events[since:]}")
            return self.events[since:]


def request_s(port: int, model: str) -> float:
    """How long a request of one token takes."""
    body = {"model": model, "prompt": "Once", "max_tokens": 1}
    began = time.monotonic()
    status, said = ask(port, "POST", "/v1/completions", body, limit_s=120)
    if status != 200:
        raise Failed(f"{model} answered {status}: {said[:300]!r}")
    return time.monotonic() - began


def post_s(port: int, path: str) -> float:
    began = time.monotonic()
    status, said = ask(port, "POST", path)
    if status != 200:
        raise Failed(f"{path} was answered with {status}: {said[:300]!r}")
    return time.monotonic() - began


def directly(children: Children, poorwill: str, count: int) -> list[dict]:
    """An engine's own sleeps and wakes, asked for as the service asks, without a service."""
    (port,) = free_ports(1)
    process = children.start("alone", stand_in(poorwill, port, MODELS[0], SIZE, TOKENS_PER_S))
    children.until_answers("alone", process, port)
    pairs = []
    for _ in range(count + 1):
        pairs.append(
            {"sleep_s": post_s(port, "/sleep?level=1&mode=wait"), "wake_s": post_s(port, "/wake_up")}
        )
        time.sleep(REST_S)
    end(process)
    return pairs[1:]  # the first pair meets memory that nobody has given back yet


def measure(children: Children, poorwill: str, count: int) -> dict:
    direct = directly(children, poorwill, count)
    front, control, *ports = free_ports(2 + len(MODELS))
    models = [
        {
            "name": name,
            "port": port,
            "need": NEED,
            "command": stand_in(poorwill, port, name, SIZE, TOKENS_PER_S),
        }
        for name, port in zip(MODELS, ports, strict=True)
    ]
    toml = rotation_toml(children.folder / "swaps", front, control, GPU, RULES, models)
    process = start_rotation(children, poorwill, "swaps", None, toml)
    children.until_answers("swaps", process, control)
    follower = Follower(control)
    for _ in range(2):  # both are started, and what each holds is learnt
        for name in MODELS:
            request_s(front, name)
    each = []
    for nth in range(count):
        leaves, comes = MODELS[(nth + 1) % 2], MODELS[nth % 2]
        time.sleep(REST_S)
        before = follower.count()
        whole_s = request_s(front, comes)
        events = follower.until_ready(comes, before)
        answer_s = sorted(request_s(front, comes) for _ in range(ANSWERS))[ANSWERS // 2]
        try:
            each.append(of_swap(events, leaves, comes, whole_s, answer_s))
        except ValueError as error:
            raise Failed(f"swap {nth + 1}: {error}: {events}") from error
    end(process)
    return {"direct": direct, "each": each, "figures": of_swaps(each, direct), "configuration": toml}
