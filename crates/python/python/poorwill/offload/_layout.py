"""How a tensor lies in its storage, and the same tensor over other memory.

A layout counts from the storage's beginning, so a copy of those bytes has whatever the tensor sees, also
with overlapping elements.
"""

import math
from dataclasses import dataclass
from typing import Any

from poorwill.offload._import import import_torch


@dataclass(frozen=True)
class Layout:
    """Type, shape, strides and offset, the last two in elements."""

    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool
    nbytes: int
    """From the storage's beginning to the end of the last element; 0 without elements."""

    @classmethod
    def of(cls, tensor: Any) -> "Layout":
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        offset, is_empty = tensor.storage_offset(), math.prod(shape) == 0
        last = offset + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        return cls(
            dtype=tensor.dtype,
            shape=shape,
            strides=strides,
            offset=offset,
            is_conj=tensor.is_conj(),
            is_neg=tensor.is_neg(),
            nbytes=0 if is_empty else (last + 1) * tensor.element_size(),
        )

    def over(self, flat: Any) -> Any:
        """A tensor of this layout that shares the storage of `flat` and keeps it alive."""
        torch = import_torch()
        tensor = torch.empty(0, dtype=self.dtype, device=flat.device)
        tensor.set_(flat.untyped_storage(), self.offset, self.shape, self.strides)
        # Flags of the tensor that say how to read its bytes; the storage does not have them.
        if self.is_conj:
            tensor = tensor.conj()
        if self.is_neg:
            tensor = torch._neg_view(tensor)
        return tensor


def flat_bytes(storage: Any, nbytes: int, device: Any) -> Any:
    """The first bytes of a storage as a tensor that shares it."""
    torch = import_torch()
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))


def checked(tensor: Any, what: str) -> Any:
    """Its storage, if it is a plain tensor with its elements in memory."""
    torch = import_torch()
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} takes a torch.Tensor, not {type(tensor).__name__}")
    dispatches = [getattr(kind, "__torch_dispatch__", None) for kind in (type(tensor), torch.Tensor)]
    if dispatches[0] is not dispatches[1]:
        raise TypeError(
            f"{what} takes plain tensors, and a {type(tensor).__name__} does its operations itself: give it "
            "the tensors that this one is made of"
        )
    problem = None
    if tensor.layout != torch.strided:
        problem = f"its layout is {tensor.layout}"
    elif tensor.is_quantized:
        problem = "it is quantised, with scales that are not in its memory"
    elif tensor.is_nested:
        problem = "it is nested"
    elif tensor.device.type == "meta":
        problem = "it is on the meta device and has no memory"
    elif tensor.device.type not in ("cpu", "cuda"):
        problem = f"it is on {tensor.device}"
    if problem is not None:
        raise ValueError(f"{what} takes dense tensors on the CPU or a GPU: {problem}")
    storage = tensor.untyped_storage()
    # A fake tensor claims a device that its storage is not on.
    if storage.device.type != tensor.device.type or (storage.nbytes() and not storage.data_ptr()):
        raise ValueError(f"{what} takes tensors with memory, and this one has none")
    needed = Layout.of(tensor).nbytes
    if storage.nbytes() < needed:
        # PyTorch would enlarge it on access, with meaningless bytes.
        raise ValueError(
            f"{what} takes tensors with memory, and this one sees {needed} bytes of a storage that was "
            f"resized to {storage.nbytes()}: give it its memory back first"
        )
    return storage
