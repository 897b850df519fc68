#!/usr/bin/env python3
"""A pair of vLLM servers with NIXL between them: one computes prompts, the other reads their KV cache.

Both sleep with Poorwill and wake again: together, alone, at level 2, by tag, and while only the cache is
awake. After every wake a prompt has to pass from one to the other, with the tokens of a server that computes
alone. A sleep has to release memory. Needs vLLM 0.33 or later and NIXL's wheel: without that it says so and
ends with status 3. Prints JSON lines. `--gpus 0,1` gives each server a GPU of its own.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from common import GIB, Ballast, conclude_in_a_folder, emit, environment, every_line_says, gib
from models import layers_for, write_checkpoint
from web import NEW_TOKENS, Answer, Client, Server, free_port, server_command

NO_NIXL = 3
HITS = "vllm:external_prefix_cache_hits"
CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail"}
ASKS = {"do_remote_decode": True, "do_remote_prefill": False}
BACK_GIB = 0.9  # of the weights' bytes, what a sleep has to give back


def complete(client: Client, tokens: int, params: dict | None = None) -> Answer:
    """Greedy tokens of the prompt; `params` say whose KV cache it is."""
    return client.complete(tokens, more=None if params is None else {"kv_transfer_params": params})


def hits(client: Client) -> float:
    """How many tokens' KV cache a server has read from elsewhere."""
    text = client.get("/metrics").text
    lines = [line for line in text.splitlines() if line.startswith((f"{HITS}{{", f"{HITS}_total{{"))]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def passed(prefill: Client, decode: Client, reference: list[int] | None) -> tuple[bool, dict]:
    """Whether a prompt goes from one to the other, and the tokens are right."""
    before = hits(decode)
    first = complete(prefill, 1, ASKS)
    params = (first.json() or {}).get("kv_transfer_params") if first.good else None
    if not params:
        return False, {"prefill": first.brief()}
    answer = complete(decode, NEW_TOKENS, params)
    read = hits(decode) - before
    right = answer.good and answer.tokens() == reference
    seen = {"read_tokens": read, "tokens_equal": right, "seconds": [first.seconds, answer.seconds]}
    return right and read > 0, seen if answer.good else {**seen, "decode": answer.brief()}


def asked(*answers: Answer) -> bool:
    return all(answer.good for answer in answers)


def whole(level: int) -> Callable[[list[Client]], bool]:
    """A sleep and a wake of each; at level 2 with the weights reloaded between the tags."""

    def act(clients: list[Client]) -> bool:
        good = asked(*(client.sleep(level) for client in clients))
        for client in clients:
            good &= asked(client.wake()) if level == 1 else asked(client.wake("weights"))
            if level == 2:
                good &= asked(client.rpc("reload_weights"), client.wake("kv_cache"))
        return good

    return act


def by_tag(clients: list[Client]) -> bool:
    return all(asked(client.sleep(1), client.wake("kv_cache"), client.wake("weights")) for client in clients)


def half_awake(clients: list[Client]) -> bool:
    """A second sleep, of the cache alone, whose registrations the first wake has made."""
    return all(
        asked(client.sleep(1), client.wake("kv_cache"), client.sleep(1), client.wake()) for client in clients
    )


STEPS: list[tuple[str, Callable[[list[Client]], bool]]] = [
    ("both", whole(1)),
    ("the one that computes prompts", lambda clients: whole(1)(clients[:1])),
    ("the one that reads", lambda clients: whole(1)(clients[1:])),
    ("level 2", whole(2)),
    ("by tag", by_tag),
    ("half awake", half_awake),
    ("both again", whole(1)),
]


def gives_back(client: Client, ballast: Ballast, bytes_back: float) -> tuple[bool, dict]:
    """Whether a sleep gives the weights and the cache back, on the GPU that the ballast is on."""
    before = ballast.free()
    slept = client.sleep(1)
    given = ballast.free() - before
    woke = client.wake()
    return asked(slept, woke) and given >= bytes_back, {"given_back_gib": gib(given), "sleep": slept.brief()}


def take(name: str, act: Callable[[], tuple[bool, dict]]) -> bool:
    start = time.monotonic()
    try:
        ok, seen = act()
    except Exception as error:
        traceback.print_exc()
        ok, seen = False, {"error": f"{type(error).__name__}: {error}"[:3000]}
    emit("step", step=name, ok=ok, seconds=round(time.monotonic() - start, 2), **seen)
    return ok


def begin(options: argparse.Namespace, model: Path, gpu: str, log: Path) -> Server:
    port = free_port()
    words = ["--kv-cache-memory-bytes", str(int(options.kv_gib * GIB))]
    words += ["--gpu-memory-utilization", str(options.utilization)]
    words += ["--kv-transfer-config", json.dumps(CONNECTOR)]
    begun = environment(
        "poorwill",
        dict(os.environ),
        VLLM_SERVER_DEV_MODE="1",
        VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()),
        CUDA_VISIBLE_DEVICES=gpu,
    )
    return Server(server_command(model, port, words), begun, port, log)


def run(options: argparse.Namespace, folder: Path) -> bool:
    model = write_checkpoint(folder, layers_for(options.gib))
    gpus = options.gpus.split(",")
    servers: list[Server] = []
    with Ballast(ordinal=int(gpus[0])) as ballast:
        try:
            for name, gpu in zip(("prefill", "decode"), (gpus * 2)[:2], strict=True):
                servers.append(begin(options, model, gpu, folder / f"{name}.log"))
                emit("server", name=name, gpu=gpu, ready_s=round(servers[-1].wait_until_ready(), 1))
            clients = [server.client for server in servers]
            # What one computes alone, without the other's cache.
            reference = complete(clients[1], NEW_TOKENS).tokens()
            enough = BACK_GIB * options.gib * GIB
            good = [reference is not None, take("before", lambda: passed(*clients, reference))]
            good.append(take("memory", lambda: gives_back(clients[0], ballast, enough)))
            for name, act in STEPS:
                # In two steps, so that a failed sleep differs from wrong tokens.
                good.append(take(f"sleep: {name}", lambda act=act: (act(clients), {})))
                good.append(take(f"tokens: {name}", lambda: passed(*clients, reference)))
        finally:
            for server in servers:
                server.stop()
                sys.stderr.write(server.last_words(100_000))
    return all(good)


def parsed(given: list[str] | None = None) -> argparse.Namespace:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--gib", type=float, default=3, help="size of the checkpoint")
    arguments.add_argument("--kv-gib", type=float, default=2)
    arguments.add_argument("--utilization", type=float, default=0.4)
    arguments.add_argument("--gpus", default="0", help="one for both, or two with a comma between")
    return arguments.parse_args(given)


def main() -> None:
    options = parsed()
    every_line_says(mode="poorwill", label="connectors")
    if importlib.util.find_spec("nixl") is None:
        emit("skipped", why="there is no nixl here: pip install nixl, or carry its wheel here")
        sys.exit(NO_NIXL)
    conclude_in_a_folder(lambda folder: run(options, folder))


if __name__ == "__main__":
    main()
