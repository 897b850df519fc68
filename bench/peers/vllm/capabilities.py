"""Linux's capabilities of one thread: root without the right to write where a folder's mode forbids it."""

import contextlib
import ctypes
import os
from collections.abc import Iterator

VERSION = 0x20080522  # of the kernel's interface, with two sets of 32 bits
OVERRIDE = 1  # CAP_DAC_OVERRIDE


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable"))


@contextlib.contextmanager
def without_override() -> Iterator[None]:
    """In this thread a folder's mode holds for root, too."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = _Header(VERSION, 0), (_Sets * 2)()

    def call(name: str) -> None:
        if getattr(libc, name)(ctypes.byref(header), ctypes.byref(sets)):
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

    call("capget")
    effective = sets[0].effective
    sets[0].effective = effective & ~(1 << OVERRIDE)
    call("capset")
    try:
        yield
    finally:
        sets[0].effective = effective
        call("capset")
