"""The vLLM versions that poorwill knows, and what it needs of each.

`CONTRACT` lists what each hook needs (`poorwill._contract`), and `check` compares the running process's
modules with it before any is replaced. A mismatch is refused at start, with the reason and a remedy.
`EXTENSIONS` lists extension points in whose presence needs end, whichever version has them.

Nothing here imports vLLM: it looks at modules that are imported already. The tests compare the same list
with the sources of the versions in `TESTED`, by the same rule (`Need.problem`).
"""

import importlib.metadata
import sys
from collections.abc import Callable, Collection, Iterator
from types import ModuleType
from typing import Any

from poorwill._contract import Extension, Found, Need, Version, dotted, find
from poorwill._contract import in_module as _in_module
from poorwill._contract import release as _release
from poorwill._contract import tuner_of as tuner_of
from poorwill._native import PoorwillError

OLDEST: Version = (0, 20, 0)
"""First known version."""
TOO_NEW: Version = (0, 34, 0)
"""First version that is not known any more."""
REGISTRY: Version = (0, 25, 0)
"""First with a registry of backends, and so with `--sleep-mode-backend`."""
TESTED = (
    *("0.20.0", "0.20.2", "0.21.0", "0.22.1", "0.23.0", "0.24.0", "0.25.1", "0.26.0"),
    *("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
)
"""Versions whose sources the contract is checked against."""
RUN = ("0.20.2", "0.33.0")
"""Those of them whose code the tests run with ours."""


class UnsupportedVllmError(PoorwillError):
    """Poorwill cannot work in this vLLM.

    Not an `ImportError`: it may be raised during an import of vLLM's, and vLLM ignores some of those.
    """


ALLOCATOR = "an allocator of the backend's own"
OFFLOADERS = "a registry of offloaders"
DESCRIPTIONS = "communicators that describe themselves"
ADAPTER_POOL = "a pool for adapters"
REASONS = "refusals with a reason"
"""Extension points, by `Extension.name`."""

WITHOUT_SLEEP = "unset POORWILL_SLEEP_MODE or choose --sleep-mode-backend cumem"
WITHOUT_OFFLOAD = "unset POORWILL_OFFLOAD"
WITHOUT_TRITON = "unset POORWILL_TRITON"
"""How to run without poorwill."""


def _contract() -> Iterator[Need]:
    # How the plugin is found and called.
    need = _in_module("vllm.plugins")
    yield need("DEFAULT_PLUGINS_GROUP", "value")
    yield need("load_general_plugins", "function")

    # Where poorwill is chosen, and conflicting settings are refused.
    need = _in_module("vllm.platforms.cuda")
    yield need("CudaPlatformBase.check_and_update_config", "classmethod", "vllm_config", is_whole=True)
    need = _in_module("vllm.config.parallel")
    yield need("ParallelConfig.worker_cls", "field")
    need = _in_module("vllm.config.cache")
    yield need("CacheConfig.kv_cache_memory_bytes", "field")
    need = _in_module("vllm.config.model")
    yield need("ModelConfig.enable_sleep_mode", "field")
    yield need("ModelConfig.multimodal_config", "field")
    yield Need("vllm.config.multimodal", "MultiModalConfig.mm_processor_cache_type", "field")
    yield need("ModelConfig.sleep_mode_backend", "field", since=REGISTRY)
    yield need("ModelConfig.enable_nccl_comm_suspend", "field", since=(0, 30, 0))
    yield Need("vllm.config.vllm", "VllmConfig.use_cumem_cudagraph_pool", "field", since=(0, 32, 0))

    # KV connectors: which is chosen, and its part in a sleep.
    need = _in_module("vllm.config.vllm")
    yield need("VllmConfig.kv_transfer_config", "field")
    yield need("VllmConfig._verify_kv_transfer_compat", "method", is_whole=True, since=(0, 21, 0))
    need = _in_module("vllm.config.kv_transfer")
    for field in ("kv_connector", "kv_connector_module_path", "kv_connector_extra_config"):
        yield need(f"KVTransferConfig.{field}", "field")
    need = _in_module("vllm.config.cache")
    yield need("CacheConfig.kv_offloading_size", "field")
    yield need("CacheConfig.kv_offloading_backend", "field")
    package = "vllm.distributed.kv_transfer.kv_connector"
    yield Need(
        f"{package}.factory",
        *("KVConnectorFactory.get_connector_class", "classmethod", ("kv_transfer_config",)),
        is_whole=True,
    )
    need = _in_module(f"{package}.v1.base")
    connector = "KVConnectorBase_V1"
    unregisters: dict[str, Any] = {"is_whole": True, "since": (0, 33, 0)}
    yield need(f"{connector}.supports_sleep_mode", "classmethod", "kv_transfer_config", **unregisters)
    yield need(f"{connector}.unregister_kv_caches", "method", **unregisters)
    yield need(f"{connector}.restore_kv_caches", "method", **unregisters)
    yield need(f"{connector}.get_mem_pool_context", "method", is_whole=True, since=(0, 31, 0))

    # The allocator that ours replaces.
    need = _in_module("vllm.device_allocator.cumem")
    yield need("CuMemAllocator.get_instance", "staticmethod", is_whole=True, unless=ALLOCATOR)
    yield need("CuMemAllocator.instance", "value", unless=ALLOCATOR)
    yield need("CuMemAllocator.default_tag", "value", unless=ALLOCATOR)

    # Allocations of LoRA's adapters, in versions without a pool for them.
    need = _in_module("vllm.v1.worker.lora_model_runner_mixin")
    loading = ("model", "vllm_config", "device")
    yield need("LoRAModelRunnerMixin.load_lora_model", "method", *loading, unless=ADAPTER_POOL)

    # The registry of backends.
    need = _in_module("vllm.device_allocator.sleep_mode_backend")
    registry, base = "SleepModeBackendFactory", "SleepModeBackend"
    named = ("name", "module_path", "class_name")
    yield need(f"{registry}.register_backend", "classmethod", *named, since=REGISTRY)
    yield need(f"{base}.__init__", "method", is_whole=True, since=REGISTRY)
    yield need(f"{base}._state", "field", since=REGISTRY)
    yield need(f"{base}.suspend", "method", "level", is_whole=True, since=REGISTRY)
    yield need(f"{base}.resume", "method", "tags", is_whole=True, since=REGISTRY)
    yield need(f"{base}.state", "method", is_whole=True, since=REGISTRY)
    yield need(f"{base}.discard", "method", "tags", is_whole=True, since=(0, 31, 0))
    for flag in (
        *("is_supported", "preserves_communicators", "preserves_compiled_artifacts"),
        *("preserves_graphs_with_communicators", "supports_durable_storage"),
    ):
        yield need(f"{base}.{flag}", "classmethod", is_whole=True, since=REGISTRY)

    # The base class of our worker.
    need = _in_module("vllm.v1.worker.gpu_worker")
    names = ("vllm_config", "local_rank", "rank", "distributed_init_method", "is_driver_worker")
    yield need("Worker.__init__", "method", *names)
    yield need("Worker.sleep", "method", "level", is_whole=True)
    yield need("Worker.wake_up", "method", "tags", is_whole=True)
    yield need("Worker.discard", "method", "tags", is_whole=True, since=(0, 31, 0))
    yield need("Worker._maybe_get_memory_pool_context", "method", "tag", is_whole=True)
    yield need("Worker.init_device", "method", is_whole=True)
    yield need("Worker.load_model", "method", "load_dummy_weights", is_whole=True)
    yield need("Worker.reload_weights", "method", "*args", "**kwargs")
    yield need("Worker.update_weights", "method", "update_info", is_whole=True)
    yield need("Worker.finish_weight_update", "method", is_whole=True, since=(0, 21, 0))
    yield need("Worker.determine_available_memory", "method", is_whole=True)
    yield need("Worker.initialize_from_config", "method", "kv_cache_config", is_whole=True)
    yield need("Worker.compile_or_warm_up_model", "method", is_whole=True)
    yield need("Worker.shutdown", "method", is_whole=True)
    for field in ("device", "model_runner", "init_snapshot", "requested_memory", "_sleep_saved_buffers"):
        yield need(f"Worker.{field}", "field")
    yield need("Worker._weight_update_active", "field", since=(0, 21, 0))
    yield need("Worker._sleep_rebuild_draft_metadata_buffers", "field", since=(0, 26, 0), until=(0, 27, 0))
    yield need("Worker._sleep_saved_draft_buffers", "field", since=(0, 27, 0))
    yield need("Worker._sleep_saved_parameters", "field", since=(0, 31, 0))
    # What is refused while the weights sleep.
    for method in ("add_lora", "save_sharded_state", "save_tensorized_model"):
        yield need(f"Worker.{method}", "value")
    yield need("Worker.start_weight_update", "value", since=(0, 21, 0))
    yield need("Worker.start_draft_weight_update", "value", since=(0, 26, 0))
    for method in ("compute_weight_checksums", "reset_weights"):
        yield need(f"Worker.{method}", "value", since=(0, 32, 0))
    yield need("Worker._get_sleep_mode_backend", "method", is_whole=True, since=REGISTRY, until=(0, 30, 0))
    yield need("Worker.sleep_mode_backend", "value", since=(0, 30, 0))
    # The connector of its process, by the names that it is looked up by.
    yield need("has_kv_transfer_group", "value")
    yield need("get_kv_transfer_group", "value")
    yield need("suspend_device_comms", "value", since=(0, 30, 0))
    for field in ("available_kv_cache_memory_bytes", "cudagraph_memory_estimate"):
        yield need(f"Worker.{field}", "field")
    yield need("CUDAGraphMode", "value")
    for function in ("maybe_apply_startup_plan", "maybe_save_startup_plan"):
        yield need(function, "value", since=(0, 26, 0))
    # What the worker measures with, by the names that it is looked up by.
    yield need("MemorySnapshot", "value")
    yield need("request_memory", "function", "init_snapshot", "cache_config")

    # The communicators of a rank, and its memory that other ranks map.
    need = _in_module("vllm.distributed.parallel_state")
    described: dict[str, Any] = {"unless": DESCRIPTIONS}
    yield need("_groups", "value", **described)
    yield need("get_world_group", "function", is_whole=True)
    fields = (
        "unique_name",
        "ranks",
        "rank",
        "world_size",
        "cpu_group",
        "device_group",
        "device_communicator",
    )
    for field in fields:
        yield need(f"GroupCoordinator.{field}", "field")
    package = "vllm.distributed.device_communicators"
    need = _in_module(f"{package}.cuda_communicator")
    for field in ("pynccl_comm", "ca_comm", "symm_mem_comm", "all2all_manager"):
        yield need(f"CudaCommunicator.{field}", "field", **described)
    yield need("CudaCommunicator.fi_pcie_ipc_ar_comm", "field", since=(0, 30, 0), **described)
    for method in ("suspend", "resume"):
        yield need(f"CudaCommunicator.{method}", "method", is_whole=True, since=(0, 30, 0))
    for field in ("comm", "nccl", "disabled"):
        yield Need(f"{package}.pynccl", f"PyNcclCommunicator.{field}", "field", **described)
    yield Need(f"{package}.pynccl_wrapper", "NCCLLibrary.lib", "field", **described)
    yield Need(f"{package}.pynccl_allocator", "_mem_pool", "value", **described)
    yield Need(f"{package}.symm_mem", "SymmMemCommunicator.buffer", "field", **described)
    for name in ("_fi_ar_workspace", "_fi_ar_quant_workspace"):
        yield Need(f"{package}.flashinfer_all_reduce", name, "value", **described)
    need = _in_module(f"{package}.flashinfer_pcie_ipc_all_reduce")
    yield need("FlashInferPcieIpcAllReduce.workspace", "field", since=(0, 30, 0), **described)
    need = _in_module(f"{package}.custom_all_reduce")
    for field in ("meta_ptrs", "buffer_ptrs", "rank", "disabled"):
        yield need(f"CustomAllreduce.{field}", "field", **described)
    yield need("CustomAllreduce._capture_registered", "field", since=(0, 32, 0), **described)
    yield need("CustomAllreduce.mnnvl_buffer", "field", since=(0, 27, 0), **described)
    yield need("CustomAllreduce.mnnvl_multimem_rs_buffer", "field", since=(0, 31, 0), **described)

    # What the model runners load, make and draft with.
    for module in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"):
        yield Need(module, "GPUModelRunner.load_lora_model", "field", unless=ADAPTER_POOL)
        for name in ("get_kv_cache_spec", "max_num_reqs"):
            yield Need(module, f"GPUModelRunner.{name}", "field")
    need = _in_module("vllm.v1.worker.gpu_model_runner")
    yield need("GPUModelRunner.drafter", "field")
    for name in ("_allocate_kv_cache_tensors", "allocate_uniform_kv_caches", "init_fp8_kv_scales"):
        yield need(f"GPUModelRunner.{name}", "field", until=(0, 29, 0))
    need = _in_module("vllm.v1.worker.gpu.model_runner")
    yield need("GPUModelRunner.speculator", "field")
    yield need("init_kv_cache", "value")

    # The budget: fields of a snapshot.
    need = _in_module("vllm.utils.mem_utils")
    yield need("MemorySnapshot.measure", "method", is_whole=True)
    for field in (
        *("free_memory", "total_memory", "cuda_memory", "torch_memory", "non_torch_memory"),
        "device_",
    ):
        yield need(f"MemorySnapshot.{field}", "field")
    for module in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"):
        yield Need(module, "GPUModelRunner.profile_cudagraph_memory", "method", is_whole=True)
        yield Need(module, "GPUModelRunner.profile_run", "method")
        yield Need(module, "GPUModelRunner.capture_model", "method")
    # Whether its estimate of graphs is subtracted from the KV cache.
    yield Need("vllm.envs", "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "value")
    need = _in_module("vllm.config.compilation")
    for field in ("cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size"):
        yield need(f"CompilationConfig.{field}", "field")
    yield Need("vllm.config.scheduler", "SchedulerConfig.max_num_batched_tokens", "field")

    # Blocks that a sleep keeps: which those are, and where they lie.
    yield Need("vllm.v1.core.sched.scheduler", "Scheduler.kv_cache_manager", "field")
    need = _in_module("vllm.v1.core.kv_cache_manager")
    for field in ("block_pool", "coordinator"):
        yield need(f"KVCacheManager.{field}", "field")
    yield Need("vllm.v1.core.kv_cache_coordinator", "KVCacheCoordinator.single_type_managers", "field")
    need = _in_module("vllm.v1.core.block_pool")
    yield need("BlockPool.blocks", "field")
    yield need("BlockPool.evict_blocks", "method", "block_ids", is_whole=True)
    yield need("BlockPool.free_block_queue", "field")
    need = _in_module("vllm.v1.core.kv_cache_utils")
    queue = "FreeKVCacheBlockQueue"
    yield need(f"{queue}.get_all_free_blocks", "method", is_whole=True)
    yield need(f"{queue}.popleft_n", "method", "n", is_whole=True)
    yield need(f"{queue}.append_n", "method", "blocks", is_whole=True)
    for field in ("block_id", "ref_cnt", "is_null", "block_hash"):
        yield need(f"KVCacheBlock.{field}", "field")
    need = _in_module("vllm.v1.kv_cache_interface")
    for field in ("num_blocks", "kv_cache_tensors"):
        yield need(f"KVCacheConfig.{field}", "field")
    yield need("KVCacheTensor.shared_by", "field", until=(0, 29, 0))
    yield need("KVCacheTensor.layers", "field", since=(0, 29, 0))
    yield need("KVCacheTensor.block_stride", "field", since=(0, 24, 0))
    yield Need("vllm.config.compilation", "CompilationConfig.static_forward_context", "field")
    probing = ("block_size", "num_kv_heads", "head_size")
    yield Need(
        "vllm.v1.attention.backend",
        *("AttentionBackend.get_kv_cache_block_dim", "classmethod", probing),
        until=(0, 29, 0),
    )
    for module in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"):
        yield Need(module, "GPUModelRunner.kv_cache_config", "field")

    # The engine's core, and the executor that calls its workers.
    need = _in_module("vllm.v1.engine.core")
    rpc = ("method", "timeout", "args", "kwargs")
    yield need("EngineCore.sleep", "method", "level", "mode", is_whole=True)
    yield need("EngineCore.wake_up", "method", "tags", is_whole=True)
    yield need("EngineCore._set_kv_connector_handshake_metadata", "method", is_whole=True, since=(0, 33, 0))
    yield need("EngineCore.release_kv_cache_memory", "method", is_whole=True, since=(0, 31, 0))
    for core in ("EngineCore", "EngineCoreProc", "DPEngineCoreProc"):
        yield need(f"{core}.resume_scheduler", "method", is_whole=True)
    for core in ("EngineCore", "EngineCoreProc"):
        yield need(f"{core}.pause_scheduler", "method", "mode", "clear_cache", is_whole=True)
    yield need("EngineCore.is_scheduler_paused", "method", is_whole=True)
    yield need("EngineCore.collective_rpc", "method", *rpc, is_whole=True)
    yield need("EngineCore.add_request", "method", "request", "request_wave", is_whole=True)
    for field in ("vllm_config", "model_executor", "scheduler"):
        yield need(f"EngineCore.{field}", "field")
    # How a request is refused in a process of its own.
    refusal = ("req_ids", "client_index")
    yield need("EngineCoreProc._send_error_outputs_to_client", "method", *refusal, unless=REASONS)
    yield need(
        "EngineCoreProc._send_finish_outputs_to_client",
        *("method", *refusal, "finish_reason", "error"),
        since=(0, 33, 0),
    )
    yield need("EngineCoreProc.output_queue", "field")
    for output in ("EngineCoreOutput", "EngineCoreOutputs"):
        yield need(output, "value")
    yield Need("vllm.v1.request", "Request.pooling_params", "field")
    yield need("RequestError", "value", since=(0, 33, 0))
    yield need("FinishReason", "value")
    yield Need("vllm.v1.core.sched.scheduler", "Scheduler.has_request", "field", since=(0, 33, 0))
    yield Need("vllm.v1.request", "Request.abort_immediately", "field", since=(0, 21, 0))
    need = _in_module("vllm.v1.executor.abstract")
    yield need("Executor.sleep", "method", "level", is_whole=True)
    yield need("Executor.wake_up", "method", "tags", is_whole=True)
    yield need("Executor.collective_rpc", "method", *rpc)
    yield need("Executor.is_sleeping", "field")
    yield need("Executor.sleeping_tags", "field")

    # The frontends, and how they call the core.
    need = _in_module("vllm.v1.engine.async_llm")
    yield need("AsyncLLM.sleep", "method", "level", "mode", is_whole=True, is_async=True)
    yield need("AsyncLLM.wake_up", "method", "tags", is_whole=True, is_async=True)
    yield need("AsyncLLM.release_kv_cache_memory", "method", is_whole=True, is_async=True, since=(0, 31, 0))
    yield need("AsyncLLM.collective_rpc", "method", *rpc, is_whole=True, is_async=True)
    yield need("AsyncLLM.check_health", "method", is_whole=True, is_async=True)
    yield need("AsyncLLM.generate", "method", "prompt", "sampling_params", "request_id", is_async=True)
    yield need("AsyncLLM.encode", "method", "prompt", "pooling_params", "request_id", is_async=True)
    yield need("AsyncLLM.resume_generation", "method", is_whole=True, is_async=True)
    yield need("AsyncLLM.engine_core", "field")
    yield need("AsyncLLM.vllm_config", "field")
    need = _in_module("vllm.v1.engine.llm_engine")
    yield need("LLMEngine.sleep", "method", "level", "mode", is_whole=True)
    yield need("LLMEngine.wake_up", "method", "tags", is_whole=True)
    yield need("LLMEngine.release_kv_cache_memory", "method", is_whole=True, since=(0, 31, 0))
    yield need("LLMEngine.collective_rpc", "method", *rpc, is_whole=True)
    yield need("LLMEngine.add_request", "method", "request_id", "prompt", "params")
    yield need("LLMEngine.step", "method", is_whole=True)
    yield need("LLMEngine.engine_core", "field")
    yield need("LLMEngine.output_processor", "field")
    yield need("LLMEngine.vllm_config", "field")
    need = _in_module("vllm.v1.engine.core_client")
    yield need("InprocClient.engine_core", "field")
    yield need("SyncMPClient.outputs_queue", "field")
    yield need("SyncMPClient.call_utility", "method", "method", "*args", is_whole=True)
    asking = ("method", "*args", "engine")
    yield need("AsyncMPClient._call_utility_async", "method", *asking, is_whole=True, is_async=True)
    # Whether the engine lives, and what waits for it.
    yield need("MPClient.ensure_alive", "method", is_whole=True)
    yield need("MPClient.utility_results", "field")
    yield need("AsyncMPClient.core_engines", "field")
    yield need("AsyncMPClient.client_count", "field")

    yield Need("vllm.entrypoints.llm", "LLM.sleep", "method", ("level", "mode"), is_whole=True)

    need = _in_module("vllm.v1.engine.output_processor")
    yield need("OutputProcessor.has_unfinished_requests", "method", is_whole=True)

    # The routes that ours are beside.
    moved: Version = (0, 23, 0)
    for module, span in (
        ("vllm.entrypoints.serve.sleep.api_router", {"until": moved}),
        ("vllm.entrypoints.serve.dev.sleep.api_router", {"since": moved}),
    ):
        need = _in_module(module)
        yield need("engine_client", "function", "request", is_whole=True, **span)
        yield need("sleep", "function", "raw_request", is_async=True, **span)
        yield need("router", "value", **span)


def _offload_contract() -> Iterator[Need]:
    """For offloaded weights only."""
    package = "vllm.model_executor.offloader"
    need = _in_module(f"{package}.base")
    yield need("create_offloader", "function", "offload_config", is_whole=True, unless=OFFLOADERS)
    yield need("get_offloader", "function", is_whole=True)
    yield need("should_pin_memory", "function", is_whole=True)
    yield need("NoopOffloader", "value", unless=OFFLOADERS)
    yield need("BaseOffloader.wrap_modules", "method", "modules_generator")
    for method in ("post_init", "sync_prev_onload", "join_after_forward"):
        yield need(f"BaseOffloader.{method}", "method", is_whole=True)
    for method in ("_wait_for_layer", "_start_prefetch"):
        yield need(f"BaseOffloader.{method}", "method", "layer_idx", is_whole=True)
    need = _in_module(f"{package}.prefetch_ops")
    yield need("_wait_prefetch_impl", "function", "input_tensor", "layer_idx", is_whole=True)
    yield need("_start_prefetch_impl", "function", "output_tensor", "layer_idx", is_whole=True)

    # What vLLM has made of its settings.
    need = _in_module(f"{package}.uva")
    for field in ("cpu_offload_max_bytes", "cpu_offload_params"):
        yield need(f"UVAOffloader.{field}", "field", unless=OFFLOADERS)
    need = _in_module(f"{package}.prefetch")
    for field in ("group_size", "num_in_group", "prefetch_step", "offload_params", "mode"):
        yield need(f"PrefetchOffloader.{field}", "field", unless=OFFLOADERS)

    # Where parameters are moved to the device, changed, and moved back.
    need = _in_module("vllm.model_executor.model_loader.utils")
    context = ("device_loading_context", "function", "module", "target_device")
    yield need(*context, is_whole=True, unless=OFFLOADERS)

    yield Need("vllm.config", "get_current_vllm_config_or_none", "function", is_whole=True)
    yield Need("vllm.config.parallel", "ParallelConfig.enable_eplb", "field")

    # Callers of `create_offloader` with a name of their own.
    first, second = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
    yield Need(first, "create_offloader", "value", unless=OFFLOADERS)
    yield Need(second, "create_offloader", "value", since=(0, 28, 0), unless=OFFLOADERS)


def _triton_contract() -> Iterator[Need]:
    """Kernels tuned within the GPU's shared memory: the inputs of the estimates."""
    yield Need("vllm.triton_utils", "HAS_TRITON", "value")
    yield Need("vllm.envs", "VLLM_TRITON_FORCE_FIRST_CONFIG", "value", since=(0, 24, 0))
    moved: Version = (0, 26, 0)
    for package, span in (
        ("vllm.model_executor.layers.fla.ops", {"until": moved}),
        ("vllm.third_party.flash_linear_attention.ops", {"since": moved}),
    ):
        need = _in_module(f"{package}.chunk_delta_h")
        state = "chunk_gated_delta_rule_fwd_kernel_h_blockdim64"
        yield need(state, "kernel", "k", "K", "BT", "BV", **span)
        need = _in_module(f"{package}.chunk_o")
        yield need("chunk_fwd_kernel_o", "kernel", "q", "K", "BT", "BK", "BV", **span)


def _extensions() -> Iterator[Extension]:
    need = _in_module("vllm.device_allocator.sleep_mode_backend")
    yield Extension(ALLOCATOR, (need("SleepModeBackend.allocator", "classmethod", is_whole=True),))
    need = _in_module("vllm.model_executor.offloader.base")
    registered = ("name", "module_path", "class_name")
    yield Extension(
        OFFLOADERS,
        (
            need("register_offloader", "function", *registered, is_whole=True),
            need("BaseOffloader.loading", "method", "module", "target_device", is_whole=True),
            need("BaseOffloader.writing", "method", is_whole=True),
            need("BaseOffloader.refill", "method", is_whole=True),
            need("BaseOffloader.hooks_forward", "value"),
        ),
    )
    parallel = _in_module("vllm.distributed.parallel_state")
    base = _in_module("vllm.distributed.device_communicators.base_device_communicator")
    yield Extension(
        DESCRIPTIONS,
        (
            parallel("get_device_groups", "function", is_whole=True),
            parallel("get_shared_memory", "function", is_whole=True),
            base("DeviceCommunicatorBase.nccl_communicator", "method", is_whole=True),
            *(base(f"SharedMemory.{field}", "field") for field in ("name", "nbytes", "addresses")),
        ),
    )
    # In vLLM itself since 0.33.
    need = _in_module("vllm.v1.worker.lora_model_runner_mixin")
    yield Extension(ADAPTER_POOL, (need("get_mem_allocator_instance", "value"),))
    need = _in_module("vllm.v1.engine.core")
    yield Extension(REASONS, (need("RequestError", "value"),))


EXTENSIONS: tuple[Extension, ...] = (*_extensions(),)

CONTRACT: tuple[Need, ...] = (*_contract(), *_offload_contract(), *_triton_contract())


def parse(version: str, instead: str = WITHOUT_SLEEP) -> Version:
    """The release that a version belongs to: 0.20.2rc1.dev3+g123 counts as 0.20.2."""
    release = _release(version)
    if release is None:
        raise _unsupported(version, "its version does not tell which release it belongs to", instead)
    return release


def known(version: str, instead: str = WITHOUT_SLEEP) -> Version:
    """The same, if it is a known release. `instead` is how to run without poorwill."""
    release = parse(version, instead)
    if not OLDEST <= release < TOO_NEW:
        newer = release >= TOO_NEW
        raise _unsupported(
            version,
            f"it is {'newer' if newer else 'older'} than what poorwill knows, "
            f"which is {dotted(OLDEST)} and later, below {dotted(TOO_NEW)}",
            instead,
        )
    return release


def running() -> str:
    """Version of this process's vLLM, or of the one that it would import, in vLLM's spelling."""
    module = sys.modules.get("vllm.version")
    said = getattr(module, "__version__", None)
    if isinstance(said, str):
        return said
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def extensions(find: Callable[[Need], Found]) -> frozenset[str]:
    """The extension points of a vLLM, by name.

    `find` looks for a need, and raises AttributeError or LookupError where there is nothing of it.
    """

    def is_met(need: Need) -> bool:
        try:
            return need.problem(find(need)) is None
        except (AttributeError, LookupError, TypeError, ValueError):
            return False

    return frozenset(each.name for each in EXTENSIONS if all(map(is_met, each.needs)))


def imported(need: Need) -> Found:
    """What this process has of a need, for `extensions`: of a module that is imported already."""
    return find(sys.modules[need.module], need)


def needs(
    version: str,
    module: str | None = None,
    instead: str = WITHOUT_SLEEP,
    extended: Collection[str] = (),
) -> list[Need]:
    """The needs of this version, or of one of its modules, where it has these extension points."""
    release = known(version, instead)
    every = (*CONTRACT, *(need for each in EXTENSIONS if each.name in extended for need in each.needs))
    concerned = {
        need.name: need
        for need in every
        if module in (None, need.module) and need.concerns(release) and need.unless not in extended
    }
    return list(concerned.values())


def check(version: str, module: ModuleType, instead: str = WITHOUT_SLEEP) -> None:
    """Raises `UnsupportedVllmError` unless this module of vLLM has everything needed of it.

    Call it before anything of the module is replaced. Without needs only the version is checked.
    """
    for need in needs(version, module.__name__, instead, extensions(imported)):
        try:
            found = find(module, need)
        except AttributeError:
            raise _unsupported(version, f"{need.name} is missing", instead) from None
        except (TypeError, ValueError) as error:
            said = f"{need.name} does not tell what it takes ({error})"
            raise _unsupported(version, said, instead) from error
        if problem := need.problem(found):
            raise _unsupported(version, f"{need.name} {problem}", instead)


def refuse_missing(version: str, module: str, instead: str = WITHOUT_SLEEP) -> None:
    """Raises `UnsupportedVllmError` if this missing module of vLLM is needed."""
    if needs(version, module, instead):
        raise _unsupported(version, f"the module {module} is missing", instead)


def refuse_unexpected(version: str, module: str, instead: str) -> None:
    """The same for an existing module that is unknown in this version."""
    if not needs(version, module, instead):
        raise _unsupported(version, f"the module {module} is not expected in it", instead)


def _unsupported(version: str, what: str, instead: str = WITHOUT_SLEEP) -> UnsupportedVllmError:
    return UnsupportedVllmError(
        f"poorwill cannot work in vLLM {version}: {what}; it was tested with vLLM {' and '.join(RUN)}: "
        f"{instead} to do without poorwill, or upgrade it"
    )
