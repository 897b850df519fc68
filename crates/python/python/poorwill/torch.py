"""PyTorch's tensors in memory that can be put to sleep: `with poorwill.pool(tag="weights"):`.

PyTorch's caching allocator sits above ours and keeps what its user has freed. What makes it give that back, so that a
load maps what lives and no more, is how a scope is built:

- A scope is a row of *generations*, each a `torch.cuda.MemPool` over one of our allocators. A generation that is
  *retired* serves no allocation any more; its tensors stay as they are. Of retired generations PyTorch gives back, when
  its cache is emptied, every segment that holds no tensor; while a scope is open that touches nothing else.
- The scope sees every operation before it runs. When PyTorch's cache has grown by a 256th of what is allocated, or by
  32 MiB, the generation is retired, another one begun, and the cache emptied.
- In a retired generation the free parts of segments that still hold a tensor are never handed out again, so their
  granules are given back, too ("carved").
- What does not fit is tried a second time when everything was given back, unless the operation changes its arguments.

Nothing of this needs a split limit or minds one, waits for the device, or records an event. Written for PyTorch 2.11;
a later one is put to the test when the first scope is opened.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, cast

from poorwill import _native
from poorwill._native import Arena, ClosedError, PoorwillError
from poorwill._settings import allocator_settings

__all__ = ["GraphPool", "Pool", "UnsupportedTorchError", "allocator_settings", "graph_pool", "library"]

_OLDEST = (2, 11)
_STEP_BYTES = 32 << 20
_STEP_SHARE = 256


class UnsupportedTorchError(PoorwillError, ImportError):
    """PyTorch is missing, or one that the pools cannot be built on."""


def _import() -> Any:
    try:
        module = importlib.import_module("torch")
    except ImportError as error:
        raise UnsupportedTorchError(
            f"poorwill's pools are for PyTorch's tensors, and PyTorch cannot be imported ({error}): install torch "
            f"{_OLDEST[0]}.{_OLDEST[1]} or later"
        ) from error
    version = str(getattr(module, "__version__", "unknown"))
    numbers = version.split("+")[0].split(".")[:2]
    if not all(number.isdecimal() for number in numbers) or tuple(map(int, numbers)) < _OLDEST:
        raise UnsupportedTorchError(
            f"PyTorch {version} is too old for poorwill's pools: install torch {_OLDEST[0]}.{_OLDEST[1]} or later"
        )
    return module


torch: Any = _import()
_Mode: Any = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode


def library(arena: Arena, tag: str = "torch") -> str:
    """The path of the shared library whose symbols `poorwill_alloc` and `poorwill_free` a
    `torch.cuda.memory.CUDAPluggableAllocator` can load.

    They serve this tag of this arena from now on, for the arena's GPU. Pools need neither the path nor the symbols.
    """
    _native.torch_make_default(arena, tag)
    return str(_native.__file__)


class _Gpu:
    """What all scopes on one GPU share."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.lock = threading.Lock()
        self.retired: set[tuple[int, int]] = set()
        self.allocators: dict[int, Any] = {}
        self.is_proved = False

    def allocator(self, arena: Arena, tag: str) -> Any:
        """PyTorch's handle of the allocator for a tag of an arena. Kept for ever: PyTorch calls it until the end."""
        alloc, free = _native.torch_allocator(arena, tag)
        with self.lock:
            if alloc not in self.allocators:
                allocator = torch._C._cuda_customAllocator(alloc, free)
                _native.make_immortal(allocator)
                self.allocators[alloc] = allocator
            return self.allocators[alloc]

    def pool(self, allocator: Any) -> Any:
        """A pool of PyTorch's. Its end is ours to say: its destructor ends the process while any scope is open."""
        # It belongs to the device that is current.
        with _current(self.ordinal):
            pool = torch.cuda.MemPool(allocator)
        _native.make_immortal(pool)
        return pool

    def begin(self, pool: Any) -> None:
        torch._C._cuda_beginAllocateCurrentThreadToPool(self.ordinal, pool.id)

    def retire(self, pool: Any) -> None:
        """Ends a generation. What it holds stays, and goes when it is free and the cache is emptied."""
        identity = pool.id
        with self.lock:
            self.retired.add(identity)
        torch._C._cuda_endAllocateToPool(self.ordinal, identity)
        torch._C._cuda_releasePool(self.ordinal, identity)
        torch._C._cuda_releasePool(self.ordinal, identity)

    def figures(self) -> tuple[int, int]:
        """The bytes that PyTorch has allocated on this GPU, and those that it caches."""
        stats = torch._C._cuda_memoryStats(self.ordinal)
        allocated = int(stats["allocated_bytes"]["all"]["current"])
        cached = int(stats["reserved_bytes"]["all"]["current"]) - int(stats["active_bytes"]["all"]["current"])
        return allocated, cached

    def empty(self) -> None:
        """Takes the free segments of retired generations back. A pool is being allocated to on this GPU, so the
        default one keeps its cache; on other GPUs the same is seen to."""
        with self._others_shielded():
            torch._C._cuda_emptyCache()

    def carve(self) -> int:
        """Takes the free parts of retired generations back, and returns how many bytes they were."""
        with self.lock:
            retired = set(self.retired)
        moment = _native.torch_moment()
        segments = [
            segment
            for segment in _snapshot()
            if segment["device"] == self.ordinal and tuple(segment["segment_pool_id"]) in retired
        ]
        with self.lock:
            self.retired -= retired.difference(tuple(segment["segment_pool_id"]) for segment in segments)
        holed = [
            (segment["address"], segment["total_size"], holes)
            for segment in segments
            if (holes := _holes(segment["blocks"]))
        ]
        return _native.torch_carve(moment, holed) if holed else 0

    def flush(self) -> None:
        """Takes back what retired generations do not need, outside of every scope."""
        pool = self.pool(None)
        self.begin(pool)
        try:
            self.empty()
            self.carve()
        finally:
            self.retire(pool)

    def give_all_back(self) -> None:
        """Empties the default pool's cache, too, unless some thread has a scope open."""
        torch._C._cuda_emptyCache()
        self.carve()

    @contextlib.contextmanager
    def _others_shielded(self) -> Iterator[None]:
        others = [other for other in range(torch.cuda.device_count()) if other != self.ordinal]
        busy = [_gpu(other) for other in others if _reserved_bytes(other) > 0]
        shields: list[tuple[_Gpu, Any]] = []
        try:
            for gpu in busy:
                pool = gpu.pool(None)
                gpu.begin(pool)
                shields.append((gpu, pool))
            yield
        finally:
            for gpu, pool in shields:
                gpu.retire(pool)


_gpus: dict[int, _Gpu] = {}
_gpus_lock = threading.Lock()


def _gpu(ordinal: int) -> _Gpu:
    with _gpus_lock:
        return _gpus.setdefault(ordinal, _Gpu(ordinal))


def _current(ordinal: int) -> contextlib.AbstractContextManager[Any]:
    if torch.cuda.current_device() == ordinal:
        return contextlib.nullcontext()
    return cast(contextlib.AbstractContextManager[Any], torch.cuda.device(ordinal))


def _reserved_bytes(ordinal: int) -> int:
    return int(torch._C._cuda_memoryStats(ordinal)["reserved_bytes"]["all"]["current"])


def _snapshot() -> list[dict[str, Any]]:
    """Every segment that PyTorch has.

    PyTorch 2.11 gives the references of its argument's items away, which does no harm where they are immortal. So no
    pool is named, whose number would not be, and before Python 3.12, where nothing is immortal, nothing is.
    """
    argument = (0, 0, False) if sys.version_info >= (3, 12) else None
    return cast(list[dict[str, Any]], torch._C._cuda_memorySnapshot(argument)["segments"])


def _holes(blocks: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """The free parts of a segment that is not free as a whole."""
    free = [(block["address"], block["size"]) for block in blocks if block["state"] == "inactive"]
    return free if len(free) < len(blocks) else []


class _Threads(threading.local):
    """The scopes that a thread is in, the innermost last."""

    def __init__(self) -> None:
        self.scopes: list[_Scope] = []


_threads = _Threads()
_users_lock = threading.Lock()
_users: dict[tuple[str, str], int] = {}


class _Scope:
    """One entry into a pool: the generations of one thread."""

    def __init__(self, arena: Arena, gpu: _Gpu, allocator: Any) -> None:
        self.arena = arena
        self.gpu = gpu
        self.allocator = allocator
        self.generation: Any = None
        self.floor = 0
        self.carve_floor = 0
        self.watch = _Watch(self)

    def begin(self) -> None:
        """Allocations of this thread come from here, from now on."""
        pool = self.gpu.pool(self.allocator)
        self.gpu.begin(pool)
        self.generation = pool

    def pause(self) -> None:
        """Allocations of this thread come from elsewhere, until the scope begins again."""
        if self.generation is not None:
            generation, self.generation = self.generation, None
            self.gpu.retire(generation)

    def is_current(self) -> bool:
        """Whether no scope on the same GPU lies further inside."""
        return _innermost(self.gpu) is self

    def look(self) -> None:
        """Before an operation that may allocate: takes back what PyTorch has cached, if that is worth it."""
        if torch.cuda.is_current_stream_capturing():
            # What a graph allocates belongs to the graph's pool, which stands behind ours.
            self.pause()
            return
        if self.generation is None:
            self.begin()
        allocated, cached = self.gpu.figures()
        step = max(_STEP_BYTES, allocated // _STEP_SHARE)
        self.floor = min(self.floor, cached)
        if cached - self.floor < step:
            return
        self.renew()
        self.floor = self.gpu.figures()[1]
        self.carve_floor = min(self.carve_floor, self.floor)
        if self.floor - self.carve_floor >= step:
            self.gpu.carve()
            self.carve_floor = self.floor

    def renew(self) -> None:
        """Retires the generation, and takes back what retired ones do not need as a whole."""
        self.pause()
        self.begin()
        self.gpu.empty()

    def give_all_back(self) -> None:
        """Before a second try: nothing stays cached that can be given back."""
        self.pause()
        self.gpu.give_all_back()
        self.begin()
        # The shield is up again: what has become free meanwhile goes without waiting for anything.
        self.gpu.empty()
        self.arena.trim()

    def enter(self) -> None:
        outer = _innermost(self.gpu)
        if outer is not None:
            # PyTorch asks whoever began first.
            outer.pause()
        _threads.scopes.append(self)
        try:
            _hold_cache(self.arena)
            try:
                if not torch.cuda.is_current_stream_capturing():
                    self.begin()
                self.floor = self.carve_floor = self.gpu.figures()[1]
                self.watch.__enter__()
            except BaseException:
                self.pause()
                _let_cache_go(self.arena)
                raise
        except BaseException:
            _threads.scopes.remove(self)
            _resume(self.gpu)
            raise

    def leave(self, *raised: Any) -> None:
        try:
            self.watch.__exit__(*raised)
            if self.generation is not None:
                self.renew()
                self.gpu.carve()
        finally:
            self.pause()
            _threads.scopes.remove(self)
            _resume(self.gpu)
            _let_cache_go(self.arena)


def _innermost(gpu: _Gpu) -> _Scope | None:
    """The scope of this thread that is in force on a GPU."""
    return next((scope for scope in reversed(_threads.scopes) if scope.gpu is gpu), None)


def _resume(gpu: _Gpu) -> None:
    scope = _innermost(gpu)
    if scope is not None and scope.generation is None and not torch.cuda.is_current_stream_capturing():
        scope.begin()


def _hold_cache(arena: Arena) -> None:
    """While a scope is open what is freed stays mapped: the next allocation wants it."""
    key = (arena.device, arena.name)
    with _users_lock:
        _users[key] = _users.get(key, 0) + 1
        if _users[key] == 1:
            _native.torch_set_cached_max(arena, None)


def _let_cache_go(arena: Arena) -> None:
    """Behind the last scope what is freed goes back to the GPU as soon as the work on it has passed."""
    key = (arena.device, arena.name)
    # An arena that was closed meanwhile has given everything back.
    with contextlib.suppress(ClosedError):
        with _users_lock:
            _users[key] -= 1
            is_last = _users[key] == 0
            if is_last:
                _native.torch_set_cached_max(arena, 0)
        if is_last:
            arena.trim()


class _Watch(_Mode):  # type: ignore[misc]
    """Sees every operation in a scope before it runs."""

    def __init__(self, scope: _Scope) -> None:
        super().__init__()
        self.scope = scope

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        scope = self.scope
        if not _allocates(func) or not scope.is_current():
            return func(*args, **kwargs)
        scope.look()
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            if func._schema.is_mutable or scope.generation is None:
                _explain(error)
                raise
        # Behind the handler, so that nothing holds what the failed try has left.
        scope.give_all_back()
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            _explain(error)
            raise


_allocating: dict[Any, bool] = {}


def _allocates(func: Any) -> bool:
    """Whether an operation gives new tensors back, and not only its arguments or views of them."""
    known = _allocating.get(func)
    if known is None:
        returns = func._schema.returns
        known = _allocating[func] = any(value.alias_info is None for value in returns)
    return known


def _explain(error: BaseException) -> None:
    """Adds to PyTorch's error what the arena has said."""
    refusal = _native.torch_refusal()
    if refusal is None:
        return
    note = f"poorwill: {refusal}"
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.args = (*error.args, note)


def _prove(gpu: _Gpu, allocator: Any) -> None:
    """Whether this PyTorch does what pools are built on, on one small tensor."""
    if gpu.is_proved:
        return
    first = gpu.pool(allocator)
    gpu.begin(first)
    try:
        tensor = torch.empty(1024, dtype=torch.uint8, device=f"cuda:{gpu.ordinal}")
    except torch.OutOfMemoryError as error:
        _explain(error)
        raise
    finally:
        gpu.retire(first)
    place = tensor.data_ptr()
    is_routed = _native.torch_has_segment_at(place)
    second = gpu.pool(allocator)
    gpu.begin(second)
    try:
        gpu.empty()
        stays = _native.torch_has_segment_at(place)
        del tensor
        gpu.empty()
        comes_back = not _native.torch_has_segment_at(place)
    finally:
        gpu.retire(second)
    if not (is_routed and stays and comes_back):
        raise UnsupportedTorchError(
            f"PyTorch {torch.__version__} does not do what poorwill's pools are built on (allocations arrive: "
            f"{is_routed}, live ones stay: {stays}, free ones come back: {comes_back}): use torch 2.11"
            + ("" if is_routed else "; expandable_segments must be off, see poorwill.torch.allocator_settings")
        )
    gpu.is_proved = True


class Pool(contextlib.ContextDecorator):
    """A context in which what a thread allocates with PyTorch comes from an arena, under a tag.

    Contexts can be nested, entered again, and entered by several threads at once. The tensors outlive them.
    """

    def __init__(self, arena: Arena, tag: str) -> None:
        if not torch.cuda.is_available():
            raise PoorwillError("PyTorch finds no GPU here: pools are for tensors on one")
        torch.cuda.init()
        kind, _, number = arena.device.partition(":")
        if kind != "cuda":
            raise PoorwillError(f"the arena is on {arena.device}, and PyTorch's pools need a GPU, like cuda:0")
        self.arena = arena
        self.tag = tag
        self._gpu = _gpu(int(number))
        self._allocator = self._gpu.allocator(arena, tag)

    def __repr__(self) -> str:
        return f"poorwill.pool(tag={self.tag!r}, device={self.arena.device!r})"

    def __enter__(self) -> Pool:
        state = self.arena.state().get(self.tag, "awake")
        if state not in ("awake", "undefined"):
            raise PoorwillError(
                f"`{self.tag}` on {self.arena.device} is {state}: wake it before allocating more of it"
            )
        if not torch.cuda.is_current_stream_capturing():
            _prove(self._gpu, self._allocator)
        _Scope(self.arena, self._gpu, self._allocator).enter()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        scope = _threads.scopes[-1] if _threads.scopes else None
        if scope is None or scope.allocator is not self._allocator:
            raise PoorwillError(
                f"{self!r} is not the pool that this thread has entered last: leave pools in the reverse order, in the "
                "threads that entered them"
            )
        scope.leave(exc_type, exc_value, traceback)


class GraphPool(tuple[int, int]):
    """The pool of a CUDA graph whose memory can be put to sleep, as `torch.cuda.graph(graph, pool=...)` takes it.

    Several graphs may share it. It ends when neither this nor any of the graphs is left.
    """

    _gpu: _Gpu

    def __del__(self) -> None:
        if not sys.is_finalizing():
            torch._C._cuda_releasePool(self._gpu.ordinal, tuple(self))


def graph_pool(arena: Arena) -> GraphPool:
    """A pool for capturing graphs, under the tag `cudagraph` of an arena: what they hold is backed up by a sleep."""
    made = Pool(arena, "cudagraph")
    pool = made._gpu.pool(made._allocator)
    identity = GraphPool(pool.id)
    identity._gpu = made._gpu
    return identity


def _before_sleep(arena: Arena) -> None:
    """What an arena calls before it sleeps: gives back what PyTorch caches of it, and has the streams looked at on which
    a graph is most likely being captured."""
    kind, _, number = arena.device.partition(":")
    if kind != "cuda" or int(number) not in _gpus:
        return
    gpu = _gpu(int(number))
    with _current(gpu.ordinal):
        streams = [torch.cuda.current_stream(), torch.cuda.graph.default_capture_stream]
        is_capturing = torch.cuda.is_current_stream_capturing()
    for stream in streams:
        if stream is not None and stream.device.index == gpu.ordinal:
            _native.torch_watch(arena, stream.cuda_stream)
    if is_capturing:
        return  # The arena refuses to sleep, and says why.
    scope = _innermost(gpu)
    if scope is not None and scope.generation is not None:
        scope.renew()
        gpu.carve()
    else:
        gpu.flush()
