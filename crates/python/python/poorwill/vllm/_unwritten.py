"""Which weights were written since a wake that dropped their bytes, whoever wrote them and in whatever way.

Such a wake fills the weights with a word that none has: in each of its halves it is no number, in every format
of floating point numbers. Where it still stands, nobody has written. So a write of any bytes counts, also of
those that were there before the sleep, and half a tensor counts as half.

Bytes are looked at eight at a time, so up to seven of them count as written with their neighbours. Of a tensor
whose elements are single bytes apart from each other, it is known only whether any was written.
"""

import importlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

torch: Any = importlib.import_module("torch")

WORD = 0x7FF3_FFA5_7F96_FFFF
"""As one element of eight bytes; its last bytes are what smaller elements are filled with."""

# Elements that are compared at a time, so that what the comparison takes of a full GPU is little.
_STEP = 4 << 20

_UNITS = ((8, "int64"), (4, "int32"), (2, "int16"), (1, "uint8"))


@dataclass(frozen=True)
class Missing:
    """A tensor that was not written, or not as a whole."""

    name: str
    nbytes: int
    """Of it that were not."""


@dataclass(frozen=True)
class _Filled:
    name: str
    elements: Any
    """Its memory in the largest units that fit."""
    unit: int
    is_dense: bool

    def missing_bytes(self) -> int:
        if not self.is_dense:
            count = int(torch.eq(self.elements, _of_size(self.unit)).sum().item())
        else:
            parts = range(0, self.elements.numel(), _STEP)
            compared = (torch.eq(self.elements[at : at + _STEP], _of_size(self.unit)) for at in parts)
            count = sum(int(part.sum().item()) for part in compared)
        # Single bytes are anything: only all of them together say something.
        if self.unit == 1 and count < self.elements.numel():
            return 0
        return count * self.unit


class Unwritten:
    """What was filled and not written since."""

    def __init__(self) -> None:
        self._filled: list[_Filled] = []
        self.tensors = 0
        """How many there were in the beginning."""
        self.nbytes = 0
        """How many bytes of theirs."""

    def begin(self, named: Iterable[tuple[str, Any]], ranges: Iterable[tuple[int, int]]) -> None:
        """Fills these tensors as far as they lie in the ranges, whose bytes are gone; and forgets all others.

        The ranges ascend.
        """
        self.forget()
        spans = list(ranges)
        seen = set()
        for name, tensor in named:
            place = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
            if not tensor.nbytes or place in seen or not _is_within(place[0], spans):
                continue
            seen.add(place)
            filled = _fill(name, tensor)
            self._filled.append(filled)
            self.nbytes += filled.elements.numel() * filled.unit
        self.tensors = len(self._filled)

    def look(self, named: Iterable[tuple[str, Any]]) -> list[Missing]:
        """What is missing still; `named` are the tensors that the model has now.

        One that has come to lie elsewhere needs its old memory no more. One that is not there for now, in the
        midst of an update, does.
        """
        if not self._filled:
            return []
        torch.cuda.synchronize(self._filled[0].elements.device)
        now = {name: tensor.data_ptr() for name, tensor in named if tensor.is_cuda}
        missing, left = [], []
        for filled in self._filled:
            if now.get(filled.name, filled.elements.data_ptr()) != filled.elements.data_ptr():
                continue
            nbytes = filled.missing_bytes()
            if nbytes:
                left.append(filled)
                missing.append(Missing(filled.name, nbytes))
        self._filled = left
        return missing

    def forget(self) -> None:
        """Lets go of all."""
        self._filled = []
        self.tensors = self.nbytes = 0


def _is_within(address: int, spans: list[tuple[int, int]]) -> bool:
    return any(begin <= address < end for begin, end in spans)


def _of_size(unit: int) -> int:
    word = WORD & ((1 << 8 * unit) - 1)
    # Bytes have no sign here, all others do.
    return word - (1 << 8 * unit) if unit > 1 and word >> (8 * unit - 1) else word


def _fill(name: str, tensor: Any) -> _Filled:
    elements, is_dense = _elements(tensor)
    unit = elements.element_size()
    elements.fill_(_of_size(unit))
    return _Filled(name, elements, unit, is_dense)


def _elements(tensor: Any) -> tuple[Any, bool]:
    """The tensor's memory in the largest units that fit, and whether it is in one piece.

    Made from its storage, since what was made for inference may not be filled outside of that.
    """
    size = tensor.element_size()
    # What is expanded is there once.
    shape, strides = zip(*((1 if stride == 0 else extent, stride) for extent, stride in _dimensions(tensor)))
    begin, count = tensor.storage_offset() * size, math.prod(shape)
    is_dense = count == 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    if is_dense:
        shape, strides = (count,), (1,)
    for unit, name in _UNITS:
        fitting = _widened(shape, strides, unit, size) if begin % unit == 0 else None
        if fitting is not None:
            empty = torch.empty(0, dtype=getattr(torch, name), device=tensor.device)
            return empty.set_(tensor.untyped_storage(), begin // unit, *fitting), is_dense
    raise AssertionError(f"{name} fits everywhere")


def _dimensions(tensor: Any) -> list[tuple[int, int]]:
    return list(zip(tensor.shape, tensor.stride(), strict=True)) or [(1, 1)]


def _widened(
    shape: tuple[int, ...], strides: tuple[int, ...], unit: int, size: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The same memory in other units, if its rows can be cut into them; a row of its own may leave a rest."""
    if unit <= size:
        more = size // unit
        if more == 1:
            return shape, strides
        return (*shape, more), (*(stride * more for stride in strides), 1)
    fewer = unit // size
    is_row = len(shape) == 1
    if strides[-1] != 1 or shape[-1] < fewer or (shape[-1] % fewer and not is_row):
        return None
    if any(stride % fewer for stride in strides[:-1]):
        return None
    return (*shape[:-1], shape[-1] // fewer), (*(stride // fewer for stride in strides[:-1]), 1)
