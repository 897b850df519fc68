"""Finds functions that others have put into vLLM's allocator, which ours replaces as a whole.

A patch of theirs would vanish without a word, and with it what it is for: Unsloth's standby keeps weights
mapped that its trainer uses. So it is refused, with the name of who patched what.
"""

import functools
import importlib
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from poorwill.vllm import _environment
from poorwill.vllm._platform import ConfigurationError

logger: Any = importlib.import_module("vllm.logger").init_logger("vllm.poorwill")

STOCK = "vllm.device_allocator.cumem"
OURS = "poorwill.vllm.allocator"

# The packages whose patches do nothing but leave the weights awake.
_STANDBY = ("unsloth", "unsloth_zoo")
_AWAKE = "weights"


@dataclass(frozen=True)
class Patch:
    """A function in the place of one of the class's."""

    name: str
    module: str
    """The module that it was written in."""
    function: str

    @property
    def is_standby(self) -> bool:
        return self.module.partition(".")[0] in _STANDBY


def find(allocator: type) -> list[Patch]:
    """What in an allocator's class neither vLLM nor Poorwill wrote, by name."""
    homes = [vars(sys.modules[name]) for name in (STOCK, OURS) if name in sys.modules]
    found: dict[str, Patch] = {}
    for kind in allocator.__mro__[:-1]:
        for name, member in vars(kind).items():
            for made in _functions(member):
                if isinstance(made, FunctionType):
                    if any(made.__globals__ is home for home in homes):
                        continue
                    module = str(made.__globals__.get("__name__"))
                    found.setdefault(name, Patch(name, module, made.__qualname__))
                else:
                    found.setdefault(name, Patch(name, type(made).__module__, repr(made)))
    return sorted(found.values(), key=lambda patch: patch.name)


def refuse(allocator: type, keep_awake: Collection[str]) -> None:
    """Raises ConfigurationError for patches.

    Those of a standby are not needed where the weights stay awake.
    """
    patches = find(allocator)
    if not patches:
        return
    if _AWAKE in keep_awake and all(patch.is_standby for patch in patches):
        logger.info(
            "%s: Poorwill does without it, since no sleep touches the weights (%s=%s)",
            _said(patches),
            _environment.KEEP_AWAKE,
            ",".join(keep_awake),
        )
        return
    others = [patch for patch in patches if not patch.is_standby]
    if others:
        remedy = (
            "leave the patch away, or let the engine sleep with vLLM's allocator: unset "
            f"{_environment.SLEEP_MODE} and --sleep-mode-backend"
        )
    else:
        remedy = (
            f"unset UNSLOTH_VLLM_STANDBY and set {_environment.KEEP_AWAKE}={_AWAKE}, which keeps awake what "
            "the trainer shares"
        )
    raise ConfigurationError(
        f"{_said(others or patches)}: Poorwill has an allocator of its own, so the patch would do nothing: "
        f"{remedy}"
    )


def _said(patches: list[Patch]) -> str:
    each = ", ".join(f"{patch.name} by {patch.module} ({patch.function})" for patch in patches)
    return f"vLLM's CuMemAllocator is patched: {each}"


def _functions(member: object) -> Iterator[object]:
    """The functions behind a class's member. Decorators of Python's own are looked through."""
    if isinstance(member, staticmethod | classmethod):
        yield from _functions(member.__func__)
    elif isinstance(member, property):
        for each in (member.fget, member.fset, member.fdel):
            yield from _functions(each)
    elif isinstance(member, FunctionType):
        is_context = member.__globals__.get("__name__") == "contextlib"
        yield getattr(member, "__wrapped__", member) if is_context else member
    elif isinstance(member, functools.partial | functools.partialmethod):
        yield from _functions(member.func)
    elif callable(member) and not isinstance(member, type):
        yield member
