"""What ranks.py has vLLM's workers do. Each is a process of its own, and imports this module by its name.

Every function gets what vLLM holds for the worker, a wrapper around it, and returns what can be passed
between processes. PyTorch is imported in the functions, for the script itself does without a GPU.
"""

import dataclasses
import os
import signal
import subprocess

from common import host_memory

SEEDS_APART = 1000  # so that no rank's weights are those of another
STOPPED_S = 6  # longer than the others wait
LEFT_BYTES = 512 << 20  # of a GPU that a fault fills: less than a wake needs


def within(worker):
    """The worker in vLLM's wrapper: what is set on the wrapper is not seen by the worker."""
    return getattr(worker, "worker", worker)


def begin(worker, mode: str) -> dict:
    """Reports what this rank is, and makes it keep its operations' reports."""
    import engine as engines
    import torch

    inner = within(worker)
    inner.bench_events = []
    if mode == "poorwill":
        ask = inner.poorwill_status

        def poorwill_status():
            status = ask()
            inner.bench_events += status["events"]
            return status

        inner.poorwill_status = poorwill_status
    return {
        "rank": int(inner.rank),
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


def fill(worker, seed: int) -> dict[str, int]:
    """Overwrites the weights, on every rank with others."""
    import engine as engines

    inner = within(worker)
    filled, left = engines.fill_weights(engines.model_of(inner), seed + SEEDS_APART * int(inner.rank))
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
    if inner.rank == rank:
        inner._environment = dataclasses.replace(inner._environment, host_budget_bytes=limit_bytes)
    return before


def break_down(worker, rank: int, place: str) -> None:
    """Has the next sleep or wake of one rank fail; `mend` ends that."""
    import torch

    inner = within(worker)
    if int(inner.rank) != rank:
        return
    inner.bench_broken = []
    allocator = inner.allocator
    if place == "held":
        # The pool itself refuses, after vLLM's own steps.
        inner.bench_broken.append(allocator.arena.hold("weights", "bench"))
    elif place == "full":
        free, _ = torch.cuda.mem_get_info()
        inner.bench_broken.append(torch.empty(free - LEFT_BYTES, dtype=torch.uint8, device=inner.device))
    else:
        name, _, when = place.partition(" ")
        stock = getattr(allocator, name)

        def broken(*positional, **named):
            if when in ("after", "killed after"):
                stock(*positional, **named)
            if when == "stopped":
                # Until a process that is not stopped has it go on.
                goes_on = f"sleep {STOPPED_S}; kill -CONT {os.getpid()}"
                subprocess.Popen(["sh", "-c", goes_on], start_new_session=True)
                os.kill(os.getpid(), signal.SIGSTOP)
                return stock(*positional, **named)
            if when.startswith("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"broken {when} {name}")

        setattr(allocator, name, broken)


def mend(worker, rank: int) -> None:
    import torch

    inner = within(worker)
    if int(inner.rank) != rank:
        return
    for name in ("suspend", "wake_up"):
        vars(inner.allocator).pop(name, None)
    while inner.bench_broken:
        kept = inner.bench_broken.pop()
        if hasattr(kept, "end"):
            kept.end()
        del kept
    torch.cuda.empty_cache()
