"""Operations, and the modes that see them: `torch.utils._python_dispatch.TorchDispatchMode`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Returned:
    """One value that an operation gives back; `alias_info` says whose memory it is, None if its own."""

    alias_info: str | None


@dataclass(frozen=True)
class Schema:
    """What an operation says about itself."""

    name: str
    returns: tuple[Returned, ...]
    is_mutable: bool


COMPOSITE = "CompositeImplicitAutograd"
"""The key of an operation that is made of others. Modes see those, but in inference mode the whole."""


class _Threads(threading.local):
    """The modes of a thread, the innermost last."""

    def __init__(self) -> None:
        self.modes: list[TorchDispatchMode] = []
        self.inference = 0


_threads = _Threads()


class Operation:
    """A `torch._ops.OpOverload`: calling it asks the innermost mode."""

    def __init__(
        self,
        name: str,
        does: Callable[..., Any],
        alias: str | None,
        is_mutable: bool,
        *,
        is_composite: bool = False,
    ) -> None:
        self._does = does
        self._is_composite = is_composite
        self._schema = Schema(name, (Returned(alias),), is_mutable)
        self.__name__ = name.removeprefix("aten::")

    def name(self) -> str:
        return self._schema.name

    def has_kernel_for_dispatch_key(self, key: str) -> bool:
        return self._is_composite and key == COMPOSITE

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _threads.modes:
            return self._does(*args, **kwargs)
        mode = _threads.modes.pop()
        try:
            types = tuple({type(arg) for arg in args if hasattr(type(arg), "__torch_dispatch__")})
            return mode.__torch_dispatch__(self, types, args, kwargs)
        finally:
            _threads.modes.append(mode)


class TorchDispatchMode:
    """A context that sees every operation of the thread. What it calls goes to the next mode outside."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise NotImplementedError

    def __enter__(self) -> TorchDispatchMode:
        _threads.modes.append(self)
        return self

    def __exit__(self, *raised: object) -> None:
        _threads.modes.pop()


def modes() -> list[TorchDispatchMode]:
    """Those of this thread."""
    return list(_threads.modes)


def infer(more: int) -> None:
    """Inference mode begins with 1 and ends with -1."""
    _threads.inference += more


def is_inference() -> bool:
    return _threads.inference > 0
