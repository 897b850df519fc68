"""What `vllm_ranks_gpu_suite` has vLLM's workers do, each in a process of its own that imports this by name.

A function gets what vLLM holds for the worker, a wrapper around it. `break_down` has the next sleep or wake
of some ranks fail at a place, and `mend` ends that.
"""

import dataclasses
import hashlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

STOPPED_S = 6
"""Longer than the others wait."""
HELD_S = 30
FULL_BYTES = 64 << 20


def _torch() -> Any:
    return import_module("torch")


def within(worker: Any) -> Any:
    """The worker in vLLM's wrapper: what is set on the wrapper is not seen by the worker."""
    return getattr(worker, "worker", worker)


def _number(inner: Any) -> int:
    """The rank among all engines: those of data parallel engines begin at 0 in each."""
    parallel = inner.vllm_config.parallel_config
    return int(parallel.data_parallel_index) * int(parallel.world_size) + int(inner.rank)


def _model(worker: Any) -> Any:
    model = within(worker).model_runner.model
    return model.unwrap() if hasattr(model, "unwrap") else model


def _storages(worker: Any) -> Iterator[tuple[str, Any]]:
    """Every storage of the model on the GPU, under the first name that has it."""
    model, seen = _model(worker), set()
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        storage = tensor.untyped_storage()
        if tensor.is_cuda and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield name, storage


def begin(worker: Any) -> dict[str, Any]:
    """What this rank is. Its allocator has to be ours."""
    inner = within(worker)
    inner.tested_rank = _number(inner)
    allocator = import_module("vllm.device_allocator.cumem").CuMemAllocator.instance
    assert type(allocator).__module__.startswith("poorwill."), type(allocator)
    weight_bytes = sum(storage.nbytes() for _, storage in _storages(worker))
    return {"rank": inner.tested_rank, "pid": os.getpid(), "weight_bytes": weight_bytes}


def used_bytes(worker: Any) -> int:
    torch = _torch()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def fill(worker: Any) -> None:
    """Overwrites the weights, on every rank with others, and keeps a copy of them."""
    torch, inner = _torch(), within(worker)
    generator = torch.Generator(device="cuda").manual_seed(1000 * (inner.tested_rank + 1))
    with torch.no_grad():
        for name, parameter in _model(worker).named_parameters():
            bound = 1.0 if "embed" in name else (3.0 / parameter.shape[-1]) ** 0.5
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.uniform_(-bound, bound, generator=generator)
    inner.tested_copy = {
        name: each.detach().to("cpu", copy=True) for name, each in _model(worker).named_parameters()
    }


def write_back(worker: Any) -> None:
    torch = _torch()
    with torch.no_grad():
        for name, parameter in _model(worker).named_parameters():
            parameter.copy_(within(worker).tested_copy[name])
    torch.cuda.synchronize()


def digests(worker: Any) -> dict[str, str]:
    """By tensor, what tells whether its bytes are the same."""
    torch = _torch()

    def of(storage: Any) -> str:
        raw = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage).cpu()
        return hashlib.blake2b(raw.numpy(), digest_size=8).hexdigest()

    return {name: of(storage) for name, storage in _storages(worker)}


class BrokenError(RuntimeError):
    """What a broken place raises."""


class Broken:
    """A rank that is to fail, and how it becomes whole again."""

    def __init__(self, inner: Any, op: str) -> None:
        self.inner, self.op = inner, {"wake": "wake_up"}.get(op, op)
        self.back: list[Callable[[], object]] = []

    def set(self, of: Any, name: str, value: object) -> None:
        before, had = vars(of).get(name), name in vars(of)
        setattr(of, name, value)
        self.back.append(lambda: setattr(of, name, before) if had else delattr(of, name))

    def around(
        self, of: Any, name: str, before: Callable[[], object] | None, after: Callable[[], object] | None
    ) -> None:
        """Has something happen before and after the call."""
        stock = getattr(of, name)

        def broken(*positional: Any, **named: Any) -> Any:
            if before is not None:
                before()
            answer = stock(*positional, **named)
            if after is not None:
                after()
            return answer

        self.set(of, name, broken)

    def around_pool(
        self, before: Callable[[], object] | None = None, after: Callable[[], object] | None = None
    ) -> None:
        """The same around the call that changes memory."""
        name = "suspend" if self.op == "sleep" else "wake_up"
        self.around(self.inner.allocator, name, before, after)


def _raise(*_: object, **__: object) -> None:
    raise BrokenError("broken by the test")


def _stop() -> None:
    """Stops this process, until one that is not stopped has it go on."""
    goes_on = f"sleep {STOPPED_S}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", goes_on], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def _full(broken: Broken) -> None:
    torch = _torch()
    free, _ = torch.cuda.mem_get_info()
    held = [torch.empty(max(free - FULL_BYTES, 0), dtype=torch.uint8, device=broken.inner.device)]

    def release() -> None:
        held.clear()
        torch.cuda.empty_cache()

    broken.back.append(release)


def _host_shortage(broken: Broken) -> None:
    bounded = dataclasses.replace(broken.inner._environment, host_budget_bytes=1)
    broken.set(broken.inner, "_environment", bounded)


def _held(broken: Broken) -> None:
    broken.back.append(broken.inner.allocator.arena.hold("weights", "test").end)


class _Joining:
    @staticmethod
    def join(*_: object) -> None:
        _raise()


class _Deciding:
    """A decision that this rank cannot make."""

    @staticmethod
    def join(*_: object) -> "_Deciding":
        return _Deciding()

    def decide(self, verdict: object) -> None:
        poorwill = import_module("poorwill")
        raise poorwill.PoorwillError(f"cannot decide {verdict} (broken by the test)")


def _deciding(broken: Broken) -> None:
    """It fails, and cannot say so: the others have to wait their time."""
    broken.set(sys.modules["poorwill.vllm.worker"], "Decision", _Deciding)
    broken.around(broken.inner, broken.op, _raise, None)


PLACES: dict[str, Callable[[Broken], None]] = {
    "entry": lambda broken: broken.around(broken.inner, broken.op, _raise, None),
    "host shortage": _host_shortage,
    "held": _held,
    "full": _full,
    "pool before": lambda broken: broken.around_pool(before=_raise),
    "pool after": lambda broken: broken.around_pool(after=_raise),
    "exit": lambda broken: broken.around(broken.inner, broken.op, None, _raise),
    "stopped": lambda broken: broken.around_pool(before=_stop),
    "join": lambda broken: broken.set(sys.modules["poorwill.vllm.worker"], "Decision", _Joining),
    "decide": _deciding,
}


def break_down(worker: Any, rank: int, op: str, place: str) -> None:
    """Has the next sleep or wake of this rank fail."""
    inner = within(worker)
    if inner.tested_rank == rank:
        inner.tested_broken = Broken(inner, op)
        PLACES[place](inner.tested_broken)


def mend(worker: Any) -> None:
    broken = vars(within(worker)).pop("tested_broken", None)
    while broken is not None and broken.back:
        broken.back.pop()()


def hold_back(worker: Any, ranks: list[int], when: str, folder: str) -> None:
    """These ranks wait in the next sleep, before the pool is asked or after it has committed.

    They leave a file `at-RANK`, and go on once there is a file `go`, or when it takes too long.
    """
    inner = within(worker)
    if inner.tested_rank not in ranks:
        return

    def wait() -> None:
        Path(folder, f"at-{inner.tested_rank}").touch()
        end = time.monotonic() + HELD_S
        while not Path(folder, "go").exists() and time.monotonic() < end:
            time.sleep(0.01)

    inner.tested_broken = Broken(inner, "sleep")
    inner.tested_broken.around_pool(**{when: wait})
