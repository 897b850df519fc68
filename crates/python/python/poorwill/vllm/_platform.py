"""Decides whether an engine is Poorwill's, where vLLM completes its configuration.

Such an engine gets our worker class by name, which the configuration carries into every process of the
engine. With another class than vLLM's it gets ours over that one (`over`). What cannot work is refused here,
before any of them starts.
"""

import functools
import logging
import sys
from types import ModuleType
from typing import Any

from poorwill._native import PoorwillError
from poorwill.vllm import _connectors, _environment, _hooks, _versions

STOCK_WORKER = "vllm.v1.worker.gpu_worker.Worker"
WORKER = "poorwill.vllm.worker.Worker"
OVER = "poorwill.vllm.over."
"""Begins the name of our worker over another class, which follows."""
BACKEND = "poorwill"
STOCK_BACKEND = "cumem"
"""The option's default, so that it differs from any choice."""
FIRST_CONFIG = "VLLM_TRITON_FORCE_FIRST_CONFIG"
"""vLLM's switch that makes Triton's autotuner take the first configuration that launches."""


class ConfigurationError(PoorwillError, ValueError):
    """Conflicting settings of vLLM and Poorwill."""


_log = logging.getLogger(__name__)
_was_chosen = False


def install(module: ModuleType) -> None:
    """Hooks the completion of the configuration, in `vllm.platforms.cuda`."""
    platform = module.CudaPlatformBase
    stock = platform.check_and_update_config.__func__
    if getattr(stock, "__poorwill__", False):
        return

    @functools.wraps(stock)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        stock(cls, vllm_config)
        decide_offload()
        decide_triton()
        decide(vllm_config)

    check_and_update_config.__dict__["__poorwill__"] = True
    platform.check_and_update_config = classmethod(check_and_update_config)


def install_graph_pool(module: ModuleType) -> None:
    """Makes vLLM capture graphs into the allocator's pool: by default on one GPU, else as with its own."""
    config = module.VllmConfig
    stock = getattr(config, "use_cumem_cudagraph_pool", None)
    if not isinstance(stock, property) or getattr(stock.fget, "__poorwill__", False):
        return
    decides: Any = stock.fget

    def use_cumem_cudagraph_pool(self: Any) -> bool:
        if not is_active(self):
            return bool(decides(self))
        # Asks whether the pool exists and graphs are kept, which is so.
        instead: dict[str, Any] = {"sleep_mode_backend": "cumem"}
        parallel = self.parallel_config
        is_alone = parallel.world_size * parallel.data_parallel_size == 1
        if is_alone and _environment.wants_graphs():
            # With several ranks they would copy what they reduce, which is the user's choice.
            instead["sleep_mode_offload_cudagraph"] = True
        return bool(decides(_View(self, model_config=_View(self.model_config, **instead))))

    use_cumem_cudagraph_pool.__dict__["__poorwill__"] = True
    config.use_cumem_cudagraph_pool = property(use_cumem_cudagraph_pool, doc=stock.__doc__)


def install_backend(module: ModuleType) -> None:
    """Adds our backend to vLLM's registry."""
    factory = module.SleepModeBackendFactory
    if BACKEND not in getattr(factory, "_registry", ()):
        factory.register_backend(BACKEND, "poorwill.vllm.backend", "Backend")


class _View:
    """An object with some attributes replaced."""

    def __init__(self, of: Any, **instead: Any) -> None:
        self.__dict__.update(instead)
        self._of = of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


def decide(vllm_config: Any) -> None:
    """Gives an engine that is to sleep with Poorwill our worker.

    Raises ConfigurationError or UnsupportedVllmError for what cannot work.
    """
    global _was_chosen
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model is None:
        return
    if not _is_chosen(model, _environment.wants_sleep_mode()):
        return
    # Errors in the settings come before anything is started.
    _environment.read()
    # Once: later configurations in this process derive from this one, say for a drafter.
    if _was_chosen:
        _hooks.refuse()
    else:
        _hooks.refuse_any()
    if problem := _connectors.problem(vllm_config):
        raise ConfigurationError(problem)
    if getattr(model, "sleep_mode_backend", None) == STOCK_BACKEND:
        model.sleep_mode_backend = BACKEND
    if not is_active(vllm_config):
        parallel.worker_cls = _our_worker(parallel.worker_cls)
    _was_chosen = True


def _our_worker(worker_cls: Any) -> str:
    """Our worker in the place of one that is named."""
    if worker_cls == STOCK_WORKER:
        return WORKER
    names = worker_cls.split(".") if isinstance(worker_cls, str) else []
    if len(names) < 2 or not all(name.isidentifier() for name in names):
        raise ConfigurationError(
            f"sleep mode is to be poorwill's, and --worker-cls is {worker_cls!r}, which is no MODULE.CLASS: "
            "put the class into a module, and name it so"
        )
    if names[0] == "vllm_omni":
        _log.info("diffusion stages of vLLM-Omni use vLLM's allocator, and sleep as without Poorwill")
    return f"{OVER}{worker_cls}"


def decide_offload() -> None:
    """Checks the settings for offloaded weights, before anything is started.

    Raises ValueError for an unreadable switch, and UnsupportedVllmError for an unknown vLLM.
    """
    if _environment.wants_offload():
        _versions.known(_versions.running(), _versions.WITHOUT_OFFLOAD)


def decide_triton() -> None:
    """The same for kernel tuning; ConfigurationError where no kernels are tuned."""
    if not _environment.wants_triton():
        return
    _environment.triton_shared_memory_bytes()
    _versions.known(_versions.running(), _versions.WITHOUT_TRITON)
    if getattr(sys.modules.get("vllm.envs"), FIRST_CONFIG, False):
        raise ConfigurationError(
            f"{_environment.TRITON}=1 drops configurations before vLLM tries them, and with {FIRST_CONFIG} "
            "it tries them in their order without a pruner: unset one of them"
        )
    for hook in _hooks.TRITON_HOOKS:
        hook.look()


def note_chosen() -> None:
    """Marks this process as having an engine of Poorwill's.

    Its configurations derive from one that was made elsewhere.
    """
    global _was_chosen
    _was_chosen = True


def is_active(vllm_config: Any) -> bool:
    """Whether an engine of this configuration sleeps with Poorwill."""
    worker_cls = vllm_config.parallel_config.worker_cls
    return isinstance(worker_cls, str) and (worker_cls == WORKER or worker_cls.startswith(OVER))


def _is_chosen(model: Any, by_environment: bool) -> bool:
    backend = getattr(model, "sleep_mode_backend", None)
    if not model.enable_sleep_mode:
        # A derived configuration, say of a drafter, is no reason for an error.
        if not _was_chosen and (by_environment or backend == BACKEND):
            said = f"--sleep-mode-backend {BACKEND}" if backend == BACKEND else f"{_environment.SLEEP_MODE}=1"
            raise ConfigurationError(
                f"{said} is given, but sleep mode is off: add --enable-sleep-mode, or take {said} away"
            )
        return False
    if backend is None:
        return by_environment
    if backend in (BACKEND, STOCK_BACKEND):
        return backend == BACKEND or by_environment
    if by_environment and not _was_chosen:
        raise ConfigurationError(
            f"{_environment.SLEEP_MODE}=1 is given, and --sleep-mode-backend is {backend}, which is "
            f"neither's: make that {BACKEND} or leave it away, or unset {_environment.SLEEP_MODE}"
        )
    return False
