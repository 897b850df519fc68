"""How one rank of an engine is made to fail, in the process of its worker.

`break_down` has the next sleep or wake of some ranks fail at a place, and `mend` ends that. Each place is a
function below, by the name that rank_faults.py has for it.
"""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from capabilities import without_override
from rank_worker import within

SHORT_S, LONG_S = 1, 6  # of a stop: shorter and longer than the others wait
FULL_BYTES = 64 << 20  # of a GPU that is full, what is left
CACHE_BYTES = 512 << 20  # left beside the weights, where the KV cache lacks memory
HELD_S = 30  # how long a rank waits for a kill
REFUSED_BY_NCCL = "invalid usage (run with NCCL_DEBUG=WARN for details)"


class BrokenError(RuntimeError):
    """What a broken place raises."""


class Broken:
    """A rank that is to fail, and how it becomes whole again."""

    def __init__(self, inner, op: str):
        self.inner, self.op = inner, {"wake": "wake_up"}.get(op, op)
        self.path = ""  # of the decision that this rank has joined
        self._back: list[Callable[[], None]] = []

    def set(self, of, name: str, value) -> None:
        before, had = vars(of).get(name), name in vars(of)
        setattr(of, name, value)
        self._back.append(lambda: setattr(of, name, before) if had else delattr(of, name))

    def later(self, action: Callable[[], None]) -> None:
        """What mends it, too."""
        self._back.append(action)

    def mend(self) -> None:
        while self._back:
            self._back.pop()()

    @property
    def point(self) -> tuple[object, str]:
        """The call that changes memory: of poorwill's pool, and with vLLM's own allocator of its worker."""
        allocator = getattr(self.inner, "allocator", None)
        if allocator is None:
            return self.inner, self.op
        return allocator, "suspend" if self.op == "sleep" else "wake_up"

    def around(self, of, name: str, before=None, after=None) -> None:
        """Has something happen before and after the call."""
        stock = getattr(of, name)

        def broken(*positional, **named):
            if before is not None:
                before()
            answer = stock(*positional, **named)
            if after is not None:
                after()
            return answer

        self.set(of, name, broken)


def raising(*_, **__):
    raise BrokenError("broken by the benchmark")


def stop(seconds: float) -> None:
    """Stops this process, until one that is not stopped has it go on."""
    goes_on = f"sleep {seconds}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", goes_on], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


# Places of any allocator


def entry(broken: Broken) -> None:
    broken.around(broken.inner, broken.op, before=raising)


def exit_(broken: Broken) -> None:
    broken.around(broken.inner, broken.op, after=raising)


def stopped_shortly(broken: Broken) -> None:
    broken.around(*broken.point, before=lambda: stop(SHORT_S))


def stopped(broken: Broken) -> None:
    broken.around(*broken.point, before=lambda: stop(LONG_S))


def _leave(broken: Broken, nbytes: int) -> None:
    import torch

    free, _ = torch.cuda.mem_get_info()
    held = [torch.empty(max(free - nbytes, 0), dtype=torch.uint8, device=broken.inner.device)]

    def release() -> None:
        held.clear()
        torch.cuda.empty_cache()

    broken.later(release)


def full(broken: Broken) -> None:
    _leave(broken, FULL_BYTES)


def short(broken: Broken) -> None:
    """The weights have room, and the KV cache has not."""
    import engine as engines

    _leave(broken, engines.weight_bytes(engines.model_of(broken.inner)) + CACHE_BYTES)


# Of vLLM's own


def no_host_memory(broken: Broken) -> None:
    """Its second copy in host memory has no place."""
    import torch

    stock, asked = torch.empty, []

    def empty(*sizes, **named):
        if named.get("device") == "cpu":
            asked.append(sizes)
            if len(asked) > 1:
                raise RuntimeError("CUDA error: out of memory (broken by the benchmark)")
        return stock(*sizes, **named)

    broken.set(torch, "empty", empty)


# Before poorwill's pool


def uncovered(broken: Broken) -> None:
    broken.set(broken.inner, "_refuse_uncovered", raising)


def peers(broken: Broken) -> None:
    from poorwill.vllm import _peers

    broken.set(_peers, "problem", lambda *_: "other processes map memory that would sleep (benchmark)")


def host_shortage(broken: Broken) -> None:
    bounded = dataclasses.replace(broken.inner._environment, host_budget_bytes=1)
    broken.set(broken.inner, "_environment", bounded)


def empty_cache(broken: Broken) -> None:
    import torch

    broken.set(torch.cuda, "empty_cache", raising)


# In the pool, and around it


def held(broken: Broken) -> None:
    hold = broken.inner.allocator.arena.hold("weights", "bench")
    broken.later(hold.end)


def pool_before(broken: Broken) -> None:
    broken.around(*broken.point, before=raising)


def pool_after(broken: Broken) -> None:
    broken.around(*broken.point, after=raising)


# The decision


class _Joining:
    @staticmethod
    def join(*_):
        raising()


def join(broken: Broken) -> None:
    broken.set(sys.modules["poorwill.vllm.worker"], "Decision", _Joining)


class _Deciding:
    """A decision that cannot be made by this rank, which the pool does not get to see."""

    @staticmethod
    def join(*_) -> "_Deciding":
        return _Deciding()

    def decide(self, verdict):
        from poorwill import PoorwillError

        raise PoorwillError(f"cannot decide {verdict} (broken by the benchmark)")


def decide(broken: Broken) -> None:
    """It fails, and cannot say so: the others have to wait their time."""
    broken.set(sys.modules["poorwill.vllm.worker"], "Decision", _Deciding)
    entry(broken)


def _joined(broken: Broken) -> None:
    stock = broken.inner.poorwill_together

    def poorwill_together(method, args, kwargs, path, *of_group):
        broken.path = path
        return stock(method, args, kwargs, path, *of_group)

    broken.set(broken.inner, "poorwill_together", poorwill_together)


def _unwritable(broken: Broken, seconds: float) -> None:
    _joined(broken)
    of, name = broken.point
    stock = getattr(of, name)

    def unwritable(*positional, **named):
        os.chmod(broken.path, 0o500)
        again = ["sh", "-c", 'sleep "$0"; chmod 700 "$1"', str(seconds), broken.path]
        subprocess.Popen(again, start_new_session=True)
        with without_override():
            return stock(*positional, **named)

    broken.set(of, name, unwritable)


def unwritable_shortly(broken: Broken) -> None:
    _unwritable(broken, SHORT_S)


def unwritable(broken: Broken) -> None:
    _unwritable(broken, LONG_S)


def moved(broken: Broken) -> None:
    """The folder has another name once the ranks have opened it."""
    _joined(broken)
    elsewhere = []

    def move() -> None:
        time.sleep(SHORT_S)
        elsewhere.append(f"{broken.path}.moved")
        os.rename(broken.path, elsewhere[0])

    broken.around(*broken.point, before=move)

    def clear() -> None:
        for path in elsewhere:
            shutil.rmtree(path, ignore_errors=True)

    broken.later(clear)


def removed(broken: Broken) -> None:
    """The other ranks are ready, and wait for a verdict that none can know any more."""
    _joined(broken)

    def remove() -> None:
        time.sleep(SHORT_S)
        shutil.rmtree(broken.path)

    broken.around(*broken.point, before=remove)


# NCCL's communicators, before NCCL is called


def not_ready(broken: Broken) -> None:
    from poorwill.vllm import _communicators

    broken.set(_communicators._OfVllm, "problem", lambda _: "not ready (broken by the benchmark)")


def refused_by_nccl(broken: Broken) -> None:
    from poorwill.vllm import _communicators

    def suspend(_):
        raise RuntimeError(REFUSED_BY_NCCL)

    broken.set(_communicators._OfVllm, "suspend", suspend)


def resumed_late(broken: Broken) -> None:
    """The first attempt fails, while the other ranks wait inside of NCCL."""
    from poorwill.vllm import _communicators

    stock, tried = _communicators._OfVllm.resume, []

    def resume(communicator):
        tried.append(communicator)
        if len(tried) == 1:
            raising()
        stock(communicator)

    broken.set(_communicators._OfVllm, "resume", resume)


def no_memory_for_nccl(broken: Broken) -> None:
    broken.set(broken.inner._communicators, "_free_bytes", lambda: 0)


def communicators(broken: Broken) -> None:
    """It never comes to the exchange, in which the others wait."""
    broken.set(broken.inner._communicators, "suspend" if broken.op == "sleep" else "resume", raising)


PLACES: dict[str, Callable[[Broken], None]] = {
    "entry": entry,
    "exit": exit_,
    "stopped shortly": stopped_shortly,
    "stopped": stopped,
    "full": full,
    "short": short,
    "no host memory": no_host_memory,
    "uncovered": uncovered,
    "peers": peers,
    "host shortage": host_shortage,
    "empty_cache": empty_cache,
    "held": held,
    "pool before": pool_before,
    "pool after": pool_after,
    "join": join,
    "decide": decide,
    "unwritable shortly": unwritable_shortly,
    "unwritable": unwritable,
    "moved": moved,
    "removed": removed,
    "NCCL not ready": not_ready,
    "NCCL refuses": refused_by_nccl,
    "NCCL resumes late": resumed_late,
    "NCCL lacks memory": no_memory_for_nccl,
    "communicators": communicators,
}


# What the script calls on all ranks


def break_down(worker, ranks: list[int], op: str, place: str) -> bool:
    """Has the next sleep or wake of these ranks fail; whether this is one of them."""
    inner = within(worker)
    if inner.bench_rank not in ranks:
        return False
    inner.bench_broken = Broken(inner, op)
    PLACES[place](inner.bench_broken)
    return True


def mend(worker) -> None:
    inner = within(worker)
    broken = vars(inner).pop("bench_broken", None)
    if broken is not None:
        broken.mend()


def hold_back(worker, ranks: list[int], when: str, folder: str) -> None:
    """These ranks wait in the next sleep, before the pool is asked or after it has committed.

    They leave a file `at-RANK`, and go on once there is a file `go`, or when it takes too long.
    """
    inner = within(worker)
    if inner.bench_rank not in ranks:
        return
    inner.bench_broken = broken = Broken(inner, "sleep")

    def wait() -> None:
        Path(folder, f"at-{inner.bench_rank}").touch()
        end = time.monotonic() + HELD_S
        while not Path(folder, "go").exists() and time.monotonic() < end:
            time.sleep(0.01)

    broken.around(*broken.point, **{when: wait})
