"""The hooks on vLLM's modules, and the reasons why some could not be installed.

A hook leaves a vLLM that does not have what it needs unchanged. An engine that wants to sleep with Poorwill
is then refused with the reason (`refuse`); others are not affected.
"""

import importlib
import logging
from dataclasses import dataclass
from types import ModuleType

from poorwill.vllm import _environment, _versions
from poorwill.vllm._imports import is_there, when_imported
from poorwill.vllm._versions import UnsupportedVllmError

_log = logging.getLogger(__name__)
_refusals: list[UnsupportedVllmError] = []


@dataclass(frozen=True)
class Hook:
    """A function of ours for a module of vLLM's."""

    module: str
    ours: str
    function: str

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
            _versions.refuse_missing(_versions.running(), self.module)

    def _install(self, module: ModuleType) -> None:
        try:
            _versions.check(_versions.running(), module)
        except UnsupportedVllmError as refusal:
            # Remembered also if it is raised: a second import of the module would go without the hook.
            _refusals.append(refusal)
            if _environment.wants_sleep_mode():
                raise
            return
        getattr(importlib.import_module(self.ours), self.function)(module)


@dataclass(frozen=True)
class OffloadHook(Hook):
    """A hook for weights that vLLM offloads.

    It is installed only if the environment asks for it. An unfit vLLM is then refused when an offloader is
    made, since vLLM ignores failed imports of some modules.
    """

    is_checked: bool = True
    """False where the sleep hooks need the rest of the module."""

    def _install(self, module: ModuleType) -> None:
        ours = importlib.import_module(self.ours)
        try:
            if self.is_checked:
                _versions.check(_versions.running(), module, _versions.WITHOUT_OFFLOAD)
        except UnsupportedVllmError as refusal:
            ours.refuse(refusal)
        getattr(ours, self.function)(module)


@dataclass(frozen=True)
class TritonHook(Hook):
    """A hook for kernels whose configurations are pruned.

    It is installed only if the environment asks for it. An unfit vLLM is refused when it imports the
    kernels.
    """

    def look(self) -> None:
        """Raises UnsupportedVllmError as `Hook.look`, but imports nothing.

        The kernels' package looks for GPUs, which only workers may do.
        """
        if not is_there(self.module):
            _versions.refuse_missing(_versions.running(), self.module, _versions.WITHOUT_TRITON)

    def _install(self, module: ModuleType) -> None:
        ours = importlib.import_module(self.ours)
        if not ours.is_compiling():
            return
        version = _versions.running()
        _versions.refuse_unexpected(version, module.__name__, _versions.WITHOUT_TRITON)
        _versions.check(version, module, _versions.WITHOUT_TRITON)
        getattr(ours, self.function)(module)


@dataclass(frozen=True)
class RouteHook(Hook):
    """A hook for routes of vLLM's server, which an engine serves without."""

    def _install(self, module: ModuleType) -> None:
        try:
            _versions.check(_versions.running(), module)
        except UnsupportedVllmError as refusal:
            _log.warning("there are no routes for hibernating: %s", refusal)
            return
        getattr(importlib.import_module(self.ours), self.function)(module)


@dataclass(frozen=True)
class RecordHook(Hook):
    """A hook that records a start. It is installed only if the environment asks for it, and never fails."""

    def _install(self, module: ModuleType) -> None:
        try:
            getattr(importlib.import_module(self.ours), self.function)(module)
        except Exception as error:
            _log.warning("nothing is recorded: %s", error)


HOOKS = (
    Hook("vllm.platforms.cuda", "poorwill.vllm._platform", "install"),
    Hook("vllm.config.vllm", "poorwill.vllm._platform", "install_graph_pool"),
    Hook("vllm.device_allocator.sleep_mode_backend", "poorwill.vllm._platform", "install_backend"),
    Hook("vllm.v1.engine.core", "poorwill.vllm._engine", "install_core"),
    Hook("vllm.v1.engine.async_llm", "poorwill.vllm._frontend", "install_async"),
    Hook("vllm.v1.engine.llm_engine", "poorwill.vllm._frontend", "install_sync"),
)

ROUTE_HOOKS = tuple(
    # The first until 0.22, the second from 0.23 on.
    RouteHook(f"vllm.entrypoints.serve.{module}.api_router", "poorwill.vllm._hibernation", "install_routes")
    for module in ("sleep", "dev.sleep")
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
    _versions.known(_versions.running())
    if _refusals:
        raise _refusals[0]
