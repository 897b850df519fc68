"""Leaves a thread's scopes for a while: what it allocates meanwhile is PyTorch's own, and is given back."""

import contextlib
from types import TracebackType
from typing import Any

from poorwill.torch._gpu import Gpu, gpu_of
from poorwill.torch._import import torch
from poorwill.torch._scope import Scope, _threads, innermost
from poorwill.torch._watch import undisturbed


class Outside(contextlib.AbstractContextManager["Outside"]):
    """A context of the thread that enters it: allocations on the current GPU come from no arena.

    They come from a private pool of PyTorch's, whose cache is released at the end. A `Pool` entered inside
    counts as ever.
    """

    def __init__(self) -> None:
        self._plain: _Plain | None = None

    @undisturbed()
    def __enter__(self) -> "Outside":
        plain = _Plain(gpu_of(torch.cuda.current_device()))
        plain.enter()
        self._plain = plain
        return self

    @undisturbed()
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        plain, self._plain = self._plain, None
        if plain is not None:
            plain.leave(exc_type, exc_value, traceback)


class _Plain(Scope):
    """A scope over PyTorch's own memory, in which no operation is checked."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.allocator: Any = None
        self._generation: Any = None
        self._is_close = True

    def renew(self) -> None:
        self.gpu.empty()

    def enter(self) -> None:
        outer = innermost(self.gpu)
        try:
            if outer is not None:
                outer.pause()
            _threads.scopes.append(self)
            self.begin()
        except BaseException:
            self._end()
            raise

    def leave(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(self._end)
            if not torch.cuda.is_current_stream_capturing():
                undo.callback(self.gpu.flush)
            undo.callback(self.pause)
