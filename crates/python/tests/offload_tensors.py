"""What the suites of host memory for weights share: devices, tensors on pages of their own, their bytes."""

import ctypes
import gc
import mmap
import random
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import poorwill
import pytest
from poorwill import offload
from poorwill.offload import HostBuffer

torch: Any = import_module("torch")
HAS_GPU = torch.cuda.is_available()
HOST = "host:256MiB"
OPEN = [HOST, "cuda:0"] if HAS_GPU else [HOST]
DEVICES = [HOST, pytest.param("cuda:0", marks=pytest.mark.gpu)]

LIMIT = "16MiB"
# The first open of a device sets its host memory limit; errors there reveal what is held.
for name in OPEN:
    poorwill.arena(name, "offloading", limit="64MiB", host_limit=LIMIT)

KIB = 1 << 10
MIB = 1 << 20
NO_UVA = "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA"
SWITCHES = ("POORWILL_DISABLE_PIN", "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY", NO_UVA)
DTYPES = ["uint8", "float16", "bfloat16", "float32", "float64", "int64"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def nothing_stays() -> Iterator[None]:
    yield
    for name in OPEN:
        assert is_nothing_held(name)


@pytest.fixture(autouse=True)
def no_switches(nothing_stays: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)


def settled() -> None:
    gc.collect()
    synchronize()


def synchronize() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def is_nothing_held(device: str) -> bool:
    """Whether all host memory of the device was given back: then its limit is there for one buffer."""
    settled()
    with pytest.MonkeyPatch.context() as patched:
        for name in SWITCHES:
            patched.delenv(name, raising=False)
        # Lets go of what the last copy has read.
        offload.offload(filled(1, 0), device=device)
        settled()
        try:
            HostBuffer(LIMIT, device=device).free()
        except poorwill.OutOfMemoryError:
            return False
    return True


def place(device: str) -> Any:
    """PyTorch's name of it."""
    return torch.device("cpu" if device.startswith("host") else device)


def filled(count: int, seed: int, dtype: str = "uint8") -> Any:
    """A flat tensor of random bytes on the CPU, on pages of its own."""
    kind = getattr(torch, dtype)
    memory = mmap.mmap(-1, count * kind.itemsize)
    memory[:] = random.Random(seed).randbytes(len(memory))
    return torch.frombuffer(memory, dtype=kind)


def content(tensor: Any) -> bytes:
    """Its elements in order, when the device has done what is queued."""
    synchronize()
    return copied(tensor)


def copied(tensor: Any) -> bytes:
    here = tensor.cpu().contiguous()
    return ctypes.string_at(here.data_ptr(), here.numel() * here.element_size())


def layout(tensor: Any) -> tuple[Any, ...]:
    return (tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())


def random_tensor(rng: random.Random, dtype: str) -> Any:
    """Any layout that PyTorch allows: transposed, with gaps, overlapping, of 0 to 3 dimensions."""
    shape = [rng.randrange(1, 6) for _ in range(rng.randrange(4))]
    strides = [rng.choice([0, 1, 2, 3, 7, 12]) for _ in shape]
    offset = rng.choice([0, 0, 1, 5])
    needed = offset + 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    base = filled(needed + rng.choice([0, 0, 3]), rng.randrange(1 << 30), dtype)
    return base.as_strided(shape, strides, offset)


def named_layouts() -> dict[str, Any]:
    matrix = filled(12 * 20, 1, "float32").view(12, 20)
    return {
        "contiguous": matrix,
        "transposed": matrix.t(),
        "rows": matrix[3:7],
        "columns": matrix[:, 5:17:3],
        "expanded": filled(20, 2, "bfloat16").view(1, 20).expand(6, 20),
        "scalar": filled(9, 3, "int64").as_strided((), (), 4),
    }
