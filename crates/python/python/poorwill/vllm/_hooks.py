"""What of vLLM is hooked, by whom, and what became of it.

A vLLM that is not what a hook needs is left alone by that hook, and nobody is told who does not want to sleep
with Poorwill. Who does is refused, with what was found (`refuse`).
"""

import importlib
from dataclasses import dataclass
from types import ModuleType

from poorwill.vllm import _environment, _versions
from poorwill.vllm._imports import is_there, when_imported
from poorwill.vllm._versions import UnsupportedVllmError

_refusals: list[UnsupportedVllmError] = []


@dataclass(frozen=True)
class Hook:
    """A function of ours for a module of vLLM's."""

    module: str
    ours: str
    function: str

    def wait(self) -> None:
        """Has the function called with the module, as soon as vLLM has imported it."""
        when_imported(self.module, self._install)

    def look(self) -> None:
        """Imports the module. Raises UnsupportedVllmError if there is none, and this vLLM has to have it."""
        try:
            importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            # Something else that it imports is no matter of ours.
            if error.name is None or not f"{self.module}.".startswith(f"{error.name}."):
                raise
            _versions.refuse_missing(_versions.running(), self.module)

    def _install(self, module: ModuleType) -> None:
        try:
            _versions.check(_versions.running(), module)
        except UnsupportedVllmError as refusal:
            # Remembered also if it is raised: whoever imports the module again gets it without the hook.
            _refusals.append(refusal)
            if _environment.wants_sleep_mode():
                raise
            return
        getattr(importlib.import_module(self.ours), self.function)(module)


@dataclass(frozen=True)
class OffloadHook(Hook):
    """One for weights that vLLM offloads. It waits only where the environment asks for it, so that an unfit
    vLLM is refused always: when an offloader is made, since vLLM does without some modules that fail.
    """

    is_checked: bool = True
    """Not where the rest of what is needed of the module is needed for sleeping."""

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
    """One for kernels whose configurations are pruned. It waits only where the environment asks for it, so
    that an unfit vLLM is refused always: when it imports the kernels.
    """

    def look(self) -> None:
        """Raises UnsupportedVllmError as `Hook.look` does, and imports nothing: the kernels' package looks
        for GPUs, which is for workers to do.
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


HOOKS = (
    Hook("vllm.platforms.cuda", "poorwill.vllm._platform", "install"),
    Hook("vllm.config.vllm", "poorwill.vllm._platform", "install_graph_pool"),
    Hook("vllm.device_allocator.sleep_mode_backend", "poorwill.vllm._platform", "install_backend"),
    Hook("vllm.v1.engine.core", "poorwill.vllm._engine", "install_core"),
    Hook("vllm.v1.engine.async_llm", "poorwill.vllm._frontend", "install_async"),
    Hook("vllm.v1.engine.llm_engine", "poorwill.vllm._frontend", "install_sync"),
)

_OFFLOADER = "vllm.model_executor.offloader"
OFFLOAD_HOOKS = (
    # Who imports names from there later has ours; who did before is given them.
    OffloadHook(f"{_OFFLOADER}.base", "poorwill.vllm._offload", "install_base"),
    OffloadHook(_OFFLOADER, "poorwill.vllm._offload", "install_names"),
    OffloadHook(f"{_OFFLOADER}.uva", "poorwill.vllm._offload", "install_names"),
    OffloadHook(f"{_OFFLOADER}.prefetch", "poorwill.vllm._offload", "install_names"),
    OffloadHook("vllm.v1.worker.gpu_model_runner", "poorwill.vllm._offload", "install_names", False),
    OffloadHook("vllm.v1.worker.gpu.model_runner", "poorwill.vllm._offload", "install_names", False),
    OffloadHook("vllm.model_executor.model_loader.utils", "poorwill.vllm._offload", "install_loading"),
    OffloadHook("vllm.v1.worker.gpu_worker", "poorwill.vllm._offload", "install_worker", False),
)

TRITON_HOOKS = tuple(
    TritonHook(f"{package}.{module}", "poorwill.vllm._triton", "install")
    # Where they are until 0.25, and from 0.26 on.
    for package in ("vllm.model_executor.layers.fla.ops", "vllm.third_party.flash_linear_attention.ops")
    for module in ("chunk_delta_h", "chunk_o")
)


def refuse_any() -> None:
    """As `refuse`, when all that is hooked has been looked at: in the process that begins an engine, which
    imports most of it anyway.
    """
    refuse()
    for hook in HOOKS:
        hook.look()
    refuse()


def refuse() -> None:
    """Raises UnsupportedVllmError if this vLLM is not known, or something could not be hooked in it."""
    _versions.known(_versions.running())
    if _refusals:
        raise _refusals[0]
