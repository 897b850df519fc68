"""What vLLM's own worker runs on here: a model in tensors with its runner, settings, and a trainer.

The tensors are the fake's for PyTorch, so that their memory is where PyTorch's allocator, and what is
plugged into it, has it.
"""

import contextlib
import gc
import importlib
import weakref
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from .loader import Stub

torch: Any = importlib.import_module("torch")

MIB = 1 << 20
GIB = 1 << 30


def filled(nbytes: int, seed: int, device: Any = "cuda") -> Any:
    """A tensor with a byte of its own."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device).fill_(seed % 251 + 1)


@dataclass(frozen=True)
class Shape:
    """What there is of an engine, in bytes."""

    weights: tuple[int, ...] = (24 * MIB, 5 * MIB, 40_000)
    buffers: tuple[int, ...] = (3 * MIB,)
    transient: int = 48 * MIB
    """What loading takes for a while."""
    outside: tuple[int, ...] = ()
    """Weights that are made before the pool is open, as by a model that caches them."""
    offloaded: tuple[int, ...] = ()
    """Weights in host memory that the GPU sees."""
    lora: tuple[int, ...] = ()
    is_hybrid: bool = False
    """Whether some layers have a list of state tensors in the place of a cache."""
    scale: int = 1
    """What the checkpoint says of the FP8 scales."""
    activations: int = 16 * MIB
    page: int = 64 * 1024
    """Of a layer's cache."""
    has_keys_first: bool = False
    """Whether a layer has the keys of all blocks before the values, as some do up to 0.28."""
    layers: int = 4
    builder: int = 2 * MIB
    """What the builders of metadata keep, before and behind the cache."""
    unprofiled: int = 0
    """What capturing takes that its profile has not seen."""


class Model:
    """Parameters, buffers, and what attention layers have as scales."""

    def __init__(self, shape: Shape, device: Any, outside: list[Any]) -> None:
        self.shape = shape
        self._parameters: dict[str, Any] = {}
        for number, nbytes in enumerate(shape.weights):
            transient = torch.empty(shape.transient, dtype=torch.uint8, device=device)
            self._parameters[f"layers.{number}.weight"] = filled(nbytes, number, device)
            # Until then work that is queued keeps what is freed.
            torch.cuda.synchronize()
            del transient
        for number, tensor in enumerate(outside):
            self._parameters[f"outside.{number}.weight"] = tensor
        self._buffers = {
            f"rotary.{number}": filled(nbytes, 100 + number, device)
            for number, nbytes in enumerate(shape.buffers)
        }
        self._buffers["attention.k_scale"] = filled(1, shape.scale - 1, device)

    def add(self, name: str, tensor: Any) -> None:
        self._parameters[name] = tensor

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, Any]]:
        seen: list[Any] = []
        for name, tensor in self._parameters.items():
            if remove_duplicate and any(tensor is other for other in seen):
                continue
            seen.append(tensor)
            yield name, tensor

    def named_buffers(self) -> Iterator[tuple[str, Any]]:
        yield from self._buffers.items()

    def load_weights(self, weights: Iterable[tuple[str, Any]] = ()) -> None:
        """Writes these weights; as the checkpoint has them, all."""
        given = list(weights)
        for name, tensor in given:
            self._parameters[name].copy_(tensor)
        for name, tensor in () if given else self.checkpoint():
            self._parameters[name].copy_(tensor)

    def checkpoint(self) -> Iterator[tuple[str, Any]]:
        """The weights as the checkpoint has them."""
        for name, tensor in self._parameters.items():
            number = int(name.split(".")[1])
            seed = 50 + number if name.startswith("outside") else number
            yield name, filled(tensor.numel(), seed, "cpu")

    def drop(self) -> None:
        self._parameters.clear()
        self._buffers.clear()


class Layer:
    """An attention layer of the model, with its view of the cache, which lives no longer for it."""

    def __init__(self, cache: Any, blocks: int, shape: Shape) -> None:
        self.has_keys_first = shape.has_keys_first
        self._cache, self._blocks, self._half = weakref.ref(cache), blocks, shape.page // 2

    @property
    def kv_cache(self) -> Any:
        cache, blocks, half = self._cache(), self._blocks, self._half
        if cache is None:
            return None
        if self.has_keys_first:
            return cache.as_strided((2, blocks, half), (blocks * half, half, 1))
        return cache.as_strided((blocks, 2, half), (2 * half, half, 1))

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_kv_cache_block_dim=lambda *_: int(self.has_keys_first))


class SpecOf:
    """A layer's cache, as its specification has it."""

    def __init__(self, page_size_bytes: int) -> None:
        self.page_size_bytes = page_size_bytes


class StateSpecOf(SpecOf):
    """The same of a layer with state tensors."""


def stub(name: str, **attributes: Any) -> Any:
    """Something with these attributes, and with stubs for others."""
    made = Stub(name)
    vars(made).update(attributes)
    return made


def kv_config(shape: Shape, num_blocks: int) -> Any:
    """What the engine's core makes of the memory that there is."""
    names = [f"layers.{number}" for number in range(shape.layers)]
    return stub(
        "kv_cache_config",
        num_blocks=num_blocks,
        kv_cache_tensors=[
            SimpleNamespace(
                size=shape.page * num_blocks, shared_by=[name], layers=[name], block_stride=shape.page
            )
            for name in names
        ],
        kv_cache_layout=None,
    )


def config(shape: Shape, **settings: Any) -> Any:
    """vLLM's configuration: what a worker and the hooks read of it, and the shape of the engine."""
    cache = stub(
        "cache_config",
        gpu_memory_utilization=settings.pop("gpu_memory_utilization", 0.75),
        kv_cache_memory_bytes=settings.pop("kv_cache_memory_bytes", None),
        cache_dtype=settings.pop("cache_dtype", "auto"),
    )
    model = stub(
        "model_config",
        enable_sleep_mode=True,
        enable_cumem_allocator=True,
        sleep_mode_backend="poorwill",
        sleep_mode_offload_cudagraph=False,
        multimodal_config=None,
        enforce_eager=True,
    )
    compilation = stub(
        "compilation_config",
        max_cudagraph_capture_size=8,
        cudagraph_capture_sizes=[1, 2, 4, 8],
        cudagraph_mode="NONE",
        static_forward_context={},
    )
    made = stub(
        "vllm_config",
        model_config=model,
        cache_config=cache,
        compilation_config=compilation,
        parallel_config=stub(
            "parallel_config",
            worker_cls="poorwill.vllm.worker.Worker",
            world_size=1,
            assigned_physical_gpu_ids=None,
            get_local_gpu_index=lambda rank: rank,
            data_parallel_rank_local=0,
            distributed_timeout_seconds=None,
        ),
        device_config=stub("device_config", device_type="cuda"),
        profiler_config=stub("profiler_config", profiler=None),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
        lora_config="lora" if shape.lora else None,
        weight_transfer_config=None,
        drafts=None,
        shape=shape,
        is_uniform=False,
    )
    for name, value in settings.items():
        [part] = [part for part in (model, compilation, made) if name in vars(part)]
        setattr(part, name, value)
    return made


class TransferEngine:
    """Receives weights from a trainer, which are the checkpoint's."""

    is_checkpoint_format = True
    supports_draft_weight_update = True

    def __init__(self, *given: Any) -> None:
        self.model = given[-1]
        self.fails: Exception | None = None

    def update_weights(self, _: Any) -> None:
        self.receive_weights(self, self.model.load_weights)

    def parse_update_info(self, _: Any) -> "TransferEngine":
        return self

    def receive_weights(self, _: Any, load_weights: Any) -> None:
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        load_weights(())

    def set_weight_update_target(self, *_: Any) -> None: ...

    def start_weight_update(self) -> None: ...

    finish_weight_update = reset_weight_update_target = shutdown = start_weight_update


class Drafter:
    """What drafts tokens for a model, with a layer of its own and one of the model's."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.model: Any = None

    def load_model(self, target: Model) -> None:
        self.model = Model(Shape(weights=(MIB,), buffers=()), self.device, [])
        name, tensor = next(target.named_parameters())
        self.model.add(f"shared.{name}", tensor)


class GPUModelRunner:
    """What loads the model, profiles it, makes the caches and captures graphs; alike in all versions but for
    what each names and pools by itself.
    """

    draft: Any = None
    is_pooling_model = False

    def __init__(self, vllm: Any, vllm_config: Any, device: Any) -> None:
        self.vllm = vllm
        self.vllm_config = vllm_config
        self.shape: Shape = vllm_config.shape
        self.cache_config = vllm_config.cache_config
        self.compilation_config = vllm_config.compilation_config
        self.lora_config = vllm_config.lora_config
        self.max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.device = device
        self.kv_caches: list[Any] = []
        self.builders: list[Any] = []
        self.lora: list[Any] = []
        self.graphs: list[Any] = []
        self.workspace: Any = None
        self.model_memory_usage = 0
        self.profiled = 0
        if vllm_config.drafts is not None:
            setattr(self, vllm_config.drafts, Drafter(device))
        self._outside = [filled(size, 50 + number) for number, size in enumerate(self.shape.outside)]

    # Loading

    def load_model(self, load_dummy_weights: bool = False) -> None:
        before = torch.cuda.memory_allocated()
        self.model = Model(self.shape, self.device, self._outside)
        for number, nbytes in enumerate(self.shape.offloaded):
            tensor = filled(nbytes, 60 + number)
            tensor._vllm_is_uva_offloaded = True
            self.model.add(f"offloaded.{60 + number}.weight", tensor)
        self.model_memory_usage = torch.cuda.memory_allocated() - before
        if self.lora_config:
            self.model = self.load_lora_model(self.model, self.vllm_config, self.device)
        if self.vllm_config.drafts is not None:
            getattr(self, self.vllm_config.drafts).load_model(self.model)

    def load_lora_model(self, model: Any, vllm_config: Any, device: Any) -> Any:
        with self.vllm.pool("runtime"):
            self.lora = [filled(size, 70 + number) for number, size in enumerate(self.shape.lora)]
        return model

    def reload_weights(self, *_: Any, **__: Any) -> None:
        self.model.load_weights()

    def get_model(self) -> Model:
        return self.model

    def get_draft_model(self) -> Any:
        return self.draft

    def add_lora(self, _: Any) -> bool:
        return True

    def maybe_remove_all_loras(self, _: Any) -> None: ...

    def reset_lora_state(self) -> None: ...

    # Passes

    def profile_run(self, randomize_inputs: bool = False) -> None:
        self.run()
        if self.vllm.workspace_context is not None:
            with self.vllm.workspace_context():
                self.workspace = torch.empty(4 << 20, dtype=torch.uint8, device=self.device)

    def run(self) -> None:
        """One forward pass, which leaves nothing behind."""
        self.profiled += 1
        torch.empty(self.shape.activations, dtype=torch.uint8, device=self.device)

    def _dummy_run(self, *_: Any, **__: Any) -> tuple[None, None]:
        self.run()
        return None, None

    def _dummy_sampler_run(self, hidden_states: Any) -> None: ...

    # Caches

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, kv_cache_allocation_context: Any = None
    ) -> None:
        self.kv_cache_config = kv_cache_config = deepcopy(kv_cache_config)
        self.builders = []
        self._make_builders()
        with kv_cache_allocation_context or contextlib.nullcontext():
            self._initialize_kv_cache_tensors(kv_cache_config)
        self._make_builders()

    def _initialize_kv_cache_tensors(self, kv_cache_config: Any) -> None:
        """Hands the caches out. A layer that keeps state in place of keys has several tensors."""
        tensors = self._make_tensors(kv_cache_config)
        self.kv_caches = list(tensors.values())
        layers = self.compilation_config.static_forward_context
        blocks = kv_cache_config.num_blocks
        layers.update({name: Layer(cache, blocks, self.shape) for name, cache in tensors.items()})
        if self.shape.is_hybrid:
            self.kv_caches = [self.kv_caches[0], self.kv_caches[1:]]

    def _make_builders(self) -> None:
        self.builders.append(filled(self.shape.builder, 80 + len(self.builders)))

    def _make_tensors(self, kv_cache_config: Any) -> dict[str, Any]:
        return {
            name: torch.zeros(raw.size, dtype=torch.uint8, device=self.device)
            for raw in kv_cache_config.kv_cache_tensors
            for name in raw.shared_by
        }

    def every_cache(self) -> list[Any]:
        return [tensor for each in self.kv_caches for tensor in (each if isinstance(each, list) else [each])]

    def get_kv_cache_spec(self) -> dict[str, Any]:
        kinds = [SpecOf] + [StateSpecOf if self.shape.is_hybrid else SpecOf] * (self.shape.layers - 1)
        return {f"layers.{number}": kind(self.shape.page) for number, kind in enumerate(kinds)}

    # Graphs

    def _profiled_blocks(self) -> int:
        return min(self.max_num_reqs, self.compilation_config.max_cudagraph_capture_size) or 1

    def profile_cudagraph_memory(self) -> int:
        self.initialize_kv_cache(kv_config(self.shape, self._profiled_blocks()), is_profiling=True)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0]
        self.capture()
        torch.cuda.synchronize()
        taken = before - torch.cuda.mem_get_info()[0]
        self.graphs.clear()
        self.kv_caches, self.builders = [], []
        gc.collect()
        torch.cuda.empty_cache()
        return int(taken)

    def capture_model(self) -> int:
        if self.shape.unprofiled:
            self.capture(of=filled(self.shape.unprofiled // 2, 90))
        self._capture_model()
        return 0

    def _capture_model(self) -> None:
        if not self.vllm_config.model_config.sleep_mode_offload_cudagraph or self.vllm.minor < 32:
            self.capture()
            return
        for _ in range(2):
            with self.vllm.allocator().cudagraph_pool() as pool:
                self.capture(pool)

    def capture(self, pool: Any = None, of: Any = None) -> None:
        """Captures a copy, of the first weight if of nothing else: as much memory again."""
        graph = torch.cuda.CUDAGraph()
        _, weight = next(self.model.named_parameters())
        copied = weight if of is None else of
        with torch.cuda.graph(graph, pool=pool):
            result = copied.clone()
        self.graphs.append((graph, copied, result))

    def shutdown(self) -> None:
        self.kv_caches, self.builders, self.lora, self.graphs, self._outside = [], [], [], [], []
        self.workspace = None
        if hasattr(self, "model"):
            self.model.drop()


class SecondGPUModelRunner(GPUModelRunner):
    """The second one of 0.20 to 0.28, which has a function of its module make the caches."""

    def _make_tensors(self, kv_cache_config: Any) -> dict[str, Any]:
        made: dict[str, Any] = self.vllm.loader.module(SECOND_RUNNER).init_kv_cache(self, kv_cache_config)
        return made


def init_kv_cache(runner: GPUModelRunner, kv_cache_config: Any) -> dict[str, Any]:
    return GPUModelRunner._make_tensors(runner, kv_cache_config)


SECOND_RUNNER = "vllm.v1.worker.gpu.model_runner"


class FirstGPUModelRunner(GPUModelRunner):
    """That of 0.20 to 0.28. What makes its caches has a name of its own, and what resets the scales of an FP8
    cache knows no lists of tensors.
    """

    def init_fp8_kv_scales(self) -> None:
        for cache_tensor in self.kv_caches:
            cache_tensor.zero_()
        for name, buffer in self.model.named_buffers():
            if name.endswith("_scale"):
                buffer.fill_(1)

    def post_kv_cache_wake_up(self) -> None:
        """What 0.21 to 0.28 call behind a wake of the cache."""
        self.init_fp8_kv_scales()

    def _make_tensors(self, kv_cache_config: Any) -> dict[str, Any]:
        if not self.vllm_config.is_uniform:
            return self._allocate_kv_cache_tensors(kv_cache_config)
        tensors, *_ = self.allocate_uniform_kv_caches(kv_cache_config, device=self.device)
        return tensors

    @staticmethod
    def allocate_uniform_kv_caches(kv_cache_config: Any, device: Any) -> tuple[dict[str, Any], Any, Any]:
        """The caches of all layers in one tensor, for what carries them elsewhere."""
        raws = kv_cache_config.kv_cache_tensors
        whole = torch.zeros(sum(raw.size for raw in raws), dtype=torch.uint8, device=device)
        return {"all": whole}, whole, None

    def _allocate_kv_cache_tensors(self, kv_cache_config: Any) -> dict[str, Any]:
        return super()._make_tensors(kv_cache_config)

    def _profiled_blocks(self) -> int:
        return self.compilation_config.max_cudagraph_capture_size or 1

    def _capture_model(self) -> None:
        self.capture()
