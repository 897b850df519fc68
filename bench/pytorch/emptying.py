"""What PyTorch's emptying of its cache costs a load in a pool, and whether graphs sleep: one JSON line each.

    python3 bench/pytorch/emptying.py >> torch-2.11.jsonl

Needs a GPU, PyTorch and the package; run it with each PyTorch that is to be compared. A load keeps 1000
tensors and frees a transient beside each. It runs outside of pools, in `use_mem_pool`, and in poorwill's
pools with either `watch`. The default pool's cache is empty, or has 2 GiB in 64 segments. `calls` are the
segments that PyTorch requested and freed. `again` is the cost of allocating the 64 tensors outside of the
pool afterwards: no call if their cache was left alone.
"""

import argparse
import contextlib
import gc
import json
import time
from collections.abc import Callable
from typing import Any

import poorwill
import poorwill.torch
import torch

MIB = 1 << 20
CACHED = 64
TENSORS = 1000


def take(mib: int) -> Any:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def calls() -> tuple[int, int]:
    stats = torch.cuda.memory_stats()
    return stats["num_device_alloc"], stats["num_device_free"]


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    torch.cuda.synchronize()
    allocated, freed = calls()
    began = time.perf_counter()
    made = work()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    after = calls()
    return made, {"s": round(seconds, 6), "calls": [after[0] - allocated, after[1] - freed]}


def load(scope: Callable[[], contextlib.AbstractContextManager[Any]], sizes_mib: list[int]) -> list[Any]:
    kept = []
    with scope():
        for mib in sizes_mib:
            transient = take(2 * mib)
            kept.append(take(mib))
            del transient
    return kept


def scopes(arena: poorwill.Arena) -> dict[str, Callable[[], contextlib.AbstractContextManager[Any]]]:
    return {
        "outside of pools": contextlib.nullcontext,
        "use_mem_pool": lambda: torch.cuda.use_mem_pool(torch.cuda.MemPool()),
        "poorwill, operations": lambda: poorwill.torch.Pool(arena, "weights", watch="operations"),
        "poorwill, segments": lambda: poorwill.torch.Pool(arena, "weights", watch="segments"),
    }


def measure_load(
    scope: Callable[[], contextlib.AbstractContextManager[Any]], cached: int, tensors: int
) -> Any:
    gc.collect()
    torch.cuda.empty_cache()
    others = [take(32) for _ in range(cached)]
    del others
    sizes_mib = [1 + place % 13 for place in range(tensors)]
    kept, load_took = timed(lambda: load(scope, sizes_mib))
    again, again_took = timed(lambda: [take(32) for _ in range(cached)])
    live = sum(tensor.nbytes for tensor in kept + again)
    return {"live_bytes": live, "load": load_took, "again": again_took}


def measure_stats() -> Any:
    """One look at PyTorch's counters, in microseconds, in the two ways to ask for them."""
    took = {}
    for name in ("_cuda_memoryStats", "_accelerator_getDeviceStats"):
        ask = getattr(torch._C, name)
        began = time.perf_counter()
        for _ in range(100):
            ask(0)
        took[name] = round((time.perf_counter() - began) * 1e4, 1)
    return took


def measure_graph(arena: poorwill.Arena) -> Any:
    """A graph whose memory is in our pool, captured outside of a scope and within, after a sleep."""
    x = torch.ones(1 << 20, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        (x * 3 + 1).sum().item()
    results = {}
    for place, scope in (("outside", contextlib.nullcontext()), ("within", arena.pool("weights"))):
        graph = torch.cuda.CUDAGraph()
        with scope, torch.cuda.graph(graph, pool=arena.graph_pool(), stream=stream):
            y = (x * 3 + 1) * 2
        graph.replay()
        torch.cuda.synchronize()
        tags = {tag.tag: tag.live_bytes for tag in arena.stats().tags}
        arena.sleep()
        arena.wake()
        x.fill_(2)
        graph.replay()
        torch.cuda.synchronize()
        results[place] = {"cudagraph_bytes": tags.get("cudagraph", 0), "is_right": bool((y == 14).all())}
        x.fill_(1)
        del y, graph
        gc.collect()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tensors", type=int, default=TENSORS)
    parser.add_argument("--no-graphs", action="store_true", help="where kernels cannot run")
    options = parser.parse_args()
    torch.cuda.init()
    about = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    arena = poorwill.arena("cuda:0")

    def say(**what: Any) -> None:
        print(json.dumps({**about, **what}), flush=True)

    # The first scope puts PyTorch to the test, and makes cuBLAS's workspaces.
    load(scopes(arena)["poorwill, segments"], [1])
    for name, scope in scopes(arena).items():
        for cached in (0, CACHED):
            say(load_in=name, cached_segments=cached, **measure_load(scope, cached, options.tensors))
            arena.trim()
    say(stats_us=measure_stats())
    if not options.no_graphs:
        say(graphs=measure_graph(arena))


if __name__ == "__main__":
    main()
