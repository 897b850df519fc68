"""vLLM's sleep mode with Poorwill, as a plugin: nothing has to be imported or patched by hand.

vLLM finds `register` by its entry point and calls it in every process of an engine. Where vLLM has a registry
of sleep-mode backends (0.33 and later), `--enable-sleep-mode --sleep-mode-backend poorwill` chooses it; before
that, `--enable-sleep-mode` with `POORWILL_SLEEP_MODE=1` in the environment. Whoever chooses neither has vLLM
as it is.

How the parts fit: the engine's configuration gets our worker in the place of vLLM's (`_platform`), and the
worker an allocator in the place of `CuMemAllocator` (`worker`, `allocator`). What only the engine's core or
its frontend can do (refusing what cannot be done, taking a failed sleep back, saying that the weights are not
there yet, metrics) is hooked where those are defined (`_engine`, `_frontend`, `_metrics`).
"""

from types import ModuleType

from poorwill.vllm import _environment
from poorwill.vllm._imports import when_imported

__all__ = ["register"]


def register() -> None:
    """What vLLM calls, at least once in every process: cheap, and the same as called once.

    Imports neither vLLM nor PyTorch: what is hooked is hooked when vLLM imports it.
    """
    when_imported("vllm.platforms.cuda", _hook_platform)
    when_imported("vllm.device_allocator.sleep_mode_backend", _hook_registry)
    when_imported("vllm.config.vllm", _hook_config)
    when_imported("vllm.v1.engine.core", _hook_core)
    when_imported("vllm.v1.engine.async_llm", _hook_async)
    when_imported("vllm.v1.engine.llm_engine", _hook_sync)
    # A setting that cannot be read is told before anything is started.
    _environment.read()


def _hook_platform(module: ModuleType) -> None:
    from poorwill.vllm import _platform

    _platform.install(module)


def _hook_registry(module: ModuleType) -> None:
    factory = module.SleepModeBackendFactory
    if "poorwill" not in factory._registry:
        factory.register_backend("poorwill", "poorwill.vllm.backend", "Backend")


def _hook_config(module: ModuleType) -> None:
    from poorwill.vllm import _platform

    _platform.install_graph_pool(module)


def _hook_core(module: ModuleType) -> None:
    from poorwill.vllm import _engine

    _engine.install_core(module)


def _hook_async(module: ModuleType) -> None:
    from poorwill.vllm import _frontend

    _frontend.install_async(module)


def _hook_sync(module: ModuleType) -> None:
    from poorwill.vllm import _frontend

    _frontend.install_sync(module)
