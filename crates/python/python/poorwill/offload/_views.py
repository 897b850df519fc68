"""Tensors over host memory: aliases of it, on the CPU and as a device sees them."""

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

    Raises ValueError for what the buffer has no room for.
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
    """The same bytes as a device sees them. It ALIASES: nothing is copied, and what is written to one is in
    the other.

    The tensor is on the CPU. One that is not page-locked yet is locked where it lies, or there is an error.
    Pages are locked whole: what else lies in the first or the last seems page-locked to CUDA and PyTorch then
    and is not, so that copying it to a GPU may fail. Tensors of 32 MiB and more have pages of their own; give
    small ones memory that has, as a `HostBuffer`, or copy them with `to_host_view`.
    Type, shape, strides and storage offset stay; what the view keeps is the whole storage, as long as it or
    any tensor made of it lives. Nobody may resize that storage meanwhile. The view is detached: it never
    requires gradients. On the host device it is a CPU tensor. A tensor whose storage has no bytes has a
    device tensor without elements and with nothing behind it.

    Raises TypeError for what is no plain tensor, ValueError for one that is not on the CPU or not dense, and
    PoorwillError where the device cannot read it or the environment says that it must not.
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
    """COPIES a tensor to host memory, and gives it as a device sees it there.

    The tensor is on the CPU or a GPU, and has nothing to do with the result, which has its type, shape,
    strides and storage offset. So the memory has all bytes from the storage's beginning to the tensor's last
    element: of a slice of a large storage, all that lies before it as well (`.clone()` it first). It lives as
    long as the result or any tensor made of it. Without `device` it is for the GPU that the tensor is on, or
    the current one.

    Raises as `device_view`, and OutOfMemoryError where there is not so much host memory.
    """
    torch = import_torch()
    checked(tensor, "to_host_view")
    layout = Layout.of(tensor)
    policy().require_views(layout.nbytes)
    if layout.nbytes == 0:
        return layout.over(nothing_on(home_of(tensor, device)))
    buffer = HostBuffer(layout.nbytes, device=home_of(tensor, device), pin=pin)
    # First, so that memory that the device cannot read is not written for nothing.
    view = torch.from_dlpack(buffer.device_view())
    fill(torch.from_dlpack(buffer), tensor)
    return layout.over(view)


def home_of(tensor: Any, device: Any) -> Any:
    """The device that is meant."""
    return tensor.device if device is None and tensor.device.type == "cuda" else device


def fill(host: Any, tensor: Any) -> None:
    """Copies the bytes that a tensor sees, and those before and between them; they are there when it
    returns."""
    host.copy_(flat_bytes(tensor.untyped_storage(), host.numel(), tensor.device))


def nothing_on(device: Any) -> Any:
    """A tensor of no bytes."""
    torch = import_torch()
    return torch.empty(0, dtype=torch.uint8, device=torch_device(device))


def torch_device(device: Any) -> Any:
    """PyTorch's name of a device of ours."""
    torch = import_torch()
    if isinstance(device, str) and device.partition(":")[0] == "host":
        return torch.device("cpu")
    return torch.device(f"cuda:{_native.cuda_ordinal(device)}")
