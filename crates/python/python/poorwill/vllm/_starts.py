"""What an engine's start measures of its GPU, whatever other processes take and give back meanwhile.

vLLM reads the GPU's free memory again and again in a start, and takes every difference for its own. Where
NVML lists this process, its own use is known. From the engine's first snapshot on, free memory is then what
was free there, less what this process took since. Where NVML does not (in most containers, in WSL), the
figures are the GPU's, as in vLLM.

A start also waits for memory that others are about to release, for as long as a wake does. Where the engine
lends, it has others give up what it lacks of what they lend. What stays lent disturbs no measurement: it is
in use, of no process by NVML, and stays in use when its owner wakes.
"""

import contextlib
import copy
import functools
import importlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from poorwill import _native
from poorwill.vllm import _environment
from poorwill.vllm._wrapped import wrapped

torch: Any = importlib.import_module("torch")
logger: Any = importlib.import_module("vllm.logger").init_logger("vllm.poorwill")

LOOK_AGAIN_S = 0.05
"""Pause between two looks at the GPU's free memory, while a start waits for it."""

GIB = 1 << 30

SPARE_PART = 8
"""The part of an engine's share that is freed beside it, for kernels and, without a cap, graphs: PyTorch and
CUDA ask no broker."""

Free = Callable[[int, int], int]
"""Has so much of a GPU given up, by its number; returns the bytes."""

Request = Callable[..., int]
"""vLLM's `request_memory`: what an engine may use of its GPU, by its first snapshot."""


@dataclass(frozen=True)
class _First:
    """The first snapshot of a start."""

    free_bytes: int
    own_bytes: int


# By the GPU's number, while an engine starts there.
_first: dict[int, _First] = {}


def own_bytes(ordinal: int) -> int | None:
    """What this process uses of a GPU by NVML; None where NVML does not list it."""
    return _native.budget(f"cuda:{ordinal}").process_used_bytes


def free_bytes(ordinal: int, measured_bytes: int, own_bytes_now: int | None) -> int:
    """A start's free memory; outside of one, and where NVML does not list us, the measured one."""
    first = _first.get(ordinal)
    if first is None:
        return measured_bytes
    if own_bytes_now is None:
        _forget(ordinal, "NVML does not list this process any more")
        return measured_bytes
    return first.free_bytes - (own_bytes_now - first.own_bytes)


def note_held(ordinal: int, own_bytes_now: int | None, held_bytes: int) -> None:
    """Gives up NVML's figure where it is less than what PyTorch alone holds.

    In a container with its own process numbers, another process may have ours.
    """
    if ordinal in _first and own_bytes_now is not None and own_bytes_now < held_bytes:
        _forget(ordinal, "NVML's figure of this process is another's")


def is_own(ordinal: int) -> bool:
    """Whether a start on this GPU measures this process alone."""
    return ordinal in _first


def end(ordinal: int | None = None) -> None:
    """The start on a GPU is over, or that on every GPU."""
    if ordinal is None:
        _first.clear()
    else:
        _first.pop(ordinal, None)


class Requests:
    """The requests for an engine's share, while its worker opens the GPU."""

    def __init__(self) -> None:
        self.count = 0


@contextlib.contextmanager
def requesting(
    modules: Iterable[ModuleType],
    timeout_s: float,
    instead: Request | None = None,
    free: Free | None = None,
) -> Iterator[Requests]:
    """While a worker opens its GPU: vLLM's request waits until the memory is free, and begins the start.

    `modules` are those that ask by the name `request_memory`, and `instead` is asked in the place of vLLM's.
    `free` is called for what is missing.
    """
    end()
    requests = Requests()
    with contextlib.ExitStack() as stack:
        for module in modules:
            wrap = _waiting(requests, timeout_s, instead, free)
            stack.enter_context(wrapped(module, "request_memory", wrap))
        yield requests


def _waiting(
    requests: Requests, timeout_s: float, instead: Request | None, free: Free | None
) -> Callable[[Request], Request]:
    def wrap(stock: Request) -> Request:
        ask = instead or stock

        @functools.wraps(stock)
        def request_memory(init_snapshot: Any, *rest: Any, **more: Any) -> int:
            requests.count += 1
            emptied = copy.copy(init_snapshot)
            emptied.free_memory = sys.maxsize
            # Raises what no waiting changes.
            needed_bytes = ask(emptied, *rest, **more)
            waited_s = _wait(init_snapshot, needed_bytes, timeout_s, free)
            try:
                requested_bytes = ask(init_snapshot, *rest, **more)
            except (ValueError, _native.BudgetError) as error:
                raise type(error)(f"{error} {_missing(init_snapshot, needed_bytes, waited_s)}") from error
            begin(init_snapshot)
            return requested_bytes

        return request_memory

    return wrap


def _wait(snapshot: Any, needed_bytes: int, timeout_s: float, free: Free | None) -> float:
    """Measures again until so much is free, or the time is over. Returns how long that took."""
    began = time.monotonic()
    if needed_bytes > snapshot.total_memory - (snapshot.own_bytes or 0):
        # No one else has so much.
        return 0.0
    _have_given_up(snapshot, needed_bytes, free)
    missing_bytes = needed_bytes - snapshot.free_memory
    while snapshot.free_memory < needed_bytes and time.monotonic() - began < timeout_s:
        time.sleep(LOOK_AGAIN_S)
        snapshot.measure()
        _have_given_up(snapshot, needed_bytes, free)
    waited_s = time.monotonic() - began
    if 0 < missing_bytes and needed_bytes <= snapshot.free_memory:
        logger.info(
            "the start waited %.1f s for %.2f GiB that another process gave back",
            waited_s,
            missing_bytes / GIB,
        )
    return waited_s


def _have_given_up(snapshot: Any, needed_bytes: int, free: Free | None) -> None:
    """Has others give up what is missing of what they lend, and measures again."""
    missing_bytes = int(needed_bytes + needed_bytes // SPARE_PART - snapshot.free_memory)
    if free is not None and missing_bytes > 0 and free(int(snapshot.device_.index), missing_bytes):
        snapshot.measure()


def _missing(snapshot: Any, needed_bytes: int, waited_s: float) -> str:
    own = snapshot.own_bytes
    in_use = int(snapshot.total_memory - snapshot.free_memory)
    holds = (
        f"this process and others hold {in_use / GIB:.2f} GiB"
        if own is None
        else f"other processes hold {max(0, in_use - own) / GIB:.2f} GiB, this one {own / GIB:.2f} GiB"
    )
    return (
        f"After {waited_s:.1f} s ({_environment.WAKE_TIMEOUT}) "
        f"{(needed_bytes - snapshot.free_memory) / GIB:.2f} GiB are missing, and {holds}: `nvidia-smi` names "
        "them; end them or put them to sleep, or give an engine that is still ending more time"
    )


def begin(snapshot: Any) -> None:
    """A start begins with its first snapshot."""
    ordinal, own = int(snapshot.device_.index), snapshot.own_bytes
    if own is None:
        logger.debug(
            "the start measures all of cuda:%d, as NVML does not list this process: what others take and "
            "give back meanwhile counts as this engine's",
            ordinal,
        )
        return
    _first[ordinal] = _First(int(snapshot.free_memory), own)
    logger.debug("the start measures this process's part of cuda:%d, by NVML", ordinal)


def _forget(ordinal: int, why: str) -> None:
    del _first[ordinal]
    logger.warning(
        "%s: the start goes on with the free memory of cuda:%d, which others change, too", why, ordinal
    )


@contextlib.contextmanager
def measured() -> Iterator[None]:
    """While vLLM itself compares free memory: it reads the start's.

    Only around such steps, since others may ask how much is really free.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(wrapped(torch.cuda, "mem_get_info", _corrected))
        if (accelerator := getattr(torch, "accelerator", None)) is not None:
            stack.enter_context(wrapped(accelerator, "get_memory_info", _corrected))
        yield


def _corrected(stock: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
    @functools.wraps(stock)
    def memory(device: Any = None) -> tuple[int, int]:
        free, total = stock() if device is None else stock(device)
        index = device if isinstance(device, int) else torch.device(device).index if device else None
        ordinal = int(torch.cuda.current_device() if index is None else index)
        if not is_own(ordinal):
            return free, total
        return free_bytes(ordinal, free, own_bytes(ordinal)), total

    return memory
