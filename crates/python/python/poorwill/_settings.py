"""Single options of PyTorch's caching allocator, changed for a while.

PyTorch takes its allocator's options as one text. Every text resets options that it does not name: the split
limit, the rounding, the garbage collection threshold. So a text has to repeat the others, and only a
snapshot of the allocator has their live values.
"""

import importlib
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any

from poorwill._native import PoorwillError

__all__ = ["allocator_settings"]

_MIB = 1 << 20

# PyTorch keeps the limit as unsigned 64 bits and reports it as signed. No limit is the maximum.
_BITS = 64
_NO_LIMIT = (1 << _BITS) - 1
_MIN_SPLIT_MB = 20
_MAX_SPLIT_MB = _NO_LIMIT // _MIB

# The snapshot's key of the last text, whichever variable or call set it.
_TEXT_SUFFIX = "_ALLOC_CONF"
_ENTRY = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")

# One of the two numbers is always 0, so this pool does not exist: the snapshot lists no segment, and its cost
# does not grow. PyTorch 2.11 drops references to the items of its argument. Immortal objects, as small
# numbers from Python 3.12 on, survive that. Earlier Pythons list everything.
_ASKED = (1, 1, False) if sys.version_info >= (3, 12) else None


def allocator_settings(
    *,
    max_split_size_mb: int | EllipsisType | None = ...,
    expandable_segments: bool | EllipsisType = ...,
    device_type: str = "cuda",
) -> AbstractContextManager[None]:
    """Changes options of PyTorch's caching allocator for the block, and restores them at its end.

    `max_split_size_mb` is the largest block, in MiB, that may be split: at least 20, `None` for no limit.
    `expandable_segments` lets segments grow. Options that are not given stay as they are, wherever they were
    set: PYTORCH_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF, PYTORCH_HIP_ALLOC_CONF, or a call.

    At the end, also after an exception, the changed options get back their values from the beginning,
    whatever happened in between. Other options that were changed inside keep their new values.

    The options are process-wide, so a block in one thread affects the others. Blocks nest, and blocks of
    several threads may overlap. The open one entered last counts; after all have ended, the options are as
    before the first. Do not set allocator options in another thread while a block begins or ends: that text
    may be replaced.

    It does nothing without a GPU, and on device types other than "cuda" and "hip". A refused or ignored
    option is an error that changes nothing. Lowering the split limit is unsafe in PyTorch while a memory
    pool holds blocks that were split under another one; begin a new pool.
    """
    wanted: dict[str, int | bool] = {}
    if max_split_size_mb is not ...:
        wanted["max_split_bytes"] = _split_bytes(max_split_size_mb)
    if expandable_segments is not ...:
        if not isinstance(expandable_segments, bool):
            raise TypeError(f"expandable_segments is {expandable_segments!r}; it is True or False")
        wanted["expandable"] = expandable_segments
    if not isinstance(device_type, str):
        raise TypeError(f'device_type is {device_type!r}; it is a text like "cuda"')
    if not device_type.isidentifier():
        raise ValueError(
            f'device_type is {device_type!r}; it is the type alone, like "cuda", without a number'
        )
    return _changed(wanted, device_type)


@contextmanager
def lower_split_limit(max_split_size_mb: int) -> Iterator[None]:
    """`allocator_settings` with this split limit, or with the live one if that is lower.

    Opens a block in either case: an outer block with the lower limit may end first.
    """
    torch = importlib.import_module("torch")
    wanted_bytes = _split_bytes(max_split_size_mb)
    if not _has_settings(torch, "cuda"):
        yield
        return
    with _lock:
        block = _enter(torch, {"max_split_bytes": min(_live(torch).max_split_bytes, wanted_bytes)})
    try:
        yield
    finally:
        _leave(torch, block)


def _split_bytes(max_split_size_mb: object) -> int:
    if max_split_size_mb is None:
        return _NO_LIMIT
    if not isinstance(max_split_size_mb, int) or isinstance(max_split_size_mb, bool):
        raise TypeError(
            f"max_split_size_mb is {max_split_size_mb!r}; it is a whole number of MiB, or None for no limit"
        )
    if not _MIN_SPLIT_MB <= max_split_size_mb <= _MAX_SPLIT_MB:
        raise ValueError(
            f"max_split_size_mb is {max_split_size_mb}; PyTorch takes {_MIN_SPLIT_MB} to {_MAX_SPLIT_MB}, "
            "and None stands for no limit"
        )
    return max_split_size_mb * _MIB


@dataclass(frozen=True)
class _Options:
    """The options that a text resets or that we change, with their current values."""

    max_split_bytes: int
    expandable: bool
    garbage_collection_threshold: float
    roundup_power2_divisions: Mapping[str, int]
    max_non_split_rounding_mb: str | None
    """From the last text; no snapshot has it."""
    rest: Mapping[str, object]
    """Options that a text leaves alone unless it names them, with unknown values."""

    def changed(self, wanted: Mapping[str, Any]) -> "_Options":
        return replace(self, **wanted)

    def text(self, named: frozenset[str]) -> str:
        """A text that sets these options: those that a text resets, and those `named`."""
        entries: list[str] = []
        if self.max_split_bytes != _NO_LIMIT:
            entries.append(f"max_split_size_mb:{self.max_split_bytes // _MIB}")
        if self.max_non_split_rounding_mb is not None:
            entries.append(f"max_non_split_rounding_mb:{self.max_non_split_rounding_mb}")
        if any(self.roundup_power2_divisions.values()):
            rising = sorted(self.roundup_power2_divisions.items(), key=lambda interval: int(interval[0]))
            each = (f"{size}:{divisions}" for size, divisions in rising)
            entries.append(f"roundup_power2_divisions:[{','.join(each)}]")
        if self.garbage_collection_threshold:
            entries.append(f"garbage_collection_threshold:{self.garbage_collection_threshold!r}")
        if "expandable" in named:
            entries.append(f"expandable_segments:{self.expandable}")
        return ",".join(entries)

    def difference(self, other: "_Options") -> str:
        """What differs, for an error."""
        names = [name for name in vars(self) if getattr(self, name) != getattr(other, name)]
        return ", ".join(f"{name} {getattr(self, name)} instead of {getattr(other, name)}" for name in names)


def _live(torch: Any) -> _Options:
    """The current options."""
    try:
        settings = dict(_snapshot(torch)["allocator_settings"])
        text = "".join(settings.pop(key) for key in list(settings) if key.endswith(_TEXT_SUFFIX))
        split_bytes = int(settings.pop("max_split_size")) % (1 << _BITS)
        options = _Options(
            max_split_bytes=split_bytes,
            expandable=bool(settings.pop("expandable_segments")),
            garbage_collection_threshold=float(settings.pop("garbage_collection_threshold")),
            roundup_power2_divisions=dict(settings.pop("roundup_power2_divisions")),
            max_non_split_rounding_mb=_in_text("max_non_split_rounding_mb", text),
            rest=settings,
        )
    except Exception as error:
        raise PoorwillError(
            f"reading the allocator settings: PyTorch {torch.__version__} does not tell them ({error}); "
            "they need its native allocator (no backend:cudaMallocAsync, no change_current_allocator) in "
            "version 2.11 or later"
        ) from error
    if split_bytes != _NO_LIMIT and split_bytes % _MIB:
        raise PoorwillError(
            f"reading the allocator settings: a split limit of {split_bytes} bytes is no whole number of MiB "
            "and could not be put back; set max_split_size_mb"
        )
    return options


def _snapshot(torch: Any) -> Any:
    take = torch._C._cuda_memorySnapshot
    try:
        return take(_ASKED)
    except (TypeError, RuntimeError):
        # This version takes no such argument; it returns the same settings more slowly.
        return take(None)


def _in_text(key: str, text: str) -> str | None:
    """An option's value in a text of settings: the last one counts."""
    found = None
    for entry in _ENTRY.findall(text):
        name, _, value = entry.partition(":")
        if name.strip() == key:
            found = value.strip()
    return found


def _write(torch: Any, live: _Options, wanted: Mapping[str, Any]) -> None:
    """Sets the options to the current ones with `wanted`; restores them after an error."""
    goal, named = live.changed(wanted), frozenset(wanted)
    if goal == live:
        return
    try:
        _set(torch, goal.text(named))
        if (reached := _live(torch)) != goal:
            raise PoorwillError(
                f"changing allocator settings: PyTorch {torch.__version__} has {reached.difference(goal)} "
                f"after {goal.text(named)!r}; this device or version does not take the option over"
            )
    except BaseException:
        # PyTorch resets before it parses, so a refused text has changed options, too.
        _set(torch, live.text(named))
        raise


def _set(torch: Any, text: str) -> None:
    try:
        torch._C._accelerator_setAllocatorSettings(text)
    except Exception as error:
        raise PoorwillError(
            f"changing allocator settings: PyTorch {torch.__version__} refuses {text!r}: {error}"
        ) from error


class _Block:
    """An open block: what it changed, and the previous values."""

    def __init__(self, before: dict[str, Any]) -> None:
        self.before = before


# The open blocks in order of entry, and the lock of all rewriting.
_open: list[_Block] = []
_lock = threading.RLock()


def _forget_other_threads() -> None:
    # Another thread may have held the lock at the fork, and is not here to release it.
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_other_threads)


@contextmanager
def _changed(wanted: Mapping[str, Any], device_type: str) -> Iterator[None]:
    torch = importlib.import_module("torch")
    if not wanted or not _has_settings(torch, device_type):
        yield
        return
    block = _enter(torch, wanted)
    try:
        yield
    finally:
        _leave(torch, block)


def _has_settings(torch: Any, device_type: str) -> bool:
    if device_type not in ("cuda", "hip"):
        return False
    built = torch.version.cuda is not None or getattr(torch.version, "hip", None) is not None
    return built and bool(torch.cuda.is_available())


def _enter(torch: Any, wanted: Mapping[str, Any]) -> _Block:
    with _lock:
        live = _live(torch)
        block = _Block({name: getattr(live, name) for name in wanted})
        _write(torch, live, wanted)
        _open.append(block)
        return block


def _leave(torch: Any, block: _Block) -> None:
    """Restores what the block changed; a later block that changed it as well restores it then."""
    with _lock:
        place = _open.index(block)
        later = _open[place + 1 :]
        del _open[place]
        put_back = dict(block.before)
        for name in block.before:
            heir = next((other for other in later if name in other.before), None)
            if heir is not None:
                heir.before[name] = put_back.pop(name)
        if put_back:
            _write(torch, _live(torch), put_back)
