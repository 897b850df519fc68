"""vLLM's own worker and its sleep mode, over the fake of PyTorch.

The model runner is not vLLM's, and the modules of ours are freshly imported.

    with workers.installed("0.20.2") as vllm:
        worker = vllm.Worker(config, 0, 0, "")
"""

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NoReturn

from imports import imported_anew

from .loader import Loader, StubModule
from .worker_parts import (
    SECOND_RUNNER,
    FirstGPUModelRunner,
    GPUModelRunner,
    SecondGPUModelRunner,
    TransferEngine,
    init_kv_cache,
    stub,
)

torch: Any = importlib.import_module("torch")

WORKER_MODULE = "vllm.v1.worker.gpu_worker"
REGISTRY_MODULE = "vllm.device_allocator.sleep_mode_backend"
REAL = (
    *(WORKER_MODULE, "vllm.v1.worker.worker_base", "vllm.v1.worker.utils"),
    "vllm.v1.worker.lora_model_runner_mixin",
    *("vllm.utils.mem_utils", "vllm.utils.mem_constants"),
    *("vllm.device_allocator", "vllm.device_allocator.cumem"),
)
PARALLEL = "vllm.distributed.parallel_state"
GIVEN = ("vllm.version", "vllm.logger", "vllm.platforms", "vllm.envs", PARALLEL, SECOND_RUNNER)


class Accelerator:
    """`torch.accelerator`, which is CUDA."""

    def __getattr__(self, name: str) -> Any:
        of_cuda = {"get_memory_info": "mem_get_info", "set_device_index": "set_device"}
        return getattr(torch.cuda, of_cuda.get(name, name))


class Device(torch.device):  # type: ignore[misc]
    """One that can be the default for a block."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class Vllm:
    """A version's worker and what it stands on."""

    def __init__(self, version: str) -> None:
        self.minor = int(version.split(".")[1])
        real = REAL if self.minor < 25 else (*REAL, REGISTRY_MODULE)
        self.loader = Loader(version, real, {"poorwill"})
        self.workspace_context: Any = None
        self._give()
        self.worker = self.loader.module(WORKER_MODULE)
        for name in real:
            self.loader.module(name)
        cumem = self.loader.module("vllm.device_allocator.cumem")
        # As if it were in the module, since patches of others are refused.
        cumem.CuMemAllocator.get_instance = staticmethod(FunctionType(_asked.__code__, vars(cumem)))

    def allocator(self) -> Any:
        if self.minor >= 33:
            return self.loader.module("vllm.device_allocator").get_mem_allocator_instance()
        return self.loader.module("vllm.device_allocator.cumem").CuMemAllocator.get_instance()

    def pool(self, tag: str) -> Any:
        """Where this version has pools for adapters."""
        return contextlib.nullcontext() if self.minor < 33 else self.allocator().use_memory_pool(tag=tag)

    def modules(self) -> dict[str, ModuleType]:
        """What Python's own tables have to have of them."""
        names = {*self.loader.real, *GIVEN}
        names |= {name.rpartition(".")[0] for name in names} | {"vllm", "vllm.v1"}
        return {name: self.loader.module(name) for name in names}

    def _give(self) -> None:
        give = self.loader.give
        self.loader.modules["torch"] = made = StubModule("torch")
        vars(made).update({name: each for name, each in vars(torch).items() if not name.startswith("__")})
        for name in ("torch.cuda", "torch.cuda.memory", "torch._C"):
            self.loader.modules[name] = importlib.import_module(name)
        give("torch", accelerator=Accelerator(), device=Device, mm=stub("mm"), nn=stub("nn"))
        platform = stub(
            "platform", device_name="cuda", logical_device_id_to_visible_device_id=lambda rank: rank
        )
        for name in ("is_cuda", "is_cuda_alike"):
            setattr(platform, name, lambda: True)
        platform.mem_get_info = lambda device: torch.cuda.mem_get_info(device)
        give("vllm.platforms", current_platform=platform)
        give("vllm.config", CUDAGraphMode=SimpleNamespace(NONE="NONE"))
        give("vllm.envs", VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=True)
        give("vllm.triton_utils", HAS_TRITON=True)
        give("vllm.utils.torch_utils", is_quantized_kv_cache=lambda dtype: dtype.startswith("fp8"))
        group = SimpleNamespace(is_last_rank=True, rank_in_group=0)
        world = SimpleNamespace(world_size=1, rank=0)
        give(PARALLEL, get_pp_group=lambda: group, get_world_group=lambda: world, _groups={})
        factory = SimpleNamespace(create_engine=TransferEngine)
        give("vllm.distributed.weight_transfer", WeightTransferEngineFactory=factory)
        loading = SimpleNamespace(get_external_weight_memory=lambda _: 0)
        give("vllm.model_executor.model_loader", get_model_loader=lambda _: loading)
        give("vllm.multimodal.gpu_ipc_memory", reserve_mm_ipc_gpu_memory=lambda size, *_: size)
        give("vllm.v1.worker.workspace", init_workspace_manager=self._init_workspace_manager)
        runner = FirstGPUModelRunner if self.minor < 29 else GPUModelRunner
        give("vllm.v1.worker.gpu_model_runner", GPUModelRunner=functools.partial(runner, self))
        second = functools.partial(SecondGPUModelRunner, self)
        give(SECOND_RUNNER, GPUModelRunner=second, init_kv_cache=init_kv_cache)

    def _init_workspace_manager(self, *_: Any, alloc_context: Any = None) -> None:
        self.workspace_context = alloc_context


def _asked() -> NoReturn:
    raise AssertionError("vLLM's own allocator is asked for")


@contextlib.contextmanager
def installed(version: str) -> Iterator[ModuleType]:
    """Our worker's module over this version, fresh; afterwards everything is as it was."""
    with imported_anew("vllm"):
        sys.modules.update(Vllm(version).modules())
        hooks: Any = importlib.import_module("poorwill.vllm._platform")
        registry = sys.modules.get(REGISTRY_MODULE)
        if registry is not None:
            hooks.install_backend(registry)
        yield importlib.import_module("poorwill.vllm.worker")
