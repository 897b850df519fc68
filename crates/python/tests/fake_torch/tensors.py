"""Tensors, and the few operations that make and change them. On the GPU their memory is the allocator's, or
lent.

Their elements lie wherever strides and an offset say, as PyTorch's do. But results of operations are always
contiguous, also where PyTorch keeps the order of the source.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from . import lent, strided
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
float64 = DType("float64", 8)
int16 = DType("int16", 2)
int32 = DType("int32", 4)
int64 = DType("int64", 8)
# What cuBLAS gets for each stream on the larger GPUs.
WORKSPACE_BYTES = 32 << 20
# And cuBLASLt.
LT_WORKSPACE_BYTES = 1 << 20

DTYPES = (uint8, float16, bfloat16, float32, float64, int16, int32, int64)
INTEGERS = (uint8, int16, int32, int64)


class Device:
    """`torch.device`: "cpu", "meta", "cuda" or "cuda:1"."""

    type: str
    index: int | None

    def __init__(self, device: str | Device, index: int | None = None) -> None:
        if isinstance(device, Device):
            self.type, self.index = device.type, device.index
            return
        self.type, colon, number = device.partition(":")
        if self.type not in ("cpu", "cuda", "meta") or bool(colon) != number.isdecimal():
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
    """Memory of a tensor and of its views. Its end gives the memory back.

    It may also be what a GPU has page-locked, what another object of Python's has, or lent by the DLPack
    protocol. On the meta device it is nothing but a size.
    """

    def __init__(
        self,
        world: World,
        device: Device,
        nbytes: int,
        *,
        memory: Any = None,
        is_pinned: bool = False,
        loan: lent.Loan | None = None,
    ) -> None:
        self._nbytes = nbytes
        self.device = device
        self._allocator = None
        self._address = 0
        self._loan = loan
        self._unlock: Callable[[], None] | None = None
        if loan is not None:
            self._address = loan.address
        elif device.type == "cpu":
            if is_pinned and nbytes:
                memory = mmap.mmap(-1, nbytes)
            buffer = bytearray(nbytes) if memory is None else memory
            self._host = (ctypes.c_ubyte * nbytes).from_buffer(buffer)
            self._address = ctypes.addressof(self._host)
            if is_pinned and nbytes:
                world.machine.lock(self._address, nbytes)
                self._unlock = partial(world.machine.unlock, self._address)
        elif nbytes and device.type == "cuda":
            world.is_initialized = True
            allocator = world.allocators[device.index or 0]
            self._address = allocator.malloc(nbytes, world.stream(allocator.device))
            self._allocator = allocator

    def data_ptr(self) -> int:
        return self._address

    def nbytes(self) -> int:
        return self._nbytes

    size = __len__ = nbytes

    def __del__(self) -> None:
        allocator = getattr(self, "_allocator", None)
        if allocator is not None:
            allocator.mutex.when_given_back(partial(allocator.free, self._address))
        loan = getattr(self, "_loan", None)
        if loan is not None:
            loan.end()
        unlock = getattr(self, "_unlock", None)
        if unlock is not None:
            unlock()


STRIDED = "torch.strided"


class Tensor:
    """`torch.Tensor`: dense and without lazy conjugations, which is all there is here."""

    layout = STRIDED
    is_quantized = is_nested = False

    def __init__(
        self,
        library: Library,
        storage: Storage,
        shape: tuple[int, ...],
        dtype: DType,
        offset: int = 0,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        """The offset is in bytes, the strides in elements."""
        self._library = library
        self._storage = storage
        self._offset = offset
        self._strides = strided.contiguous(shape) if strides is None else strides
        self.shape = shape
        self.dtype = dtype
        self.requires_grad = False

    def __repr__(self) -> str:
        return f"tensor(shape={self.shape}, dtype={self.dtype}, device='{self.device}')"

    @property
    def device(self) -> Device:
        return self._storage.device

    @property
    def data(self) -> Tensor:
        return Tensor(
            self._library, self._storage, self.shape, self.dtype, offset=self._offset, strides=self._strides
        )

    @data.setter
    def data(self, other: Tensor) -> None:
        self._storage, self._offset = other._storage, other._offset
        self.shape, self._strides, self.dtype = other.shape, other._strides, other.dtype

    def size(self) -> tuple[int, ...]:
        return self.shape

    def is_pinned(self) -> bool:
        """Asks the driver, as PyTorch does."""
        return self.device.type == "cpu" and self._library.world.machine.is_locked(self.data_ptr())

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def nbytes(self) -> int:
        return self.numel() * self.dtype.itemsize

    def numel(self) -> int:
        return prod(self.shape)

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def storage_offset(self) -> int:
        return self._offset // self.dtype.itemsize

    def is_contiguous(self) -> bool:
        return strided.is_contiguous(self.shape, self._strides)

    def is_conj(self) -> bool:
        return False

    def is_neg(self) -> bool:
        return False

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Says so; nothing here has gradients."""
        self.requires_grad = requires_grad
        return self

    def element_size(self) -> int:
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        return self._storage.data_ptr() + self._offset if self._storage.data_ptr() else 0

    def untyped_storage(self) -> Storage:
        return self._storage

    def fill_(self, value: int) -> Tensor:
        return self._library.call("aten::fill_.Scalar", self, value)

    def zero_(self) -> Tensor:
        return self._library.call("aten::zero_", self)

    def copy_(self, other: Tensor, non_blocking: bool = False) -> Tensor:
        return self._library.call("aten::copy_", self, other, non_blocking)

    def set_(self, source: Storage, offset: int, size: Sequence[int], stride: Sequence[int]) -> Tensor:
        return self._library.call(
            "aten::set_.source_Storage_storage_offset", self, source, offset, size, stride
        )

    def as_strided(
        self, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
    ) -> Tensor:
        return self._library.call("aten::as_strided", self, size, stride, storage_offset)

    def t(self) -> Tensor:
        rows, columns = self.shape
        return self.as_strided((columns, rows), self._strides[::-1])

    def expand(self, *shape: int) -> Tensor:
        new = len(shape) - len(self.shape)
        old = [(0, 0)] * new + list(zip(self.shape, self._strides, strict=True))
        strides = [
            stride if extent == wanted else 0 for (extent, stride), wanted in zip(old, shape, strict=True)
        ]
        return self.as_strided(shape, strides)

    def __getitem__(self, at: slice | tuple[slice, ...]) -> Tensor:
        """Slices alone."""
        given = at if isinstance(at, tuple) else (at,)
        cuts = (*given, *[slice(None)] * (len(self.shape) - len(given)))
        offset, shape, strides = self.storage_offset(), [], []
        for cut, extent, stride in zip(cuts, self.shape, self._strides, strict=True):
            taken = range(extent)[cut]
            offset += taken.start * stride
            shape.append(len(taken))
            strides.append(taken.step * stride)
        return self.as_strided(shape, strides, offset)

    def contiguous(self) -> Tensor:
        return self if self.is_contiguous() else self.clone()

    def clone(self) -> Tensor:
        return self._library.call("aten::clone", self)

    def masked_fill_(self, mask: Tensor, value: int) -> Tensor:
        return self._library.call("aten::masked_fill_.Scalar", self, mask, value)

    def sum(self) -> Tensor:
        return self._library.call("aten::sum", self)

    def item(self) -> int:
        """Of a single integer."""
        [value] = self._library.numbers(self)
        return int(value)

    def view(self, *shape: Any) -> Tensor:
        if len(shape) == 1 and isinstance(shape[0], DType):
            return self._library.seen_as(self, shape[0])
        return self._library.call("aten::view", self, shape)

    def to(self, device: Any, non_blocking: bool = False) -> Tensor:
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
            ("aten::masked_fill_.Scalar", self._masked_fill, "a!", True),
            ("aten::eq.Scalar", self._eq, None, False),
            ("aten::sum", self._sum, None, False),
            ("aten::zero_", partial(self._fill, value=0), "a!", True),
            ("aten::copy_", self._copy, "a!", True),
            ("aten::set_.source_Storage_storage_offset", self._set, "a!", True),
            ("aten::as_strided", self._as_strided, "a", False),
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
        if pin_memory and not self.place(device).type == "cpu":
            raise RuntimeError("Only dense CPU tensors can be pinned")
        pinned = {"pin_memory": True} if pin_memory else {}
        return self.call("aten::empty.memory_format", _shape(shape), dtype=dtype, device=device, **pinned)

    def from_dlpack(self, lender: Any) -> Tensor:
        """Bytes of another library; they go back with the last tensor over them."""
        ordinals = range(len(self.world.allocators))
        loan = lent.take(lender, {ordinal: self.world.stream(ordinal) for ordinal in ordinals})
        device = Device(loan.device, loan.ordinal if loan.device == "cuda" else None)
        return Tensor(self, Storage(self.world, device, loan.nbytes, loan=loan), (loan.nbytes,), uint8)

    def frombuffer(self, buffer: Any, *, dtype: DType, count: int = -1, offset: int = 0) -> Tensor:
        """Of memory that Python can write to; the storage begins at the offset, which is in bytes."""
        memory = memoryview(buffer)[offset:]
        number = len(memory) // dtype.itemsize if count < 0 else count
        if number == 0 or number * dtype.itemsize > len(memory):
            raise ValueError(f"a buffer of {len(memory)} bytes, for {count} elements")
        storage = Storage(self.world, Device("cpu"), number * dtype.itemsize, memory=memory)
        return Tensor(self, storage, (number,), dtype)

    def zeros(self, *shape: Any, dtype: DType = float32, device: Any = None) -> Tensor:
        return self.call("aten::zeros", _shape(shape), dtype=dtype, device=device)

    def empty_like(self, tensor: Tensor, *, device: Any = None, pin_memory: bool = False) -> Tensor:
        if device is not None:
            pinned = pin_memory and self.place(device).type == "cpu"
            return self.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=pinned)
        return self.call("aten::empty_like", tensor)

    def empty_strided(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        *,
        dtype: DType = float32,
        layout: str = STRIDED,
        device: Any = None,
        pin_memory: bool = False,
    ) -> Tensor:
        flat = self.empty((strided.span(size, stride),), dtype=dtype, device=device, pin_memory=pin_memory)
        return flat.as_strided(tuple(size), tuple(stride))

    def equal(self, first: Tensor, second: Tensor) -> bool:
        return first.shape == second.shape and self.read(first) == self.read(second)

    def eq(self, tensor: Tensor, value: int) -> Tensor:
        return self.call("aten::eq.Scalar", tensor, value)

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

    def _empty(
        self, shape: tuple[int, ...], dtype: DType = float32, device: Any = None, pin_memory: bool = False
    ) -> Tensor:
        nbytes = prod(shape) * dtype.itemsize
        storage = Storage(self.world, self.place(device), nbytes, is_pinned=pin_memory)
        return Tensor(self, storage, shape, dtype)

    def _zeros(self, shape: tuple[int, ...], dtype: DType = float32, device: Any = None) -> Tensor:
        return self._fill(self._empty(shape, dtype, device), 0)

    def _empty_like(self, tensor: Tensor) -> Tensor:
        return self._empty(tensor.shape, tensor.dtype, tensor.device)

    def _eq(self, tensor: Tensor, value: int) -> Tensor:
        """One byte for each element."""
        equal = self.numbers(tensor) == value
        return self._written(self._empty(tensor.shape, uint8, tensor.device), equal.tobytes())

    def _masked_fill(self, tensor: Tensor, mask: Tensor, value: int) -> Tensor:
        numbers = self.numbers(tensor).copy()
        numbers[self.numbers(mask) != 0] = value
        return self._written(tensor, numbers.tobytes())

    def _sum(self, tensor: Tensor) -> Tensor:
        total = int(self.numbers(tensor).sum())
        return self._written(self._empty((), int64, tensor.device), total.to_bytes(8, "little", signed=True))

    def _written(self, tensor: Tensor, content: bytes) -> Tensor:
        kind = Storage(self.world, Device("cpu"), len(content), memory=bytearray(content))
        return self._copy(tensor, Tensor(self, kind, tensor.shape, tensor.dtype))

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

    def seen_as(self, tensor: Tensor, dtype: DType) -> Tensor:
        """The same bytes as elements of another type, which only the last dimension counts."""
        *others, last = tensor.shape
        size = last * tensor.dtype.itemsize
        if size % dtype.itemsize:
            raise RuntimeError("self.size(-1) must be divisible by the new element's size")
        offset = tensor._offset * tensor.dtype.itemsize // dtype.itemsize
        return Tensor(self, tensor.untyped_storage(), (*others, size // dtype.itemsize), dtype, offset)

    def _view(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        if not tensor.is_contiguous():
            raise RuntimeError("view size is not compatible with input tensor's size and stride")
        return Tensor(self, tensor.untyped_storage(), _shape(shape), tensor.dtype, tensor._offset)

    def _as_strided(
        self, tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
    ) -> Tensor:
        itemsize, storage = tensor.dtype.itemsize, tensor.untyped_storage()
        begin = tensor.storage_offset() if offset is None else offset
        if strided.span(size, stride) and (begin + strided.span(size, stride)) * itemsize > storage.nbytes():
            raise RuntimeError("setStorage: sizes and strides are out of bounds for storage")
        return Tensor(self, storage, tuple(size), tensor.dtype, begin * itemsize, tuple(stride))

    def _set(
        self, tensor: Tensor, source: Storage, offset: int, size: Sequence[int], stride: Sequence[int]
    ) -> Tensor:
        """PyTorch makes a storage larger that is too small, if it is its own."""
        if source.device != tensor.device:
            raise RuntimeError(f"Attempted to set the storage of a tensor on device {tensor.device}")
        span, itemsize = strided.span(size, stride), tensor.dtype.itemsize
        if span and (offset + span) * itemsize > source.nbytes():
            raise RuntimeError("Trying to resize storage that is not resizable")
        tensor._storage, tensor._offset = source, offset * itemsize
        tensor.shape, tensor._strides = tuple(size), tuple(stride)
        return tensor

    def _fill(self, tensor: Tensor, value: int) -> Tensor:
        address, size = tensor.data_ptr(), tensor.nbytes
        if value and tensor.dtype.itemsize > 1:
            if tensor.dtype not in INTEGERS:
                raise NotImplementedError("only integers can be filled with a number other than 0")
            element = value.to_bytes(tensor.dtype.itemsize, "little", signed=True)
            return self._written(tensor, element * tensor.numel())
        if not tensor.is_contiguous():
            return self._scatter(tensor, bytes([value]) * size)
        if not tensor.is_cuda:
            ctypes.memset(address, value, size)
        elif size:
            device, machine = tensor.device.index or 0, self.world.machine
            self.world.do(device, lambda stream: machine.fill(device, address, size, value, stream))
        return tensor

    def _copy(self, tensor: Tensor, other: Tensor, non_blocking: bool = False) -> Tensor:
        """The host may not see the end of a non-blocking copy to a GPU: the memory has to stay."""
        if tensor.nbytes != other.nbytes:
            raise RuntimeError("the sizes of the tensors have to be the same")
        if not tensor.is_contiguous():
            return self._scatter(tensor, self.read(other))
        if not tensor.is_cuda:
            ctypes.memmove(tensor.data_ptr(), self.read(other), tensor.nbytes)
        elif tensor.nbytes:
            device, machine = tensor.device.index or 0, self.world.machine
            address, source, nbytes = tensor.data_ptr(), other.data_ptr(), tensor.nbytes
            if non_blocking and not other.is_cuda and other.is_contiguous():
                self.world.do(device, lambda stream: machine.queue(device, address, source, nbytes, stream))
            else:
                self.world.do(device, lambda stream: machine.write(device, address, self.read(other), stream))
        return tensor

    def _scatter(self, tensor: Tensor, content: bytes) -> Tensor:
        """Writes elements to where they lie, and leaves what lies between them alone."""
        memory = bytearray(self._bytes_of(tensor))
        if memory:
            itemsize = tensor.dtype.itemsize
            into = strided.over(memory, tensor.shape, tensor.stride(), itemsize)
            into[...] = strided.over(content, tensor.shape, strided.contiguous(tensor.shape), itemsize)
            kind = Storage(self.world, Device("cpu"), len(memory), memory=memory)
            begin = Tensor(self, tensor.untyped_storage(), (len(memory),), uint8, tensor._offset)
            self._copy(begin, Tensor(self, kind, (len(memory),), uint8))
        return tensor

    def read(self, tensor: Tensor) -> bytes:
        """The elements in order, one after the other."""
        if tensor.is_contiguous() or not tensor.nbytes:
            return self._bytes_of(tensor)
        array = strided.over(self._bytes_of(tensor), tensor.shape, tensor.stride(), tensor.dtype.itemsize)
        return bytes(array.tobytes())

    def numbers(self, tensor: Tensor) -> Any:
        """The elements of a tensor of integers, in order, as an array of NumPy's."""
        if tensor.dtype not in INTEGERS:
            raise NotImplementedError("only integers are computed with")
        return strided.integers(self.read(tensor), tensor.dtype.name)

    def _bytes_of(self, tensor: Tensor) -> bytes:
        """From the first element to the end of the last."""
        size = strided.span(tensor.shape, tensor.stride()) * tensor.dtype.itemsize
        if not size:
            return b""
        if not tensor.is_cuda:
            return ctypes.string_at(tensor.data_ptr(), size)
        device = tensor.device.index or 0
        stream = self.world.stream(device)
        if (device, stream) in self.world.captures:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return self.world.machine.read(device, tensor.data_ptr(), size, stream)


def _shape(given: Sequence[Any]) -> tuple[int, ...]:
    if len(given) == 1 and isinstance(given[0], Sequence):
        given = given[0]
    return tuple(int(extent) for extent in given)
