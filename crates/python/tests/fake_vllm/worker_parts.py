"""What the stand-ins of both versions' workers are made of: a model in tensors, and settings.

The tensors are the stand-in's for PyTorch, so that their memory is where PyTorch's allocator, and what is
plugged into it, has it.
"""

import functools
import importlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

torch: Any = importlib.import_module("torch")

MIB = 1 << 20
GIB = 1 << 30


def format_gib(size: int) -> str:
    return f"{round(size / GIB, 2)}"


def init_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


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
    layers: int = 4
    builder: int = 2 * MIB
    """What the builders of metadata keep, before and behind the cache."""
    graph: int = 4 * MIB


class Model:
    """Parameters, buffers, and what attention layers have as scales."""

    def __init__(self, shape: Shape, device: Any, outside: list[Any]) -> None:
        self.shape = shape
        self._parameters: dict[str, Any] = {}
        for number, nbytes in enumerate(shape.weights):
            transient = torch.empty(shape.transient, dtype=torch.uint8, device=device)
            self._parameters[f"layers.{number}.weight"] = filled(nbytes, number, device)
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

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        yield from self._parameters.items()

    def named_buffers(self) -> Iterator[tuple[str, Any]]:
        yield from self._buffers.items()

    def write(self) -> None:
        """The weights as the checkpoint has them."""
        for name, tensor in self._parameters.items():
            number = int(name.split(".")[1])
            tensor.fill_((50 + number if name.startswith("outside") else number) % 251 + 1)

    def drop(self) -> None:
        self._parameters.clear()
        self._buffers.clear()


class SpecOf:
    """A layer's cache, as its specification has it."""

    def __init__(self, page_size_bytes: int) -> None:
        self.page_size_bytes = page_size_bytes


class StateSpecOf(SpecOf):
    """The same of a layer with state tensors."""


def kv_config(shape: Shape, num_blocks: int) -> Any:
    """What the engine's core makes of the memory that there is."""
    names = [f"layers.{number}" for number in range(shape.layers)]
    return SimpleNamespace(
        num_blocks=num_blocks,
        kv_cache_tensors=[SimpleNamespace(size=shape.page * num_blocks, shared_by=[name]) for name in names],
        kv_cache_groups=[SimpleNamespace(layer_names=names)],
        needs_kv_cache_zeroing=False,
    )


def config(shape: Shape, **settings: Any) -> Any:
    """What of vLLM's configuration a worker and the hooks read."""
    cache = SimpleNamespace(
        gpu_memory_utilization=settings.pop("gpu_memory_utilization", 0.75),
        kv_cache_memory_bytes=settings.pop("kv_cache_memory_bytes", None),
        cache_dtype=settings.pop("cache_dtype", "auto"),
        num_gpu_blocks=None,
    )
    model = SimpleNamespace(
        enable_sleep_mode=True,
        enable_cumem_allocator=True,
        sleep_mode_backend="poorwill",
        sleep_mode_offload_cudagraph=False,
        enforce_eager=True,
        enable_nccl_comm_suspend=False,
    )
    compilation = SimpleNamespace(max_cudagraph_capture_size=8, cudagraph_mode="NONE")
    parallel = SimpleNamespace(worker_cls="poorwill.vllm.worker.Worker", rank=0, world_size=1)
    made = SimpleNamespace(
        model_config=model,
        cache_config=cache,
        parallel_config=parallel,
        compilation_config=compilation,
        lora_config="lora" if shape.lora else None,
        weight_transfer_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        shape=shape,
        minimal=functools.partial(kv_config, shape),
        is_uniform=False,
        grow_workspace=None,
    )
    for name, value in settings.items():
        [part] = [part for part in (model, compilation, made) if hasattr(part, name)]
        setattr(part, name, value)
    return made


class TransferEngine:
    """Receives weights from a trainer, which are the checkpoint's."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.fails: Exception | None = None

    def update_weights(self, update_info: Any) -> None:
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        self.model.write()


class RunnerParts:
    """What a model runner has in both versions."""

    def __init__(self, vllm_config: Any, device: Any) -> None:
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
        self.model_memory_usage = 0
        self.profiled = 0
        self._outside = [filled(size, 50 + number) for number, size in enumerate(self.shape.outside)]

    def make_model(self) -> Model:
        before = torch.cuda.memory_allocated()
        model = Model(self.shape, self.device, self._outside)
        for number, nbytes in enumerate(self.shape.offloaded):
            tensor = filled(nbytes, 60 + number)
            tensor._vllm_is_uva_offloaded = True
            model.add(f"offloaded.{60 + number}.weight", tensor)
        self.model_memory_usage = torch.cuda.memory_allocated() - before
        return model

    def make_lora(self) -> None:
        self.lora = [filled(size, 70 + number) for number, size in enumerate(self.shape.lora)]

    def make_builders(self) -> None:
        self.builders.append(filled(self.shape.builder, 80 + len(self.builders)))

    def make_tensors(self, kv_cache_config: Any) -> dict[str, Any]:
        return {
            name: torch.zeros(raw.size, dtype=torch.uint8, device=self.device)
            for raw in kv_cache_config.kv_cache_tensors
            for name in raw.shared_by
        }

    def bind(self, tensors: dict[str, Any]) -> None:
        """Hands the caches out. A layer that keeps state in place of keys has several tensors."""
        self.kv_caches = list(tensors.values())
        if self.shape.is_hybrid:
            self.kv_caches = [self.kv_caches[0], self.kv_caches[1:]]

    def every_cache(self) -> list[Any]:
        return [tensor for each in self.kv_caches for tensor in (each if isinstance(each, list) else [each])]

    def specs(self) -> dict[str, SpecOf]:
        kinds = [SpecOf] + [StateSpecOf if self.shape.is_hybrid else SpecOf] * (self.shape.layers - 1)
        return {f"layers.{number}": kind(self.shape.page) for number, kind in enumerate(kinds)}

    def run(self) -> None:
        """One forward pass, which leaves nothing behind."""
        self.profiled += 1
        torch.empty(self.shape.activations, dtype=torch.uint8, device=self.device)

    def capture(self, pool: Any = None) -> None:
        graph = torch.cuda.CUDAGraph()
        name = next(iter(dict(self.get_model().named_parameters())))
        weight = dict(self.get_model().named_parameters())[name]
        with torch.cuda.graph(graph, pool=pool):
            result = weight.clone()
        self.graphs.append((graph, weight, result))

    def get_model(self) -> Model:
        model: Model = self.model  # type: ignore[attr-defined]
        return model

    def end(self) -> None:
        self.kv_caches, self.builders, self.lora, self.graphs, self._outside = [], [], [], [], []
        if hasattr(self, "model"):
            self.get_model().drop()


class Platform:
    """`current_platform`, of NVIDIA's GPUs."""

    device_name = "cuda"

    def is_cuda(self) -> bool:
        return True

    def is_cuda_alike(self) -> bool:
        return True

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)


current_platform = Platform()
