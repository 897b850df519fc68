"""When a scope looks at what PyTorch caches: before each operation, or after each request for a segment.

Before each operation (`EachOperation`), nothing is ever mapped beside what could have been given back, and
an operation that fails for lack of memory is tried once more. But every operation passes through Python,
which takes some 20 µs: a load that converts thousands of small tensors takes twice as long.

After each request (`Afterwards`), operations run as they are. PyTorch has to ask for a segment before more
can be mapped, so nothing is missed: what was freed since the last request is given back after the next, and
until then at most that one operation's segments are mapped beside it. What is cached may grow by a part of
what is mapped before it is given back, and so may what is to be carved. So the peak is no higher than the
most that lived, those two parts, and an operation. That is for who has room for it.
"""

import atexit
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from poorwill import _native
from poorwill.torch._import import DispatchMode, torch
from poorwill.torch._operations import operation

if TYPE_CHECKING:
    from poorwill.torch._scope import Scope

SPARE_BYTES = 1 << 30
"""How much has to be left, and a quarter of what is mapped, to look afterwards: more than one operation of
a load takes."""


class EachOperation(DispatchMode):  # type: ignore[misc]
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
            # A subclass runs code of its own, in which anything may have happened.
            if types or not what.is_repeatable or not scope.is_in_force:
                explain(error)
                raise
        # Behind the handler, where nothing holds what the first try has left.
        with undisturbed():
            scope.give_all_back()
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            explain(error)
            raise


class Afterwards:
    """Has the scopes of Python's main thread look after PyTorch was given a segment.

    Between any two of its instructions, that is: not while it is in a function that may not be disturbed.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._scopes: set[Scope] = set()

    def begin(self, scope: "Scope") -> None:
        """For this scope, too."""
        self._scopes.add(scope)
        _native.torch_call_afterwards(self._look_undisturbed)

    def end(self, scope: "Scope") -> None:
        """Not for this scope any more, if it was."""
        self._scopes.discard(scope)
        if not self._scopes:
            _native.torch_call_afterwards(None)

    def forget(self) -> None:
        """In a fork: for none of the scopes, which are the parent's."""
        self._scopes.clear()

    def _look_undisturbed(self) -> None:
        if self._scopes and _thread.undisturbed == 0:
            with undisturbed():
                self._look()


@atexit.register
def _end_with_python() -> None:
    # Threads that are not Python's go on, and a scope may never have been left.
    _native.torch_call_afterwards(None)


class _Thread(threading.local):
    undisturbed = 0


_thread = _Thread()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Nothing looks afterwards in this thread meanwhile: for what begins and ends pools, or takes locks."""
    _thread.undisturbed += 1
    try:
        yield
    finally:
        _thread.undisturbed -= 1


def is_main_thread() -> bool:
    """Whether looking afterwards is possible in this thread."""
    return threading.current_thread() is threading.main_thread()


def has_room(limit_bytes: int, mapped_bytes: int, free_bytes: int) -> bool:
    """Whether what is mapped leaves so much that nothing has to be given back before an operation."""
    return min(limit_bytes - mapped_bytes, free_bytes) >= mapped_bytes // 4 + SPARE_BYTES


def counts_modes() -> bool:
    """Whether this PyTorch tells how many dispatch modes a thread is in."""
    return hasattr(torch._C, "_len_torch_dispatch_stack")


def modes() -> int:
    """How many dispatch modes this thread is in."""
    return int(torch._C._len_torch_dispatch_stack())


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
