#!/usr/bin/env python3
"""The machine's own limits: the link, pinning host memory, virtual memory calls. Prints JSON lines."""

# What is defined in a turn of a loop is called in that turn only.
# ruff: noqa: B023

import concurrent.futures
import ctypes
import gc
import json
import time

import torch
from cuda_driver import Access, Prop, declare

GIB, MIB = 1 << 30, 1 << 20
POPULATE_WRITE, HUGEPAGE = 23, 14  # madvise advice
libc = ctypes.CDLL("libc.so.6", use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
cuda = ctypes.CDLL("libcuda.so.1")
declare(cuda)
size_t, pointer = ctypes.c_size_t, ctypes.c_void_p
for name, arguments in {
    "cuMemHostRegister_v2": [pointer, size_t, ctypes.c_uint],
    "cuMemHostUnregister": [pointer],
    "cuCtxSetCurrent": [pointer],
}.items():
    getattr(cuda, name).argtypes = arguments


def report(what: str, **figures):
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}
    print(json.dumps({"what": what, **rounded}), flush=True)


def timed(action) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def link():
    host = torch.ones(2 * GIB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def both():
        with torch.cuda.stream(streams[0]):
            device[:GIB].copy_(host[:GIB], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            host[GIB:].copy_(device[GIB:], non_blocking=True)

    for name, action in {
        "h2d": lambda: device.copy_(host, non_blocking=True),
        "d2h": lambda: host.copy_(device, non_blocking=True),
        "both": both,
    }.items():
        action()
        report("link " + name, gib_per_s=2 / min(timed(action) for _ in range(5)))


def pinning(gib: int = 8):
    report(
        "pin by torch", gib_per_s=4 / timed(lambda: torch.empty(4 * GIB, dtype=torch.uint8, pin_memory=True))
    )
    gc.collect()
    context = ctypes.c_void_p()
    cuda.cuCtxGetCurrent(ctypes.byref(context))
    for huge, threads, piece in [(False, 16, 256), (True, 1, 1024), (True, 8, 256), (True, 16, 64)]:
        base = libc.mmap(None, gib * GIB + 2 * MIB, 3, 0x22, -1, 0)
        start = -(-base // (2 * MIB)) * 2 * MIB
        if huge:
            libc.madvise(start, gib * GIB, HUGEPAGE)

        def register(index):
            cuda.cuCtxSetCurrent(context)
            libc.madvise(start + index * piece * MIB, piece * MIB, POPULATE_WRITE)
            return cuda.cuMemHostRegister_v2(start + index * piece * MIB, piece * MIB, 0)

        begin = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            codes = set(pool.map(register, range(gib * 1024 // piece)))
        seconds = time.perf_counter() - begin
        report(
            "pin by registering",
            huge=huge,
            threads=threads,
            piece_mib=piece,
            codes=list(codes),
            gib_per_s=gib / seconds,
        )
        for index in range(gib * 1024 // piece):
            cuda.cuMemHostUnregister(start + index * piece * MIB)
        libc.munmap(base, gib * GIB + 2 * MIB)


def virtual_memory():
    prop, access = Prop(), Access()
    prop.type = prop.location.type = access.location.type = 1
    access.flags = 3
    # The second is what poorwill maps large tensors in: 768 chunks.
    for chunk, total in [
        (2 * MIB, 2 * GIB),
        (32 * MIB, 24 * GIB),
        (256 * MIB, 16 * GIB),
        (GIB, 32 * GIB),
        (4 * GIB, 64 * GIB),
    ]:
        count, base, handles, codes, took = total // chunk, ctypes.c_uint64(), [], set(), {}

        def step(name, action):
            begin = time.perf_counter()
            action()
            took[name + "_us_per_chunk"] = (time.perf_counter() - begin) * 1e6 / count

        def create():
            for _ in range(count):
                handle = ctypes.c_uint64()
                codes.add(cuda.cuMemCreate(ctypes.byref(handle), chunk, ctypes.byref(prop), 0))
                handles.append(handle.value)

        def map_all():
            codes.update(cuda.cuMemMap(base.value + i * chunk, chunk, 0, h, 0) for i, h in enumerate(handles))

        codes.add(cuda.cuMemAddressReserve(ctypes.byref(base), total, 0, 0, 0))
        step("create", create)
        step("map", map_all)
        step("access", lambda: codes.add(cuda.cuMemSetAccess(base.value, total, ctypes.byref(access), 1)))
        step("unmap", lambda: codes.add(cuda.cuMemUnmap(base.value, total)))
        step("release", lambda: codes.update(cuda.cuMemRelease(h) for h in handles))
        cuda.cuMemAddressFree(base.value, total)
        report("virtual memory", chunk_mib=chunk // MIB, codes=list(codes), **took)


if __name__ == "__main__":
    torch.empty(1, device="cuda")
    report("device", name=torch.cuda.get_device_name(), total_gib=torch.cuda.mem_get_info()[1] / GIB)
    link()
    pinning()
    torch.cuda.empty_cache()
    virtual_memory()
