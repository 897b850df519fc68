"""The replacement of vLLM's `CuMemAllocator` in its workers: pools by tag, sleep, wake, discard.

One for each process, over one arena of the worker's GPU. Methods and their meaning are `CuMemAllocator`'s as
of 0.20 and 0.33, except where noted. `events` has what happened, for metrics.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from poorwill import _native
from poorwill._native import Arena, Decision, PoorwillError, Preparation
from poorwill.vllm._events import Events

DEFERRABLE = ("weights", "kv_cache")
"""Tags that a wake by tag may leave asleep. Every wake brings back all others."""

_DROPPED = ("kv_cache", "workspace")
"""Tags that every sleep drops."""


@dataclass(frozen=True)
class AllocationData:
    """A segment of memory, in the form of vLLM's allocator, to read only."""

    handle: tuple[int, int, int, int]
    """The GPU, the bytes, the address, and 0 for the driver's handle, which callers must not unmap."""
    tag: str
    is_asleep: bool
    cpu_backup_tensor: None = None
    """Always None: a backup is not a tensor."""


class Allocator:
    """Memory of an engine that can sleep."""

    instance: ClassVar["Allocator | None"] = None
    stock: ClassVar[Any] = None
    """vLLM's class that this one replaced."""
    default_tag: str = "default"

    def __init__(
        self, arena: Arena, *, wake_timeout_s: float = 0.0, keep_awake: tuple[str, ...] = ()
    ) -> None:
        self.arena = arena
        self.events = Events()
        self.when_dropped: Callable[[list[str]], None] | None = None
        """Called after a wake with the tags that came back without their bytes."""
        self.kept_of_weights: Callable[[], list[tuple[int, int]]] | None = None
        """Called before a sleep drops the weights: address and length of what it has to keep of them."""
        self._wake_timeout_s = wake_timeout_s
        self._keep_awake = keep_awake
        self._graph_pool: Any = None
        self._renamed: dict[str, str] = {}
        self._current_tag = self.default_tag
        self._level: int | None = None
        self._kept: list[tuple[int, int]] = []
        self._group: dict[str, Any] = {}
        self._decision: Decision | None = None
        self._ranks = 0
        # Scratch memory holds nothing from one step to the next.
        arena.declare("workspace", level1="drop", level2="drop", dropped="undefined")

    @classmethod
    def open(
        cls,
        device: str,
        *,
        limit_bytes: int | None = None,
        host_limit_bytes: int | None = None,
        cache_limit_bytes: int | None = None,
        pageable: bool = False,
        keep_backups: bool | None = None,
        compress: Literal["auto", "off", "always"] = "auto",
        links: bool = False,
        disk: str | None = None,
        disk_limit_bytes: int | None = None,
        wake_timeout_s: float = 0.0,
        keep_awake: tuple[str, ...] = (),
        lend: bool | str | None = None,
        peer_copies: bool = False,
    ) -> "Allocator":
        """Opens the process's allocator, over an arena with these limits.

        One that an engine has left is closed: the next engine has its own limits.
        """
        if cls.instance is not None:
            if cls.instance.arena.device != device:
                raise PoorwillError(
                    f"this process has an engine that sleeps on {cls.instance.arena.device}, and one process "
                    f"has one such GPU: start the engine on {device} in a process of its own"
                )
            if cls.instance.get_current_usage() > 0:
                # vLLM refuses that itself, when it loads the weights.
                return cls.instance
            cls.instance.arena.close()
            cls.instance = None
        arena = _native.arena(
            device,
            "vllm",
            limit=limit_bytes,
            host_limit=host_limit_bytes,
            cache_limit=cache_limit_bytes,
            pageable=pageable,
            # A rank uses one GPU, whichever others it sees; those with links have to reach it.
            peers=None if links else (),
            links=links,
            keep_backups=keep_backups,
            compress=compress,
            disk=disk,
            disk_limit=disk_limit_bytes,
            lend=lend,
            peer_copies=peer_copies,
        )
        cls.instance = cls(arena, wake_timeout_s=wake_timeout_s, keep_awake=keep_awake)
        return cls.instance

    @staticmethod
    def get_instance() -> "Allocator":
        """The process's allocator; opened over the current GPU without limits if no worker opened one."""
        if Allocator.instance is None:
            torch: Any = importlib.import_module("torch")
            return Allocator.open(f"cuda:{torch.cuda.current_device()}")
        return Allocator.instance

    @contextlib.contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """PyTorch's allocations in the context sleep by this tag."""
        from poorwill.torch import Pool

        name = self.default_tag if tag is None else tag
        # Weights are quantised expert by expert, in a hundred thousand operations and more.
        watch: Literal["operations", "segments"] = "segments" if name == "weights" else "operations"
        before, self._current_tag = self._current_tag, self._renamed.get(name, name)
        try:
            with Pool(self.arena, self._current_tag, watch=watch):
                yield
        finally:
            self._current_tag = before

    @contextlib.contextmanager
    def renaming(self, tags: dict[str, str]) -> Iterator[None]:
        """Makes requests for a pool by one of these tags use the other, in the context."""
        before = self._renamed
        self._renamed = {**before, **tags}
        try:
            yield
        finally:
            self._renamed = before

    @contextlib.contextmanager
    def cudagraph_pool(self) -> Iterator[tuple[int, int]]:
        """A pool for graphs that are captured in the context. They sleep as `cudagraph`."""
        if self._graph_pool is None:
            self._graph_pool = self.arena.graph_pool()
        yield self._graph_pool

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        """Puts everything to sleep and backs up `offload_tags` only, like vLLM's.

        In the engine's own sleep (`sleeping_by`) the level decides. Raises SleepError, with everything awake
        as before, or with a report of what was not released.
        """
        if self._level is not None:
            self.suspend(self._level)
            return
        names = self._names(offload_tags)
        unkept = [tag for tag in names if tag in _DROPPED]
        if unkept:
            raise PoorwillError(
                f"sleep cannot keep {', '.join(unkept)}: no sleep does; discard it, or leave it out"
            )
        states = self.arena.state().items()
        awake = [tag for tag, state in states if state in ("awake", "undefined")]
        awake = [tag for tag in awake if tag not in self._keep_awake]
        kept = [tag for tag in awake if tag in names]
        if kept:
            with self.events.of("sleep") as event:
                event.slept(self.arena.sleep(1, kept))
        try:
            self.discard([tag for tag in awake if tag not in names])
        except BaseException:
            if kept:
                self.wake_up(kept)
            raise

    @contextlib.contextmanager
    def sleeping_by(self, level: int) -> Iterator[None]:
        """Marks a sleep in the context as the engine's, at this level."""
        before, self._level = self._level, level
        try:
            yield
        finally:
            self._level = before

    @contextlib.contextmanager
    def keeping(self, ranges: list[tuple[int, int]]) -> Iterator[None]:
        """A sleep of the engine's in the context keeps these bytes, whose tags it drops."""
        before, self._kept = self._kept, ranges
        try:
            yield
        finally:
            self._kept = before

    @contextlib.contextmanager
    def together(self, decision: Decision, ranks: int, undo_after_s: float) -> Iterator[None]:
        """The sleep or wake in the context is one of so many ranks: all do it, or none.

        Raises UndoneError where another rank cannot.
        """
        self._group = {"decision": decision, "undo_after": undo_after_s}
        self._decision, self._ranks = decision, ranks
        try:
            yield
            if self._group:
                # There was nothing to do here, so it cannot fail.
                decision.note_staged()
        finally:
            self._group, self._decision = {}, None

    def going_on(self) -> int | None:
        """How many ranks carry out the sleep or wake that failed here. None where each does by itself.

        Raises PoorwillError where the verdict cannot be read.
        """
        if self._decision is None:
            return None
        return self._ranks if self._decision.verdict == "commit" else 0

    def _take_group(self) -> dict[str, Any]:
        group, self._group = self._group, {}
        return group

    def suspend(self, level: int) -> None:
        """Puts everything to sleep as the engine does.

        Weights are backed up at level 1. At level 2 they are dropped, but for what no one would write again
        (`kept_of_weights`). The KV cache is dropped but for what a context keeps (`keeping`).
        Runtime state, graphs and other tags are backed up at both, and what is to stay awake stays. Raises
        SleepError, with everything awake as before, or with a report of what was not released.
        """
        states = self.arena.state()
        drops = level == 2 and states.get("weights") in ("awake", "undefined")
        drops = drops and "weights" not in self._keep_awake
        kept = self.kept_of_weights() if drops and self.kept_of_weights is not None else []
        keep_awake = [tag for tag in self._keep_awake if tag in states]
        kept = [*kept, *self._kept]
        with self.events.of("sleep") as event:
            report = self.arena.sleep(level, kept=kept, keep_awake=keep_awake, **self._take_group())
            event.slept(report)

    def discard(self, tags: Sequence[str]) -> None:
        """Drops the memory and bytes of awake tags. Sleeping ones stay as they are.

        Raises PoorwillError for one that sleeps with a backup.
        """
        states = self.arena.state()
        names = self._names(tags)
        kept = [tag for tag in names if states.get(tag) == "asleep_backed_up"]
        if kept:
            raise PoorwillError(
                f"discard {', '.join(names)}: {', '.join(kept)} sleeps with a backup, which would be lost: "
                "wake it first"
            )
        awake = [tag for tag in names if states.get(tag) in ("awake", "undefined")]
        if awake:
            with self.events.of("discard") as event:
                event.slept(self.arena.discard(awake))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Wakes everything, or all but those of `DEFERRABLE` that are not named.

        Raises ValueError for an unknown tag. Raises WakeError or OutOfMemoryError with everything asleep as
        before.
        """
        asleep = self.sleeping()
        if tags is not None:
            known = {*DEFERRABLE, *self.arena.state()}
            unknown = [tag for tag in tags if tag not in known]
            if unknown:
                raise ValueError(
                    f"wake_up knows no tag {', '.join(map(repr, unknown))}: there are "
                    f"{', '.join(sorted(known))}"
                )
            asleep = [tag for tag in asleep if tag in tags or tag not in DEFERRABLE]
        if not asleep:
            if group := self._take_group():
                # Before what vLLM does with the other ranks.
                group["decision"].note_staged()
            return
        with self.events.of("wake") as event:
            # Without a timeout it waits for the engine's own work, not for others' memory.
            timeout = self._wake_timeout_s or None
            report = self.arena.wake(asleep, timeout=timeout, **self._take_group())
            event.woken(report)
        # Scratch memory needs no rewrite: it is written before each use.
        scratch = [tag for tag in report.undefined_tags if tag in _DROPPED]
        if scratch:
            self.arena.mark_restored(scratch)
        if self.when_dropped is not None and report.undefined_tags:
            self.when_dropped(report.undefined_tags)

    @property
    def current_tag(self) -> str:
        """The tag of allocations in the current pool, or of a pool without a tag."""
        return self._current_tag

    @property
    def pointer_to_data(self) -> Mapping[int, AllocationData]:
        """The segment at each address, now."""
        ordinal = int(self.arena.device.removeprefix("cuda:"))
        asleep = set(self.sleeping())
        return MappingProxyType(
            {
                segment["addr"]: AllocationData(
                    (ordinal, segment["bytes"], segment["addr"], 0), segment["tag"], segment["tag"] in asleep
                )
                for segment in self.arena.snapshot()
            }
        )

    @property
    def is_sleeping(self) -> bool:
        """Whether anything sleeps."""
        return bool(self.sleeping())

    def sleeping(self) -> list[str]:
        """The tags that sleep."""
        return [tag for tag, state in self.arena.state().items() if state not in ("awake", "undefined")]

    def undefined(self) -> list[str]:
        """The tags that are awake without their former bytes."""
        return [tag for tag, state in self.arena.state().items() if state == "undefined"]

    def prepare(self) -> Preparation:
        """Starts to back up what a sleep at level 1 keeps, in the background."""
        keep_awake = [tag for tag in self._keep_awake if tag in self.arena.state()]
        return self.arena.prepare_sleep(1, keep_awake=keep_awake)

    def get_current_usage(self) -> int:
        """The bytes that are in use."""
        self.settle()
        return self.arena.stats().live_bytes

    def release_pools(self) -> None:
        """Releases graphs' memory, and all unused memory."""
        self._graph_pool = None
        self.settle()

    close = release_pools

    def ranges(self, tag: str | None = None) -> list[tuple[int, int]]:
        """Address ranges of memory that sleeps, or that sleeps by this tag, in ascending order."""
        return [
            (segment["addr"], segment["addr"] + segment["bytes"])
            for segment in self.arena.snapshot()
            if tag in (None, segment["tag"])
        ]

    def settle(self) -> None:
        """Releases what PyTorch caches here, and all that serves no byte."""
        from poorwill.torch import settle

        settle(self.arena.device)
        self.arena.trim()

    def _names(self, tags: Sequence[str] | None) -> tuple[str, ...]:
        if tags is None:
            return (self.default_tag,)
        return (tags,) if isinstance(tags, str) else tuple(tags)
