"""vLLM's own offloaders, and the code that moves parameters to the device while they load.

They are imported from its sources as vLLM imports them, over the current `torch`, with stubs around them.

    with offloaders.installed("0.33.0") as vllm:
        offloader = vllm.make(cpu_offload_gb=1)
"""

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from imports import imported_anew
from vllm_sources import sources

from .loader import StubModule, init_logger

torch: Any = importlib.import_module("torch")

OFFLOADER = "vllm.model_executor.offloader"
RUNNER = "vllm.v1.worker.gpu_model_runner"
OTHER_RUNNER = "vllm.v1.worker.gpu.model_runner"
WORKER = "vllm.v1.worker.gpu_worker"
LOADING = "vllm.model_executor.model_loader.utils"

NO_PIN = "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY"
NO_UVA = "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA"


def folder(version: str) -> Path:
    """Where a version has its offloaders."""
    root = sources()
    assert root is not None
    return root.joinpath(version, *OFFLOADER.split("."))


class Finder(MetaPathFinder, Loader):
    """Finds vLLM's offloaders, and what loads, in files; everything else of vLLM's is a stub."""

    def __init__(self, version: str, offloaders: Path) -> None:
        self.offloaders = offloaders
        self.loading = folder(version).parents[1].joinpath(*LOADING.split(".")[1:]).with_suffix(".py")

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != "vllm":
            return None
        if name == LOADING:
            return importlib.util.spec_from_file_location(name, self.loading)
        if name == OFFLOADER:
            return importlib.util.spec_from_file_location(
                name, self.offloaders / "__init__.py", submodule_search_locations=[str(self.offloaders)]
            )
        if name.startswith(f"{OFFLOADER}."):
            own = name.rpartition(".")[2]
            return importlib.util.spec_from_file_location(name, self.offloaders / f"{own}.py")
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


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
        # A vLLM with a registry of offloaders tells them by itself.
        writing = getattr(_offloader(), "writing", contextlib.nullcontext)
        with writing() if _has_registry() and name != "wake_up" else contextlib.nullcontext():
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
        if _has_registry() and (tags is None or "weights" in tags):
            _offloader().refill()


def _has_registry() -> bool:
    return hasattr(sys.modules[f"{OFFLOADER}.base"], "register_offloader")


def _offloader() -> Any:
    return sys.modules[f"{OFFLOADER}.base"].get_offloader()


class Vllm:
    """What a test asks of a version."""

    def __init__(self, version: str) -> None:
        self.version = version

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


def modules(version: str) -> dict[str, ModuleType]:
    """What the offloaders ask vLLM for."""
    made: dict[str, ModuleType] = {"vllm.envs": Envs("vllm.envs")}

    def put(name: str, **contents: Any) -> None:
        made[name] = StubModule(name)
        made[name].__dict__.update(contents)

    put("vllm", envs=made["vllm.envs"])
    put("vllm.version", __version__=version)
    put("vllm.logger", init_logger=init_logger)
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
    put("vllm.config", get_current_vllm_config_or_none=lambda: None)
    put(WORKER, Worker=type("Worker", (Worker,), dict(Worker.__dict__)))
    return made


def _add_runners(version: str) -> None:
    """What asks for an offloader by a name of its own."""
    importlib.import_module(LOADING)
    package = importlib.import_module(OFFLOADER)
    names = {name: getattr(package, name) for name in ("create_offloader", "get_offloader", "set_offloader")}
    for name in (RUNNER, OTHER_RUNNER):
        sys.modules[name] = module = ModuleType(name)
        if name == RUNNER or version != "0.20.2":
            module.__dict__.update(names)


@contextlib.contextmanager
def installed(version: str, *, is_late: bool = False, offloaders: Path | None = None) -> Iterator[Vllm]:
    """A process with this vLLM, in which the plugin has been registered: before vLLM has imported anything of
    its own, or after. `offloaders` has others than the version's. Afterwards everything is as it was.
    """
    finders = list(sys.meta_path)
    with imported_anew("vllm"):
        try:
            sys.meta_path.append(Finder(version, offloaders or folder(version)))
            sys.modules.update(modules(version))
            if "def register_offloader(" in (folder(version) / "base.py").read_text():
                # Its worker imports it.
                importlib.import_module(f"{OFFLOADER}.base")
            steps: list[Callable[[], None]] = [
                lambda: importlib.import_module("poorwill.vllm").register(),
                lambda: _add_runners(version),
            ]
            for step in reversed(steps) if is_late else steps:
                step()
            yield Vllm(version)
        finally:
            base = sys.modules.get(f"{OFFLOADER}.base")
            if base is not None:
                base.set_offloader(base.NoopOffloader())
            sys.meta_path[:] = finders
