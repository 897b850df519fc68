"""`torch.nn` and `torch.func`, as far as offloaded modules need them: parameters, modules, their names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .tensors import Tensor


class Parameter(Tensor):
    """`torch.nn.Parameter`: looks at the memory of the tensor that it is made of."""

    def __init__(self, data: Tensor, requires_grad: bool = True) -> None:
        super().__init__(
            *(data._library, data.untyped_storage(), data.shape, data.dtype, data._offset, data.stride())
        )
        self.requires_grad = requires_grad


class Module:
    """`torch.nn.Module`."""

    def __init__(self) -> None:
        self.__dict__.update(_parameters={}, _buffers={}, _modules={})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        for kind, members in ((Parameter, self._parameters), (Module, self._modules)):
            if isinstance(value, kind) or (name in members and value is None):
                members[name] = value
                return
        if name in self._buffers:
            self._buffers[name] = value
        else:
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        for members in ("_parameters", "_buffers", "_modules"):
            if name in self.__dict__.get(members, ()):
                return self.__dict__[members][name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __delattr__(self, name: str) -> None:
        for members in (self._parameters, self._buffers, self._modules):
            if name in members:
                del members[name]
                return
        object.__delattr__(self, name)

    def named_modules(
        self, memo: set[int] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Module]]:
        seen = set() if memo is None else memo
        if remove_duplicate and id(self) in seen:
            return
        seen.add(id(self))
        yield prefix, self
        for name, module in self._modules.items():
            if module is not None:
                inner = f"{prefix}.{name}" if prefix else name
                yield from module.named_modules(seen, inner, remove_duplicate)

    def modules(self) -> Iterator[Module]:
        yield from (module for _, module in self.named_modules())

    def children(self) -> Iterator[Module]:
        yield from self._modules.values()

    def _members(
        self, kind: str, prefix: str, recurse: bool, remove_duplicate: bool
    ) -> Iterator[tuple[str, Any]]:
        seen = set()
        inner = self.named_modules(None, prefix, remove_duplicate) if recurse else [(prefix, self)]
        for place, module in inner:
            for name, tensor in list(module.__dict__[kind].items()):
                if tensor is not None and not (remove_duplicate and id(tensor) in seen):
                    seen.add(id(tensor))
                    yield (f"{place}.{name}" if place else name), tensor

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        yield from self._members("_parameters", prefix, recurse, remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        yield from (parameter for _, parameter in self.named_parameters(recurse=recurse))

    def state_dict(self) -> dict[str, Tensor]:
        found = [*self._members("_parameters", "", True, False), *self._members("_buffers", "", True, False)]
        return {name: tensor.data for name, tensor in found}


def functional_call(
    module: Module, state: dict[str, Tensor], args: Any = (), kwargs: Any = None, *, tie_weights: bool = True
) -> Any:
    """`torch.func.functional_call`: the module with other tensors, for one call."""
    with contextlib.ExitStack() as after:
        for name, tensor in state.items():
            owner, _, own = name.rpartition(".")
            holder = dict(module.named_modules())[owner]
            members = holder._parameters if own in holder._parameters else holder._buffers
            after.callback(members.__setitem__, own, members[own])
            members[own] = tensor
        return module(*args, **(kwargs or {}))
