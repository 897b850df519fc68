"""What NCCL's library does to the memory of one communicator: suspend, resume, figures.

It calls the library that is loaded already, with functions of its own: vLLM's keep their signatures.
Suspending came with NCCL 2.29.7. An older library lacks the functions, and `Nccl.problem` says so.

Suspending and resuming are collective: a call returns once every rank of the communicator has made it.
Addresses stay, so captured graphs stay valid.
"""

import ctypes
import re
from dataclasses import dataclass
from typing import Any

from poorwill._native import PoorwillError

__all__ = ["Figures", "Nccl", "NcclError", "is_refusal"]

FIRST = "2.29.7"
"""The first version that suspends."""

_SUSPEND_MEMORY = 0x01
_SUSPENDABLE, _IS_SUSPENDED, _PERSISTENT, _TOTAL = range(4)

_COMMUNICATOR = ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclCommSuspend": (_COMMUNICATOR, ctypes.c_int),
    "ncclCommResume": (_COMMUNICATOR,),
    "ncclCommMemStats": (_COMMUNICATOR, ctypes.c_int, ctypes.POINTER(ctypes.c_uint64)),
}

# NCCL's words for its codes 4 and 5, which it returns before it changes anything. CUDA's errors are worded
# alike, without what is in the brackets.
_REFUSED = re.compile(r"\binvalid (argument|usage) \(run with NCCL_DEBUG")


class NcclError(PoorwillError):
    """A function of NCCL failed."""


def is_refusal(error: Exception) -> bool:
    """Whether a call was refused and has changed nothing, by NCCL's words in the error."""
    return _REFUSED.search(str(error)) is not None


@dataclass(frozen=True)
class Figures:
    """Device memory of one communicator, as NCCL counts it."""

    total_bytes: int
    """All that it allocated, suspended or not."""
    suspendable_bytes: int
    """What a suspension gives back. NCCL copies nearly all of it to page-locked host memory."""
    is_suspended: bool

    @property
    def held_bytes(self) -> int:
        """What is on the device now."""
        return self.total_bytes - self.suspendable_bytes if self.is_suspended else self.total_bytes


class Nccl:
    """A loaded library; a `ctypes.CDLL`, or anything with functions by name."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._functions = {name: _function(library, name, given) for name, given in _SIGNATURES.items()}

    def problem(self) -> str | None:
        """Why it cannot suspend; None if it can."""
        missing = [name for name, function in self._functions.items() if function is None]
        if not missing:
            return None
        return f"NCCL {self._version()} has no {', '.join(missing)}, which came with {FIRST}"

    def figures(self, communicator: Any) -> Figures:
        """Raises NcclError, as where NCCL_DISABLE_MEM_MANAGER=1 has it count nothing."""
        total, suspendable, is_suspended = (
            self._figure(communicator, which) for which in (_TOTAL, _SUSPENDABLE, _IS_SUSPENDED)
        )
        return Figures(total, suspendable, bool(is_suspended))

    def suspend(self, communicator: Any) -> None:
        """Gives the memory back. Raises NcclError."""
        self._call("ncclCommSuspend", communicator, _SUSPEND_MEMORY)

    def resume(self, communicator: Any) -> None:
        """Takes the memory again, at the same addresses.

        Raises NcclError. Where memory was missing, a repeated call goes on from there.
        """
        self._call("ncclCommResume", communicator)

    def _figure(self, communicator: Any, which: int) -> int:
        value = ctypes.c_uint64()
        self._call("ncclCommMemStats", communicator, which, ctypes.byref(value))
        return value.value

    def _call(self, name: str, *args: Any) -> None:
        function = self._functions[name]
        if function is None:
            raise NcclError(f"{name}: {self.problem()}")
        code = int(function(*args))
        if code:
            raise NcclError(f"{name} failed with code {code}: {self._words(code)}")

    def _words(self, code: int) -> str:
        words = _function(self._library, "ncclGetErrorString", (ctypes.c_int,), ctypes.c_char_p)
        return "unknown" if words is None else str(words(code).decode())

    def _version(self) -> str:
        function = _function(self._library, "ncclGetVersion", (ctypes.POINTER(ctypes.c_int),))
        value = ctypes.c_int()
        if function is None or function(ctypes.byref(value)):
            return "of unknown version"
        return f"{value.value // 10000}.{value.value // 100 % 100}.{value.value % 100}"


def _function(library: Any, name: str, argtypes: tuple[Any, ...], restype: Any = ctypes.c_int) -> Any:
    """A function object that belongs to us alone; None if the library lacks the function."""
    try:
        function = library[name]
    except AttributeError:
        return None
    function.argtypes, function.restype = argtypes, restype
    return function
