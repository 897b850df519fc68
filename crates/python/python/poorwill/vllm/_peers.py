"""Memory of this rank that other processes map, as far as vLLM's objects show it: name, bytes and addresses.

Who maps it keeps its pages. Memory that sleeps must not be among it: a sleep would not release it, and after
the wake the others would read the old pages. `problem` names such memory.
"""

import ctypes
import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from poorwill.vllm._communicators import are_described, groups

__all__ = ["Shared", "find", "problem"]

_PACKAGE = "vllm.distributed.device_communicators"

# These use the group's other communicators, and have no memory.
_WITHOUT_MEMORY = frozenset({"AgRsAll2AllManager", "NaiveAll2AllManager", "PassThroughAll2AllManager"})


@dataclass(frozen=True)
class Shared:
    """Memory of this rank that others map."""

    name: str
    nbytes: int | None
    """None where nothing shows the size."""
    addresses: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For a status."""
        return {"name": self.name, "bytes": self.nbytes}


def find() -> list[Shared]:
    """All of the engine that this process is a rank of."""
    parallel: Any = importlib.import_module("vllm.distributed.parallel_state")
    if are_described():
        return [_described(each) for each in parallel.get_shared_memory()]
    return list(_shared(parallel, _allocation_bytes))


def problem(shared: Iterable[Shared], ranges: Sequence[tuple[int, int]]) -> str | None:
    """Why memory in these ranges may not sleep; None if others map none of it."""
    names = [
        each.name
        for each in shared
        if any(start <= address < end for address in each.addresses for start, end in ranges)
    ]
    if not names:
        return None
    return (
        f"other processes map memory that would sleep ({', '.join(names)}): they would keep its pages, and "
        "use them after the wake"
    )


def _shared(parallel: Any, allocation_bytes: Callable[[int], int | None]) -> Iterator[Shared]:
    for group in groups(parallel):
        device, name = group.device_communicator, group.unique_name
        if device is not None:
            yield from _of_custom_all_reduce(name, getattr(device, "ca_comm", None), allocation_bytes)
            buffer = getattr(getattr(device, "symm_mem_comm", None), "buffer", None)
            if buffer is not None:
                yield _tensor(f"{name}, symmetric memory all-reduce", buffer)
            workspace = getattr(getattr(device, "fi_pcie_ipc_ar_comm", None), "workspace", None)
            if workspace is not None:
                yield Shared(f"{name}, FlashInfer's PCIe all-reduce", None)
            experts = getattr(device, "all2all_manager", None)
            if experts is not None and type(experts).__name__ not in _WITHOUT_MEMORY:
                yield Shared(f"{name}, {type(experts).__name__}", None)
    yield from _of_modules()


def _of_custom_all_reduce(
    name: str, reduce: Any, allocation_bytes: Callable[[int], int | None]
) -> Iterator[Shared]:
    if reduce is None or reduce.disabled:
        return
    for pointers, use in ((reduce.meta_ptrs, "signals"), (reduce.buffer_ptrs, "buffer")):
        # Across nodes each rank has its own address in every place, and shares nothing.
        if len(set(pointers)) == len(pointers):
            own = pointers[reduce.rank]
            yield Shared(f"{name}, custom all-reduce, {use}", allocation_bytes(own), (own,))
    if getattr(reduce, "_capture_registered", True):
        yield Shared(f"{name}, custom all-reduce, inputs in captured graphs", None)
    for attribute in ("mnnvl_buffer", "mnnvl_multimem_rs_buffer"):
        buffer = getattr(reduce, attribute, None)
        if buffer is not None:
            yield _tensor(f"{name}, custom all-reduce, {attribute}", buffer)


def _of_modules() -> Iterator[Shared]:
    """What vLLM keeps once for the process."""
    flashinfer = sys.modules.get(f"{_PACKAGE}.flashinfer_all_reduce")
    for attribute in ("_fi_ar_workspace", "_fi_ar_quant_workspace"):
        if getattr(flashinfer, attribute, None) is not None:
            yield Shared(f"FlashInfer's all-reduce, {attribute}", None)
    pool = getattr(sys.modules.get(f"{_PACKAGE}.pynccl_allocator"), "_mem_pool", None)
    if pool is not None:
        segments = pool.snapshot()
        yield Shared(
            "NCCL's symmetric memory",
            sum(segment["total_size"] for segment in segments),
            tuple(segment["address"] for segment in segments),
        )


def _described(memory: Any) -> Shared:
    """One of vLLM's own descriptions, with the size that the driver knows where vLLM has none."""
    addresses = tuple(memory.addresses)
    nbytes = memory.nbytes
    if nbytes is None and len(addresses) == 1:
        nbytes = _allocation_bytes(addresses[0])
    return Shared(memory.name, nbytes, addresses)


def _tensor(name: str, tensor: Any) -> Shared:
    return Shared(name, int(tensor.nbytes), (int(tensor.data_ptr()),))


def _allocation_bytes(address: int) -> int | None:
    """The size of the allocation with this address, by the driver; None if it knows none."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    driver = _driver()
    if driver is None or driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address):
        return None
    return size.value


@functools.cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    pointers = (ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t))
    driver.cuMemGetAddressRange_v2.argtypes = (*pointers, ctypes.c_uint64)
    return driver
