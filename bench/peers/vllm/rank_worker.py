"""What ranks.py has vLLM's workers do. Each is a process of its own, and imports this module by its name.

Every function gets what vLLM holds for the worker, a wrapper around it, and returns what can be passed
between processes. PyTorch is imported in the functions, for the script itself does without a GPU.
"""

import dataclasses
import os
import time

from common import host_memory

SEEDS_APART = 1000  # so that no rank's weights are those of another


def within(worker):
    """The worker in vLLM's wrapper: what is set on the wrapper is not seen by the worker."""
    return getattr(worker, "worker", worker)


def number(inner) -> int:
    """The rank among all engines: those of data parallel engines begin at 0 in each."""
    config = getattr(inner, "vllm_config", None)
    if config is None:
        return int(inner.rank)
    parallel = config.parallel_config
    return int(parallel.data_parallel_index) * int(parallel.world_size) + int(inner.rank)


def begin(worker, mode: str) -> dict:
    """Reports what this rank is, and makes it keep its operations' reports."""
    import engine as engines
    import torch

    inner = within(worker)
    inner.bench_events, inner.bench_rank = [], number(inner)
    if mode == "poorwill":
        ask = inner.poorwill_status

        def poorwill_status():
            status = ask()
            inner.bench_events += status["events"]
            return status

        inner.poorwill_status = poorwill_status
    return {
        "rank": inner.bench_rank,
        "device": str(inner.device),
        "name": torch.cuda.get_device_name(),
        "pid": os.getpid(),
        "worker": f"{type(inner).__module__}.{type(inner).__qualname__}",
        "weight_bytes": engines.weight_bytes(engines.model_of(inner)),
        "used_bytes": engines.used_memory(),
        **engines.check_allocator(mode),
    }


def reported(worker) -> list:
    """Reports of the operations since the last call."""
    inner = within(worker)
    events, inner.bench_events = inner.bench_events, []
    return events


def host(worker) -> dict[str, float]:
    """What this rank's process and the machine hold of host memory, in GiB."""
    return host_memory()


def synchronize(worker) -> None:
    import torch

    torch.cuda.synchronize()


def settle(worker) -> None:
    """Returns what PyTorch keeps unused to the GPU."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def echo(worker, word: str) -> list:
    """Shows whether an answer belongs to its question."""
    return [within(worker).bench_rank, word]


def alone(worker, ranks: list[int]) -> dict | None:
    """Sleeps and wakes the memory of these ranks alone, outside of the engine's state; the seconds of each.

    Other ranks do nothing.
    """
    import torch

    inner = within(worker)
    if inner.bench_rank not in ranks:
        return None
    torch.cuda.synchronize()
    begin = time.perf_counter()
    inner.allocator.suspend(1)
    torch.cuda.synchronize()
    asleep = time.perf_counter()
    inner.allocator.wake_up()
    torch.cuda.synchronize()
    return {"sleep_s": asleep - begin, "wake_s": time.perf_counter() - asleep}


def fill(worker, seed: int) -> dict[str, int]:
    """Overwrites the weights, on every rank with others."""
    import engine as engines

    inner = within(worker)
    filled, left = engines.fill_weights(engines.model_of(inner), seed + SEEDS_APART * inner.bench_rank)
    return {"tensors": filled, "left": left}


def digests(worker) -> dict[str, str]:
    """What tells whether the bytes of the model are the same, by tensor."""
    import engine as engines

    return engines.digests(engines.model_of(within(worker)))


def keep_copy(worker) -> None:
    """Copies the weights to host memory."""
    import engine as engines

    inner = within(worker)
    inner.bench_copy = engines.copied(engines.model_of(inner))


def write_back(worker) -> None:
    """Writes the weights from that copy."""
    import engine as engines

    inner = within(worker)
    engines.write_back(engines.model_of(inner), inner.bench_copy)


def bound_host_memory(worker, rank: int, limit_bytes: int | None) -> int | None:
    """Has one rank of poorwill's hold no more host memory than that. Returns what it might until now; on
    other ranks nothing changes.

    The setting itself comes from the environment, and is the same on all ranks.
    """
    inner = within(worker)
    before = inner._environment.host_budget_bytes
    if inner.bench_rank == rank:
        inner._environment = dataclasses.replace(inner._environment, host_budget_bytes=limit_bytes)
    return before
