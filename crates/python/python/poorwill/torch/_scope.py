"""Scopes: whose memory a thread's allocations are, and when a generation is retired."""

import contextlib
import sys
import threading
from typing import Any

from poorwill import _native
from poorwill._native import Arena, ClosedError
from poorwill.torch._gpu import Gpu
from poorwill.torch._import import DispatchMode, torch

# How much PyTorch's cache may grow before a generation is retired. It is the chunk of an arena: what is
# freed in larger pieces is given back as a whole and never cut, and smaller pieces lie in single granules,
# which can be carved.
_STEP_BYTES = 32 << 20


class Scope:
    """One entry into a pool, by one thread: a row of generations."""

    def __init__(self, arena: Arena, gpu: Gpu, allocator: Any) -> None:
        self.arena = arena
        self.gpu = gpu
        self.allocator = allocator
        self._generation: Any = None
        self._floor = 0
        self._carved_floor = 0
        self._watch = _Watch(self)

    @property
    def is_in_force(self) -> bool:
        """Whether what this thread allocates on the GPU comes from here."""
        return self._generation is not None

    def begin(self) -> None:
        """What this thread allocates comes from here, in a new generation."""
        pool = self.gpu.pool(self.allocator)
        self.gpu.begin(pool)
        self._generation = pool

    def pause(self) -> None:
        """What this thread allocates comes from elsewhere, until the scope begins again."""
        if self._generation is not None:
            generation, self._generation = self._generation, None
            self.gpu.retire(generation)

    def renew(self) -> None:
        """Retires the generation, and takes back what retired ones hold for no tensor."""
        self.pause()
        self.begin()
        self.gpu.empty()

    def look(self, operation: str) -> None:
        """Before an operation that may allocate: takes back what PyTorch caches, if that is worth it."""
        if torch.cuda.is_current_stream_capturing():
            # What a graph allocates belongs to the graph's pool, which would come second.
            self.pause()
            return
        if operation in _PRODUCTS:
            self._keep_workspace_out()
        if self._generation is None:
            self.begin()
        cached = self.gpu.cached_bytes()
        self._floor = min(self._floor, cached)
        if cached - self._floor < _STEP_BYTES:
            return
        self.renew()
        self._floor = self.gpu.cached_bytes()
        self._carved_floor = min(self._carved_floor, self._floor)
        if self._floor - self._carved_floor >= _STEP_BYTES:
            # What is carved PyTorch goes on counting as cached.
            self.gpu.carve()
            self._carved_floor = self._floor

    def _keep_workspace_out(self) -> None:
        """cuBLAS has a workspace for each stream, which PyTorch allocates with the first product and keeps.

        It is everybody's, so it must not sleep with what is allocated here.
        """
        stream = torch.cuda.current_stream().cuda_stream
        if stream not in _threads.streams_with_workspace:
            self.pause()
            torch.cuda.current_blas_handle()
            _threads.streams_with_workspace.add(stream)

    def give_all_back(self) -> None:
        """Takes back what PyTorch caches, in the default pool too, and what the arena keeps."""
        self.pause()
        self.gpu.empty_default()
        self.begin()
        self.gpu.empty()
        self.gpu.carve()
        _native.torch_trim(self.arena)

    def enter(self) -> None:
        """What this thread allocates comes from here, until it leaves or enters another."""
        outer = innermost(self.gpu)
        if outer is not None:
            # PyTorch asks the pool that was begun first.
            outer.pause()
        _threads.scopes.append(self)
        try:
            with contextlib.ExitStack() as undo:
                _hold_cache(self.arena)
                undo.callback(_let_cache_go, self.arena)
                undo.callback(self.pause)
                if not torch.cuda.is_current_stream_capturing():
                    self.begin()
                self._floor = self._carved_floor = self.gpu.cached_bytes()
                self._watch.__enter__()
                undo.pop_all()
        except BaseException:
            self._end()
            raise

    def leave(self, *raised: Any) -> None:
        """Takes back what nobody needs any more; the scope around this one, if any, is in force again."""
        with contextlib.ExitStack() as undo:
            undo.callback(_let_cache_go, self.arena)
            undo.callback(self._end)
            undo.callback(self.pause)
            self._watch.__exit__(*raised)
            if self.is_in_force:
                self.renew()
                self.gpu.carve()

    def _end(self) -> None:
        _threads.scopes.remove(self)
        outer = innermost(self.gpu)
        if outer is not None and not outer.is_in_force and not torch.cuda.is_current_stream_capturing():
            outer.begin()


class _Threads(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.streams_with_workspace: set[int] = set()


_threads = _Threads()


def innermost(gpu: Gpu | None = None) -> Scope | None:
    """The scope that this thread has entered last, of those on a GPU or of all."""
    scopes = (scope for scope in reversed(_threads.scopes) if gpu is None or scope.gpu is gpu)
    return next(scopes, None)


_users_lock = threading.Lock()
_users: dict[tuple[str, str], int] = {}


def _hold_cache(arena: Arena) -> None:
    """While a scope is open, what is freed stays mapped for the next allocation."""
    key = (arena.device, arena.name)
    with _users_lock:
        _users[key] = _users.get(key, 0) + 1
        if _users[key] == 1:
            _native.torch_set_cached_max(arena, None)


def _let_cache_go(arena: Arena) -> None:
    """Behind the last scope, what is freed goes back to the GPU as soon as the work on it has passed."""
    key = (arena.device, arena.name)
    # An arena that was closed meanwhile has given everything back.
    with contextlib.suppress(ClosedError):
        with _users_lock:
            _users[key] -= 1
            is_last = _users[key] == 0
            if is_last:
                _native.torch_set_cached_max(arena, 0)
        if is_last:
            _native.torch_trim(arena)


class _Watch(DispatchMode):  # type: ignore[misc]
    """Sees every operation of a scope's thread before it runs."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions run as they are compiled."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise PyTorch imports its compiler, which takes seconds, to keep it out of here.
        return False

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self._scope = scope

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        scope = self._scope
        if not _allocates(func) or innermost(scope.gpu) is not scope:
            return func(*args, **kwargs)
        scope.look(_name(func))
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            if _mutates(func) or not scope.is_in_force:
                explain(error)
                raise
        # Behind the handler, where nothing holds what the first try has left.
        scope.give_all_back()
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            explain(error)
            raise


# What cuBLAS computes.
_PRODUCTS = frozenset(
    f"aten::{name}"
    for name in (
        "_addmm_activation",
        "_grouped_mm",
        "_int_mm",
        "_scaled_mm",
        "addbmm",
        "addmm",
        "addmv",
        "addr",
        "baddbmm",
        "bmm",
        "dot",
        "linear",
        "mm",
        "mv",
        "vdot",
    )
)

_allocating: dict[Any, bool] = {}


def _name(func: Any) -> str:
    schema = getattr(func, "_schema", None)
    return "" if schema is None else str(schema.name)


def _allocates(func: Any) -> bool:
    """Whether an operation returns new tensors, and not only its arguments or views of them."""
    known = _allocating.get(func)
    if known is None:
        schema = getattr(func, "_schema", None)
        # An operator of higher order has none, and may do anything.
        known = schema is None or any(value.alias_info is None for value in schema.returns)
        _allocating[func] = known
    return known


def _mutates(func: Any) -> bool:
    """Whether an operation may change its arguments, so that trying it again could change them twice."""
    schema = getattr(func, "_schema", None)
    return schema is None or bool(schema.is_mutable)


def explain(error: BaseException) -> None:
    """Adds to an error of PyTorch's what the arena has said."""
    refusal = _native.torch_refusal()
    if refusal is None:
        return
    note = f"poorwill: {refusal}"
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.args = (*error.args, note)
