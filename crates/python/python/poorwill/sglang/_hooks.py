"""Our hooks on SGLang's functions: all of them, or none.

They are all registered, or SGLang is left as it is (`_versions.check`). SGLang applies them one by one, and
goes on where one fails. So our memory saver is given only where all are in their places.
"""

import importlib
import logging
import pkgutil
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from poorwill._native import PoorwillError
from poorwill.sglang import _occupation
from poorwill.sglang._adapter import ADAPTER, adapter_over
from poorwill.sglang._answers import COMMUNICATOR, ask
from poorwill.sglang._generations import Generation
from poorwill.sglang._versions import REGISTRY, Fit

NAME = "poorwill"
"""Ours among memory savers and their modes."""
INTERFACE = 1
"""The interface of SGLang's memory savers that ours has."""

_log = logging.getLogger("poorwill.sglang")
# The targets of the hooks that ours needs where it is chosen by its name.
_around: list[str] = []


def install(fit: Fit) -> None:
    """Registers all hooks, and offers our memory saver to torch_memory_saver where that takes modes."""
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    for target, hook in hooks(fit).items():
        registry.HookRegistry.register(target, hook, registry.HookType.AROUND)
    if fit.has_registry:
        _around[:] = around_calls(fit.generation)
        savers = importlib.import_module(REGISTRY.module)
        savers.MemorySavers.register(NAME, f"{__name__}:make", INTERFACE)
    offer_hook_mode()


def hooks(fit: Fit) -> dict[str, Callable[..., Any]]:
    """What is called around SGLang's functions, by their paths."""
    others = around_calls(fit.generation)
    if fit.has_registry:
        return others
    return {**others, f"{ADAPTER}.TorchMemorySaverAdapter.create": partial(create, tuple(others))}


def around_calls(generation: Generation) -> dict[str, Callable[..., Any]]:
    """The hooks around a release and a resume."""
    return {
        f"{generation.manager}.release_memory_occupation": partial(_occupation.release, generation),
        f"{generation.manager}.resume_memory_occupation": partial(_occupation.resume, generation),
        f"{COMMUNICATOR}.__call__": ask,
    }


def create(others: tuple[str, ...], original: Any, enable: bool) -> Any:
    """What SGLang's `TorchMemorySaverAdapter.create` returns: ours, if all others are in place."""
    if not enable:
        return original(enable)
    if left := _left(others):
        _log.error("%s: its own memory saver is used", left)
        return original(enable)
    return _made()


def make() -> Any:
    """Our memory saver, which was chosen by its name. Raises PoorwillError if a hook is not in place."""
    if left := _left(_around):
        raise PoorwillError(f"{left}: leave --memory-saver-backend away to use its own memory saver")
    return _made()


def _made() -> Any:
    return adapter_over(importlib.import_module(ADAPTER).TorchMemorySaverAdapter)


def _left(targets: Iterable[str]) -> str:
    """Which of our hooks are not in their places, as a sentence; nothing if all are."""
    left = [target for target in targets if not _is_hooked(target)]
    return f"SGLang did not apply our hooks on {' and '.join(left)}, and its log says why" if left else ""


def _is_hooked(target: str) -> bool:
    try:
        # SGLang wraps what it hooks.
        return hasattr(pkgutil.resolve_name(target), "__wrapped__")
    except (ImportError, AttributeError):
        # It could not import the module either.
        return False


def offer_hook_mode() -> bool:
    """Registers us as a mode of torch_memory_saver's, where it takes modes of others.

    Its release 0.0.10 does not; the call is the one that is proposed there (#79). Returns whether it does.
    """
    try:
        saver: Any = importlib.import_module("torch_memory_saver")
    except Exception:
        # Also where its library cannot be loaded. It is not needed here.
        return False
    offer = getattr(saver, "register_hook_mode", None)
    if offer is None:
        return False
    from poorwill.compat.torch_memory_saver._pools import Pools

    try:
        offer(NAME, Pools, uses_preload=False)
    except (ValueError, RuntimeError, TypeError) as error:
        # It takes each name once.
        _log.debug("torch_memory_saver did not take the mode %s: %s", NAME, error)
        return False
    return True
