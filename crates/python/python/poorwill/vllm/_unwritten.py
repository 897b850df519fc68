"""Which weights were written since a wake that dropped their bytes, by any caller on any path.

Such a wake fills the weights with a pattern: NaN in 64, 32 or 16 bits, and an unlikely row of single bytes.
Where it remains, nothing was written. So a write of any bytes counts, also of the bytes from before the
sleep, and half a tensor counts as half.

The comparison reads eight bytes at a time, so up to seven count as written with their neighbours. Of a
tensor of single bytes that are apart, it is known only whether any was written. A single 255 cannot be
distinguished from an unwritten byte. It keeps no memory alive: it looks at the model's current tensors.
"""

import importlib
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

torch: Any = importlib.import_module("torch")

WORD = 0x7FF3_FFA5_7F96_FFFF
"""The pattern as an element of eight bytes; smaller elements are filled with its last bytes."""

ENOUGH = 4
"""Missing tensors found before a check stops.

So a loop that writes one tensor and checks again does not read the whole model each time.
"""

# Elements compared at a time, which bounds temporary memory on a full GPU.
_STEP = 1 << 20

_UNITS = ((8, "int64"), (4, "int32"), (2, "int16"), (1, "uint8"))


@dataclass(frozen=True)
class Missing:
    """A tensor that was not written, or only in part."""

    name: str
    nbytes: int
    """Its unwritten bytes."""


@dataclass(frozen=True)
class Look:
    """Result of a check."""

    missing: list[Missing]
    is_all: bool
    """Whether the list is complete; False if the check stopped early."""


@dataclass
class _Place:
    """A filled range of memory."""

    address: int
    nbytes: int
    names: list[str]
    """Names of the parameters there; tied ones have several."""


class Unwritten:
    """What was filled and not written since."""

    def __init__(self) -> None:
        self.is_blind = False
        """Whether some memory cannot be seen, so that it is unknown whether it was written."""
        self.tensors = 0
        """Number of filled tensors."""
        self.nbytes = 0
        """Their bytes."""
        self._places: list[_Place] = []
        self._absent: set[str] = set()

    def begin(self, named: Iterable[tuple[str, Any]], ranges: Iterable[tuple[int, int]]) -> None:
        """Fills these tensors within the ranges, whose bytes are gone, and forgets all others.

        The ranges ascend.
        """
        self.forget()
        # Unknown until this has completed.
        self.is_blind = True
        places: dict[Any, _Place] = {}
        spans, is_blind, device = list(ranges), False, None
        for name, tensor in named:
            if tensor.device.type == "meta":
                self._absent.add(name)
                continue
            address = tensor.data_ptr()
            if tensor.nbytes and not address:
                is_blind = True
            if not tensor.nbytes or not _is_within(address, spans):
                continue
            key = (address, tuple(tensor.shape), tuple(tensor.stride()))
            if key in places:
                places[key].names.append(name)
                continue
            elements, device = _elements(tensor), tensor.device
            elements.fill_(_of_size(elements.element_size()))
            places[key] = _Place(address, elements.nbytes, [name])
        if device is not None:
            # The next writer may use another stream.
            torch.cuda.synchronize(device)
        self._places = list(places.values())
        self.tensors = len(self._places) + len(self._absent)
        self.nbytes = sum(place.nbytes for place in self._places)
        self.is_blind = is_blind or not self.tensors

    def look(self, named: Iterable[tuple[str, Any]]) -> Look:
        """What is still missing; `named` are the model's current tensors.

        One that has moved does not need its old memory. One that is absent during an update still does.
        """
        now = {name: tensor for name, tensor in named if tensor.is_cuda}
        self._absent -= now.keys()
        missing = [Missing(name, 0) for name in sorted(self._absent)]
        if self._places and now:
            torch.cuda.synchronize(next(iter(now.values())).device)
        left: list[_Place] = []
        for index, place in enumerate(self._places):
            if len(missing) >= ENOUGH:
                self._places = left + self._places[index:]
                return Look(missing, is_all=False)
            there = [now[name] for name in place.names if name in now]
            held = [tensor for tensor in there if tensor.data_ptr() == place.address]
            if held:
                nbytes = missing_bytes(held[0])
            else:
                nbytes = 0 if there else place.nbytes
            if nbytes or not held:
                left.append(place)
            if nbytes:
                missing.append(Missing(place.names[0], nbytes))
        self._places = left
        return Look(missing, is_all=True)

    def clear(self, named: Iterable[tuple[str, Any]]) -> None:
        """Zeroes what was not written, like new memory, and forgets everything."""
        addresses = {place.address for place in self._places}
        for _, tensor in named:
            if tensor.is_cuda and tensor.data_ptr() in addresses and missing_bytes(tensor):
                for part in _parts(elements := _elements(tensor)):
                    part.masked_fill_(torch.eq(part, _of_size(elements.element_size())), 0)
        self.forget()

    def forget(self) -> None:
        """Forgets everything."""
        self._places, self._absent = [], set()
        self.is_blind = False
        self.tensors = self.nbytes = 0


def missing_bytes(tensor: Any) -> int:
    """Bytes of a tensor that were not written since they were filled."""
    elements = _elements(tensor)
    unit = int(elements.element_size())
    parts = list(_parts(elements))
    counts = torch.empty(len(parts), dtype=torch.int64, device=tensor.device)
    for at, part in enumerate(parts):
        counts[at : at + 1].copy_(torch.eq(part, _of_size(unit)).sum())
    # Waits for the GPU once.
    count = int(counts.sum().item())
    # Single bytes may have any value: only all of them together count.
    if unit == 1 and count < elements.numel():
        return 0
    return count * unit


def _is_within(address: int, spans: list[tuple[int, int]]) -> bool:
    at = bisect_right(spans, address, key=lambda span: span[0])
    return at > 0 and address < spans[at - 1][1]


def _of_size(unit: int) -> int:
    word = WORD & ((1 << 8 * unit) - 1)
    # Bytes are unsigned here, all others signed.
    return word - (1 << 8 * unit) if unit > 1 and word >> (8 * unit - 1) else word


def _parts(elements: Any) -> Iterator[Any]:
    """In steps along the first dimension."""
    rows = int(elements.shape[0])
    step = max(1, _STEP // max(1, elements.numel() // rows))
    for at in range(0, rows, step):
        yield elements[at : at + step]


def _elements(tensor: Any) -> Any:
    """The tensor's memory in the largest units that fit.

    Made from its storage, since inference tensors may not be filled outside of inference mode.
    """
    size = tensor.element_size()
    # Expanded dimensions have one copy.
    shape, strides = zip(
        *((1 if stride == 0 else extent, stride) for extent, stride in _dimensions(tensor)), strict=True
    )
    begin, count = tensor.storage_offset() * size, math.prod(shape)
    if count == 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)):
        shape, strides = (count,), (1,)
    for unit, name in _UNITS:
        fitting = _widened(shape, strides, unit, size) if begin % unit == 0 else None
        if fitting is not None:
            empty = torch.empty(0, dtype=getattr(torch, name), device=tensor.device)
            return empty.set_(tensor.untyped_storage(), begin // unit, *fitting)
    raise AssertionError(f"{name} fits everywhere")


def _dimensions(tensor: Any) -> list[tuple[int, int]]:
    return list(zip(tensor.shape, tensor.stride(), strict=True)) or [(1, 1)]


def _widened(
    shape: tuple[int, ...], strides: tuple[int, ...], unit: int, size: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The same memory in other units, if its rows can be divided; a single row may leave a rest."""
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
