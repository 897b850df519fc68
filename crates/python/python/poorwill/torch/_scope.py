"""Scopes: which memory a thread allocates from, and when a generation is retired."""

import contextlib
import os
import threading
from types import TracebackType
from typing import Any

from poorwill import _cache, _native
from poorwill._native import Arena, ClosedError
from poorwill._settings import lower_split_limit
from poorwill.torch._gpu import Gpu, on
from poorwill.torch._import import torch
from poorwill.torch._operations import Operation
from poorwill.torch._watch import (
    Afterwards,
    EachOperation,
    counts_modes,
    explain,
    has_headroom,
    is_main_thread,
    modes,
)

# With checks after requests, the cache may grow by this part of what is mapped, if that is more than a step.
# Then no cached part is so large that it would be split.
_STEPS = 64

# Change of mapped bytes before the device's free memory is queried again.
_HEADROOM_STEP_BYTES = 256 << 20


class Scope:
    """One entry into a pool, by one thread: a row of generations."""

    def __init__(
        self, arena: Arena, tag: str, gpu: Gpu, allocator: Any, *, watches_segments: bool = False
    ) -> None:
        self.arena = arena
        self.tag = tag
        self.gpu = gpu
        self.allocator = allocator
        self._generation: Any = None
        self._floor = 0
        self._each_operation = EachOperation(self)
        self._watches_segments = watches_segments
        # Whether each operation is checked, or only requests for segments; and the number of earlier modes.
        self._is_close = True
        self._modes_before = 0
        # Mapped bytes at the last query of free memory.
        self._mapped_bytes = -_HEADROOM_STEP_BYTES
        self._uncut: contextlib.AbstractContextManager[None] = contextlib.nullcontext()

    @property
    def is_innermost(self) -> bool:
        """Whether this thread has entered no later scope on the GPU."""
        return innermost(self.gpu) is self

    @property
    def is_in_force(self) -> bool:
        """Whether this thread's allocations on the GPU come from here."""
        return self._generation is not None

    def begin(self) -> None:
        """Starts a new generation for this thread's allocations."""
        pool = self.gpu.pool(self.allocator)
        self.gpu.begin(pool)
        self._generation = pool
        self.gpu.note_scope(1)

    def pause(self) -> None:
        """Lets this thread allocate from elsewhere until the scope resumes."""
        if self._generation is not None:
            generation, self._generation = self._generation, None
            self.gpu.note_scope(-1)
            self.gpu.retire(generation)

    def resume(self) -> None:
        """Resumes a paused scope."""
        if self._generation is None:
            self.begin()

    def renew(self) -> None:
        """Retires the generation, and frees what retired ones hold without a tensor."""
        retired = self._generation
        self.pause()
        self.begin()
        self.gpu.empty()
        if retired is not None:
            self.gpu.carve_pool(retired)

    def look_before(self, operation: Operation) -> None:
        """Before an operation that may allocate: releases PyTorch's cache, if that is worth it."""
        if torch.cuda.is_current_stream_capturing():
            # A graph's allocations belong to the graph's pool. PyTorch 2.11 asks the pool that was begun
            # last, which is this one; other versions ask the first. An operation that returns nothing new may
            # still need temporary memory.
            self.pause()
            return
        if operation.multiplies:
            self._keep_workspaces_out()
        self.resume()
        if operation.allocates:
            self._take_back_growth(_cache.STEP_BYTES)

    def look_after_segment(self) -> None:
        """The same after an operation that requested a segment, if operations are not checked."""
        if self._is_close or not self.is_in_force or torch.cuda.is_current_stream_capturing():
            return
        try:
            # Nothing allocates from an arena that was closed meanwhile.
            with contextlib.suppress(ClosedError):
                self._look_after(self.arena.stats().mapped_bytes)
        finally:
            # Also after an interrupt: the next allocations come from here.
            self.resume()

    def _look_after(self, mapped_bytes: int) -> None:
        step_bytes = max(_cache.STEP_BYTES, mapped_bytes // _STEPS)
        limit_bytes = self.arena.cache_limit_bytes
        if limit_bytes is not None:
            step_bytes = min(step_bytes, _cache.largest_step_bytes(limit_bytes))
        self._take_back_growth(step_bytes)
        with on(self.gpu.ordinal):
            is_at_home = self._place() in _threads.places_with_workspaces
        if not is_at_home or not self._has_headroom(mapped_bytes):
            self._come_close()

    def _take_back_growth(self, step_bytes: int) -> None:
        cached = self.gpu.cached_bytes()
        self._floor = min(self._floor, cached)
        if cached - self._floor < step_bytes:
            return
        # The caches of other threads' generations are theirs to release. Retiring one without need leaves
        # segments that are little used.
        idle = self.gpu.idle_bytes(self._generation)
        if idle >= step_bytes:
            self.renew()
            idle = 0
        else:
            self.gpu.empty()
        cached = self.gpu.cached_bytes()
        if self.gpu.has_to_carve(cached, step_bytes):
            # PyTorch still counts carved bytes as cached.
            self.gpu.carve()
        self._floor = cached - min(idle, step_bytes // 2)

    def _may_look_afterwards(self) -> bool:
        return (
            self._watches_segments
            and is_main_thread()
            and counts_modes()
            and self.gpu.asks_last_begun
            and self._has_headroom(self.arena.stats().mapped_bytes)
        )

    def _has_headroom(self, mapped_bytes: int) -> bool:
        """Whether enough memory is left to check only after requests."""
        if abs(mapped_bytes - self._mapped_bytes) < _HEADROOM_STEP_BYTES:
            return True
        self._mapped_bytes = mapped_bytes
        with on(self.gpu.ordinal):
            free_bytes, _ = torch.cuda.mem_get_info()
        return has_headroom(self.arena.limit_bytes, mapped_bytes, free_bytes)

    def _come_close(self) -> None:
        """Checks every operation from now on, if no mode was entered since that would be left before."""
        if modes() == self._modes_before:
            if not torch.cuda.is_current_stream_capturing():
                self._keep_workspaces_out()
            self._each_operation.__enter__()
            self._is_close = True
            _afterwards.end(self)
        else:
            # At the next request, then.
            self._mapped_bytes = -_HEADROOM_STEP_BYTES

    def _place(self) -> tuple[int, int]:
        return (self.gpu.ordinal, torch.cuda.current_stream().cuda_stream)

    def _keep_workspaces_out(self) -> None:
        """Creates the workspaces of cuBLAS and cuBLASLt, one each for a stream, outside of this pool.

        PyTorch allocates them with the first product that needs them, and keeps them. The whole process uses
        them, so they must not sleep.
        """
        with on(self.gpu.ordinal):
            place = self._place()
            if place not in _threads.places_with_workspaces:
                self.pause()
                torch.cuda.current_blas_handle()
                # Only a product with an added vector creates cuBLASLt's. If products fail, the operation
                # itself will say why.
                with contextlib.suppress(RuntimeError):
                    kind = {"dtype": torch.float16, "device": f"cuda:{self.gpu.ordinal}"}
                    square = torch.zeros((64, 64), **kind)
                    torch.addmm(torch.zeros(64, **kind), square, square)
                    _threads.places_with_workspaces.add(place)

    def give_all_back(self) -> None:
        """Frees PyTorch's cache, the default pool's as well, and the arena's."""
        self.pause()
        self.gpu.empty_default()
        self.begin()
        self.gpu.empty()
        self.gpu.carve()
        _native.torch_trim(self.arena)

    def enter(self) -> None:
        """This thread's allocations come from here, until it leaves or enters another scope."""
        outer = innermost(self.gpu)
        if not _threads.scopes:
            # PyTorch may have freed them since the last time.
            _threads.places_with_workspaces.clear()
        is_capturing = torch.cuda.is_current_stream_capturing()
        try:
            if outer is not None and (outer._is_close or not is_capturing):
                # PyTorch asks the pool that was begun last, or first, by version. So one is begun at a time.
                # While a graph is captured it asks neither, and no call reports the end of that.
                outer.pause()
            with contextlib.ExitStack() as undo:
                _threads.scopes.append(self)
                _hold_cache(self.arena)
                undo.callback(_let_cache_go, self.arena)
                undo.callback(self.pause)
                self._is_close = is_capturing or not self._may_look_afterwards()
                if not self._is_close:
                    self._modes_before = modes()
                    # So large free parts are whole at the next check.
                    self._uncut = lower_split_limit(_cache.STEP_BYTES >> 20)
                    undo.enter_context(self._uncut)
                    # No call reports the first product.
                    self._keep_workspaces_out()
                if not is_capturing:
                    self.begin()
                self._floor = self.gpu.cached_bytes()
                if self._is_close:
                    undo.enter_context(self._each_operation)
                else:
                    undo.callback(_afterwards.end, self)
                    _afterwards.begin(self)
                undo.pop_all()
        except BaseException:
            self._end()
            raise

    def leave(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Frees what is unused; an outer scope, if any, is in force again."""
        with contextlib.ExitStack() as undo:
            undo.push(self._uncut)
            undo.callback(_let_cache_go, self.arena)
            undo.callback(self._end)
            undo.callback(self.pause)
            if self._is_close:
                self._each_operation.__exit__(kind, error, traceback)
            else:
                _afterwards.end(self)
                if isinstance(error, torch.OutOfMemoryError):
                    explain(error)
            if self.is_in_force:
                self.renew()
                self.gpu.carve()
            elif not torch.cuda.is_current_stream_capturing():
                self.gpu.flush()

    def _end(self) -> None:
        with contextlib.suppress(ValueError):
            # An interrupt may come before its beginning.
            _threads.scopes.remove(self)
        outer = innermost(self.gpu)
        if outer is None or outer.is_in_force:
            return
        if not torch.cuda.is_current_stream_capturing():
            outer.begin()
        elif not outer._is_close:
            # No call reports the end of the capture.
            outer._come_close()


class _Threads(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        # A GPU and a stream. PyTorch has workspaces for each thread.
        self.places_with_workspaces: set[tuple[int, int]] = set()


_threads = _Threads()


def innermost(gpu: Gpu | None = None) -> Scope | None:
    """The scope that this thread entered last, on a GPU or on any."""
    scopes = (scope for scope in reversed(_threads.scopes) if gpu is None or scope.gpu is gpu)
    return next(scopes, None)


_users_lock = threading.Lock()
_users: dict[Arena, int] = {}


def _hold_cache(arena: Arena) -> None:
    """While a scope is open, freed memory stays mapped for the next allocation, up to the arena's limit."""
    with _users_lock:
        if arena not in _users:
            limit_bytes = arena.cache_limit_bytes
            share_bytes = None if limit_bytes is None else _cache.arena_share_bytes(limit_bytes)
            _native.torch_set_cached_max(arena, share_bytes)
        _users[arena] = _users.get(arena, 0) + 1


def _let_cache_go(arena: Arena) -> None:
    """After the last scope, freed memory goes back to the GPU once its work is complete."""
    # An arena that was closed meanwhile has released everything.
    with contextlib.suppress(ClosedError):
        with _users_lock:
            _users[arena] -= 1
            is_last = _users[arena] == 0
            if is_last:
                del _users[arena]
                _native.torch_set_cached_max(arena, 0)
        if is_last:
            _native.torch_trim(arena)


def _look_afterwards() -> None:
    for gpu in {scope.gpu for scope in _threads.scopes}:
        scope = innermost(gpu)
        if scope is not None:
            scope.look_after_segment()


_afterwards = Afterwards(_look_afterwards)
os.register_at_fork(after_in_child=_afterwards.forget)
