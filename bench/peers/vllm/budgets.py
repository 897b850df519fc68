#!/usr/bin/env python3
"""What an engine's share of the card becomes, with CUDA graphs: its KV cache, its graphs, and what is in use
in the end.

    budgets.py
    budgets.py --shares 0.95,0.88 --v2

For each share one engine with --gpu-memory-utilization and one with POORWILL_BUDGET, each in a process of its
own. Other shares have to make other KV caches, larger by the difference of the shares. Under POORWILL_BUDGET
nothing may be in use beyond it, also after prompts were answered. Then two engines get the last share as
POORWILL_BUDGET and a KV cache size. One is so large that the graphs do not fit beside it; it has to be
refused with the size that would fit. The other has that size, and has to start.

Prints JSON lines; exit code 1 if anything is not as it should be.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

from common import (
    ERROR_CHARACTERS,
    GIB,
    MIB,
    adopt,
    conclude,
    conclude_in_a_folder,
    emit,
    environment,
    every_line_says,
    gib,
)
from models import write_model

SHARES = (0.95, 0.92, 0.88)
LIMITS_BY = ["utilization", "budget"]
BUDGET, CACHE = "POORWILL_BUDGET", "--kv-cache-memory-bytes"
LAYERS = 8
LIMIT_S = 150
TOLERANCE_BYTES = 256 * MIB
"""By how much what two engines are left with may differ beside their shares: what a pass takes varies."""


def child(way: str, share: float, kv_bytes: int, model: Path) -> bool:
    """Starts one engine, answers prompts, and says what it has of the card. What is refused is said."""
    import engine as engines
    import torch

    chosen = engines.settings(
        model, mode="poorwill", graphs="compile", utilization=share if way == "utilization" else 0.9
    )
    if kv_bytes:
        chosen["kv_cache_memory_bytes"] = kv_bytes
    try:
        engine = engines.start("poorwill", chosen)
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, engines.WrongAllocatorError):
            raise
        emit("refused", error_type=type(error).__name__, error=str(error)[:ERROR_CHARACTERS])
        return True
    worker, graphs = engine.worker, engine.worker._graphs

    def used() -> int:
        return int(worker.init_snapshot.free_memory) - torch.cuda.mem_get_info()[0]

    started = used()
    engine.tokens()
    engine.throughput(1)
    estimate = int(getattr(worker, "cudagraph_memory_estimate", 0))
    emit(
        "engine",
        allowed_bytes=int(worker.requested_memory),
        cache_bytes=kv_bytes or int(worker.available_kv_cache_memory_bytes),
        kv_blocks=engine.kv_blocks,
        pass_bytes=graphs.pass_bytes,
        graphs_estimated_bytes=estimate,
        graphs_bytes=graphs.graphs_bytes,
        used_bytes=started,
        used_serving_bytes=used(),
        runner=f"{type(worker.model_runner).__module__}.{type(worker.model_runner).__qualname__}",
    )
    return True


def run(way: str, share: float, kv_bytes: int, is_v2: bool, model: Path) -> dict:
    """What came of one engine: its last line, or how its process ended."""
    words = ["--child", way, "--shares", str(share), "--kv-bytes", str(kv_bytes), "--model", str(model)]
    more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if way == "budget":
        more[BUDGET] = str(share)
    if is_v2:
        more["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    try:
        ran = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), *words],
            env=environment("poorwill", dict(os.environ), **more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return {"event": "failed", "error": f"still running after {LIMIT_S} s"}
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    found = [line for line in lines if line["event"] in ("engine", "refused", "failed")]
    return found[-1] if found else {"event": "failed", "error": f"ended with code {ran.returncode}"}


def reported(way: str, share: float, line: dict, good: bool) -> bool:
    """Says what came of an engine, in GiB."""
    sizes = {name.replace("_bytes", "_gib"): gib(line[name]) for name in line if name.endswith("_bytes")}
    rest = {name: line[name] for name in ("kv_blocks", "runner", "error_type", "error") if name in line}
    emit("budget", way=way, share=share, came=line["event"], **sizes, **rest, ok=good)
    return good


def is_within(way: str, line: dict) -> bool:
    """Whether an engine started, and has kept to what binds it."""
    if line["event"] != "engine":
        return False
    most = max(line["used_bytes"], line["used_serving_bytes"])
    return way != "budget" or most <= line["allowed_bytes"]


def are_apart(lines: list[dict]) -> bool:
    """Whether the KV caches of the engines of one way differ as their shares do."""
    return all(
        one["cache_bytes"] != other["cache_bytes"]
        and abs((one["cache_bytes"] - other["cache_bytes"]) - (one["allowed_bytes"] - other["allowed_bytes"]))
        <= TOLERANCE_BYTES
        for one, other in itertools.pairwise(lines)
    )


def fitting(said: str) -> int:
    """The size of a KV cache that a refusal names; 0 if it names none."""
    found = re.findall(rf"{CACHE} (\d+)", said)
    return int(found[-1]) if found else 0


def given(share: float, sized: dict, is_v2: bool, model: Path) -> bool:
    """Whether a cache that leaves no room for the graphs is refused, and the one that is named starts."""
    # All that was left for the graphs, and half of what they took beside.
    too_large = sized["cache_bytes"] + max(sized["graphs_bytes"] // 2, 64 * MIB)
    line = run("budget", share, too_large, is_v2, model)
    said = line.get("error", "")
    refused = line["event"] == "refused" and BUDGET in said and CACHE in said
    good = reported("budget-and-cache", share, line, refused)
    size = fitting(said) or sized["cache_bytes"] - GIB
    line = run("budget", share, size, is_v2, model)
    return reported("budget-and-fitting-cache", share, line, is_within("budget", line)) and good


def compare(shares: list[float], is_v2: bool, folder: Path) -> bool:
    # One folder for all: vLLM compiles anew for a model that lies somewhere else.
    model = write_model(folder, "dense", LAYERS)
    good, sized = True, {}
    for way in LIMITS_BY:
        lines = []
        for share in shares:
            lines.append(run(way, share, 0, is_v2, model))
            good = reported(way, share, lines[-1], is_within(way, lines[-1])) and good
        if all(line["event"] == "engine" for line in lines):
            apart = are_apart(lines)
            emit("caches", way=way, cache_gib=[gib(line["cache_bytes"]) for line in lines], ok=apart)
            good, sized = good and apart, lines[-1]
        else:
            good = False
    if sized:
        good = given(shares[-1], sized, is_v2, model) and good
    return good


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--shares", default=",".join(map(str, SHARES)))
    arguments.add_argument("--v2", action="store_true", help="with vLLM's second model runner")
    arguments.add_argument("--child", choices=LIMITS_BY, help=argparse.SUPPRESS)
    arguments.add_argument("--kv-bytes", type=int, default=0, help=argparse.SUPPRESS)
    arguments.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    try:
        shares = [float(share) for share in options.shares.split(",")]
    except ValueError:
        arguments.error(f"--shares is {options.shares}: write shares like 0.95,0.88")
    if not all(0 < share <= 1 for share in shares) or len(set(shares)) < (1 if options.child else 2):
        arguments.error(
            f"--shares is {options.shares}: it takes two shares or more, each above 0 and at most 1"
        )
    if options.child:
        adopt(dict(os.environ))
        every_line_says(mode="poorwill", label=f"{options.child}-{shares[0]}")
        conclude(lambda: child(options.child, shares[0], options.kv_bytes, options.model))
    every_line_says(mode="poorwill", label="budgets-v2" if options.v2 else "budgets")
    conclude_in_a_folder(lambda folder: compare(shares, options.v2, folder))


if __name__ == "__main__":
    main()
