"""Where the elements of a tensor lie: strides, in elements as PyTorch counts them, and arrays of NumPy's."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor that has its elements in order; an extent of 0 counts as 1."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """The strides of extents of 1 do not count, and nothing counts where there are no elements."""
    if prod(shape) == 0:
        return True
    known = zip(shape, strides, contiguous(shape), strict=True)
    return all(extent == 1 or stride == in_order for extent, stride, in_order in known)


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the end of the last."""
    if prod(shape) == 0:
        return 0
    return 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))


def over(memory: Any, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Any:
    """NumPy's array over memory; its elements are numbers of that size, whatever they mean."""
    return np.ndarray(
        tuple(shape), np.dtype(f"u{itemsize}"), memory, 0, tuple(stride * itemsize for stride in strides)
    )


def integers(content: bytes, kind: str) -> Any:
    """NumPy's array of integers of that kind."""
    return np.frombuffer(content, np.dtype(kind))
