"""Memory pools, and what PyTorch's C functions and `torch.cuda.memory` say of the allocator."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

from .allocator import DeviceAllocator
from .blocks import PoolId
from .driver import Pluggable, addresses
from .tensors import index_of
from .world import World


class MemPool:
    """`torch.cuda.MemPool`, on the device that is current when it is made."""

    world: ClassVar[World]

    def __init__(self, allocator: object = None) -> None:
        world = self.world
        self._device = world.device
        self._id = (0, world.number())
        world.allocators[self._device].create_or_share(self._id, world.custom(allocator))
        self._is_made = True

    @property
    def id(self) -> PoolId:
        return self._id

    def __del__(self) -> None:
        if getattr(self, "_is_made", False):
            end = partial(self.world.destroy_pool, self._device, self._id)
            self.world.allocators[self._device].mutex.when_given_back(end)


class CUDAPluggableAllocator:
    """`torch.cuda.memory.CUDAPluggableAllocator`."""

    def __init__(self, path_to_so_file: str, alloc_fn_name: str, free_fn_name: str) -> None:
        self._allocator = Pluggable(*addresses(path_to_so_file, alloc_fn_name, free_fn_name))

    def allocator(self) -> Pluggable:
        return self._allocator


class Memory:
    """The C functions about memory, by their names in `torch._C`, and what `torch.cuda` makes of them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.pool_type: type[MemPool] = type("MemPool", (MemPool,), {"world": world})

    def c_functions(self) -> dict[str, Any]:
        allocators = self.world.allocators
        return {
            "_cuda_customAllocator": Pluggable,
            "_cuda_beginAllocateCurrentThreadToPool": self.world.begin_for_thread,
            "_cuda_beginAllocateToPool": lambda device, pool_id: allocators[device].begin(
                pool_id, lambda stream: True
            ),
            "_cuda_endAllocateToPool": lambda device, pool_id: allocators[device].end(pool_id),
            "_cuda_releasePool": lambda device, pool_id: allocators[device].release(pool_id),
            "_cuda_emptyCache": self._empty_cache,
            "_cuda_memoryStats": lambda device: allocators[device].figures.reported(),
            "_accelerator_getDeviceStats": lambda device: allocators[device].figures.reported(),
            "_cuda_memorySnapshot": self.snapshot,
            "_cuda_isHistoryEnabled": lambda: allocators[0].history.is_on,
            "_cuda_resetPeakMemoryStats": lambda device: allocators[device].figures.reset_peaks(),
            "_cuda_getAllocatorBackend": lambda: "native",
            "_accelerator_setAllocatorSettings": self.world.settings.parse,
        }

    def _empty_cache(self) -> None:
        for allocator in self.world.allocators:
            allocator.empty_cache()

    def snapshot(self, mempool_id: tuple[Any, ...] | None = None) -> dict[str, Any]:
        if mempool_id is not None and not (isinstance(mempool_id, tuple) and len(mempool_id) in (2, 3)):
            raise TypeError("mempool_id must be a tuple of 2 or 3 items")
        pool_id = (0, 0) if mempool_id is None else (mempool_id[0], mempool_id[1])
        includes_traces = mempool_id is None or len(mempool_id) == 2 or bool(mempool_id[2])
        return {
            "segments": [
                segment for allocator in self.world.allocators for segment in allocator.snapshot(pool_id)
            ],
            "device_traces": [
                allocator.history.trace() if includes_traces else [] for allocator in self.world.allocators
            ],
            "external_annotations": [],
            "allocator_settings": self.world.settings.snapshot(),
        }

    def record_memory_history(
        self,
        enabled: str | None = "all",
        context: str | None = "all",
        stacks: str = "all",
        max_entries: int = sys.maxsize,
        device: Any = None,
    ) -> None:
        if enabled not in (None, "state", "all"):
            raise RuntimeError("expected state to be 'state', 'all', or None")
        if context not in (None, "state", "alloc", "all"):
            raise RuntimeError("expected context to be 'state', 'alloc', 'all', or None")
        if stacks not in ("python", "all"):
            raise RuntimeError("expected stacks to be 'python', or 'all'")
        for allocator in self.world.allocators:
            with allocator.mutex:
                allocator.history.record(enabled, context, max_entries)

    def memory_snapshot(
        self, mempool_id: tuple[int, int] | None = None, include_traces: bool = True
    ) -> list[dict[str, Any]]:
        segments: list[dict[str, Any]] = self.snapshot(mempool_id)["segments"]
        return segments

    def memory_reserved(self, device: Any = None) -> int:
        return self._allocator(device).figures.current("reserved_bytes")

    def memory_allocated(self, device: Any = None) -> int:
        return self._allocator(device).figures.current("allocated_bytes")

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._allocator(device).figures.reset_peaks()

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """The figures with the names put together, as `torch.cuda.memory_stats` has them."""
        return dict(sorted(_flat("", self._allocator(device).figures.reported())))

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return self.world.machine.memory_bytes(index_of(self.world, device))

    @contextmanager
    def use_mem_pool(self, pool: MemPool, device: Any = None) -> Iterator[None]:
        ordinal = index_of(self.world, device)
        self.world.begin_for_thread(ordinal, pool.id)
        try:
            yield
        finally:
            self.world.allocators[ordinal].end(pool.id)
            self.world.allocators[ordinal].release(pool.id)

    def _allocator(self, device: Any) -> DeviceAllocator:
        return self.world.allocators[index_of(self.world, device)]


def _flat(name: str, figures: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for key, value in figures.items():
        if isinstance(value, dict):
            yield from _flat(f"{name}{key}.", value)
        else:
            yield f"{name}{key}", value
