"""Host memory for offloaded weights: its limit, pinning, and messages."""

import importlib
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from poorwill import _native, offload
from poorwill._native import OutOfMemoryError, PoorwillError
from poorwill.offload._layout import checked
from poorwill.offload._members import about
from poorwill.vllm import _environment

DEVICES = ("cuda",)
"""PyTorch's names of the device types whose parameters are offloaded."""

_ARENA = "vllm-offload"
# It maps nothing, but only an arena carries a limit of host memory.
_NOTHING = "2MiB"

_NO_PIN = "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY"


def home(device: Any) -> Any:
    """Our name of the device whose host memory is meant, from PyTorch's."""
    return _native.cuda_ordinal(device)


def keep_to_budget(owner: Any, device: Any) -> None:
    """Applies `POORWILL_HOST_BUDGET` to the device's host memory, as long as `owner` lives.

    An engine that sleeps with Poorwill has an arena with that limit already, for backups and weights.
    """
    limit = _environment.read().host_budget_bytes
    sleeping = getattr(sys.modules.get("poorwill.vllm.allocator"), "Allocator", None)
    if limit is None or getattr(sleeping, "instance", None) is not None:
        return
    arena = _native.arena(home(device), _ARENA, limit=_NOTHING, host_limit=limit)
    weakref.finalize(owner, arena.close).atexit = False


def unfit(tensor: Any) -> str | None:
    """Why a tensor on the GPU cannot be copied byte by byte; None if it can."""
    try:
        checked(tensor, "offloading")
    except (TypeError, ValueError) as error:
        return str(error)
    return None


@contextmanager
def explaining(what: str, lower: str) -> Iterator[None]:
    """Adds the purpose and a remedy to an error of host memory.

    `lower` is the setting that requests less.
    """
    try:
        yield
    except OutOfMemoryError as error:
        help_ = f"{lower}, raise {_environment.HOST_BUDGET} if it is set, or free host memory"
        if offload.policy().pin:
            help_ += f", and where page-locking is what fails, set {_NO_PIN}=1 for pageable memory"
        raise about(error, f"{what}: {help_}") from error
    except PoorwillError as error:
        if not offload.policy().pin:
            raise
        help_ = f"set {_NO_PIN}=1 for pageable memory, which is copied"
        raise about(error, f"{what}, which is to be page-locked: {help_}") from error


def kind(is_pinned: bool, is_read_in_place: bool | None = None) -> str:
    """How the GPU accesses the memory, and why not better; None where it is copied in any case."""
    allowed = offload.policy()
    if is_read_in_place:
        return "page-locked, and read in place"
    if is_pinned:
        because = "" if is_read_in_place is None else f", since {allowed.uva_because}=1 is set"
        return f"page-locked, and copied to the GPU{because}"
    because = (
        f"{allowed.pin_because}=1 is set" if allowed.pin_because else "vLLM finds that it cannot be locked"
    )
    return f"pageable, since {because}, and copied to the GPU"


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names for a sentence."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, and {len(names) - most} more"


def gib(size: float) -> str:
    """A size for a sentence."""
    return f"{size / (1 << 30):.2f} GiB"


def logger() -> Any:
    return importlib.import_module("vllm.logger").init_logger("vllm.poorwill")
