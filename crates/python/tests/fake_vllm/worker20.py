"""vLLM 0.20.2's GPU worker, its memory snapshots and its model runner, as far as a sleep has to do with them.

`workers` puts them where vLLM has them. What fails here fails there: a level 2 sleep reads the buffers of a
model that sleeps already, a wake of the cache alone writes buffers into weights that still sleep, and the
scales of an FP8 cache are reset by a method that knows no lists of tensors.
"""

import contextlib
import gc
import importlib
import math
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from fake_vllm.worker_parts import RunnerParts, TransferEngine, current_platform, format_gib, init_logger

torch: Any = importlib.import_module("torch")
logger = init_logger(__name__)


@dataclass
class MemorySnapshot:
    """What a device and PyTorch say of memory at one moment."""

    torch_peak: int = 0
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
        self.torch_peak = torch.cuda.memory_stats(self.device_).get("allocated_bytes.all.peak", 0)
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
    torch_peak_increase: int = 0
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
    result.after_profile.measure()
    result.torch_peak_increase = result.after_profile.torch_peak - result.before_profile.torch_peak
    result.non_torch_increase = result.after_profile.non_torch_memory - baseline_snapshot.non_torch_memory
    result.non_kv_cache_memory = (
        result.non_torch_increase + result.torch_peak_increase + result.weights_memory
    )


def request_memory(init_snapshot: MemorySnapshot, cache_config: Any) -> int:
    wanted: int = math.ceil(init_snapshot.total_memory * cache_config.gpu_memory_utilization)
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


class GPUModelRunner(RunnerParts):
    """The model and its caches."""

    def load_model(self, load_dummy_weights: bool = False) -> None:
        self.model = self.make_model()
        if self.lora_config:
            self.model = self.load_lora_model(self.model, self.vllm_config, self.device)

    def load_lora_model(self, model: Any, vllm_config: Any, device: Any) -> Any:
        self.make_lora()
        return model

    def init_fp8_kv_scales(self) -> None:
        if not self.cache_config.cache_dtype.startswith("fp8"):
            return
        for cache_tensor in self.kv_caches:
            if cache_tensor is not None:
                cache_tensor.zero_()
        for name, buffer in self.model.named_buffers():
            if name.endswith("_scale"):
                buffer.fill_(1)

    def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False) -> None:
        kv_cache_config = deepcopy(kv_cache_config)
        self.builders = []
        self.make_builders()
        self.initialize_kv_cache_tensors(kv_cache_config, [16])
        self.make_builders()

    def initialize_kv_cache_tensors(
        self, kv_cache_config: Any, kernel_block_sizes: list[int]
    ) -> dict[str, Any]:
        if self.vllm_config.is_uniform:
            tensors, *_ = self.allocate_uniform_kv_caches(
                kv_cache_config, [], self.cache_config.cache_dtype, self.device, kernel_block_sizes
            )
        else:
            tensors = self._allocate_kv_cache_tensors(kv_cache_config)
        self.bind(tensors)
        return tensors

    @staticmethod
    def allocate_uniform_kv_caches(
        kv_cache_config: Any, attn_groups: Any, cache_dtype: Any, device: Any, kernel_block_sizes: list[int]
    ) -> tuple[dict[str, Any], Any, Any]:
        """The caches of all layers in one tensor, for what carries them elsewhere."""
        raws = kv_cache_config.kv_cache_tensors
        whole = torch.zeros(sum(raw.size for raw in raws), dtype=torch.uint8, device=device)
        return {"all": whole}, whole, None

    def _allocate_kv_cache_tensors(self, kv_cache_config: Any) -> dict[str, Any]:
        return self.make_tensors(kv_cache_config)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return dict(self.specs())

    def profile_run(self) -> None:
        self.run()

    def _init_minimal_kv_cache_for_profiling(self) -> None:
        blocks = self.compilation_config.max_cudagraph_capture_size or 1
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
        self.capture()
        return 0

    def reload_weights(
        self, weights_iterator: Any = None, weights_path: str | None = None, is_checkpoint_format: bool = True
    ) -> None:
        self.model.write()

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
        self._sleep_saved_buffers: dict[str, Any] = {}
        self.weight_transfer_engine: Any = None

    def sleep(self, level: int = 1) -> None:
        before = torch.cuda.mem_get_info()[0]
        if level == 2:
            buffers = self.model_runner.model.named_buffers()
            self._sleep_saved_buffers = {name: buffer.cpu().clone() for name, buffer in buffers}
        _memory().sleep(offload_tags=("weights",) if level == 1 else ())
        freed = torch.cuda.mem_get_info()[0] - before
        assert freed >= 0, "Memory usage increased after sleeping."

    def wake_up(self, tags: list[str] | None = None) -> None:
        _memory().wake_up(tags)
        if self._sleep_saved_buffers:
            for name, buffer in self.model_runner.model.named_buffers():
                if name in self._sleep_saved_buffers:
                    buffer.copy_(self._sleep_saved_buffers[name])
            self._sleep_saved_buffers = {}
        is_cache = tags is None or "kv_cache" in tags
        if is_cache and self.cache_config.cache_dtype.startswith("fp8"):
            self.model_runner.init_fp8_kv_scales()

    def _maybe_get_memory_pool_context(self, tag: str) -> Any:
        if not self.model_config.enable_sleep_mode:
            return contextlib.nullcontext()
        allocator = _memory()
        if tag == "weights":
            assert allocator.get_current_usage() == 0, "There is one instance for each process."
        return allocator.use_memory_pool(tag=tag)

    def init_device(self) -> None:
        self.device = torch.device(f"cuda:{self.local_rank}")
        torch.cuda.set_device(self.device)
        gc.collect()
        torch.cuda.empty_cache()
        self.init_snapshot = MemorySnapshot(device=self.device)
        self.requested_memory = request_memory(self.init_snapshot, self.cache_config)
        self.model_runner = GPUModelRunner(self.vllm_config, self.device)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        with self._maybe_get_memory_pool_context(tag="weights"):
            self.model_runner.load_model(load_dummy_weights=load_dummy_weights)
        if self.vllm_config.weight_transfer_config is not None:
            self.weight_transfer_engine = TransferEngine(self.model_runner.model)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        self.model_runner.reload_weights(*args, **kwargs)

    def determine_available_memory(self) -> int:
        if given := self.cache_config.kv_cache_memory_bytes:
            self.model_runner.profile_run()
            return int(given)
        weights = int(self.model_runner.model_memory_usage)
        with memory_profiling(self.init_snapshot, weights_memory=weights) as result:
            self.model_runner.profile_run()
            peak = torch.cuda.memory_stats(self.device).get("allocated_bytes.all.peak", 0)
            if self.vllm_config.compilation_config.cudagraph_mode != "NONE":
                self.cudagraph_memory_estimate = self.model_runner.profile_cudagraph_memory()
        result.torch_peak_increase = peak - result.before_profile.torch_peak
        result.non_kv_cache_memory = (
            result.non_torch_increase + result.torch_peak_increase + result.weights_memory
        )
        self.profile_result = result
        assert self.init_snapshot.free_memory >= result.after_profile.free_memory
        return int(self.requested_memory - result.non_kv_cache_memory)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        self.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        if self.model_config.enable_sleep_mode:
            with _memory().use_memory_pool(tag="kv_cache"):
                self.model_runner.initialize_kv_cache(kv_cache_config)
        else:
            self.model_runner.initialize_kv_cache(kv_cache_config)

    def compile_or_warm_up_model(self) -> Any:
        self.model_runner.run()
        if not self.model_config.enforce_eager:
            self.model_runner.capture_model()
        return (0.0, 0.0)

    def get_model(self) -> Any:
        return self.model_runner.get_model()

    def add_lora(self, lora_request: Any) -> bool:
        return True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if self.weight_transfer_engine is None:
            raise RuntimeError("Weight transfer not configured.")
        self.weight_transfer_engine.update_weights(update_info)
        torch.cuda.synchronize()

    def shutdown(self) -> None:
        if self.model_runner is not None:
            self.model_runner.shutdown()


def _memory() -> Any:
    return sys.modules["vllm.device_allocator.cumem"].CuMemAllocator.get_instance()


def put(made: dict[str, ModuleType]) -> None:
    """Puts what stands here where vLLM has it."""
    made["vllm.device_allocator.cumem"].__dict__.update(CuMemAllocator=CuMemAllocator, cumem_available=True)
    made["vllm.utils.mem_utils"].__dict__.update(
        MemorySnapshot=MemorySnapshot,
        MemoryProfilingResult=MemoryProfilingResult,
        memory_profiling=memory_profiling,
    )
