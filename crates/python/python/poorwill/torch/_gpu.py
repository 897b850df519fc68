"""Calls to PyTorch's caching allocator on one GPU: generations begin, retire, and free memory.

The calls are those of `torch.cuda.use_mem_pool`, in another order. Each states what it relies on.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any, cast

from poorwill import _native
from poorwill._native import Arena
from poorwill._torch_version import UnsupportedTorchError
from poorwill.torch._import import torch


class Gpu:
    """One GPU, shared by all scopes on it."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self._lock = threading.Lock()
        self._retired: set[tuple[int, int]] = set()
        self._allocators: dict[int, Any] = {}
        self._idle_shields: list[Any] = []
        self._is_proved = False
        self.scopes_in_force = 0
        """Number of threads that allocate from a generation of ours."""
        self.uncarved_from = 0
        """Cached bytes, by PyTorch's count, after all free parts of retired segments were carved."""
        self.asks_last_begun = False
        """Whether a graph's allocations go to the graph's pool while another pool is begun. Known after
        `prove`.
        """

    def allocator(self, arena: Arena, tag: str) -> Any:
        """PyTorch's handle of the allocator for a tag of an arena.

        Never dropped: PyTorch calls it until the process ends.
        """
        alloc, free = _native.torch_allocator(arena, tag)
        with self._lock:
            if alloc not in self._allocators:
                allocator = torch._C._cuda_customAllocator(alloc, free)
                _native.make_immortal(allocator)
                self._allocators[alloc] = allocator
            return self._allocators[alloc]

    def pool(self, allocator: Any) -> Any:
        """A pool of PyTorch's, over an allocator or its own.

        Never dropped: its destructor would end the process while any scope is open.
        """
        # It belongs to the current GPU.
        with on(self.ordinal):
            pool = torch.cuda.MemPool(allocator)
        _native.make_immortal(pool)
        return pool

    def begin(self, pool: Any) -> None:
        """This thread's allocations on the GPU now come from the pool, if no other is begun."""
        torch._C._cuda_beginAllocateCurrentThreadToPool(self.ordinal, pool.id)

    def retire(self, pool: Any) -> None:
        """Ends the pool. Its memory stays until it is free and the cache is emptied."""
        identity = pool.id
        with self._lock:
            self._retired.add(identity)
        torch._C._cuda_endAllocateToPool(self.ordinal, identity)
        # Both beginning and creating the pool counted as a use. Only an unused pool's memory is freed.
        torch._C._cuda_releasePool(self.ordinal, identity)
        torch._C._cuda_releasePool(self.ordinal, identity)

    def cached_bytes(self) -> int:
        """PyTorch's bytes on this GPU that no tensor uses."""
        stats = _stats(self.ordinal)
        reserved, active = (stats[f"{name}_bytes"]["all"]["current"] for name in ("reserved", "active"))
        return int(reserved) - int(active)

    def idle_bytes(self, pool: Any) -> int:
        """Cached bytes of a pool."""
        segments = snapshot_segments(pool.id)
        return sum(int(segment["total_size"]) - int(segment["active_size"]) for segment in segments)

    def empty(self) -> None:
        """Frees the empty segments of retired pools.

        While this thread allocates from a pool, emptying the cache does only that on this GPU with PyTorch
        2.11. Other GPUs with a cache are shielded by a begun pool. Since 2.13 the default pools' caches go
        as well, which `_emptying` logs.
        """
        with self._others_shielded():
            torch._C._cuda_emptyCache()

    def empty_default(self) -> None:
        """Frees the empty segments of retired pools, and of the default pool unless a scope is open."""
        torch._C._cuda_emptyCache()

    def carve(self) -> int:
        """Releases the free parts of retired pools' segments. Returns the bytes released."""
        with self._lock:
            retired = set(self._retired)
        # A later segment at the same address has a higher serial number.
        moment = _native.torch_moment()
        segments = [
            segment
            for segment in snapshot_segments()
            if segment["device"] == self.ordinal and tuple(segment["segment_pool_id"]) in retired
        ]
        with self._lock:
            self._retired -= retired.difference(tuple(segment["segment_pool_id"]) for segment in segments)
        carved_bytes = _carve(moment, segments)
        self.uncarved_from = self.cached_bytes()
        return carved_bytes

    def carve_pool(self, pool: Any) -> None:
        """Releases the free parts of one retired pool's segments for the next generation."""
        moment = _native.torch_moment()
        self.uncarved_from += _carve(moment, snapshot_segments(pool.id))

    def has_to_carve(self, cached_bytes: int, step_bytes: int) -> bool:
        """Whether the cache has grown by so much since the last carve, for each thread with a generation."""
        self.uncarved_from = min(self.uncarved_from, cached_bytes)
        return cached_bytes - self.uncarved_from >= step_bytes * max(self.scopes_in_force, 1)

    def note_scope(self, change: int) -> None:
        """Counts a thread that begins or ends allocating from a generation."""
        with self._lock:
            self.scopes_in_force += change

    def flush(self) -> None:
        """Releases what retired pools do not need, outside of every scope."""
        with self._shielded():
            self.empty()
            self.carve()

    def prove(self, allocator: Any) -> None:
        """Tests this PyTorch, once, with one small tensor.

        Raises UnsupportedTorchError if it does not behave as generations need.
        """
        if self._is_proved:
            return
        first = self.pool(allocator)
        self.begin(first)
        try:
            tensor = torch.empty(1024, dtype=torch.uint8, device=f"cuda:{self.ordinal}")
        finally:
            self.retire(first)
        place = tensor.data_ptr()
        arrives = _native.torch_has_segment_at(place)
        second = self.pool(allocator)
        self.begin(second)
        try:
            self.empty()
            stays = _native.torch_has_segment_at(place)
            del tensor
            self.empty()
            comes_back = not _native.torch_has_segment_at(place)
            self.asks_last_begun = self._asks_last_begun()
            self.empty()
        finally:
            self.retire(second)
        if not (arrives and stays and comes_back):
            raise UnsupportedTorchError(
                f"PyTorch {torch.__version__} does not do what poorwill's pools are built on (allocations "
                f"arrive: {arrives}, live ones stay: {stays}, free ones come back: {comes_back}): use torch "
                "2.11, without an allocator of its own"
            )
        self._is_proved = True

    def _asks_last_begun(self) -> bool:
        """Whether PyTorch asks the pool that was begun last, within another's scope."""
        within = self.pool(None)
        self.begin(within)
        try:
            tensor = torch.empty(1024, dtype=torch.uint8, device=f"cuda:{self.ordinal}")
            return not _native.torch_has_segment_at(tensor.data_ptr())
        finally:
            self.retire(within)

    @contextlib.contextmanager
    def _others_shielded(self) -> Iterator[None]:
        with contextlib.ExitStack() as shields:
            for other in range(torch.cuda.device_count()):
                if other != self.ordinal and _has_cache(other):
                    shields.enter_context(gpu_of(other)._shielded())
            yield

    @contextlib.contextmanager
    def _shielded(self) -> Iterator[None]:
        """While a pool is begun, emptying the cache leaves the default pool alone, with PyTorch 2.11.

        These pools serve no allocation and are reused, since none is ever dropped. There are as many as
        threads that do this at once.
        """
        with self._lock:
            pool = self._idle_shields.pop() if self._idle_shields else None
        if pool is None:
            pool = self.pool(None)
        self.begin(pool)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(self.ordinal, pool.id)
            torch._C._cuda_releasePool(self.ordinal, pool.id)
            with self._lock:
                self._idle_shields.append(pool)


_gpus: dict[int, Gpu] = {}
_gpus_lock = threading.Lock()


def gpu_of(ordinal: int) -> Gpu:
    """The GPU of this number."""
    with _gpus_lock:
        return _gpus.setdefault(ordinal, Gpu(ordinal))


def known_gpu(ordinal: int) -> Gpu | None:
    """The GPU of this number, if it ever had a pool."""
    with _gpus_lock:
        return _gpus.get(ordinal)


def ordinal_of(device: str) -> int | None:
    """The number of a GPU by its name; None for other devices."""
    kind, _, number = device.partition(":")
    return int(number) if kind == "cuda" and number.isdecimal() else None


def on(ordinal: int) -> contextlib.AbstractContextManager[Any]:
    """Makes a GPU the current one."""
    if torch.cuda.current_device() == ordinal:
        return contextlib.nullcontext()
    return cast(contextlib.AbstractContextManager[Any], torch.cuda.device(ordinal))


def _has_cache(ordinal: int) -> bool:
    return int(_stats(ordinal)["reserved_bytes"]["all"]["current"]) > 0


def _stats(ordinal: int) -> dict[str, Any]:
    """PyTorch's counters. Since 2.13 those of `torch.cuda` take 2 µs more for each pool ever made."""
    return cast(dict[str, Any], torch._C._accelerator_getDeviceStats(ordinal))


def snapshot_segments(pool: tuple[int, int] = (0, 0)) -> list[dict[str, Any]]:
    """Every segment that PyTorch has, or those of one private pool.

    PyTorch 2.11 drops references to the items of its argument, so each gets one more before. Versions
    without that defect leak it, which is little beside the pool, which is immortal. Before Python 3.12 there
    is no argument, and all segments are listed.
    """
    argument = (*pool, False) if sys.version_info >= (3, 12) else None
    for item in argument or ():
        _native.make_immortal(item)
    segments = cast(list[dict[str, Any]], torch._C._cuda_memorySnapshot(argument)["segments"])
    return [s for s in segments if pool == (0, 0) or tuple(s["segment_pool_id"]) == pool]


def _carve(moment: int, segments: list[dict[str, Any]]) -> int:
    carved = [
        (segment["address"], segment["total_size"], holes)
        for segment in segments
        if (holes := _holes(segment["blocks"]))
    ]
    return _native.torch_carve(moment, carved) if carved else 0


def _holes(blocks: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """The free parts of a segment that is partly in use."""
    free = [(block["address"], block["size"]) for block in blocks if block["state"] == "inactive"]
    return free if len(free) < len(blocks) else []
