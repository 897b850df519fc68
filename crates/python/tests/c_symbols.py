"""The C functions that PyTorch calls, as ctypes has them, and slow work for the fake libcuda.

functions = Functions.of(arena, "weights")
segment = functions.alloc(2 << 20)
functions.free(segment, 2 << 20)
"""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from ctypes import c_int, c_size_t, c_ssize_t, c_uint64, c_void_p
from functools import partial
from typing import Any

from fake_torch import Driver
from helpers import together
from poorwill import Arena, _native

MIB = 1 << 20
GRANULE = 2 * MIB

_libc = ctypes.CDLL(None, use_errno=True)
# What a semaphore of POSIX takes at most.
_SEMAPHORE_BYTES = 64


class Functions:
    """The functions of one arena and one tag: to get segments, and to give them back.

    While one runs the interpreter's lock is kept if `keeps_gil`, and given away otherwise.
    """

    def __init__(self, alloc: Any, free: Any) -> None:
        self._alloc, self._free = alloc, free
        for function in (alloc, free):
            function.restype = None
        alloc.restype = c_void_p
        self.address = ctypes.cast(alloc, c_void_p).value

    @classmethod
    def of(cls, arena: Arena, tag: str, *, keeps_gil: bool = False) -> "Functions":
        made = ctypes.PYFUNCTYPE if keeps_gil else ctypes.CFUNCTYPE
        alloc, free = _native.torch_allocator(arena, tag)
        return cls(
            made(c_void_p, c_ssize_t, c_int, c_void_p)(alloc),
            made(None, c_void_p, c_ssize_t, c_int, c_void_p)(free),
        )

    @classmethod
    def exported(cls, *, keeps_gil: bool = False) -> "Functions":
        """Those that `CUDAPluggableAllocator` finds by name."""
        library = (ctypes.PyDLL if keeps_gil else ctypes.CDLL)(str(_native.__file__))
        alloc, free = library.poorwill_alloc, library.poorwill_free
        alloc.argtypes = [c_ssize_t, c_int, c_void_p]
        free.argtypes = [c_void_p, c_ssize_t, c_int, c_void_p]
        return cls(alloc, free)

    def alloc(self, size: int, stream: int = 0, device: int = 0) -> int:
        """The address of a segment; 0 where there is none."""
        return self._alloc(size, device, stream) or 0

    def free(self, segment: int, size: int, stream: int = 0, device: int = 0) -> None:
        self._free(segment, size, device, stream)


class CachingAllocatorsLock:
    """Functions that are called as PyTorch calls them, with a lock of its own.

    A wait for it releases the interpreter's lock; the thread that has it may take it again.
    """

    def __init__(self, functions: Functions, mutex: Any) -> None:
        self._functions, self._mutex = functions, mutex

    def alloc(self, size: int, stream: int = 0, device: int = 0) -> int:
        with self._mutex:
            return self._functions.alloc(size, stream, device)

    def free(self, segment: int, size: int, stream: int = 0, device: int = 0) -> None:
        with self._mutex:
            self._functions.free(segment, size, stream, device)


class Gpu(Driver):
    """The fake libcuda, and work that takes its time."""

    def __init__(self, path: str | None = None) -> None:
        super().__init__(path)
        self._semaphores: list[Any] = []

    def used_bytes(self, device: int = 0) -> int:
        free_bytes, total_bytes = self.memory_bytes(device)
        return total_bytes - free_bytes

    def census(self, device: int = 0) -> dict[str, int]:
        """What there is on a device, by the fake's own count."""
        names = (
            *("reservations", "backings", "mappings", "streams", "events", "captures", "graphs"),
            *("host", "contexts", "bytes", "waiting_calls"),
        )
        counts = (c_uint64 * len(names))()
        self._call("poorwillFakeCensus", c_int(device), counts)
        return dict(zip(names, counts, strict=True))

    def pause(self, stream: int, microseconds: int, device: int = 0) -> None:
        """Makes the stream do nothing for a while. No thread has to be awake for its end."""
        with self._current(device):
            self._call("cuLaunchHostFunc", c_void_p(stream), _libc.usleep, c_size_t(microseconds))

    @contextlib.contextmanager
    def held(self, stream: int, device: int = 0) -> Iterator[None]:
        """What is queued on the stream from now on begins at the end of the block."""
        semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
        # The stream may look at it behind the end of the block.
        self._semaphores.append(semaphore)
        assert _libc.sem_init(semaphore, 0, 0) == 0
        with self._current(device):
            self._call("cuLaunchHostFunc", c_void_p(stream), _libc.sem_wait, semaphore)
        try:
            yield
        finally:
            assert _libc.sem_post(semaphore) == 0

    def holds(self, address: int, size: int, byte: int, stream: int = 0) -> bool:
        """Whether each byte there is this one, when the stream has come so far."""
        return self.read(0, address, size, stream) == bytes([byte]) * size

    def arm(self, first: int, count: int) -> None:
        """From now on the calls of these numbers fail, of all threads."""
        self._library.poorwillFakeArm(c_uint64(first), c_uint64(count))

    def disarm(self) -> int:
        """Ends that. Returns how many calls there were."""
        self._library.poorwillFakeDisarm.restype = c_uint64
        return int(self._library.poorwillFakeDisarm())

    def current_context(self) -> int:
        context = c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        return context.value or 0


class Crowd:
    """Threads of which none may fail, and none may hang."""

    def __init__(self) -> None:
        self._is_done = threading.Event()
        self._workers: list[Callable[[], None]] = []
        self._others: list[Callable[[], None]] = []

    def works(self, work: Any, *arguments: Any) -> None:
        self._workers.append(partial(work, *arguments))

    def keeps_on(self, work: Any, *arguments: Any) -> None:
        """Does `work` again and again until the workers have ended."""

        def repeat() -> None:
            while not self._is_done.is_set():
                work(*arguments)

        self._others.append(repeat)

    def run(self) -> None:
        """The suite's watchdog shows stuck threads."""
        together(self._work, *self._others)

    def _work(self) -> None:
        try:
            together(*self._workers)
        finally:
            self._is_done.set()
