#!/usr/bin/env python3
"""What two GPUs' links to host memory carry, by bare driver calls, as JSON lines.

    links.py --gib 8

A copy that is queued in the neighbour's context goes over the neighbour's link, and NVLink from there on. So
do copies from this GPU. `relay` first copies into a ring in the neighbour's memory. `context` is what its
context takes. Samples of what was copied are compared.
"""

import argparse
import ctypes as C
import json
import mmap
import threading
import time

import pynvml

MIB, GIB = 1 << 20, 1 << 30
RING_PIECES = 4
STACK, PRINTF, HEAP = 0, 1, 2

cuda = C.CDLL("libcuda.so.1")
libc = C.CDLL("libc.so.6")
address = C.c_ulonglong


class Location(C.Structure):
    _fields_ = [("type", C.c_int), ("id", C.c_int)]


class Properties(C.Structure):
    _fields_ = [
        ("type", C.c_int),
        ("handles", C.c_int),
        ("location", Location),
        ("windows", C.c_void_p),
        ("flags", C.c_ubyte * 8),
    ]


class Access(C.Structure):
    _fields_ = [("location", Location), ("flags", C.c_int)]


def call(name: str, *words) -> None:
    code = getattr(cuda, name)(*words)
    if code:
        raise RuntimeError(f"{name} failed: {code}")


def say(**figures) -> None:
    print(json.dumps(figures), flush=True)


def used_mib(gpu: int) -> int:
    return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(gpu)).used // MIB


class Gpu:
    """Its primary context, and a stream for copies."""

    def __init__(self, number: int):
        device, self.context, self.stream = C.c_int(), C.c_void_p(), C.c_void_p()
        call("cuDeviceGet", C.byref(device), number)
        call("cuDevicePrimaryCtxRetain", C.byref(self.context), device)
        self.enter()
        call("cuStreamCreate", C.byref(self.stream), 1)

    def enter(self) -> None:
        call("cuCtxSetCurrent", self.context)

    def wait(self) -> None:
        self.enter()
        call("cuStreamSynchronize", self.stream)


def memory_of(gpu: int, size: int) -> int:
    """Memory of this GPU that both have access to."""
    handle, at = address(), address()
    properties = Properties(1, 1, Location(1, gpu), None)
    call("cuMemCreate", C.byref(handle), C.c_size_t(size), C.byref(properties), address(0))
    call("cuMemAddressReserve", C.byref(at), C.c_size_t(size), C.c_size_t(0), address(0), address(0))
    call("cuMemMap", at, C.c_size_t(size), C.c_size_t(0), handle, address(0))
    both = (Access * 2)(Access(Location(1, 0), 3), Access(Location(1, 1), 3))
    call("cuMemSetAccess", at, C.c_size_t(size), both, C.c_size_t(2))
    return at.value


class Links:
    def __init__(self, size: int):
        self.size, self.own = size, Gpu(0)
        before = used_mib(1)
        began = time.perf_counter()
        self.other = Gpu(1)
        seconds, made = time.perf_counter() - began, used_mib(1) - before
        for limit, value in ((STACK, 0), (PRINTF, 4096), (HEAP, 4096)):
            call("cuCtxSetLimit", limit, C.c_size_t(value))
        say(what="context", seconds=round(seconds, 3), mib=made, mib_without_stacks=used_mib(1) - before)
        self.own.enter()
        self.host = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.host.madvise(mmap.MADV_HUGEPAGE)
        self.from_ = C.addressof(C.c_char.from_buffer(self.host))
        fill = [threading.Thread(target=self._fill, args=(part,)) for part in range(8)]
        [thread.start() for thread in fill]
        [thread.join() for thread in fill]
        for at in range(0, size, 256 * MIB):
            call("cuMemHostRegister_v2", C.c_void_p(self.from_ + at), C.c_size_t(256 * MIB), 1)
        self.to, self.neighbours = memory_of(0, size), memory_of(1, size)

    def _fill(self, part: int) -> None:
        libc.memset(C.c_void_p(self.from_ + part * self.size // 8), part + 1, C.c_size_t(self.size // 8))

    def _piece(self, gpu: Gpu, at: int, piece: int, to_device: bool) -> None:
        gpu.enter()
        host, size = C.c_void_p(self.from_ + at), C.c_size_t(piece)
        if to_device:
            call("cuMemcpyHtoDAsync_v2", address(self.to + at), host, size, gpu.stream)
        else:
            call("cuMemcpyDtoHAsync_v2", host, address(self.to + at), size, gpu.stream)

    def rate(self, share: float, piece: int, to_device: bool = True) -> float:
        """GiB a second with this share of the pieces over the other link."""
        began, over = time.perf_counter(), 0
        for nth in range(self.size // piece):
            is_over = over + 1 <= share * (nth + 1)
            over += is_over
            self._piece(self.other if is_over else self.own, nth * piece, piece, to_device)
        self.own.wait()
        self.other.wait()
        return round(self.size / GIB / (time.perf_counter() - began), 1)

    def relay(self, piece: int) -> float:
        """All over the other link, through a ring there."""
        began, ring = time.perf_counter(), self.neighbours
        self.other.enter()
        for nth in range(self.size // piece):
            at, size = address(ring + nth % RING_PIECES * piece), C.c_size_t(piece)
            host = C.c_void_p(self.from_ + nth * piece)
            call("cuMemcpyHtoDAsync_v2", at, host, size, self.other.stream)
            call("cuMemcpyDtoDAsync_v2", address(self.to + nth * piece), at, size, self.other.stream)
        self.other.wait()
        return round(self.size / GIB / (time.perf_counter() - began), 1)

    def from_neighbour(self, piece: int) -> float:
        """From memory of the neighbour's, by this GPU's copy engine."""
        self.own.enter()
        began = time.perf_counter()
        for at in range(0, self.size, piece):
            to, from_ = address(self.to + at), address(self.neighbours + at)
            call("cuMemcpyDtoDAsync_v2", to, from_, C.c_size_t(piece), self.own.stream)
        self.own.wait()
        return round(self.size / GIB / (time.perf_counter() - began), 1)

    def wrong(self) -> int:
        """Samples of a MiB that are not what host memory has."""
        self.own.enter()
        back = mmap.mmap(-1, MIB)
        into, bad = C.addressof(C.c_char.from_buffer(back)), 0
        for at in range(0, self.size - MIB, 65 * MIB):
            call("cuMemcpyDtoH_v2", C.c_void_p(into), address(self.to + at), C.c_size_t(MIB))
            bad += libc.memcmp(C.c_void_p(into), C.c_void_p(self.from_ + at), C.c_size_t(MIB)) != 0
        return bad


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--gib", type=int, default=8)
    options = arguments.parse_args()
    call("cuInit", 0)
    pynvml.nvmlInit()
    links = Links(options.gib * GIB)
    for piece in (64 * MIB, 16 * MIB, 2 * MIB):
        rates = {"own": 0.0, "other": 1.0, "both": 0.5}
        found = {name: links.rate(share, piece) for name, share in rates.items()}
        say(what="to the GPU, GiB/s", piece_mib=piece // MIB, **found, wrong=links.wrong())
    found = {name: links.rate(share, 16 * MIB, False) for name, share in rates.items()}
    say(what="from the GPU, GiB/s", piece_mib=16, **found)
    say(what="relay, GiB/s", piece_mib=64, other=links.relay(64 * MIB), wrong=links.wrong())
    say(what="from the neighbour's memory, GiB/s", piece_mib=64, rate=links.from_neighbour(64 * MIB))


if __name__ == "__main__":
    main()
