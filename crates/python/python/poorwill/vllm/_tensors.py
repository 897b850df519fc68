"""A model's tensors in GPU memory, by name.

A wrapper subclass, as torchao's, stands for the tensors that it consists of. Host memory at its device
address is left out, since it does not sleep.
"""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any


def parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """The model's parameters on the GPU, or without memory during an update, with every name of tied ones."""
    for name, tensor in model.named_parameters(remove_duplicate=False):
        for inner, part in _parts(name, tensor):
            if part.device.type in ("cuda", "meta"):
                yield inner, part


def visible(models: list[Any]) -> Iterator[tuple[str, Any]]:
    """The models' parameters and buffers on the GPU, but for hidden memory, which has no address."""
    for named in (named for model in models for named in (model.named_parameters, model.named_buffers)):
        for name, tensor in named():
            for inner, part in _parts(name, tensor):
                if part.is_cuda and part.data_ptr():
                    yield inner, part


def storages(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[int, int, str]]:
    """Address, bytes and a name of every storage of these, once each."""
    seen: set[int] = set()
    for name, tensor in tensors:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in seen:
            seen.add(address)
            yield address, storage.nbytes(), name


class Places:
    """Where tensors are now. Whether they still are takes a hundredth of looking at all anew."""

    def __init__(self, tensors: Iterable[tuple[str, Any]]) -> None:
        self._all = [(weakref.ref(tensor), tensor.data_ptr()) for _, tensor in tensors]

    def are_as_before(self) -> bool:
        """Whether each of them lives, at the same address."""
        return all((tensor := of()) is not None and tensor.data_ptr() == place for of, place in self._all)


def extents(model: Any) -> Iterator[tuple[int, int]]:
    """First address, and the one behind the last, of every visible parameter and buffer on the GPU."""
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named():
            for _, part in _parts(name, tensor):
                if part.is_cuda and part.numel() and part.data_ptr():
                    steps = zip(part.shape, part.stride(), strict=True)
                    elements = 1 + sum((extent - 1) * stride for extent, stride in steps)
                    yield part.data_ptr(), part.data_ptr() + elements * part.element_size()


def _parts(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    if getattr(tensor, "_vllm_is_uva_offloaded", False):
        return
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    attributes, _ = tensor.__tensor_flatten__()
    for attribute in attributes:
        yield from _parts(f"{name}.{attribute}", getattr(tensor, attribute))
