"""Tensors of a model that no update writes: scales, tables and others, neither parameter nor buffer.

A level 2 sleep drops the weights, since someone writes them again. That holds for parameters. vLLM itself
saves buffers. What else lives in the memory of the weights was made while the model was loaded, and no one
would make it again. So these bytes are found by what PyTorch has allocated there, wherever they are held: in
plain attributes, containers, or objects of a quantisation. The sleep keeps them.
"""

import importlib
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from poorwill.torch._gpu import snapshot_segments
from poorwill.vllm._tensors import extents

torch: Any = importlib.import_module("torch")

Range = tuple[int, int]
"""First address, and the one behind the last."""

# How many objects are searched for names, and how deep below a module.
_OBJECTS_MOST = 200_000
_DEPTH_MOST = 6

_LEAVES = (
    *(str, bytes, int, float, complex, type, type(None), types.ModuleType),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType),
)


@dataclass(frozen=True)
class Hidden:
    """Bytes that live in the memory of the weights, and that no parameter or buffer has."""

    address: int
    nbytes: int
    name: str | None = None
    """Where the model holds the tensor, if that was found."""


def find(models: list[Any], ranges: list[Range]) -> list[Hidden]:
    """What is hidden in these ranges of addresses, by address. Touches no device memory."""
    # What PyTorch has added to the size that was asked for has no bytes.
    blocks = [
        (int(block["address"]), int(block["address"]) + int(block["requested_size"]))
        for segment in snapshot_segments()
        if _is_within(int(segment["address"]), ranges)
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    written = (extent for model in models for extent in extents(model))
    return [Hidden(begin, end - begin) for begin, end in _without(sorted(blocks), sorted(written))]


def named(models: list[Any], hidden: list[Hidden]) -> list[Hidden]:
    """The same, largest first, with the names of those that are reached from the models' modules."""
    names: dict[int, str] = {}
    for address, name in _tensors(models):
        for each in hidden:
            if each.address <= address < each.address + each.nbytes:
                names.setdefault(each.address, name)
    found = [Hidden(each.address, each.nbytes, names.get(each.address)) for each in hidden]
    return sorted(found, key=lambda each: -each.nbytes)


def _is_within(address: int, ranges: list[Range]) -> bool:
    return any(begin <= address < end for begin, end in ranges)


def _without(blocks: list[Range], written: list[Range]) -> Iterator[Range]:
    """The parts of blocks that nothing written covers. Both ascend; what is written may overlap."""
    at = 0
    for begin, end in blocks:
        while at < len(written) and written[at][1] <= begin and written[at][0] < begin:
            at += 1
        for first, last in written[at:]:
            if first >= end:
                break
            if begin < first:
                yield begin, first
            begin = max(begin, last)
        if begin < end:
            yield begin, end


def _tensors(models: list[Any]) -> Iterator[tuple[int, str]]:
    """Address and name of tensors on the GPU that modules hold in any other way than PyTorch's."""
    seen: set[int] = set()
    # Those held most directly come first, which have the shortest names.
    left = deque(
        (value, f"{path}.{name}" if path else name, 0)
        for model in models
        for path, module in _modules(model)
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules")
    )
    for _ in range(_OBJECTS_MOST):
        if not left:
            return
        value, name, depth = left.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.is_cuda:
                yield int(value.data_ptr()), name
        elif depth < _DEPTH_MOST:
            left.extend((inner, f"{name}{step}", depth + 1) for step, inner in _held(value))


def _modules(model: Any) -> Iterable[tuple[str, Any]]:
    return model.named_modules() if hasattr(model, "named_modules") else [("", model)]


def _held(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", inner) for key, inner in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(f"[{nth}]", inner) for nth, inner in enumerate(value)]
    return [(f".{key}", inner) for key, inner in getattr(value, "__dict__", {}).items()]
