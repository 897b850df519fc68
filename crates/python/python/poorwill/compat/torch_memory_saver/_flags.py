"""The region that each thread is in, in the words of the other package's C symbols.

`cdll` is private there, and used all the same: projects look whether a thread is in a region, and leave it
for a while.
"""

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

from poorwill.compat.torch_memory_saver import _environment
from poorwill.compat.torch_memory_saver._kinds import Kind
from poorwill.torch import Outside


class Flags(threading.local):
    """The regions of one thread, the innermost last."""

    def __init__(self) -> None:
        self._kinds: list[Kind] = []
        self._outside: list[Outside] = []

    @property
    def innermost(self) -> Kind | None:
        """The region that allocations of this thread belong to."""
        return self._kinds[-1] if self._kinds and not self._outside else None

    @contextlib.contextmanager
    def entered(self, kind: Kind) -> Iterator[None]:
        """In a region."""
        self._kinds.append(kind)
        outside, self._outside = self._outside, []
        try:
            yield
        finally:
            self._outside = outside
            self._kinds.pop()

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """Out of it again."""
        with Outside() as outside:
            self._outside.append(outside)
            try:
                yield
            finally:
                self._outside.pop()


class Symbols:
    """The symbols, in Python. Those of the CUDA runtime are looked up in the process."""

    def __init__(self, flags: Flags) -> None:
        self._flags = flags
        self._left: list[Any] = []

    def tms_get_interesting_region(self) -> bool:
        """Whether this thread's allocations belong to a region."""
        return self._flags.innermost is not None

    def tms_set_interesting_region(self, interesting: bool) -> None:
        """Leaves the innermost region for a while, or returns to it."""
        if interesting == self.tms_get_interesting_region():
            return
        if interesting:
            if self._left:
                self._left.pop().__exit__(None, None, None)
        else:
            self._left.append(self._flags.left())
            self._left[-1].__enter__()

    def tms_get_current_tag(self) -> bytes:
        """The innermost region's tag."""
        kind = self._flags.innermost
        return b"default" if kind is None else kind.tag.encode()

    def tms_get_enable_cpu_backup(self) -> bool:
        """Whether it is backed up in host memory."""
        kind = self._flags.innermost
        return kind is not None and kind.is_readable

    def tms_get_enable_disk_backup(self) -> bool:
        """Whether it is backed up on disk."""
        kind = self._flags.innermost
        return kind is not None and kind.backup == "disk"

    def tms_get_cpu_backup_backend(self) -> bytes:
        """Its kind of host memory."""
        kind = self._flags.innermost
        backend = kind.backup if kind is not None and kind.is_readable else _environment.backend()
        return backend.encode()

    def __getattr__(self, name: str) -> Any:
        return getattr(ctypes.CDLL(None), name)
