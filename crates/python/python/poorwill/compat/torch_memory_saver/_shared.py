"""Tensors over host memory that another object owns."""

import ctypes
from typing import Any

from poorwill.torch._import import torch


def shared_tensor(address: int, like: Any, owner: object) -> Any:
    """A tensor over host memory, of the type and shape of another. It keeps the owner."""
    kind: Any = type("Shared", (ctypes.c_uint8 * int(like.nbytes),), {})
    memory = kind.from_address(address)
    memory.owner = owner
    return torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype).view(tuple(like.shape))
