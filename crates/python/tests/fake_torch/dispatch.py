"""Operations, and the modes that see them: `torch.utils._python_dispatch.TorchDispatchMode`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
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


class _Threads(threading.local):
    """The modes of a thread, the innermost last."""

    def __init__(self) -> None:
        self.modes: list[TorchDispatchMode] = []


_threads = _Threads()


class Operation:
    """A `torch._ops.OpOverload`: calling it asks the innermost mode."""

    def __init__(self, name: str, does: Callable[..., Any], alias: str | None, is_mutable: bool) -> None:
        self._does = does
        self._schema = Schema(name, (Returned(alias),), is_mutable)
        self.__name__ = name.removeprefix("aten::")

    def __repr__(self) -> str:
        return f"<OpOverload(op='{self._schema.name}')>"

    def name(self) -> str:
        return self._schema.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _threads.modes:
            return self._does(*args, **kwargs)
        mode = _threads.modes.pop()
        try:
            return mode.__torch_dispatch__(self, (), args, kwargs)
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

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _threads.modes.pop()


def modes() -> list[TorchDispatchMode]:
    """Those of this thread."""
    return list(_threads.modes)
