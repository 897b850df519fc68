"""When a scope checks PyTorch's cache: before each operation, or after each request for a segment.

Before each operation (`EachOperation`), nothing is mapped while the cache could be released instead, and an
operation that runs out of memory is retried. But each operation passes through Python, which takes some 20
µs: a load that converts thousands of small tensors takes twice as long.

After each request (`Afterwards`), operations run unchanged. PyTorch has to request a segment before more can
be mapped, so no growth is missed. Memory that was freed since the last request is released after the next
one. Until then at most that one operation's segments are mapped in addition. The cache and the carvable
parts may each grow by a part of what is mapped. So the peak is at most the peak of live memory, those two
parts, and one operation. It needs memory to spare.
"""

import atexit
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from poorwill import _native, _record
from poorwill.torch._import import DispatchMode, torch
from poorwill.torch._operations import operation

if TYPE_CHECKING:
    from poorwill.torch._scope import Scope

SPARE_BYTES = 1 << 30
"""Least free memory for checks after requests, besides a quarter of what is mapped: more than one operation
of a load takes.
"""


class EachOperation(DispatchMode):  # type: ignore[misc]
    """Checks every operation of a scope's thread before it runs."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions run as they are compiled."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise PyTorch imports its compiler, which takes seconds, to exclude this.
        return False

    def __init__(self, scope: "Scope") -> None:
        super().__init__()
        self._scope = scope

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        scope = self._scope
        if not scope.is_innermost:
            return func(*args, **kwargs)
        what = operation(func)
        with undisturbed():
            scope.look_before(what)
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            # A subclass runs code of its own, with unknown effects.
            if types or not what.is_repeatable or not scope.is_in_force:
                explain(error)
                raise
        # After the handler, where nothing holds what the first try left.
        with undisturbed():
            scope.give_all_back()
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            explain(error)
            raise


class Afterwards:
    """Makes the scopes of Python's main thread check after PyTorch got a segment.

    The check runs between two instructions, but not in a function that must not be disturbed.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._scopes: set[Scope] = set()

    def begin(self, scope: "Scope") -> None:
        """Adds this scope."""
        self._scopes.add(scope)
        _native.torch_call_afterwards(self._look_undisturbed)

    def end(self, scope: "Scope") -> None:
        """Removes this scope, if it was added."""
        self._scopes.discard(scope)
        if not self._scopes:
            _native.torch_call_afterwards(None)

    def forget(self) -> None:
        """In a fork: removes all scopes, which are the parent's."""
        self._scopes.clear()

    def _look_undisturbed(self) -> None:
        if self._scopes and _thread.undisturbed == 0:
            with undisturbed():
                self._look()


@atexit.register
def _end_with_python() -> None:
    # Threads that are not Python's go on, and a scope may still be open.
    _native.torch_call_afterwards(None)


class _Thread(threading.local):
    undisturbed = 0


_thread = _Thread()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Suppresses checks in this thread, for code that begins and ends pools or takes locks."""
    _thread.undisturbed += 1
    try:
        yield
    finally:
        _thread.undisturbed -= 1


def is_main_thread() -> bool:
    """Whether this thread can check after requests."""
    return threading.current_thread() is threading.main_thread()


def has_headroom(limit_bytes: int, mapped_bytes: int, free_bytes: int) -> bool:
    """Whether so much is free that nothing has to be released before an operation."""
    return min(limit_bytes - mapped_bytes, free_bytes) >= mapped_bytes // 4 + SPARE_BYTES


def counts_modes() -> bool:
    """Whether this PyTorch reports how many dispatch modes a thread is in."""
    return hasattr(torch._C, "_len_torch_dispatch_stack")


def modes() -> int:
    """How many dispatch modes this thread is in."""
    return int(torch._C._len_torch_dispatch_stack())


def explain(error: BaseException) -> None:
    """Adds the arena's message to an error of PyTorch's, and what to record unless that is under way."""
    refusal = _native.torch_refusal()
    if refusal is None:
        return
    notes = [f"poorwill: {refusal}"] if _record.is_open() else [f"poorwill: {refusal}", _record.ADVICE]
    if sys.version_info >= (3, 11):
        for note in notes:
            error.add_note(note)
    else:
        error.args = (*error.args, *notes)
