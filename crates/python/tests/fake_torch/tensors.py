"""Tensors, and the few operations that make and change them. On the GPU their memory is the allocator's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from .dispatch import Operation, is_inference
from .world import World


@dataclass(frozen=True)
class DType:
    """`torch.dtype`."""

    name: str
    itemsize: int

    def __repr__(self) -> str:
        return f"torch.{self.name}"


uint8 = DType("uint8", 1)
float16 = DType("float16", 2)
bfloat16 = DType("bfloat16", 2)
float32 = DType("float32", 4)
# What cuBLAS gets for each stream on the larger GPUs.
WORKSPACE_BYTES = 32 << 20
# And cuBLASLt.
LT_WORKSPACE_BYTES = 1 << 20

DTYPES = (uint8, float16, bfloat16, float32)


class Device:
    """`torch.device`: "cpu", "cuda" or "cuda:1"."""

    type: str
    index: int | None

    def __init__(self, device: str | Device, index: int | None = None) -> None:
        if isinstance(device, Device):
            self.type, self.index = device.type, device.index
            return
        self.type, colon, number = device.partition(":")
        if self.type not in ("cpu", "cuda") or bool(colon) != number.isdecimal():
            raise RuntimeError(f"Invalid device string: '{device}'")
        self.index = int(number) if number else index

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"

    def __repr__(self) -> str:
        return f"device(type={self.type!r}, index={self.index})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and (self.type, self.index) == (other.type, other.index)

    def __hash__(self) -> int:
        return hash((self.type, self.index))


def index_of(world: World, device: Any) -> int:
    """The number of a GPU, however it was named; of the current one if it was not."""
    if device is None:
        return world.device
    if isinstance(device, int):
        return device
    known = Device(device)
    return world.device if known.index is None else known.index


class Storage:
    """Memory of a tensor and of its views. Its end gives the memory back."""

    def __init__(self, world: World, device: Device, nbytes: int) -> None:
        self._nbytes = nbytes
        self.device = device
        self._allocator = None
        self._address = 0
        if device.type == "cpu":
            self._host = (ctypes.c_ubyte * nbytes)()
            self._address = ctypes.addressof(self._host)
        elif nbytes:
            world.is_initialized = True
            allocator = world.allocators[device.index or 0]
            self._address = allocator.malloc(nbytes, world.stream(allocator.device))
            self._allocator = allocator

    def data_ptr(self) -> int:
        return self._address

    def nbytes(self) -> int:
        return self._nbytes

    size = __len__ = nbytes

    def record_stream(self, stream: int) -> None:
        if self._allocator is not None:
            self._allocator.record_stream(self._address, stream)

    def __del__(self) -> None:
        allocator = getattr(self, "_allocator", None)
        if allocator is not None:
            allocator.mutex.when_given_back(partial(allocator.free, self._address))


class Tensor:
    """`torch.Tensor`, contiguous always."""

    def __init__(
        self, library: Library, storage: Storage, shape: tuple[int, ...], dtype: DType, offset: int = 0
    ) -> None:
        self._library = library
        self._storage = storage
        self._offset = offset
        self.shape = shape
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"tensor(shape={self.shape}, dtype={self.dtype}, device='{self.device}')"

    @property
    def device(self) -> Device:
        return self._storage.device

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def nbytes(self) -> int:
        return self.numel() * self.dtype.itemsize

    def numel(self) -> int:
        return prod(self.shape)

    def element_size(self) -> int:
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        return self._storage.data_ptr() + self._offset if self._storage.data_ptr() else 0

    def untyped_storage(self) -> Storage:
        return self._storage

    def record_stream(self, stream: Any) -> None:
        self._storage.record_stream(stream.cuda_stream)

    def fill_(self, value: int) -> Tensor:
        return self._library.call("aten::fill_.Scalar", self, value)

    def zero_(self) -> Tensor:
        return self._library.call("aten::zero_", self)

    def copy_(self, other: Tensor) -> Tensor:
        return self._library.call("aten::copy_", self, other)

    def clone(self) -> Tensor:
        return self._library.call("aten::clone", self)

    def view(self, *shape: int) -> Tensor:
        return self._library.call("aten::view", self, shape)

    def to(self, device: Any) -> Tensor:
        place = self._library.place(device)
        if is_inference():
            return self._library.call("aten::to.device", self, place)
        return self._library.call("aten::_to_copy", self, device=place) if place != self.device else self

    def cpu(self) -> Tensor:
        return self._library.call("aten::_to_copy", self, device=Device("cpu"))

    def numpy_bytes(self) -> bytes:
        """What is in it; PyTorch has no such method."""
        return self._library.read(self)


class Library:
    """The operations, over one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        made: list[tuple[str, Callable[..., Tensor], str | None, bool]] = [
            ("aten::empty.memory_format", self._empty, None, False),
            ("aten::zeros", self._zeros, None, False),
            ("aten::empty_like", self._empty_like, None, False),
            ("aten::clone", self._clone, None, False),
            ("aten::_to_copy", self._to_copy, None, False),
            ("aten::mm", self._mm, None, False),
            ("aten::mm.out", self._mm_out, "a!", True),
            ("aten::addmm", self._addmm, None, False),
            ("aten::view", self._view, "a", False),
            ("aten::fill_.Scalar", self._fill, "a!", True),
            ("aten::zero_", partial(self._fill, value=0), "a!", True),
            ("aten::copy_", self._copy, "a!", True),
            ("aten::clone.out", self._clone_out, "a!", True),
            ("others::clone", self._clone, None, False),
        ]
        self._workspaces: dict[tuple[int, int], Storage] = {}
        self._lt_workspaces: dict[tuple[int, int], Storage] = {}
        self.operations = {name: Operation(name, does, alias, mutable) for name, does, alias, mutable in made}
        self.operations["aten::to.device"] = Operation(
            "aten::to.device", self._to, "a", False, is_composite=True
        )

    def call(self, name: str, *args: Any, **kwargs: Any) -> Tensor:
        result = self.operations[name](*args, **kwargs)
        assert isinstance(result, Tensor)
        return result

    def place(self, device: Any) -> Device:
        place = Device("cpu" if device is None else f"cuda:{device}" if isinstance(device, int) else device)
        if place.type == "cuda" and place.index is None:
            place.index = self.world.device
        if place.type == "cuda" and not 0 <= (place.index or 0) < len(self.world.allocators):
            raise RuntimeError("CUDA error: invalid device ordinal")
        return place

    # What is called `torch.empty` and so on

    def empty(
        self, *shape: Any, dtype: DType = float32, device: Any = None, pin_memory: bool = False
    ) -> Tensor:
        return self.call("aten::empty.memory_format", _shape(shape), dtype=dtype, device=device)

    def zeros(self, *shape: Any, dtype: DType = float32, device: Any = None) -> Tensor:
        return self.call("aten::zeros", _shape(shape), dtype=dtype, device=device)

    def empty_like(self, tensor: Tensor) -> Tensor:
        return self.call("aten::empty_like", tensor)

    def equal(self, first: Tensor, second: Tensor) -> bool:
        return first.shape == second.shape and self.read(first) == self.read(second)

    def mm(self, first: Tensor, second: Tensor, *, out: Tensor | None = None) -> Tensor:
        if out is not None:
            return self.call("aten::mm.out", first, second, out=out)
        return self.call("aten::mm", first, second)

    def addmm(self, vector: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return self.call("aten::addmm", vector, first, second)

    def blas_handle(self) -> int:
        """`torch.cuda.current_blas_handle`: a stream's first one brings a workspace, which stays."""
        device = self.world.device
        place = (device, self.world.stream(device))
        if place not in self._workspaces:
            self._workspaces[place] = Storage(self.world, Device("cuda", device), WORKSPACE_BYTES)
        return 1 + list(self._workspaces).index(place)

    # What the operations do

    def _empty(self, shape: tuple[int, ...], dtype: DType = float32, device: Any = None) -> Tensor:
        storage = Storage(self.world, self.place(device), prod(shape) * dtype.itemsize)
        return Tensor(self, storage, shape, dtype)

    def _zeros(self, shape: tuple[int, ...], dtype: DType = float32, device: Any = None) -> Tensor:
        return self._fill(self._empty(shape, dtype, device), 0)

    def _empty_like(self, tensor: Tensor) -> Tensor:
        return self._empty(tensor.shape, tensor.dtype, tensor.device)

    def _clone(self, tensor: Tensor) -> Tensor:
        return self._copy(self._empty_like(tensor), tensor)

    def _clone_out(self, tensor: Tensor, *, out: Tensor) -> Tensor:
        """Needs memory of its own for a while, and changes an argument."""
        return self._copy(out, self._clone(tensor))

    def _to_copy(self, tensor: Tensor, *, device: Any) -> Tensor:
        return self._copy(self._empty(tensor.shape, tensor.dtype, device), tensor)

    def _mm(self, first: Tensor, second: Tensor) -> Tensor:
        """Takes the memory that a product takes. It computes nothing: what is in the result is anything."""
        if first.is_cuda:
            self.blas_handle()
        return self._empty((first.shape[0], second.shape[1]), first.dtype, first.device)

    def _mm_out(self, first: Tensor, second: Tensor, *, out: Tensor) -> Tensor:
        self._mm(first, second)
        return out

    def _addmm(self, vector: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """As `_mm`, with cuBLASLt."""
        device = first.device.index or 0
        place = (device, self.world.stream(device))
        if first.is_cuda and place not in self._lt_workspaces:
            self._lt_workspaces[place] = Storage(self.world, first.device, LT_WORKSPACE_BYTES)
        return self._empty((first.shape[0], second.shape[1]), first.dtype, first.device)

    def _to(self, tensor: Tensor, device: Device) -> Tensor:
        return tensor if device == tensor.device else self._to_copy(tensor, device=device)

    def _view(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        return Tensor(self, tensor.untyped_storage(), _shape(shape), tensor.dtype, tensor._offset)

    def _fill(self, tensor: Tensor, value: int) -> Tensor:
        if value and tensor.dtype.itemsize > 1:
            raise NotImplementedError("only bytes can be filled with a number other than 0")
        address, size = tensor.data_ptr(), tensor.nbytes
        if not tensor.is_cuda:
            ctypes.memset(address, value, size)
        elif size:
            device, machine = tensor.device.index or 0, self.world.machine
            self.world.do(device, lambda stream: machine.fill(device, address, size, value, stream))
        return tensor

    def _copy(self, tensor: Tensor, other: Tensor) -> Tensor:
        if tensor.nbytes != other.nbytes:
            raise RuntimeError("the sizes of the tensors have to be the same")
        if not tensor.is_cuda:
            ctypes.memmove(tensor.data_ptr(), self.read(other), tensor.nbytes)
        elif tensor.nbytes:
            device, machine = tensor.device.index or 0, self.world.machine
            address = tensor.data_ptr()
            self.world.do(device, lambda stream: machine.write(device, address, self.read(other), stream))
        return tensor

    def read(self, tensor: Tensor) -> bytes:
        if not tensor.nbytes:
            return b""
        if not tensor.is_cuda:
            return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
        device = tensor.device.index or 0
        stream = self.world.stream(device)
        if (device, stream) in self.world.captures:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return self.world.machine.read(device, tensor.data_ptr(), tensor.nbytes, stream)


def _shape(given: Sequence[Any]) -> tuple[int, ...]:
    if len(given) == 1 and isinstance(given[0], Sequence):
        given = given[0]
    return tuple(int(extent) for extent in given)
