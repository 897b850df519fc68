"""An SGLang plugin: `--enable-memory-saver` with Poorwill, without a line changed.

SGLang 0.5.23 and later finds `register` by its entry point (`sglang.srt.plugins`) and calls it in every
process. From then on its adapter makes our memory saver in the place of torch_memory_saver's. A release or
resume may be repeated, and all ranks carry it out, or none. Without `--enable-memory-saver` nothing changes.
`SGLANG_PLUGINS` with other names leaves this plugin out.
"""

import importlib
import logging
from typing import Any

from poorwill.sglang._adapter import ADAPTER, adapter_over
from poorwill.sglang._answers import COMMUNICATOR, ask
from poorwill.sglang._occupation import MANAGER, release, resume

__all__ = ["register"]

logger = logging.getLogger("poorwill.sglang")

HOOK_MODE = "poorwill"


def register() -> None:
    """Hooks SGLang's adapter, and torch_memory_saver where it takes modes. Repeating it is harmless.

    Raises ImportError where SGLang has no registry of hooks.
    """
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    kinds = hooks.HookType
    for target, hook, kind in (
        (f"{ADAPTER}.TorchMemorySaverAdapter.create", create, kinds.REPLACE),
        (f"{MANAGER}.release_memory_occupation", release, kinds.AROUND),
        (f"{MANAGER}.resume_memory_occupation", resume, kinds.AROUND),
        (f"{COMMUNICATOR}.__call__", ask, kinds.AROUND),
    ):
        hooks.HookRegistry.register(target, hook, kind)
    offer_hook_mode()


def create(enable: bool) -> Any:
    """What SGLang's `TorchMemorySaverAdapter.create` returns from now on."""
    adapter = importlib.import_module(ADAPTER)
    if not enable:
        return adapter._TorchMemorySaverAdapterNoop()
    return adapter_over(adapter.TorchMemorySaverAdapter)


def offer_hook_mode() -> bool:
    """Registers us as a mode of torch_memory_saver's, where it takes modes of others.

    Its release 0.0.10 does not; the call is the one that is proposed there (#79). Returns whether it does.
    """
    try:
        saver: Any = importlib.import_module("torch_memory_saver")
    except ImportError:
        return False
    offer = getattr(saver, "register_hook_mode", None)
    if offer is None:
        return False
    from poorwill.compat.torch_memory_saver._pools import Pools

    try:
        offer(HOOK_MODE, Pools, uses_preload=False)
    except (ValueError, RuntimeError, TypeError) as error:
        # It takes each name once.
        logger.debug("torch_memory_saver did not take the mode %s: %s", HOOK_MODE, error)
        return False
    return True
