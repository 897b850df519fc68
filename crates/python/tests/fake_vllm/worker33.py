"""vLLM 0.33.0's GPU worker, its memory snapshots, its registry of sleep-mode backends and its model runner,
as far as a sleep has to do with them. `workers` puts them where vLLM has them.
"""

import contextlib
import gc
import importlib
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

from fake_vllm.worker_parts import RunnerParts, TransferEngine, current_platform, format_gib, init_logger

torch: Any = importlib.import_module("torch")
logger = init_logger(__name__)


@dataclass
class MemorySnapshot:
    """What a device and PyTorch say of memory at one moment."""

    torch_peak: int = 0
    torch_allocated: int = 0
    free_memory: int = 0
    total_memory: int = 0
    cuda_memory: int = 0
    torch_memory: int = 0
    non_torch_memory: int = 0
    timestamp: float = 0.0
    device: Any = None
    auto_measure: bool = True

    def __post_init__(self) -> None:
        self.device_ = torch.device(
            f"cuda:{torch.cuda.current_device()}" if self.device is None else self.device
        )
        if self.auto_measure:
            self.measure()

    def measure(self) -> None:
        stats = torch.cuda.memory_stats(self.device_)
        self.torch_peak = stats.get("allocated_bytes.all.peak", 0)
        self.torch_allocated = stats.get("allocated_bytes.all.current", 0)
        self.free_memory, self.total_memory = current_platform.mem_get_info(self.device_)
        self.cuda_memory = self.total_memory - self.free_memory
        self.torch_memory = torch.cuda.memory_reserved(self.device_)
        self.non_torch_memory = self.cuda_memory - self.torch_memory
        self.timestamp = time.time()


@dataclass
class MemoryProfilingResult:
    """What a profile has found."""

    before_create: MemorySnapshot
    weights_memory: int = 0
    non_kv_cache_memory: int = 0
    total_consumed: int = 0
    transient_peak_headroom: int = 0
    non_torch_increase: int = 0
    before_profile: MemorySnapshot = field(default_factory=lambda: MemorySnapshot(auto_measure=False))
    after_profile: MemorySnapshot = field(default_factory=lambda: MemorySnapshot(auto_measure=False))


@contextlib.contextmanager
def memory_profiling(
    baseline_snapshot: MemorySnapshot, weights_memory: int = 0
) -> Iterator[MemoryProfilingResult]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(baseline_snapshot.device_)
    result = MemoryProfilingResult(baseline_snapshot, weights_memory)
    for snapshot in (result.before_profile, result.after_profile):
        snapshot.device_ = baseline_snapshot.device_
    result.before_profile.measure()
    yield result
    gc.collect()
    torch.cuda.empty_cache()
    after = result.after_profile
    after.measure()
    result.non_torch_increase = after.non_torch_memory - baseline_snapshot.non_torch_memory
    result.total_consumed = baseline_snapshot.free_memory - after.free_memory
    result.transient_peak_headroom = after.torch_peak - after.torch_allocated
    result.non_kv_cache_memory = result.total_consumed + result.transient_peak_headroom


def request_memory(init_snapshot: MemorySnapshot, cache_config: Any, external_weight_memory: int = 0) -> int:
    wanted: int = math.ceil(init_snapshot.total_memory * cache_config.gpu_memory_utilization)
    wanted -= external_weight_memory
    if init_snapshot.free_memory < wanted:
        raise ValueError(
            f"{format_gib(init_snapshot.free_memory)} of {format_gib(init_snapshot.total_memory)} GiB are "
            f"free, and {format_gib(wanted)} GiB are wanted"
        )
    return wanted


class CuMemAllocator:
    """vLLM's own allocator, which no engine of Poorwill's may reach."""

    instance: "CuMemAllocator | None" = None
    default_tag: str = "default"

    @staticmethod
    def get_instance() -> "CuMemAllocator":
        raise AssertionError("vLLM's own allocator is asked for")

    def release_pools(self) -> None:
        raise AssertionError("vLLM's own allocator is asked for")


def get_mem_allocator_instance() -> Any:
    return sys.modules["vllm.device_allocator.cumem"].CuMemAllocator.get_instance()


class SleepModeBackend(ABC):
    """How memory is put to sleep."""

    def __init__(self) -> None:
        self._state = "RUNNING"

    @abstractmethod
    def suspend(self, level: int = 1) -> None: ...

    @abstractmethod
    def resume(self, tags: list[str] | None = None) -> None: ...

    def state(self) -> str:
        return self._state

    def discard(self, tags: tuple[str, ...]) -> None:
        raise RuntimeError(f"{type(self).__name__} does not discard")

    @classmethod
    def is_supported(cls) -> bool:
        return True

    @classmethod
    def preserves_communicators(cls) -> bool:
        return False

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        return False

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        return False

    @classmethod
    def supports_durable_storage(cls) -> bool:
        return False


class SleepModeBackendFactory:
    """The registry."""

    _registry: ClassVar[dict[str, Callable[[], type[SleepModeBackend]]]] = {}

    @classmethod
    def register_backend(cls, name: str, module_path: str, class_name: str) -> None:
        if name in cls._registry:
            raise ValueError(f"Sleep-mode backend '{name}' is already registered.")
        cls._registry[name] = lambda: getattr(importlib.import_module(module_path), class_name)

    @classmethod
    def get_backend_class(cls, name: str) -> type[SleepModeBackend]:
        if name not in cls._registry:
            raise ValueError(f"Unsupported sleep-mode backend '{name}'.")
        return cls._registry[name]()

    @classmethod
    def create_backend(cls, model_config: Any) -> SleepModeBackend:
        backend = cls.get_backend_class(model_config.sleep_mode_backend)
        if not backend.is_supported():
            raise ValueError(f"Sleep-mode backend '{model_config.sleep_mode_backend}' is not supported.")
        return backend()


class GPUModelRunner(RunnerParts):
    """The model and its caches."""

    def load_model(self, load_dummy_weights: bool = False, *, model: Any = None) -> None:
        self.model = model or self.make_model()
        if self.lora_config:
            self.model = self.load_lora_model(self.model, self.vllm_config, self.device)

    def load_lora_model(self, model: Any, vllm_config: Any, device: Any) -> Any:
        with get_mem_allocator_instance().use_memory_pool(tag="runtime"):
            self.make_lora()
        return model

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, kv_cache_allocation_context: Any = None
    ) -> None:
        kv_cache_config = deepcopy(kv_cache_config)
        self.builders = []
        self.make_builders()
        self.initialize_kv_cache_tensors(
            kv_cache_config, [16], kv_cache_allocation_context=kv_cache_allocation_context
        )
        self.make_builders()

    def initialize_kv_cache_tensors(
        self,
        kv_cache_config: Any,
        kernel_block_sizes: list[int],
        kv_cache_allocation_context: Any = None,
    ) -> dict[str, Any]:
        with kv_cache_allocation_context or contextlib.nullcontext():
            tensors = self.make_tensors(kv_cache_config)
        self.bind(tensors)
        return tensors

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return dict(self.specs())

    def profile_run(self, randomize_inputs: bool = False) -> None:
        self.run()
        self.vllm_config.grow_workspace()

    def _init_minimal_kv_cache_for_profiling(self) -> None:
        blocks = min(self.max_num_reqs, self.compilation_config.max_cudagraph_capture_size) or 1
        self.initialize_kv_cache(self.vllm_config.minimal(blocks), is_profiling=True)

    def _cleanup_profiling_kv_cache(self) -> None:
        torch.cuda.synchronize()
        self.kv_caches, self.builders = [], []
        gc.collect()
        torch.cuda.empty_cache()

    def profile_cudagraph_memory(self) -> int:
        self._init_minimal_kv_cache_for_profiling()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0]
        self.capture()
        torch.cuda.synchronize()
        taken = before - torch.cuda.mem_get_info()[0]
        self.graphs.clear()
        self._cleanup_profiling_kv_cache()
        return int(taken)

    def capture_model(self) -> int:
        if not self.vllm_config.model_config.sleep_mode_offload_cudagraph:
            self.capture()
            return 0
        for _ in range(2):
            with get_mem_allocator_instance().cudagraph_pool() as pool:
                self.capture(pool)
        return 0

    def reload_weights(
        self, weights_iterator: Any = None, weights_path: str | None = None, is_checkpoint_format: bool = True
    ) -> None:
        self.model.write()

    def get_draft_model(self) -> Any:
        return None

    def shutdown(self) -> None:
        self.end()


class Worker:
    """One rank."""

    def __init__(
        self,
        vllm_config: Any,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ):
        self.vllm_config = vllm_config
        self.cache_config = vllm_config.cache_config
        self.model_config = vllm_config.model_config
        self.rank = rank
        self.local_rank = local_rank
        self.device: Any = None
        self.model_runner: Any = None
        self.workspace: Any = None
        self._sleep_saved_buffers: dict[str, Any] = {}
        self._sleep_saved_parameters: dict[str, Any] = {}
        self._sleep_saved_draft_buffers: dict[str, Any] = {}
        self.weight_transfer_engine: Any = None
        self._weight_update_active = False
        self._weight_update_is_draft = False
        self._sleep_mode_backend: SleepModeBackend | None = None

    @property
    def sleep_mode_backend(self) -> SleepModeBackend:
        if self._sleep_mode_backend is None:
            self._sleep_mode_backend = SleepModeBackendFactory.create_backend(self.model_config)
        return self._sleep_mode_backend

    def sleep(self, level: int = 1) -> None:
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        if level == 2:
            buffers = self.model_runner.model.named_buffers()
            self._sleep_saved_buffers = {name: buffer.cpu().clone() for name, buffer in buffers}
        self.sleep_mode_backend.suspend(level)
        torch.cuda.synchronize()
        freed = torch.cuda.mem_get_info()[0] - before
        assert freed >= 0, "Memory usage increased after sleeping."

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.sleep_mode_backend.resume(tags)
        if (tags is None or "weights" in tags) and self._sleep_saved_buffers:
            for name, buffer in self.model_runner.model.named_buffers():
                if name in self._sleep_saved_buffers:
                    buffer.copy_(self._sleep_saved_buffers[name])
            self._sleep_saved_buffers = {}
        torch.cuda.synchronize()

    def discard(self, tags: tuple[str, ...]) -> None:
        self.sleep_mode_backend.discard(tags)

    def _maybe_get_memory_pool_context(self, tag: str) -> Any:
        if not self.model_config.enable_cumem_allocator:
            return contextlib.nullcontext()
        allocator = get_mem_allocator_instance()
        if tag == "weights":
            assert allocator.get_current_usage() == 0, "There is one instance for each process."
        return allocator.use_memory_pool(tag=tag)

    @contextlib.contextmanager
    def _scoped_allocator_max_split(self, max_split_size_mb: int) -> Iterator[None]:
        before = torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]
        scoped = f"max_split_size_mb:{max_split_size_mb}"
        torch._C._accelerator_setAllocatorSettings(f"{before},{scoped}" if before else scoped)
        try:
            yield
        finally:
            torch._C._accelerator_setAllocatorSettings(before)

    def init_device(self) -> None:
        self.device = torch.device(f"cuda:{self.local_rank}")
        torch.cuda.set_device(self.device)
        gc.collect()
        torch.cuda.empty_cache()
        self.init_snapshot = MemorySnapshot(device=self.device)
        self.requested_memory = request_memory(self.init_snapshot, self.cache_config, 0)
        self.vllm_config.grow_workspace = self._grow_workspace
        self.model_runner = GPUModelRunner(self.vllm_config, self.device)

    def _grow_workspace(self) -> None:
        with self._maybe_get_memory_pool_context("workspace"):
            self.workspace = torch.empty(4 << 20, dtype=torch.uint8, device=self.device)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        with (
            self._maybe_get_memory_pool_context(tag="weights"),
            self._scoped_allocator_max_split(max_split_size_mb=20),
        ):
            self.model_runner.load_model(load_dummy_weights=load_dummy_weights)
        if self.vllm_config.weight_transfer_config is not None:
            self.weight_transfer_engine = TransferEngine(self.model_runner.get_model())

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        self.model_runner.reload_weights(*args, **kwargs)

    def determine_available_memory(self) -> int:
        if given := self.cache_config.kv_cache_memory_bytes:
            self.model_runner.profile_run()
            return int(given)
        weights = int(self.model_runner.model_memory_usage)
        with (
            memory_profiling(self.init_snapshot, weights_memory=weights) as result,
            self._scoped_allocator_max_split(max_split_size_mb=20),
        ):
            self.model_runner.profile_run()
        if self.vllm_config.compilation_config.cudagraph_mode != "NONE":
            self.cudagraph_memory_estimate = self.model_runner.profile_cudagraph_memory()
        self.profile_result = result
        assert self.init_snapshot.free_memory >= result.after_profile.free_memory
        return int(self.requested_memory - result.non_kv_cache_memory)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        self.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        of_cache = self._maybe_get_memory_pool_context(tag="kv_cache")
        with self._maybe_get_memory_pool_context(tag="runtime"):
            self.model_runner.initialize_kv_cache(kv_cache_config, kv_cache_allocation_context=of_cache)

    def compile_or_warm_up_model(self) -> Any:
        self.model_runner.run()
        if not self.model_config.enforce_eager:
            self.model_runner.capture_model()
        return (0.0, 0.0)

    def get_model(self) -> Any:
        return self.model_runner.get_model()

    def get_draft_model(self) -> Any:
        return self.model_runner.get_draft_model()

    def _check_weight_transfer_engine(self) -> None:
        if self.weight_transfer_engine is None:
            raise RuntimeError("Weight transfer not configured.")

    def add_lora(self, lora_request: Any) -> bool:
        return True

    def start_weight_update(self) -> None:
        self._start_weight_update()

    def start_draft_weight_update(self) -> None:
        self._start_weight_update(is_draft=True)

    def _start_weight_update(self, is_draft: bool = False) -> None:
        self._check_weight_transfer_engine()
        if self._weight_update_active:
            raise RuntimeError("A weight update is active already.")
        self._weight_update_active = True
        self._weight_update_is_draft = is_draft

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._check_weight_transfer_engine()
        if not self._weight_update_active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            self.weight_transfer_engine.update_weights(update_info)
        except BaseException:
            self._weight_update_active = False
            raise

    def finish_weight_update(self) -> None:
        self._check_weight_transfer_engine()
        if not self._weight_update_active:
            raise RuntimeError("There is no weight update to finish.")
        self._weight_update_active = False

    def shutdown(self) -> None:
        if self.model_runner is not None:
            self.model_runner.shutdown()
        self.workspace = None
        instance = sys.modules["vllm.device_allocator.cumem"].CuMemAllocator.instance
        if instance is not None:
            instance.release_pools()


def put(made: dict[str, ModuleType]) -> None:
    """Puts what stands here where vLLM has it."""
    made["vllm.device_allocator"].__dict__.update(get_mem_allocator_instance=get_mem_allocator_instance)
    made["vllm.device_allocator.cumem"].__dict__.update(CuMemAllocator=CuMemAllocator, cumem_available=True)
    backend = ModuleType("vllm.device_allocator.sleep_mode_backend")
    backend.__dict__.update(
        SleepModeBackend=SleepModeBackend, SleepModeBackendFactory=SleepModeBackendFactory
    )
    made[backend.__name__] = backend
    made["vllm.utils.mem_utils"].__dict__.update(
        MemorySnapshot=MemorySnapshot,
        MemoryProfilingResult=MemoryProfilingResult,
        memory_profiling=memory_profiling,
    )
