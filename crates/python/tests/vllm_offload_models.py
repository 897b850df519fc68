"""What the suites of offloaders in vLLM share: a row of layers, and how much host memory is held. As a plugin
of pytest it brings the fixtures.
"""

import ctypes
import gc
import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import poorwill
import pytest
from fake_vllm import offloaders
from fake_vllm.offloaders import Vllm
from poorwill.offload import HostBuffer

torch: Any = importlib.import_module("torch")
nn: Any = importlib.import_module("torch.nn")

VERSIONS = ("0.20.2", "0.33.0")
GIB = 1 << 30
KIB = 1 << 10
SWITCHES = (
    *("POORWILL_OFFLOAD", "POORWILL_HOST_BUDGET", "POORWILL_DISABLE_PIN", "POORWILL_PAGEABLE"),
    *(offloaders.NO_PIN, offloaders.NO_UVA),
)
PAGE = 4 * KIB
# What layers have, by name; whole pages, as memory is held, and no powers of two.
SIZES = {"norm.weight": 3 * PAGE, "experts.w2_weight": 19 * PAGE, "experts.w2_weight_scale": 5 * PAGE}
EACH = sum(SIZES.values())
# Enough for those of the tests that look at what is held.
BUDGET = 489 * PAGE
CUDA = torch.device("cuda:0")
Said = Callable[[], str]


def tensor(nbytes: int, value: int, device: Any = "cuda:0") -> Any:
    return torch.empty((nbytes,), dtype=torch.uint8, device=device).fill_(value)


def parameter(nbytes: int, value: int, device: Any = "cuda:0") -> Any:
    return nn.Parameter(tensor(nbytes, value, device), requires_grad=False)


class Part(nn.Module):  # type: ignore[misc]
    def __init__(self, **parameters: Any) -> None:
        super().__init__()
        for name, each in parameters.items():
            setattr(self, name, each)


class Layer(nn.Module):  # type: ignore[misc]
    """One that tells what its parameters hold when it is called."""

    def __init__(self, number: int, sizes: dict[str, int] | None = None) -> None:
        super().__init__()
        for at, (name, nbytes) in enumerate((sizes or SIZES).items()):
            part, _, own = name.rpartition(".")
            if part and part not in self._modules:
                setattr(self, part, Part())
            owner = self._modules[part] if part else self
            setattr(owner, own, parameter(nbytes, value_of(number, at)))

    def forward(self, x: Any, seen: list[Any] | None = None) -> Any:
        if seen is not None:
            seen.append({name: content(each) for name, each in self.named_parameters()})
        return x


def value_of(number: int, at: int) -> int:
    return 1 + (number * 8 + at) % 250


def content(each: Any) -> bytes:
    if each.device.type == "cuda":
        torch.cuda.synchronize()
    data = each.data
    return bytes(data.numpy_bytes() if hasattr(data, "numpy_bytes") else data.cpu().numpy().tobytes())


def contents(module: Any) -> dict[str, bytes]:
    return {name: content(each) for name, each in module.named_parameters()}


def expected(number: int, sizes: dict[str, int] | None = None) -> dict[str, bytes]:
    return {
        name: bytes([value_of(number, at)]) * nbytes
        for at, (name, nbytes) in enumerate((sizes or SIZES).items())
    }


def named(module: Any) -> dict[str, Any]:
    return dict(module.named_parameters())


def is_in_host_memory(each: Any) -> bool:
    """Whether a GPU's tensor is of host memory: the driver says so, and the fake one by its address."""
    if hasattr(each, "numpy_bytes"):
        return bool(each.data_ptr() >> 56 & 1)
    kind, memory_type, host = ctypes.c_uint(), 2, 1
    driver = ctypes.CDLL("libcuda.so.1")
    assert (
        driver.cuPointerGetAttribute(ctypes.byref(kind), memory_type, ctypes.c_void_p(each.data_ptr())) == 0
    )
    return kind.value == host


def forward(layers: list[Any]) -> list[Any]:
    """One pass over all layers; what each of them has found in its parameters."""
    seen: list[Any] = []
    x = tensor(8, 1)
    for layer in layers:
        x = layer(x, seen)
    return seen


def held_exactly(nbytes: int, budget: int) -> bool:
    """Whether so much of a budget for host memory is held, and not a byte more or less."""
    gc.collect()
    torch.cuda.synchronize()
    gc.collect()
    try:
        HostBuffer(budget - nbytes + 1, device=0).free()
    except poorwill.OutOfMemoryError:
        HostBuffer(budget - nbytes, device=0).free()
        return True
    return False


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def vllm(version: str, no_switches: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vllm]:
    """A process in which weights are offloaded with Poorwill."""
    monkeypatch.setenv("POORWILL_OFFLOAD", "1")
    with offloaders.installed(version) as made:
        yield made
    gc.collect()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Said:
    """What was logged, a line each."""
    caplog.set_level(logging.INFO)
    return lambda: "\n".join(record.getMessage() for record in caplog.records)
