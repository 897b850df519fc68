#!/usr/bin/env python3
"""Parts of a sleep and a wake on one GPU that copy nothing, beside the driver's calls for the same handles.

Prints a JSON object for each cycle, in milliseconds. `rest_s` is how long the memory was free before it came
back. `beside_ms` is what a sleep or wake takes beyond its phases. `outside_ms` is what the call takes beyond
that: emptying PyTorch's cache, and a thread. `asked` are single queries. A sleep synchronizes once, and makes
each of the others twice.
"""

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator
from uuid import UUID

from cuda_driver import Access, Prop, declare

GRANULE, SPAN = 2 << 20, 1 << 30
# CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED.
RDMA_WITH_VIRTUAL_MEMORY = 110


class Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("instances", ctypes.c_uint * 2),
    ]


def handles(segment: dict) -> Iterator[tuple[int, int]]:
    """Offset and size of each handle that a wake maps in a segment, by docs/adr/0018."""
    users: dict[int, set[int]] = {}
    for block in segment["blocks"]:
        if block["kind"] == "live":
            start = block["addr"] - segment["addr"]
            for granule in range(start // GRANULE, (start + block["bytes"] - 1) // GRANULE + 1):
                users.setdefault(granule, set()).add(block["addr"])
    first, length = 0, 0
    for granule, blocks in sorted(users.items()):
        continues = length > 0 and granule == first + length and len(blocks) == 1
        if continues and blocks == users[first] and length < SPAN // GRANULE:
            length += 1
            continue
        if length:
            yield first * GRANULE, length * GRANULE
        first, length = granule, 1
    if length:
        yield first * GRANULE, length * GRANULE


def timed_ms(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1e3


class DriverCalls:
    """The driver's calls by themselves, one reservation for each segment, as the pool has them."""

    def __init__(self, segments: list[tuple[int, list[tuple[int, int]]]]):
        self._cuda = ctypes.CDLL("libcuda.so.1")
        declare(self._cuda)
        self._prop, self._access, self._created = Prop(), Access(), []
        self._prop.type = self._prop.location.type = self._access.location.type = 1
        self._access.flags = 3
        self._prop.flags[1] = self._opens_to_network_cards()
        self._ranges = []
        for reserved_bytes, of_segment in segments:
            base = ctypes.c_uint64()
            self._call("cuMemAddressReserve", ctypes.byref(base), reserved_bytes, GRANULE, 0, 0)
            self._ranges += [(base.value + offset, length) for offset, length in of_segment]

    def _call(self, name: str, *arguments: object) -> None:
        checked(self._cuda, name, *arguments)

    def _opens_to_network_cards(self) -> bool:
        """As the pool's memory is where the GPU supports that."""
        can = ctypes.c_int()
        code = self._cuda.cuDeviceGetAttribute(ctypes.byref(can), RDMA_WITH_VIRTUAL_MEMORY, 0)
        return code == 0 and can.value != 0

    def _create(self) -> None:
        for _, length in self._ranges:
            handle = ctypes.c_uint64()
            self._call("cuMemCreate", ctypes.byref(handle), length, ctypes.byref(self._prop), 0)
            self._created.append(handle.value)

    def _map(self) -> None:
        for (addr, length), handle in zip(self._ranges, self._created, strict=True):
            self._call("cuMemMap", addr, length, 0, handle, 0)

    def _open(self) -> None:
        for addr, length in self._ranges:
            self._call("cuMemSetAccess", addr, length, ctypes.byref(self._access), 1)

    def _unmap(self) -> None:
        for addr, length in self._ranges:
            self._call("cuMemUnmap", addr, length)

    def _release(self) -> None:
        while self._created:
            self._call("cuMemRelease", self._created.pop())

    def bring_in(self) -> dict[str, float]:
        return steps(create_ms=self._create, map_ms=self._map, access_ms=self._open)

    def give_back(self) -> dict[str, float]:
        return steps(unmap_ms=self._unmap, release_ms=self._release)

    def ask(self) -> dict[str, float]:
        """What each query takes."""
        free, total, uuid = ctypes.c_size_t(), ctypes.c_size_t(), (ctypes.c_ubyte * 16)()
        asked = {
            "synchronize_ms": lambda: self._call("cuCtxSynchronize"),
            "mem_get_info_ms": lambda: self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total)),
        }
        self._call("cuDeviceGetUuid_v2", uuid, 0)
        return quickest(asked) | nvml_queries(f"GPU-{UUID(bytes=bytes(uuid))}".encode())


def nvml_queries(uuid: bytes) -> dict[str, float]:
    """Empty where NVML is not there, or refuses one of them."""
    device, listed = ctypes.c_void_p(), (Process * 64)()

    def by_uuid() -> None:
        checked(nvml, "nvmlDeviceGetHandleByUUID", uuid, ctypes.byref(device))

    def processes() -> None:
        count = ctypes.c_uint(len(listed))
        checked(nvml, "nvmlDeviceGetComputeRunningProcesses_v3", device, ctypes.byref(count), listed)

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        checked(nvml, "nvmlInit_v2")
        took = quickest({"nvml_by_uuid_ms": by_uuid, "nvml_processes_ms": processes})
        checked(nvml, "nvmlShutdown")
    except (OSError, RuntimeError) as error:
        print(f"no figures of NVML: {error}", file=sys.stderr)
        return {}
    return took


def checked(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    code = getattr(library, name)(*arguments)
    if code != 0:
        raise RuntimeError(f"{name} gave {code}")


def quickest(asked: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Of five calls each: the first may load something."""
    return {name: min(timed_ms(call) for _ in range(5)) for name, call in asked.items()}


def steps(**actions: Callable[[], None]) -> dict[str, float]:
    took = {name: timed_ms(action) for name, action in actions.items()}
    return {"sum_ms": sum(took.values()), **took}


def parts(call: Callable[[], object], *phases: str) -> dict[str, float]:
    """What a sleep or wake took in all, and where."""
    reports = []
    call_ms = timed_ms(lambda: reports.append(call()))
    [report] = reports
    seconds = {phase: getattr(report.phases, phase) for phase in phases}
    return {
        "call_ms": call_ms,
        "outside_ms": call_ms - report.seconds * 1e3,
        "beside_ms": (report.seconds - sum(seconds.values())) * 1e3,
        **{f"{phase.removesuffix('_s')}_ms": second * 1e3 for phase, second in seconds.items()},
    }


def described(tensors: int, sizes: list[int], mapped_bytes: int) -> dict[str, int | float]:
    """Exits where the driver's calls would be for other memory than the pool's."""
    if sum(sizes) != mapped_bytes:
        sys.exit(f"the handles found have {sum(sizes)} bytes, and the wake mapped {mapped_bytes}")
    gib = round(sum(sizes) / (1 << 30), 3)
    return {"tensors": tensors, "handles": len(sizes), "gib": gib, "bytes_are_the_pools": True}


def rounded(figures: dict) -> dict:
    return {
        name: rounded(figure) if isinstance(figure, dict) else round(figure, 3)
        for name, figure in figures.items()
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--gib", type=float, default=24)
    arguments.add_argument("--rests-s", type=float, nargs="+", default=[0, 0.1, 2, 0, 0.1, 2])
    options = arguments.parse_args()

    # Here, so that the rest can be tried without them.
    import poorwill
    import torch
    from sleep_wake import CONTENTS, load

    torch.empty(1, device="cuda")
    with poorwill.pool(tag="weights"):
        tensors = load(options.gib, CONTENTS["constant"]())
    torch.cuda.synchronize()
    loaded = parts(lambda: poorwill.sleep(level=2), "unmap_s", "release_s")
    mapped_bytes = poorwill.wake().mapped_bytes
    segments = [(segment["bytes"], list(handles(segment))) for segment in poorwill.arena().snapshot()]
    sizes = [length for _, lengths in segments for _, length in lengths]
    memory = described(len(tensors), sizes, mapped_bytes)
    calls = DriverCalls(segments)
    for rest_s in options.rests_s:
        awake = calls.ask()
        torch.cuda.synchronize()
        sleep = parts(lambda: poorwill.sleep(level=2), "unmap_s", "release_s")
        time.sleep(rest_s)
        wake = parts(poorwill.wake, "create_s", "map_s")
        poorwill.sleep(level=2)
        asleep = calls.ask()
        calls.bring_in()
        given_back = calls.give_back()
        time.sleep(rest_s)
        brought_in = calls.bring_in()
        calls.give_back()
        poorwill.wake()
        figures = {
            "first_sleep": loaded,
            "sleep": sleep,
            "give_back": given_back,
            "sleep_ratio": sleep["call_ms"] / given_back["sum_ms"],
            "wake": wake,
            "bring_in": brought_in,
            "wake_ratio": wake["call_ms"] / brought_in["sum_ms"],
            "asked": {"awake": awake, "asleep": asleep},
        }
        print(json.dumps({**memory, "rest_s": rest_s, **rounded(figures)}), flush=True)


if __name__ == "__main__":
    main()
