"""vLLM's modules around its offloaders, over whatever `torch` is: the offloaders themselves are the
stand-in's, or vLLM's own where its sources are at hand.

    with offloaders.installed("0.33.0", origin) as vllm:
        offloader = vllm.make(cpu_offload_gb=1)
"""

import ast
import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

torch: Any = importlib.import_module("torch")

HERE = Path(__file__).resolve().parent
STAND_IN = "the stand-in"
ORIGINAL = "vLLM's sources"
OFFLOADER = "vllm.model_executor.offloader"
RUNNER = "vllm.v1.worker.gpu_model_runner"
OTHER_RUNNER = "vllm.v1.worker.gpu.model_runner"
WORKER = "vllm.v1.worker.gpu_worker"
LOADING = "vllm.model_executor.model_loader.utils"

PACKAGES = (
    *("vllm", "vllm.utils", "vllm.config", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu"),
    *("vllm.model_executor", "vllm.model_executor.model_loader"),
)
NO_PIN = "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY"
NO_UVA = "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA"


def sources(version: str) -> Path | None:
    """Where vLLM's own are; None if nobody has named them."""
    named = os.environ.get("POORWILL_VLLM_SOURCES")
    return Path(named) / version if named else None


class Log(logging.Logger):
    """vLLM's loggers can say a thing once."""

    info_once = logging.Logger.info
    debug_once = logging.Logger.debug
    warning_once = logging.Logger.warning


def init_logger(name: str) -> logging.Logger:
    before = logging.getLoggerClass()
    logging.setLoggerClass(Log)
    try:
        return logging.getLogger(name)
    finally:
        logging.setLoggerClass(before)


class Envs(ModuleType):
    """Variables of the environment, as attributes."""

    def __getattr__(self, name: str) -> bool:
        if name in (NO_PIN, NO_UVA):
            return bool(int(os.environ.get(name, "0")))
        raise AttributeError(name)


class Platform:
    """`current_platform`."""

    def __init__(self, name: str = "cuda") -> None:
        self.device_name = name

    def is_cuda(self) -> bool:
        return self.device_name == "cuda"


class Worker:
    """As much of vLLM's as writes weights, and wakes."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.write: Callable[[], None] = lambda: None

    def _call(self, name: str) -> None:
        self.calls.append(name)
        self.write()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        self._call("reload_weights")

    def update_weights(self, update_info: Any) -> None:
        self._call("update_weights")

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def finish_weight_update(self) -> None:
        self._call("finish_weight_update")

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._call("wake_up")


class Vllm:
    """What a test asks of a version."""

    def __init__(self, version: str, origin: str) -> None:
        self.version = version
        self.origin = origin

    @property
    def has_prefix(self) -> bool:
        return self.version != "0.20.2"

    def module(self, name: str) -> Any:
        return importlib.import_module(name)

    @property
    def base(self) -> Any:
        return self.module(f"{OFFLOADER}.base")

    def make(self, backend: str = "auto", **settings: Any) -> Any:
        """What a runner makes for its configuration, and what the process has then."""
        uva = {"cpu_offload_gb": 0, "cpu_offload_params": set()}
        prefetch = {
            "offload_group_size": 0,
            "offload_num_in_group": 1,
            "offload_prefetch_step": 1,
            "offload_params": set(),
        }
        for name, value in settings.items():
            [part] = [part for part in (uva, prefetch) if name in part]
            part[name] = value
        config = SimpleNamespace(
            offload_backend=backend, uva=SimpleNamespace(**uva), prefetch=SimpleNamespace(**prefetch)
        )
        runner = self.module(RUNNER)
        runner.set_offloader(runner.create_offloader(config))
        return self.base.get_offloader()

    def loading(self, module: Any, device: Any) -> Any:
        return self.module(LOADING).device_loading_context(module, device)


def view_of(host: Any) -> Any:
    """What vLLM's C++ does: the GPU's view of memory that PyTorch has page-locked."""
    from poorwill.offload import device_view

    return device_view(host, device=torch.cuda.current_device())


def _register(op_name: str, op_func: Any, **_: Any) -> None:
    ops = torch.ops
    if not hasattr(ops, "vllm"):
        ops.vllm = SimpleNamespace()
    setattr(ops.vllm, op_name, op_func)


def modules(version: str, origin: str, folder: Path | None = None) -> dict[str, ModuleType]:
    made: dict[str, ModuleType] = {name: ModuleType(name) for name in PACKAGES}
    for name in PACKAGES:
        made[name].__path__ = []

    def put(name: str, **contents: Any) -> None:
        made.setdefault(name, ModuleType(name)).__dict__.update(contents)

    put("vllm.version", __version__=version)
    put("vllm.logger", init_logger=init_logger)
    made["vllm.envs"] = Envs("vllm.envs")
    put("vllm.platforms", current_platform=Platform())
    put(
        "vllm.utils.platform_utils",
        is_pin_memory_available=lambda: torch.cuda.is_available(),
        is_uva_available=lambda: torch.cuda.is_available(),
    )
    put(
        "vllm.utils.torch_utils",
        get_accelerator_view_from_cpu_tensor=view_of,
        direct_register_custom_op=_register,
        get_dtype_size=lambda dtype: dtype.itemsize,
    )
    put("vllm.utils.mem_utils", format_gib=lambda size: f"{size / (1 << 30):.2f}")
    put("vllm.utils.gpu_sync_debug", gpu_sync_allowed=contextlib.nullcontext)
    put("vllm.config", OffloadConfig=object, get_current_vllm_config_or_none=lambda: None)
    put(WORKER, Worker=type("Worker", (Worker,), dict(Worker.__dict__)))
    for name, module in made.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(made[parent], own, module)
    root = sources(version)
    if folder is None and origin == ORIGINAL and root is not None:
        folder = root / "vllm" / "model_executor"
    made["vllm.model_executor"].__path__ = [str(folder or HERE / "model_executor")]
    made["vllm.model_executor.model_loader"].__path__ = [str(HERE / "model_executor" / "model_loader")]
    return made


def _original_loading(version: str) -> Any:
    """The one function of a module that imports all of vLLM."""
    root = sources(version)
    assert root is not None
    parsed = ast.parse((root / "vllm/model_executor/model_loader/utils.py").read_text())
    [found] = [node for node in parsed.body if getattr(node, "name", "") == "device_loading_context"]
    module: Any = ast.Module([found], [])
    names = {
        "contextmanager": contextlib.contextmanager,
        "torch": torch,
        "envs": sys.modules["vllm.envs"],
        "is_pin_memory_available": sys.modules["vllm.utils.platform_utils"].is_pin_memory_available,
        "get_accelerator_view_from_cpu_tensor": view_of,
    }
    exec(compile(module, "model_loader/utils.py", "exec"), names)
    return names["device_loading_context"]


def _add_runners(version: str) -> None:
    """What asks for an offloader by a name of its own."""
    package = importlib.import_module(OFFLOADER)
    names = {name: getattr(package, name) for name in ("create_offloader", "get_offloader", "set_offloader")}
    for name in (RUNNER, OTHER_RUNNER):
        sys.modules[name] = module = ModuleType(name)
        if name == RUNNER or version != "0.20.2":
            module.__dict__.update(names)


@contextlib.contextmanager
def installed(
    version: str, origin: str, *, is_late: bool = False, folder: Path | None = None
) -> Iterator[Vllm]:
    """A process with this vLLM, in which the plugin has been registered: before vLLM has imported anything of
    its own, or after. `folder` has other sources. Afterwards everything is as it was.
    """
    before = {name: module for name, module in sys.modules.items() if _concerns(name)}
    finders = list(sys.meta_path)
    for name in before:
        del sys.modules[name]
    package = sys.modules["poorwill"]
    ours = package.__dict__.pop("vllm", None)
    try:
        sys.modules.update(modules(version, origin, folder))
        steps: list[Callable[[], None]] = [
            lambda: importlib.import_module("poorwill.vllm").register(),
            lambda: _start(version, origin),
        ]
        for step in reversed(steps) if is_late else steps:
            step()
        yield Vllm(version, origin)
    finally:
        base = sys.modules.get(f"{OFFLOADER}.base")
        if base is not None:
            base.set_offloader(base.NoopOffloader())
        for name in [name for name in sys.modules if _concerns(name)]:
            del sys.modules[name]
        sys.modules.update(before)
        sys.meta_path[:] = finders
        package.__dict__.pop("vllm", None)
        if ours is not None:
            package.__dict__["vllm"] = ours


def _start(version: str, origin: str) -> None:
    loading = importlib.import_module(LOADING)
    if origin == ORIGINAL:
        replaced = loading.device_loading_context
        original = _original_loading(version)
        # Behind our hook, where that is in place already.
        if getattr(replaced, "__poorwill__", False):
            loading.__dict__["device_loading_context"] = original
            importlib.import_module("poorwill.vllm._offload").install_loading(loading)
        else:
            loading.__dict__["device_loading_context"] = original
    _add_runners(version)


def _concerns(name: str) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in ("vllm", "poorwill.vllm"))
