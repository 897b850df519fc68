"""Pools for tensors and for CUDA graphs: the public API."""

import contextlib
import os
import sys
from types import TracebackType
from typing import Any, Literal

from poorwill import _cache, _native
from poorwill._native import Arena, PoorwillError
from poorwill._torch_version import UnsupportedTorchError
from poorwill.torch import _emptying
from poorwill.torch._gpu import Gpu, gpu_of, known_gpu, on, ordinal_of
from poorwill.torch._import import torch
from poorwill.torch._scope import Scope, innermost
from poorwill.torch._watch import explain, undisturbed


class Pool(contextlib.ContextDecorator):
    """A context in which a thread's PyTorch allocations come from an arena, under a tag.

    Contexts can be nested, re-entered, and used by several threads at once; the innermost counts. Tensors
    outlive them. A CUDA graph's allocations during capture belong to the graph's pool; see `graph_pool`.

    What PyTorch caches is released as it grows. `watch="operations"` checks before each operation, which
    costs some 20 µs each. `watch="segments"` leaves operations alone, for loads of thousands of small ones.
    It checks in Python's main thread after PyTorch requested a segment, as long as a quarter of what is
    mapped and 1 GiB are free. Otherwise it checks each operation. PyTorch's process-wide split limit is then
    32 MiB or less until the context ends, and cuBLAS gets its workspaces first. Without checks of
    operations, one that runs out of memory is not retried.

    After a check, and once queued work is complete, the arena's `cache_limit` bounds what is mapped besides
    live tensors. What lies between live ones, in mappings or segments, may exceed it. Mappings have 32 MiB,
    in tags that sleeps drop or that have slept up to 1 GiB.
    Each further thread in a pool adds 96 MiB, or three sixteenths of the limit if that is more.

    Raises PoorwillError for an arena without a GPU or a PyTorch without one. Raises UnsupportedTorchError
    for a custom allocator in PyTorch. Raises ValueError for an invalid tag or `watch`, and for an arena whose
    `cache_limit` is below 128 MiB.
    """

    def __init__(
        self, arena: Arena, tag: str, *, watch: Literal["operations", "segments"] = "operations"
    ) -> None:
        if watch not in ("operations", "segments"):
            raise ValueError(f'watch is {watch!r}; it is "operations" or "segments"')
        ordinal = ordinal_of(arena.device)
        if ordinal is None:
            raise PoorwillError(
                f"the arena is on {arena.device}, and PyTorch's pools are for a GPU: open one on cuda:0"
            )
        if not torch.cuda.is_available():
            raise PoorwillError("PyTorch finds no GPU here: install a torch that was built for CUDA")
        backend = torch.cuda.get_allocator_backend()
        if backend != "native":
            raise UnsupportedTorchError(
                f"PyTorch's allocator is {backend} here, which has no pools: take `backend` out of "
                "PYTORCH_ALLOC_CONF, and let nothing call change_current_allocator"
            )
        limit_bytes = arena.cache_limit_bytes
        if limit_bytes is not None:
            _cache.check_limit("cache_limit", limit_bytes)
        torch.cuda.init()
        self.arena = arena
        self.tag = tag
        self._watches_segments = watch == "segments"
        with undisturbed():
            self._gpu = gpu_of(ordinal)
            self._allocator = self._gpu.allocator(arena, tag)

    def __repr__(self) -> str:
        return f"poorwill.pool(tag={self.tag!r}, device={self.arena.device!r})"

    @undisturbed()
    def __enter__(self) -> "Pool":
        state = self.arena.state().get(self.tag, "awake")
        if state not in ("awake", "undefined"):
            raise PoorwillError(
                f"cannot allocate for `{self.tag}` on {self.arena.device}, which is {state}: wake it first"
            )
        if not torch.cuda.is_current_stream_capturing():
            _emptying.look(self._gpu)
            try:
                self._gpu.prove(self._allocator)
            except torch.OutOfMemoryError as error:
                explain(error)
                raise
        Scope(
            self.arena, self.tag, self._gpu, self._allocator, watches_segments=self._watches_segments
        ).enter()
        return self

    @undisturbed()
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        scope = innermost()
        if scope is None or scope.allocator is not self._allocator:
            raise PoorwillError(
                f"{self!r} is not what this thread has entered last: leave pools in the reverse order, in "
                "the thread that entered them"
            )
        scope.leave(exc_type, exc_value, traceback)


class GraphPool(tuple[int, int]):
    """A pool of CUDA graphs whose memory can sleep, for `torch.cuda.graph(graph, pool=...)`.

    Several graphs may share it. It ends with the last of this object and its graphs.
    """

    _gpu: Gpu
    _process: int

    def __copy__(self) -> "GraphPool":
        return self

    def __deepcopy__(self, memo: object) -> "GraphPool":
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a pool of graphs belongs to its process and cannot be pickled: make one there")

    def __del__(self) -> None:
        # In a fork, a thread that does not exist may hold PyTorch's lock.
        if not sys.is_finalizing() and self._process == os.getpid():
            torch._C._cuda_releasePool(self._gpu.ordinal, tuple(self))


def graph_pool(arena: Arena, tag: str = "cudagraph") -> GraphPool:
    """A pool for capturing graphs, under a tag of an arena. A sleep backs `cudagraph` up."""
    made = Pool(arena, tag)
    with undisturbed():
        pool = GraphPool(made._gpu.pool(made._allocator).id)
    pool._gpu, pool._process = made._gpu, os.getpid()
    return pool


def library(arena: Arena, tag: str = "torch") -> str:
    """The path of the shared library with the symbols `poorwill_alloc` and `poorwill_free`.

    For `torch.cuda.memory.CUDAPluggableAllocator`; pools do not need it. The symbols serve this tag of this
    arena from now on, on the arena's GPU.
    """
    _native.torch_make_default(arena, tag)
    return str(_native.__file__)


@undisturbed()
def settle(device: str) -> list[int]:
    """Makes PyTorch release its cache on the device, before an arena sleeps, prepares, trims or closes.

    Returns the streams on which a graph is most likely being captured, for the arena to check.
    """
    ordinal = ordinal_of(device)
    gpu = None if ordinal is None else known_gpu(ordinal)
    if gpu is None:
        return []
    with on(gpu.ordinal):
        streams = [torch.cuda.current_stream(), torch.cuda.graph.default_capture_stream]
    streams = [stream for stream in streams if stream is not None and stream.device.index == gpu.ordinal]
    capturing = [stream for stream in streams if _is_capturing(stream)]
    if not capturing:
        scope = innermost(gpu)
        if scope is not None and scope.is_in_force:
            scope.renew()
            gpu.carve()
        else:
            gpu.flush()
    # A user's stream may be gone at the next check; PyTorch would call it by its handle.
    lasting = [
        stream for stream in streams if stream.cuda_stream == 0 or stream.stream_id != stream.cuda_stream
    ]
    return [stream.cuda_stream for stream in {*lasting, *capturing}]


def _is_capturing(stream: Any) -> bool:
    with torch.cuda.stream(stream):
        return bool(torch.cuda.is_current_stream_capturing())
