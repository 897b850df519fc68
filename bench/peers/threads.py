#!/usr/bin/env python3
"""Loads of many operations, in Poorwill's pool and in PyTorch's own, in one process; prints JSON lines.

`threads`: four threads allocate 300 blocks each, of 512 B to 256 MiB, and keep them. `churn`: the same, and
each frees about half of its blocks under way. `experts`: the experts of a layer come one by one, are stacked,
and laid out transposed. Sizes follow from the seed. Each round takes each load once through each pool, and
the pools take turns to be first.
"""

import argparse
import gc
import json
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

GIB, MIB = 1 << 30, 1 << 20
LEAST_BYTES, DOUBLINGS = 512, 19  # 256 MiB is the most
THREADS, BLOCKS = 4, 300
# How strongly small blocks prevail: with these the blocks that stay are 10.9 GiB.
SKEWS = {"threads": 2.17, "churn": 1.03}
LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 10, 64, 2048, 1408
POOLS = ("none", "poorwill")

Step = tuple[str, int]
"""`take` and a size in bytes, or `give` and the place of a block among those that the thread has."""


def steps(load: str, seed: int, thread: int) -> list[Step]:
    """What one thread does."""
    rng = random.Random(f"{load} {seed} {thread}")
    made: list[Step] = []
    count = 0
    for _ in range(BLOCKS):
        size = int(LEAST_BYTES * 2 ** (DOUBLINGS * rng.random() ** SKEWS[load]))
        made.append(("take", size // LEAST_BYTES * LEAST_BYTES))
        count += 1
        if load == "churn" and rng.random() < 0.5:
            made.append(("give", rng.randrange(count)))
            count -= 1
    return made


def kept_bytes(made: list[Step]) -> int:
    """What lives after the steps."""
    sizes: list[int] = []
    for what, value in made:
        if what == "take":
            sizes.append(value)
        else:
            sizes.pop(value)
    return sum(sizes)


def follow(torch: Any, made: list[Step]) -> list[Any]:
    """Takes the steps, and returns what lives after them."""
    kept: list[Any] = []
    for what, value in made:
        if what == "take":
            kept.append(torch.empty(value, dtype=torch.uint8, device="cuda"))
        else:
            kept.pop(value)
    return kept


def in_threads(torch: Any, pool: Callable[[], Any], load: str, seed: int) -> list[Any]:
    """All threads begin at once, each in the pool. What one raises is raised here."""
    kept: list[list[Any]] = [[] for _ in range(THREADS)]
    failed: list[BaseException] = []
    made = [steps(load, seed, thread) for thread in range(THREADS)]
    start = threading.Barrier(THREADS)

    def work(thread: int) -> None:
        try:
            start.wait()
            with pool():
                kept[thread] = follow(torch, made[thread])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return [tensor for part in kept for tensor in part]


def experts(torch: Any, pool: Callable[[], Any]) -> list[Any]:
    """What is kept of each layer is as large as its experts were."""
    kept = []
    with pool():
        for _layer in range(LAYERS):
            for shape in ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)):
                one_by_one = [
                    torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _expert in range(EXPERTS)
                ]
                stacked = torch.stack(one_by_one)
                del one_by_one
                kept.append(stacked.transpose(1, 2).contiguous())
                del stacked
    return kept


def measure(torch: Any, load: str, pool_name: str, watch: str, seed: int) -> dict[str, Any]:
    """One load through one pool, from nothing held to nothing held."""
    from allocators import MAKE

    if pool_name == "poorwill":
        import poorwill
        from poorwill.torch import Pool

        def pool() -> Any:
            return Pool(poorwill.arena(), "weights", watch=watch)

        def give_back() -> None:
            poorwill.trim()

    else:
        pool, give_back = MAKE[pool_name]().pool, torch.cuda.empty_cache

    with pool():
        # Where PyTorch keeps something of its own, it has it by now.
        torch.empty(1, device="cuda")
    give_back()
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    start = time.perf_counter()
    if load == "experts":
        kept = experts(torch, pool)
    else:
        kept = in_threads(torch, pool, load, seed)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    held = before - torch.cuda.mem_get_info()[0]
    live = sum(tensor.nbytes for tensor in kept)
    count = len(kept)
    del kept
    gc.collect()
    give_back()
    return {
        "tensors": count,
        "live_gib": round(live / GIB, 3),
        "held_gib": round(held / GIB, 3),
        "held_ratio": round(held / live, 4),
        "seconds": round(seconds, 4),
        "left_mib": round((before - torch.cuda.mem_get_info()[0]) / MIB),
    }


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def main() -> int:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument(
        "--load", choices=[*SKEWS, "experts"], action="append", help="only this one; default: all"
    )
    arguments.add_argument("--pool", choices=POOLS, action="append", help="only this one; default: all")
    arguments.add_argument("--watch", choices=["operations", "segments"], default="operations")
    arguments.add_argument("--rounds", type=positive, default=3)
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    try:
        import torch
    except ImportError as error:
        print(f"threads.py measures pools of PyTorch: {error}; install torch", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("threads.py measures pools on a GPU, and PyTorch finds none", file=sys.stderr)
        return 2
    torch.empty(1, device="cuda")
    failed = False
    pools = options.pool or list(POOLS)
    for turn in range(options.rounds):
        for load in options.load or [*SKEWS, "experts"]:
            for nth in range(len(pools)):
                pool = pools[(nth + turn) % len(pools)]
                line = {"round": turn + 1, "load": load, "pool": pool, "seed": options.seed}
                try:
                    line |= measure(torch, load, pool, options.watch, options.seed)
                except (RuntimeError, ImportError) as error:
                    failed = True
                    line["failed"] = str(error).splitlines()[0]
                print(json.dumps(line), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
