"""The machine that the fake libcuda is: real memory, streams and events, without a GPU.

What PyTorch asks the CUDA runtime for is asked of the driver's interface here.
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from typing import Any, Protocol

OUT_OF_MEMORY = 2
NOT_READY = 600
NON_BLOCKING = 1
WITHOUT_TIMES = 2


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("compression", c_ubyte),
        ("rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", c_int))


PINNED = 1
ON_DEVICE = 1
READ_AND_WRITE = 3
FOR_ALL_AND_MAPPED = 3
HOST_WINDOW = 1 << 56
"""The fake's bit in addresses by which a GPU knows memory of the host. The real library's copies know such
addresses and the fake's do not, so they are made here."""


class DriverError(RuntimeError):
    """A call of the driver failed."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"CUDA error: {call} gave {code}")
        self.code = code


class Driver:
    """The fake libcuda of this process; the same that poorwill's library has loaded."""

    def __init__(self, path: str | None = None) -> None:
        self._library = ctypes.CDLL(path or os.environ["POORWILL_FAKE_LIBCUDA"])
        self._call("cuInit", c_uint(0))
        self._contexts: dict[int, c_void_p] = {}
        # By address, what is left to do to give it back.
        self._mappings: dict[int, list[tuple[Any, ...]]] = {}
        # Python makes pending calls in the midst of what is one function of C's.
        self._lock = threading.RLock()

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise DriverError(name, code)

    @contextmanager
    def _current(self, device: int) -> Iterator[None]:
        with self._lock:
            if device not in self._contexts:
                context = c_void_p()
                self._call("cuDevicePrimaryCtxRetain", byref(context), c_int(device))
                self._contexts[device] = context
        self._call("cuCtxPushCurrent_v2", self._contexts[device])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def devices(self) -> int:
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        return count.value

    def memory_bytes(self, device: int) -> tuple[int, int]:
        free, total = c_size_t(), c_size_t()
        with self._current(device):
            self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def allocate(self, size: int, device: int, stream: int) -> int:
        """As `cudaMalloc` does."""
        location = _Location(ON_DEVICE, device)
        properties = _Properties(type=PINNED, location=location)
        backing, address = c_uint64(), c_uint64()
        with self._current(device):
            granule = c_size_t()
            self._call("cuMemGetAllocationGranularity", byref(granule), byref(properties), c_int(0))
            mapped = -(-size // granule.value) * granule.value
            try:
                self._call("cuMemCreate", byref(backing), c_size_t(mapped), byref(properties), c_uint64(0))
            except DriverError as error:
                if error.code == OUT_OF_MEMORY:
                    return 0
                raise
            self._call(
                "cuMemAddressReserve", byref(address), c_size_t(mapped), c_size_t(0), c_uint64(0), c_uint64(0)
            )
            self._call("cuMemMap", address, c_size_t(mapped), c_size_t(0), backing, c_uint64(0))
            access = _Access(location, READ_AND_WRITE)
            self._call("cuMemSetAccess", address, c_size_t(mapped), byref(access), c_size_t(1))
        with self._lock:
            self._mappings[address.value] = [
                ("cuMemUnmap", c_uint64(address.value), c_size_t(mapped)),
                ("cuMemRelease", c_uint64(backing.value)),
                ("cuMemAddressFree", c_uint64(address.value), c_size_t(mapped)),
            ]
        return address.value

    def free(self, address: int, size: int, device: int, stream: int) -> None:
        """As `cudaFree` does, which waits for the device."""
        with self._lock:
            steps = self._mappings[address]
        with self._current(device):
            self._call("cuCtxSynchronize")
            # What fails can be tried again, from there on.
            while steps:
                self._call(*steps[0])
                del steps[0]
        with self._lock:
            del self._mappings[address]

    def new_stream(self, device: int) -> int:
        stream = c_void_p()
        with self._current(device):
            self._call("cuStreamCreate", byref(stream), c_uint(NON_BLOCKING))
        assert stream.value is not None
        return stream.value

    def synchronize(self, device: int, stream: int | None) -> None:
        with self._current(device):
            if stream is None:
                self._call("cuCtxSynchronize")
            else:
                self._call("cuStreamSynchronize", c_void_p(stream))

    def record(self, device: int, stream: int) -> int:
        event = c_void_p()
        with self._current(device):
            self._call("cuEventCreate", byref(event), c_uint(WITHOUT_TIMES))
            self._call("cuEventRecord", event, c_void_p(stream))
        assert event.value is not None
        return event.value

    def has_passed(self, device: int, event: int) -> bool:
        with self._current(device):
            try:
                self._call("cuEventQuery", c_void_p(event))
            except DriverError as error:
                if error.code == NOT_READY:
                    return False
                raise
            self._call("cuEventDestroy_v2", c_void_p(event))
        return True

    def begin_capture(self, device: int, stream: int) -> None:
        """Has the stream captured where the library can play that."""
        if hasattr(self._library, "cuStreamBeginCapture_v2"):
            with self._current(device):
                self._call("cuStreamBeginCapture_v2", c_void_p(stream), c_int(0))

    def end_capture(self, device: int, stream: int) -> None:
        if hasattr(self._library, "cuStreamEndCapture"):
            with self._current(device):
                self._call("cuStreamEndCapture", c_void_p(stream), byref(c_void_p()))

    def _host_memory(self, device: int, address: int, size: int, stream: int) -> int | None:
        """Where the host has what a GPU knows by this address, when the stream has come so far; None for what
        is on the GPU."""
        if not address & HOST_WINDOW:
            return None
        with self._current(device):
            self._call("cuStreamSynchronize", c_void_p(stream))
            host, known = address & ~HOST_WINDOW, c_uint64()
            # All of it is registered still.
            for place in (host, host + size - 1):
                self._call("cuMemHostGetDevicePointer_v2", byref(known), c_void_p(place), c_uint(0))
                assert known.value == place | HOST_WINDOW
        return host

    def fill(self, device: int, address: int, size: int, byte: int, stream: int) -> None:
        host = self._host_memory(device, address, size, stream)
        if host is not None:
            ctypes.memset(host, byte, size)
            return
        with self._current(device):
            self._call("cuMemsetD8Async", c_uint64(address), c_ubyte(byte), c_size_t(size), c_void_p(stream))

    def read(self, device: int, address: int, size: int, stream: int) -> bytes:
        host = self._host_memory(device, address, size, stream)
        if host is not None:
            return ctypes.string_at(host, size)
        content = (c_char * size)()
        with self._current(device):
            self._call("cuMemcpyDtoHAsync_v2", content, c_uint64(address), c_size_t(size), c_void_p(stream))
            self._call("cuStreamSynchronize", c_void_p(stream))
        return content.raw

    def write(self, device: int, address: int, content: bytes, stream: int) -> None:
        host = self._host_memory(device, address, len(content), stream)
        if host is not None:
            ctypes.memmove(host, content, len(content))
            return
        with self._current(device):
            self._call(
                "cuMemcpyHtoDAsync_v2", c_uint64(address), content, c_size_t(len(content)), c_void_p(stream)
            )
            self._call("cuStreamSynchronize", c_void_p(stream))

    def queue(self, device: int, address: int, source: int, size: int, stream: int) -> None:
        with self._current(device):
            self._call(
                "cuMemcpyHtoDAsync_v2", c_uint64(address), c_void_p(source), c_size_t(size), c_void_p(stream)
            )

    def lock(self, address: int, size: int) -> None:
        """As `cudaHostRegister` does."""
        with self._current(0):
            self._call("cuMemHostRegister_v2", c_void_p(address), c_size_t(size), c_uint(FOR_ALL_AND_MAPPED))

    def is_locked(self, address: int) -> bool:
        known = c_uint64()
        with self._current(0):
            try:
                self._call("cuMemHostGetDevicePointer_v2", byref(known), c_void_p(address), c_uint(0))
            except DriverError:
                return False
        return True

    def unlock(self, address: int) -> None:
        with self._current(0):
            self._call("cuMemHostUnregister", c_void_p(address))


class Segments(Protocol):
    """The source of segments: the machine, or a plugged-in allocator."""

    def allocate(self, size: int, device: int, stream: int) -> int:
        """The address of a segment; 0 where there is none."""

    def free(self, address: int, size: int, device: int, stream: int) -> None: ...


class Pluggable:
    """An allocator made of two C functions, as `torch._C._cuda_customAllocator` makes one.

    They are called with the allocator's lock held and without the interpreter's.
    """

    _alloc_type = ctypes.CFUNCTYPE(c_void_p, c_size_t, c_int, c_void_p)
    _free_type = ctypes.CFUNCTYPE(None, c_void_p, c_size_t, c_int, c_void_p)

    def __init__(self, alloc: int, free: int) -> None:
        self._alloc = self._alloc_type(alloc)
        self._free = self._free_type(free)

    def allocate(self, size: int, device: int, stream: int) -> int:
        return self._alloc(size, device, stream) or 0

    def free(self, address: int, size: int, device: int, stream: int) -> None:
        self._free(address, size, device, stream)


def addresses(path: str, *names: str) -> list[int]:
    """Where functions of a shared library are."""
    library = ctypes.CDLL(path)
    return [ctypes.cast(getattr(library, name), c_void_p).value or 0 for name in names]
