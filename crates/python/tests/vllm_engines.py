"""Engines of one rank, for the suites that `test_vllm_suites.py` runs.

They start as vLLM's core starts them. As a plugin of pytest it brings the fixtures.
"""

import contextlib
import ctypes
import gc
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_vllm import worker_parts, workers
from fake_vllm.worker_parts import MIB as MIB
from fake_vllm.worker_parts import Shape as Shape
from fake_vllm.worker_parts import filled as filled
from poorwill.vllm._versions import TESTED

torch: Any = importlib.import_module("torch")

BLOCKS = 128
FAULTS = {"quick": 6, "usual": 20, "long": 200}[os.environ.get("POORWILL_EFFORT", "usual")]


def free_bytes(device: int = 0) -> int:
    torch.cuda.synchronize(device)
    return int(torch.cuda.mem_get_info(device)[0])


def keep_workspaces(device: int) -> None:
    """Has cuBLAS take what it keeps for as long as the process lives."""
    square = torch.zeros((64, 64), dtype=torch.float16, device=f"cuda:{device}")
    torch.addmm(torch.zeros(64, dtype=torch.float16, device=f"cuda:{device}"), square, square)


class Engine:
    """A worker that has started, or is to."""

    def __init__(self, module: Any, version: str, shape: Shape, *, device: int = 0, **settings: Any) -> None:
        self.module = module
        self.version = version
        self.shape = shape
        self.config = worker_parts.config(shape, **settings)
        keep_workspaces(device)
        torch.cuda.empty_cache()
        self.reserved_at_start = int(torch.cuda.memory_reserved(device))
        self.free_at_start = free_bytes(device)
        self.worker = module.Worker(self.config, device, 0, "nowhere")

    def start(self, blocks: int = BLOCKS) -> "Engine":
        self.load()
        self.start_cache(blocks)
        self.worker.compile_or_warm_up_model()
        self.use_cache()
        return self

    def load(self) -> "Engine":
        self.worker.init_device()
        self.worker.load_model()
        return self

    def start_cache(self, blocks: int = BLOCKS) -> None:
        self.worker.determine_available_memory()
        self.worker.initialize_from_config(worker_parts.kv_config(self.shape, blocks))

    @property
    def runner(self) -> Any:
        return self.worker.model_runner

    @property
    def allocator(self) -> Any:
        return self.worker._allocator

    @property
    def arena(self) -> Any:
        return self.allocator.arena

    def snapshot(self) -> Any:
        """What vLLM measures of its GPU, as our hook leaves it."""
        memory = importlib.import_module("vllm.utils.mem_utils")
        return memory.MemorySnapshot(device=self.worker.device)

    def use_cache(self) -> None:
        for tensor in self.runner.every_cache():
            tensor.fill_(77)

    def weights(self) -> dict[str, Any]:
        return dict(self.runner.model.named_parameters())

    def buffers(self) -> dict[str, Any]:
        return dict(self.runner.model.named_buffers())

    def runtime(self) -> dict[str, Any]:
        kept = [*self.runner.builders, *self.runner.lora]
        return {f"runtime.{number}": tensor for number, tensor in enumerate(kept)}

    def kept(self) -> dict[str, Any]:
        return {**self.weights(), **self.buffers(), **self.runtime()}

    def caches(self) -> dict[str, Any]:
        return {f"cache.{number}": tensor for number, tensor in enumerate(self.runner.every_cache())}

    def cache_is_zero(self) -> bool:
        return all(not content.strip(b"\0") for content in contents(self.caches()).values())

    def states(self) -> dict[str, str]:
        return dict(self.arena.state())

    def is_awake(self) -> bool:
        return set(self.states().values()) == {"awake"}

    def events(self, operation: str | None = None) -> list[dict[str, Any]]:
        reported = self.worker.poorwill_status()["events"]
        return [event for event in reported if operation in (None, event["operation"])]

    def prepared(self) -> None:
        """Waits for what was begun at the start."""
        preparation = self.worker._preparation
        if preparation is not None:
            preparation.wait()

    def end(self) -> None:
        self.worker.shutdown()
        self.runner.__dict__.clear()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def acting(engine: Engine, moment: str, act: Callable[[], object]) -> Engine:
    """Has another act at a moment of the start, once: behind that function of the model runner."""
    stock = getattr(engine.runner, moment)
    has_acted = False

    def acts(*given: Any, **more: Any) -> Any:
        nonlocal has_acted
        done = stock(*given, **more)
        if not has_acted:
            act()
        has_acted = True
        return done

    setattr(engine.runner, moment, acts)
    return engine


def contents(tensors: dict[str, Any]) -> dict[str, bytes]:
    return {name: tensor.numpy_bytes() for name, tensor in tensors.items()}


def addresses(tensors: dict[str, Any]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


Start = Callable[..., Engine]


@contextlib.contextmanager
def engines(version: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Makes engines of a version in a process as a new one, and ends them.

    Settings whose names begin with `POORWILL_` go to the environment.
    """
    made: list[Engine] = []
    with workers.installed(version) as module:

        def make(shape: Shape | None = None, **settings: Any) -> Engine:
            for name in [name for name in settings if name.startswith("POORWILL_")]:
                monkeypatch.setenv(name, settings.pop(name))
            made.append(Engine(module, version, shape or Shape(), **settings))
            return made[-1]

        try:
            yield make
        finally:
            arenas = [engine.arena for engine in made if engine.allocator is not None]
            for engine in made:
                engine.worker.__dict__.clear()
            made.clear()
            gc.collect()
            torch.cuda.synchronize()
            for arena in arenas:
                arena.close()
            torch.cuda.empty_cache()


class Faults:
    """Calls of the driver that fail."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["POORWILL_FAKE_LIBCUDA"])
        self._library.poorwillFakeArm.argtypes = (ctypes.c_uint64, ctypes.c_uint64)
        self._library.poorwillFakeDisarm.restype = ctypes.c_uint64

    def arm(self, first: int, count: int = 1) -> None:
        self._library.poorwillFakeArm(first, count)

    def disarm(self) -> int:
        """How many calls there were."""
        return int(self._library.poorwillFakeDisarm())

    def calls_of(self, act: Callable[[], object]) -> list[int]:
        """The calls that an act makes, by number: the last, and as many others as this run has time for."""
        self.arm(1 << 40)
        act()
        calls = self.disarm()
        return sorted({*range(0, calls, max(1, calls // FAULTS)), calls - 1})

    def fail(self, number: int, act: Callable[[], object]) -> Exception | None:
        """Has a call of an act fail. What comes of it."""
        self.arm(number)
        try:
            act()
        except Exception as error:
            return error
        finally:
            self.disarm()
        return None


LORA = Shape(lora=(2 * MIB, 100_000))


@pytest.fixture(params=TESTED)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def start(version: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    with engines(version, monkeypatch) as make:
        yield make


@pytest.fixture
def faults() -> Iterator[Faults]:
    faults = Faults()
    yield faults
    faults.disarm()


def minor(version: str) -> int:
    """Of vLLM 0.33.1 it is 33."""
    return int(version.split(".")[1])


def only(version: str) -> pytest.MarkDecorator:
    """For tests of what one version has."""
    return pytest.mark.parametrize("version", [version], indirect=True)
