"""Scopes: whose memory a thread's allocations are, and when a generation is retired."""

import contextlib
import re
import sys
import threading
from dataclasses import dataclass
from typing import Any

from poorwill import _native
from poorwill._native import Arena, ClosedError
from poorwill.torch._gpu import Gpu, on
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

    def look(self, operation: "_Operation") -> None:
        """Before an operation: takes back what PyTorch caches, if it may allocate and that is worth it."""
        if torch.cuda.is_current_stream_capturing():
            # What a graph allocates belongs to the graph's pool. PyTorch 2.11 asks the pool that was begun
            # last, which that is; others ask the first. An operation that returns nothing new may need
            # memory for a while as well.
            self.pause()
            return
        if operation.multiplies:
            self._keep_workspaces_out()
        if self._generation is None:
            self.begin()
        if not operation.allocates:
            return
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

    def _keep_workspaces_out(self) -> None:
        """cuBLAS and cuBLASLt have a workspace each for a stream. PyTorch allocates it with the first product
        that needs it, and keeps it.

        They are everybody's, so they must not sleep with what is allocated here.
        """
        with on(self.gpu.ordinal):
            place = (self.gpu.ordinal, torch.cuda.current_stream().cuda_stream)
            if place not in _threads.places_with_workspaces:
                self.pause()
                torch.cuda.current_blas_handle()
                # Only a product brings cuBLASLt's, one that adds a vector. What is wrong with products, the
                # operation itself will say.
                with contextlib.suppress(RuntimeError):
                    kind = {"dtype": torch.float16, "device": f"cuda:{self.gpu.ordinal}"}
                    square = torch.zeros((64, 64), **kind)
                    torch.addmm(torch.zeros(64, **kind), square, square)
                    _threads.places_with_workspaces.add(place)

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
        if not _threads.scopes:
            # Since the last time PyTorch may have been told to let go of them.
            _threads.places_with_workspaces.clear()
        if outer is not None:
            # PyTorch asks the pool that was begun last, or first, by its version. So one is begun at a time.
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
            elif not torch.cuda.is_current_stream_capturing():
                self.gpu.flush()

    def _end(self) -> None:
        _threads.scopes.remove(self)
        outer = innermost(self.gpu)
        if outer is not None and not outer.is_in_force and not torch.cuda.is_current_stream_capturing():
            outer.begin()


class _Threads(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        # A GPU and a stream. PyTorch has workspaces for each thread.
        self.places_with_workspaces: set[tuple[int, int]] = set()


_threads = _Threads()


def innermost(gpu: Gpu | None = None) -> Scope | None:
    """The scope that this thread has entered last, of those on a GPU or of all."""
    scopes = (scope for scope in reversed(_threads.scopes) if gpu is None or scope.gpu is gpu)
    return next(scopes, None)


_users_lock = threading.Lock()
_users: dict[Arena, int] = {}


def _hold_cache(arena: Arena) -> None:
    """While a scope is open, what is freed stays mapped for the next allocation."""
    with _users_lock:
        if arena not in _users:
            _native.torch_set_cached_max(arena, None)
        _users[arena] = _users.get(arena, 0) + 1


def _let_cache_go(arena: Arena) -> None:
    """Behind the last scope, what is freed goes back to the GPU as soon as the work on it has passed."""
    # An arena that was closed meanwhile has given everything back.
    with contextlib.suppress(ClosedError):
        with _users_lock:
            _users[arena] -= 1
            is_last = _users[arena] == 0
            if is_last:
                del _users[arena]
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
        if innermost(scope.gpu) is not scope:
            return func(*args, **kwargs)
        operation = _operation(func)
        scope.look(operation)
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            # A subclass runs code of its own, in which anything may have happened.
            if types or not operation.is_repeatable or not scope.is_in_force:
                explain(error)
                raise
        # Behind the handler, where nothing holds what the first try has left.
        scope.give_all_back()
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            explain(error)
            raise


@dataclass(frozen=True)
class _Operation:
    """What is to be known of an operation."""

    allocates: bool
    """Whether it may return new tensors, and not only its arguments or views of them."""
    multiplies: bool
    """Whether it may use cuBLAS."""
    is_repeatable: bool
    """Whether trying it a second time does nothing twice."""


# Words in the names of operations that use cuBLAS, or that are made of such ones: in inference mode those are
# seen as a whole.
_PRODUCTS = frozenset(
    "addbmm addmm addmv addr attention baddbmm bilinear bmm cdist cell chain conv convolution cov dot einsum "
    "gru inner linalg linear lstm lu matmul matrix mm mv pinverse rnn sspaddmm tensordot vdot".split()
)
_WORD = re.compile("[a-z]+")

# They change running averages, which their schemas do not say.
_CHANGING_UNSAID = re.compile("(batch|instance)_norm")

_operations: dict[Any, _Operation] = {}


def _operation(func: Any) -> _Operation:
    known = _operations.get(func)
    if known is None:
        known = _operations[func] = _examined(func)
    return known


def _examined(func: Any) -> _Operation:
    schema = getattr(func, "_schema", None)
    if schema is None:
        # An operator of higher order may do anything.
        return _Operation(allocates=True, multiplies=True, is_repeatable=False)
    space, _, name = str(schema.name).partition("::")
    return _Operation(
        # What is made of other operations is seen as a whole in inference mode, and may return a copy where
        # its schema speaks of a view: `to`, `contiguous`, `reshape`.
        allocates=any(value.alias_info is None for value in schema.returns)
        or func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd),
        multiplies=not _PRODUCTS.isdisjoint(_WORD.findall(name)),
        # Others than PyTorch's own may do what they do not say: send messages to other processes, say.
        is_repeatable=space == "aten" and not schema.is_mutable and not _CHANGING_UNSAID.search(name),
    )


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
