"""Tensors over host memory: aliases on the CPU and at the device's address."""

import math
import operator
from collections.abc import Sequence
from typing import Any, Literal

from poorwill import _native
from poorwill._native import HostBuffer
from poorwill.offload._import import import_torch
from poorwill.offload._layout import Layout, checked, flat_bytes
from poorwill.offload._policy import policy


def host_tensor(buffer: HostBuffer, shape: int | Sequence[int], dtype: Any, *, offset_bytes: int = 0) -> Any:
    """A contiguous CPU tensor over a buffer's bytes. It ALIASES: nothing is copied, and it keeps the memory.

    `dtype` is PyTorch's. The tensor begins `offset_bytes` into the buffer, a multiple of an element's size,
    and need not reach its end.

    Raises ValueError for a tensor that exceeds the buffer.
    """
    torch = import_torch()
    extents = tuple(map(operator.index, shape if isinstance(shape, Sequence) else (shape,)))
    if any(extent < 0 for extent in extents):
        raise ValueError(f"a tensor cannot have the shape {list(extents)}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, not {type(dtype).__name__}")
    size = dtype.itemsize
    nbytes = math.prod(extents) * size
    if offset_bytes < 0 or offset_bytes % size != 0:
        raise ValueError(
            f"offset_bytes is {offset_bytes}, and elements of {dtype} begin at multiples of {size}"
        )
    if offset_bytes + nbytes > buffer.nbytes:
        raise ValueError(
            f"{list(extents)} of {dtype} take {nbytes} bytes, and from byte {offset_bytes} on the buffer has "
            f"{max(buffer.nbytes - offset_bytes, 0)} of its {buffer.nbytes}: make it larger, or the tensor "
            "smaller"
        )
    strides, stride = [], 1
    for extent in reversed(extents):
        strides.append(stride)
        stride *= max(extent, 1)
    layout = Layout(
        dtype, extents, tuple(reversed(strides)), offset_bytes // size, False, False, offset_bytes + nbytes
    )
    return layout.over(torch.from_dlpack(buffer))


def device_view(tensor: Any, *, device: Any = None) -> Any:
    """The same bytes at their device address. It ALIASES: writes to one appear in the other.

    `tensor` is on the CPU. If it is not page-locked yet, it is locked in place, or an error is raised. Whole
    pages are locked. CUDA and PyTorch then take other data in the first and last page for page-locked, so
    that copying it to a GPU may fail. Tensors of 32 MiB and more have pages of their own. Put small ones
    into a `HostBuffer`, or copy them with `to_host_view`.

    Type, shape, strides and storage offset stay. The view keeps the whole storage, as long as it or any
    tensor made of it lives; do not resize that storage meanwhile. The view never requires gradients. On the
    host device it is a CPU tensor. For an empty storage it is a device tensor without elements.

    Raises TypeError for a tensor that is not plain, and ValueError for one that is not dense on the CPU.
    Raises PoorwillError where the device cannot read it or the environment forbids that.
    """
    torch = import_torch()
    storage = checked(tensor, "device_view")
    if tensor.device.type != "cpu":
        raise ValueError(
            f"device_view takes tensors in host memory, and this one is on {tensor.device}: "
            "to_host_view copies it there"
        )
    nbytes = storage.nbytes()
    policy().require_views(nbytes)
    layout = Layout.of(tensor)
    if nbytes == 0:
        return layout.over(nothing_on(device))
    view = _native.device_view_of(storage.data_ptr(), nbytes, storage, device=device)
    return layout.over(torch.from_dlpack(view))


def to_host_view(tensor: Any, *, device: Any = None, pin: bool | Literal["auto"] = "auto") -> Any:
    """COPIES a tensor to host memory, and returns it at its device address.

    `tensor` is on the CPU or a GPU, and independent of the result, which has its type, shape, strides and
    storage offset. The copy has all bytes from the storage's beginning to the tensor's last element. Clone a
    slice of a large storage first (`.clone()`), or all before it is copied as well. The memory lives as long
    as the result or any tensor made of it. `device` defaults to the tensor's GPU, or the current one.

    Raises as `device_view`, and OutOfMemoryError without enough host memory.
    """
    torch = import_torch()
    checked(tensor, "to_host_view")
    layout = Layout.of(tensor)
    policy().require_views(layout.nbytes)
    if layout.nbytes == 0:
        return layout.over(nothing_on(home_of(tensor, device)))
    buffer = HostBuffer(layout.nbytes, device=home_of(tensor, device), pin=pin)
    # First, so that nothing is copied to memory that the device cannot read.
    view = torch.from_dlpack(buffer.device_view())
    fill(torch.from_dlpack(buffer), tensor)
    return layout.over(view)


def home_of(tensor: Any, device: Any) -> Any:
    """The device for a tensor's host memory: the given one, its own, or the current one."""
    return tensor.device if device is None and tensor.device.type == "cuda" else device


def fill(host: Any, tensor: Any) -> None:
    """Copies the bytes that a tensor sees, and those before and between them. Waits for the copy."""
    host.copy_(flat_bytes(tensor.untyped_storage(), host.numel(), tensor.device))


def nothing_on(device: Any) -> Any:
    """A tensor of no bytes."""
    torch = import_torch()
    return torch.empty(0, dtype=torch.uint8, device=torch_device(device))


def torch_device(device: Any) -> Any:
    """PyTorch's device for one of ours."""
    torch = import_torch()
    if isinstance(device, str) and device.partition(":")[0] == "host":
        return torch.device("cpu")
    return torch.device(f"cuda:{_native.cuda_ordinal(device)}")
