"""vLLM's own worker with its own allocator, from its sources, over GPU memory that is a table.

It shows what an engine without our plugin does: what sleeps, and whether it answers, faults or answers with
gibberish.
"""

from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

from .loader import Loader, Stub
from .worker import MemoryFault

WORKER = "vllm.v1.worker.gpu_worker"
CUMEM = "vllm.device_allocator.cumem"
REAL = (WORKER, "vllm.v1.worker.worker_base", "vllm.device_allocator", CUMEM)
BACKENDS = "vllm.device_allocator.sleep_mode_backend"

_SIZE = 1 << 20
_HOST = 1 << 40


class Memory:
    """What the mapped addresses of one GPU and of the host contain; None is what no one wrote."""

    def __init__(self) -> None:
        self._contents: dict[int, str | None] = {}
        self._addresses = count(_SIZE, _SIZE)
        self._host_addresses = count(_HOST, _SIZE)

    def take(self, *, is_host: bool = False) -> "Tensor":
        tensor = Tensor(self, next(self._host_addresses if is_host else self._addresses))
        self._contents[tensor.address] = None
        return tensor

    def map(self, device: int, size: int, address: int, *_: int) -> None:
        if address in self._contents:
            raise MemoryFault(f"{address} is mapped twice")
        self._contents[address] = None

    def unmap(self, device: int, size: int, address: int, *_: int) -> None:
        if address not in self._contents:
            raise MemoryFault(f"{address} is unmapped twice")
        del self._contents[address]

    def read(self, address: int) -> str | None:
        if address not in self._contents:
            raise MemoryFault(f"{address} is read, which is not mapped")
        return self._contents[address]

    def write(self, address: int, content: str | None) -> None:
        self.read(address)
        self._contents[address] = content

    def copy(self, to: int, of: int, size: int) -> None:
        self.write(to, self.read(of))

    def info(self, *_: Any) -> tuple[int, int]:
        return _HOST - _SIZE * sum(address < _HOST for address in self._contents), _HOST


class Tensor:
    """All of one allocation."""

    is_cpu = False

    def __init__(self, memory: Memory, address: int) -> None:
        self._memory = memory
        self.address = address
        self.data = self

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return _SIZE

    def element_size(self) -> int:
        return 1

    def cpu(self) -> "Tensor":
        return self._memory.take(is_host=True).copy_(self)

    def clone(self) -> "Tensor":
        return self.cpu()

    def copy_(self, other: "Tensor") -> "Tensor":
        self._memory.copy(self.address, other.address, _SIZE)
        return self


class Stock:
    """A version's worker class, and the allocator that its instances share."""

    def __init__(self, version: str) -> None:
        minor = int(version.split(".")[1])
        loader = Loader(version, REAL if minor < 25 else (*REAL, BACKENDS))
        self._memory = Memory()
        bindings = {"python_create_and_map": "map", "python_unmap_and_release": "unmap"}
        loader.give(
            "vllm.cumem_allocator",
            init_module=Stub("init_module"),
            **{theirs: self._bound(ours) for theirs, ours in bindings.items()},
        )
        platform: Any = Stub("platform")
        platform.is_cuda_alike = lambda: True
        loader.give("vllm.platforms", current_platform=platform)
        loader.give("torch", empty=lambda *_, **__: self._memory.take(is_host=True))
        loader.give("torch.cuda", mem_get_info=self._bound("info"))
        loader.give("torch.accelerator", get_memory_info=self._bound("info"))
        worker = loader.module(WORKER).Worker
        self._cumem = loader.module(CUMEM)
        self._cumem.libcudart = SimpleNamespace(cudaMemcpy=self._bound("copy"))
        # Looking through all of the tests' objects takes longer than everything else.
        self._cumem.gc = Stub("gc")
        self._given = {
            "CuMemAllocator": self._cumem.CuMemAllocator,
            "allocation": loader.module("vllm.device_allocator").__dict__.get("AllocationData")
            or self._cumem.AllocationData,
        }
        self._backend = None if minor < 25 else loader.module(BACKENDS)
        self._make = _worker_class(worker)

    def _bound(self, name: str) -> Any:
        # Each worker has a new memory.
        return lambda *args: getattr(self._memory, name)(*args)

    def worker(self, rank: int) -> Any:
        """The only one from now on."""
        self._memory = memory = Memory()
        made, allocator = object.__new__(self._make), object.__new__(self._given["CuMemAllocator"])
        allocator.pointer_to_data = {}
        self._given["CuMemAllocator"].instance = allocator
        self._given["CuMemAllocator"].get_instance = staticmethod(lambda: allocator)
        made.rank, made.memory, made.calls = rank, memory, []
        made.weight, made.buffer, made.cache = (
            self._allocated(allocator, tag) for tag in ("weights", "weights", "kv_cache")
        )
        made.reload_weights()
        memory.write(made.buffer.address, "angles")
        model: Any = Stub("model")
        model.named_buffers = lambda: iter([("rotary", made.buffer)])
        model.named_parameters = lambda: iter([("weight", made.weight)])
        made.model_runner = Stub("model_runner")
        made.model_runner.model = model
        made.get_draft_model = lambda: None
        made.cache_config = SimpleNamespace(cache_dtype="auto")
        options = SimpleNamespace(enable_nccl_comm_suspend=False, sleep_preserve_parameter_names=())
        made.model_config, made.vllm_config = options, SimpleNamespace(model_config=options)
        made._sleep_mode_backend = self._backend and self._backend.CuMemBackend()
        for name in ("buffers", "draft_buffers", "parameters"):
            setattr(made, f"_sleep_saved_{name}", {})
        made._sleep_rebuild_draft_metadata_buffers = {}
        return made

    def _allocated(self, allocator: Any, tag: str) -> Tensor:
        tensor = self._memory.take()
        handle = (0, _SIZE, tensor.address, 0)
        allocator.pointer_to_data[tensor.address] = self._given["allocation"](handle, tag)
        return tensor


def _worker_class(of: Any) -> Any:
    class Worker(of):  # type: ignore[misc]
        """vLLM's, with a model that says whether it has its weights."""

        def execute_model(self, batch: Any) -> dict[str, str]:
            # Written in each step, and read in the next.
            self.memory.write(self.cache.address, "keys")
            return dict.fromkeys(batch.ids, "token" if self.is_whole() else "gibberish")

        def is_whole(self) -> bool:
            """Whether the model has its bytes. A fault if it sleeps."""
            model = [self.memory.read(tensor.address) for tensor in (self.weight, self.buffer)]
            return model == ["weight", "angles"]

        def reload_weights(self) -> None:
            self.memory.write(self.weight.address, "weight")

        def asleep(self) -> Iterator[str]:
            """The tags of which nothing is mapped."""
            for tag, tensor in (("weights", self.weight), ("kv_cache", self.cache)):
                try:
                    self.memory.read(tensor.address)
                except MemoryFault:
                    yield tag

        def synchronize_device(self) -> None: ...

        def reset_mm_cache(self) -> None: ...

        def reset_encoder_cache(self) -> None: ...

        def get_kv_connector_handshake_metadata(self) -> None: ...

    return Worker
