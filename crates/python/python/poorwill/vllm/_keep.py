"""What a sleep at level 1 keeps of the KV cache: requests with `mode=keep`, prefixes with `keep_tags`.

The scheduler pauses without clearing its caches. Once no step is in flight, the blocks to keep are backed up
with the weights. Prefixes in other blocks are forgotten before, so that no later request finds one whose
bytes are gone. What would go wrong is refused by name before any change (`problem`).

Behind each sleep free blocks are taken in the order of their numbers. What is written until the next one lies
in fewer granules then, and so does all that is kept.

What requests need besides is not dropped by any sleep at level 1. The outputs of encoders, sampled tokens and
drafts are in memory that does not sleep. LoRA adapters, the states of runners and grammars survive. Drafts'
keys, the state of Mamba layers and cross attention are blocks like others.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from poorwill import PoorwillError
from poorwill.vllm import _environment
from poorwill.vllm._blocks import runs_of

__all__ = [
    *("CACHE", "KEEP", "SEVERAL", "KeepUnsupportedError", "Keeper", "Wanted"),
    *("asked", "asking", "checked", "decoded", "encoded", "problem", "refuse_tags"),
]

KEEP = "keep"
"""The mode of a sleep that leaves requests where they are."""

CACHE = "kv_cache"

ASKED: ContextVar[tuple[str, ...]] = ContextVar("poorwill_keep_tags", default=())
"""The tags to keep that pass vLLM's own methods (`asking`)."""

_INSTEAD = "sleep with mode=wait or abort, without keep_tags"


class KeepUnsupportedError(PoorwillError):
    """This engine cannot keep its KV cache over a sleep. Nothing was changed."""

    @classmethod
    def because(cls, cause: str) -> "KeepUnsupportedError":
        return cls(cls.sentence(cause))

    @staticmethod
    def sentence(cause: str) -> str:
        return f"sleep: requests and prefixes cannot be kept, since {cause}: {_INSTEAD}"


_QUEUE = "FreeKVCacheBlockQueue"

SEVERAL = "there are several data parallel engines"


@dataclass(frozen=True)
class Wanted:
    """What one sleep is to keep."""

    prefixes: bool
    """Whether the blocks of prefixes are kept as well as those of requests."""

    @classmethod
    def of(cls, level: object, mode: str, tags: Iterable[str]) -> "Wanted | None":
        """None where nothing is to be kept. Raises ValueError for tags that a sleep cannot keep."""
        given = named(tags)
        if unknown := [tag for tag in given if tag != CACHE]:
            raise ValueError(
                f"sleep: keep_tags has {', '.join(map(repr, unknown))}; it may have {CACHE}, and the others "
                "are kept by the level"
            )
        if given and level != 1:
            raise ValueError(
                f"sleep: keep_tags={CACHE} needs level 1, and level is {level!r}: level 0 drops nothing, and "
                "behind level 2 there are other weights"
            )
        return cls(bool(given)) if level == 1 and (given or mode == KEEP) else None


@contextlib.contextmanager
def asking(tags: Iterable[str]) -> Iterator[None]:
    """Sleeps that begin in the context are to keep these tags, besides what they are given."""
    token = ASKED.set(named(tags))
    try:
        yield
    finally:
        ASKED.reset(token)


def named(tags: Iterable[str]) -> tuple[str, ...]:
    """The tags of an argument, which may be a single one."""
    return (tags,) if isinstance(tags, str) else tuple(tags)


def checked(mode: str) -> str:
    """A mode of a caller's, which names no tags."""
    if "+" in mode:
        raise ValueError(
            f"sleep: mode is {mode!r}; it is abort, wait or keep, and keep_tags={CACHE} keeps prefixes"
        )
    return mode


def asked(tags: Iterable[str]) -> tuple[str, ...]:
    """The tags of an argument and of `asking`."""
    return tuple(dict.fromkeys((*named(tags), *ASKED.get())))


def refuse_tags(tags: Iterable[str]) -> None:
    """Raises ValueError where there are tags, and no worker of ours to keep them."""
    if asked(tags):
        raise ValueError("sleep: keep_tags needs an engine that sleeps with Poorwill, and this one does not")


def encoded(mode: str, tags: Iterable[str]) -> str:
    """The mode with the tags to keep, as it passes through vLLM's clients."""
    return "+".join((mode, *dict.fromkeys(tags)))


def decoded(mode: Any) -> tuple[Any, tuple[str, ...]]:
    """The same apart."""
    if not isinstance(mode, str):
        return mode, ()
    own, *tags = mode.split("+")
    return own, tuple(tags)


def problem(core: Any, *, goes_on: bool) -> str | None:
    """Why the blocks of an engine cannot be kept. `goes_on` says whether its scheduler resumes alone."""
    config = core.vllm_config
    if config.kv_transfer_config:
        name = getattr(config.kv_transfer_config, "kv_connector", None)
        return f"the KV connector {name} has its own part of the requests' blocks"
    if not goes_on:
        return SEVERAL
    multimodal = config.model_config.multimodal_config
    if multimodal and multimodal.mm_processor_cache_type == "shm":
        return "a sleep clears inputs of waiting requests in shared memory (mm_processor_cache_type=shm)"
    manager = core.scheduler.kv_cache_manager
    if any(each.block_pool is not manager.block_pool for each in manager.coordinator.single_type_managers):
        return "the KV cache has blocks of several pools (HiSparse)"
    return None


class Keeper:
    """Keeps blocks over the sleeps of one engine."""

    def __init__(self, core: Any, ask: Callable[..., list[Any]]) -> None:
        """`ask` calls a method of all ranks, and raises if one fails."""
        self._core = core
        self._ask = ask
        self._wanted: Wanted | None = None
        self._is_pausing = False
        self._has_kept = False

    @property
    def clears(self) -> bool:
        """Whether the pause in progress may clear caches."""
        return not self._is_pausing

    @property
    def has_kept(self) -> bool:
        """Whether the last sleep kept blocks."""
        return self._has_kept

    def set(self, wanted: Wanted | None) -> None:
        """Of the next sleep."""
        self._wanted = wanted

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """A pause that begins in the context is that of the next sleep."""
        self._is_pausing = self._wanted is not None
        try:
            yield
        finally:
            self._is_pausing = False

    def take(self, asleep: frozenset[str]) -> list[tuple[int, int]] | None:
        """The runs of blocks that the ranks are to keep, once no step is in flight; None if nothing is kept.

        Raises PoorwillError, with nothing changed, where a rank has no memory for them.
        """
        wanted, self._wanted = self._wanted, None
        if CACHE in asleep:
            # What the sleep before has kept stays.
            return None
        self._has_kept = False
        runs = None
        if wanted is not None and CACHE not in _environment.read().keep_awake:
            runs = self._kept(wanted)
        # A scheduler of another class may have none, and keeps nothing then.
        pool = getattr(getattr(self._core.scheduler, "kv_cache_manager", None), "block_pool", None)
        _sort_free(getattr(pool, "free_block_queue", None))
        self._has_kept = bool(runs)
        return runs

    def _kept(self, wanted: Wanted) -> list[tuple[int, int]]:
        pool = self._core.scheduler.kv_cache_manager.block_pool
        live, cached = set(), set()
        for block in pool.blocks:
            if block.is_null:
                continue
            if block.ref_cnt > 0:
                live.add(block.block_id)
            elif block.block_hash is not None:
                cached.add(block.block_id)
        runs = runs_of(live | cached if wanted.prefixes else live)
        self._ask("poorwill_can_keep", args=(runs,))
        if not wanted.prefixes:
            pool.evict_blocks(cached)
        return runs


def _sort_free(queue: Any) -> None:
    """Has blocks without a prefix taken first and by number, and prefixes forgotten in their order.

    Queues of other kinds than vLLM's stay as they are: nothing depends on it.
    """
    if type(queue).__name__ != _QUEUE:
        return
    free = queue.get_all_free_blocks()
    ordered = sorted(free, key=_place)
    if any(one is not other for one, other in zip(free, ordered, strict=True)):
        queue.popleft_n(len(free))
        queue.append_n(ordered)


def _place(block: Any) -> int:
    # Sorting leaves equal ones in their order.
    return block.block_id if block.block_hash is None else sys.maxsize
