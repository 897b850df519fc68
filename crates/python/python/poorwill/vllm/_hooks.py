"""The hooks on vLLM's modules, and the reasons why some could not be installed.

A hook leaves a vLLM that does not have what it needs unchanged. An engine that wants to sleep with Poorwill
is then refused with the reason (`refuse`); others are not affected.

Every process of every vLLM beside us imports this. So what a hook needs, the contract first, is imported
when vLLM imports the hook's module, and no decorator of dataclasses is here.
"""

import importlib
import os
from types import ModuleType

from poorwill.vllm._imports import is_there, when_imported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from poorwill.vllm._versions import UnsupportedVllmError

_refusals: "list[UnsupportedVllmError]" = []


class Hook:
    """A function of ours for a module of vLLM's."""

    def __init__(self, module: str, ours: str, function: str) -> None:
        self.module = module
        self.ours = ours
        self.function = function

    def is_wanted(self) -> bool:
        """Whether it waits at all. Any engine's options may choose sleep mode."""
        return True

    def wait(self) -> None:
        """Calls the function with the module, as soon as vLLM imports it."""
        when_imported(self.module, self._install)

    def look(self) -> None:
        """Imports the module. Raises UnsupportedVllmError if this vLLM lacks a module that it must have."""
        try:
            importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            # A failed import of another module is not our concern.
            if error.name is None or not f"{self.module}.".startswith(f"{error.name}."):
                raise
            from poorwill.vllm import _versions

            _versions.refuse_missing(_versions.running(), self.module)

    def _install(self, module: ModuleType) -> None:
        from poorwill.vllm import _environment, _versions

        try:
            _versions.check(_versions.running(), module)
        except _versions.UnsupportedVllmError as refusal:
            # Remembered also if it is raised: a second import of the module would go without the hook.
            _refusals.append(refusal)
            if _environment.wants_sleep_mode():
                raise
            return
        getattr(importlib.import_module(self.ours), self.function)(module)


class OffloadHook(Hook):
    """A hook for weights that vLLM offloads.

    It is installed only if the environment asks for it. An unfit vLLM is then refused when an offloader is
    made, since vLLM ignores failed imports of some modules.
    """

    def __init__(self, module: str, ours: str, function: str, is_checked: bool = True) -> None:
        super().__init__(module, ours, function)
        self.is_checked = is_checked
        """False where the sleep hooks need the rest of the module."""

    def is_wanted(self) -> bool:
        return _may_be_on("POORWILL_OFFLOAD")

    def _install(self, module: ModuleType) -> None:
        from poorwill.vllm import _versions

        ours = importlib.import_module(self.ours)
        try:
            if self.is_checked:
                _versions.check(_versions.running(), module, _versions.WITHOUT_OFFLOAD)
        except _versions.UnsupportedVllmError as refusal:
            ours.refuse(refusal)
        getattr(ours, self.function)(module)


class TritonHook(Hook):
    """A hook for kernels whose configurations are pruned.

    It is installed only if the environment asks for it. An unfit vLLM is refused when it imports the
    kernels.
    """

    def is_wanted(self) -> bool:
        return _may_be_on("POORWILL_TRITON")

    def look(self) -> None:
        """Raises UnsupportedVllmError as `Hook.look`, but imports nothing.

        The kernels' package looks for GPUs, which only workers may do.
        """
        if not is_there(self.module):
            from poorwill.vllm import _versions

            _versions.refuse_missing(_versions.running(), self.module, _versions.WITHOUT_TRITON)

    def _install(self, module: ModuleType) -> None:
        ours = importlib.import_module(self.ours)
        if not ours.is_compiling():
            return
        from poorwill.vllm import _versions

        version = _versions.running()
        _versions.refuse_unexpected(version, module.__name__, _versions.WITHOUT_TRITON)
        _versions.check(version, module, _versions.WITHOUT_TRITON)
        getattr(ours, self.function)(module)


class RouteHook(Hook):
    """A hook for routes of vLLM's server, and for what its callers pass. An engine serves without."""

    def __init__(self, module: str, ours: str, function: str, lacks: str) -> None:
        super().__init__(module, ours, function)
        self.lacks = lacks
        """What there is not without it."""

    def _install(self, module: ModuleType) -> None:
        from poorwill.vllm import _versions

        try:
            _versions.check(_versions.running(), module)
        except _versions.UnsupportedVllmError as refusal:
            _warn(f"there {self.lacks}", refusal)
            return
        getattr(importlib.import_module(self.ours), self.function)(module)


class RecordHook(Hook):
    """A hook that records a start. It is installed only if the environment asks for it, and never fails."""

    def is_wanted(self) -> bool:
        return bool(os.environ.get("POORWILL_RECORD", "").strip())

    def _install(self, module: ModuleType) -> None:
        try:
            getattr(importlib.import_module(self.ours), self.function)(module)
        except Exception as error:
            _warn("nothing is recorded", error)


def _may_be_on(switch: str) -> bool:
    """Whether it is set to anything but off, also to an invalid value: that error is raised later."""
    return os.environ.get(switch, "").strip() not in ("", "0")


def _warn(what: str, because: Exception) -> None:
    import logging

    logging.getLogger(__name__).warning("%s: %s", what, because)


HOOKS = (
    Hook("vllm.platforms.cuda", "poorwill.vllm._platform", "install"),
    Hook("vllm.config.vllm", "poorwill.vllm._platform", "install_graph_pool"),
    Hook("vllm.device_allocator.sleep_mode_backend", "poorwill.vllm._platform", "install_backend"),
    Hook("vllm.v1.engine.core", "poorwill.vllm._engine", "install_core"),
    Hook("vllm.v1.engine.async_llm", "poorwill.vllm._frontend", "install_async"),
    Hook("vllm.v1.engine.llm_engine", "poorwill.vllm._frontend", "install_sync"),
)

_NO_TAGS = "is no keep_tags"
ROUTE_HOOKS = (
    *(
        # The first until 0.22, the second from 0.23 on.
        RouteHook(f"vllm.entrypoints.serve.{module}.api_router", f"poorwill.vllm.{ours}", function, lacks)
        for module in ("sleep", "dev.sleep")
        for ours, function, lacks in (
            ("_hibernation", "install_routes", "are no routes for hibernating"),
            ("_routes", "install", _NO_TAGS),
        )
    ),
    RouteHook("vllm.entrypoints.llm", "poorwill.vllm._frontend", "install_offline", _NO_TAGS),
)

_OFFLOADER = "vllm.model_executor.offloader"
OFFLOAD_HOOKS = (
    # Later imports by name get ours; earlier ones are replaced.
    OffloadHook(f"{_OFFLOADER}.base", "poorwill.vllm._offload", "install_base"),
    OffloadHook(_OFFLOADER, "poorwill.vllm._offload", "install_names"),
    OffloadHook(f"{_OFFLOADER}.uva", "poorwill.vllm._offload", "install_names"),
    OffloadHook(f"{_OFFLOADER}.prefetch", "poorwill.vllm._offload", "install_names"),
    OffloadHook(f"{_OFFLOADER}.prefetch_ops", "poorwill.vllm._offload", "install_names"),
    OffloadHook("vllm.v1.worker.gpu_model_runner", "poorwill.vllm._offload", "install_names", False),
    OffloadHook("vllm.v1.worker.gpu.model_runner", "poorwill.vllm._offload", "install_names", False),
    OffloadHook("vllm.model_executor.model_loader.utils", "poorwill.vllm._offload", "install_loading"),
    OffloadHook("vllm.v1.worker.gpu_worker", "poorwill.vllm._offload", "install_worker", False),
)

RECORD_HOOK = RecordHook("vllm.v1.worker.gpu_worker", "poorwill.vllm._recording", "install")

TRITON_HOOKS = tuple(
    TritonHook(f"{package}.{module}", "poorwill.vllm._triton", "install")
    # The first until 0.25, the second from 0.26 on.
    for package in ("vllm.model_executor.layers.fla.ops", "vllm.third_party.flash_linear_attention.ops")
    for module in ("chunk_delta_h", "chunk_o")
)

ALL = (*HOOKS, *ROUTE_HOOKS, *OFFLOAD_HOOKS, *TRITON_HOOKS, RECORD_HOOK)


def refuse_any() -> None:
    """As `refuse`, after importing every hooked module.

    Only for the process that starts an engine, which imports most of them anyway.
    """
    refuse()
    for hook in HOOKS:
        hook.look()
    refuse()


def refuse() -> None:
    """Raises UnsupportedVllmError for an unknown vLLM, or if a hook could not be installed."""
    from poorwill.vllm import _versions

    _versions.known(_versions.running())
    if _refusals:
        raise _refusals[0]
