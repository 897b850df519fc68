"""Memory of another library, by the DLPack protocol: `torch.from_dlpack`.

The capsule is read as PyTorch reads it, in both forms. The deleter runs at the end of the last tensor, with
the interpreter's lock held, as in PyTorch where a tensor ends in Python. PyTorch's own threads end some
without that lock, which is not modelled.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

KINDS = {1: "cpu", 2: "cuda"}
VERSION = (1, 0)


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", c_void_p), ("deleter", c_void_p))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _Tensor),
    )


_FORMS: dict[str, type[ctypes.Structure]] = {"dltensor": _Managed, "dltensor_versioned": _Versioned}
# Without the lock, as C++ may call it.
_DELETER = ctypes.CFUNCTYPE(None, c_void_p)

_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer = ctypes.PYFUNCTYPE(c_void_p, ctypes.py_object, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))
# A capsule does not copy its name.
_TAKEN = {name: f"used_{name}".encode() for name in _FORMS}


@dataclass
class Loan:
    """What a capsule held; `end` gives it back."""

    device: str
    ordinal: int
    address: int
    nbytes: int
    _managed: int
    _deleter: int | None

    def end(self) -> None:
        if self._deleter:
            _DELETER(self._deleter)(self._managed)


def take(lender: Any, streams: dict[int, int]) -> Loan:
    """Takes a flat array of bytes. `streams` are the current ones of the GPUs, by ordinal."""
    kind, ordinal = lender.__dlpack_device__()
    asked: dict[str, Any] = {"max_version": VERSION}
    if KINDS.get(kind) == "cuda":
        # The default stream has a number of its own there.
        asked["stream"] = streams[ordinal] or 1
    try:
        capsule = lender.__dlpack__(**asked)
    except TypeError:
        del asked["max_version"]
        capsule = lender.__dlpack__(**asked)
    for name, form in _FORMS.items():
        if _is_valid(capsule, name.encode()):
            managed = _pointer(capsule, name.encode())
            held = form.from_address(managed)
            tensor = held.tensor
            assert (tensor.device_type, tensor.device_id) == (kind, ordinal)
            if (tensor.code, tensor.bits, tensor.lanes, tensor.ndim) != (1, 8, 1, 1):
                raise NotImplementedError("only flat arrays of bytes can be taken")
            if tensor.strides:
                assert tensor.strides[0] == 1
            _rename(capsule, _TAKEN[name])
            address = (tensor.data or 0) + tensor.byte_offset
            return Loan(KINDS[kind], ordinal, address, tensor.shape[0], managed, held.deleter)
    raise RuntimeError("from_dlpack received an invalid capsule")
