"""A small transformer to offload, and what the suites of offloaded modules ask about it.

The suites run on the host device, and on a GPU where PyTorch finds one.
"""

import gc
import random
from collections.abc import Iterator
from typing import Any

import poorwill
import pytest
from poorwill import offload
from poorwill.offload import HostBuffer

torch: Any = pytest.importorskip("torch")
nn: Any = pytest.importorskip("torch.nn")

HAS_GPU = torch.cuda.is_available()
HOST = "host:256MiB"
DEVICES = [HOST, "cuda:0"] if HAS_GPU else [HOST]
LIMIT = "16MiB"
for name in DEVICES:
    poorwill.arena(name, "offloading-modules", limit="64MiB", host_limit=LIMIT)

on_a_gpu = pytest.mark.skipif(not HAS_GPU, reason="PyTorch finds no GPU")

NO_UVA = "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA"
SWITCHES = ("POORWILL_DISABLE_PIN", "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY", NO_UVA)
WIDTH, WORDS = 32, 50


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(params=["in place", "copied"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    chosen: str = request.param
    if chosen == "copied":
        monkeypatch.setenv(NO_UVA, "1")
    return chosen


@pytest.fixture(autouse=True)
def no_switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)
    with torch.no_grad():
        yield
    for name in DEVICES:
        assert is_nothing_held(name)


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.between = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.fails = False

    def forward(self, x: Any) -> Any:
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        if self.fails:
            raise RuntimeError("in the middle of a layer")
        return x + self.mlp(self.between(x))


class Model(nn.Module):  # type: ignore[misc]
    """A small transformer, with tied embeddings, and layers of different sizes."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH, 40 + 24 * (number % 3)) for number in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, words: Any) -> Any:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) * self.scale


def is_nothing_held(device: str) -> bool:
    gc.collect()
    if HAS_GPU:
        torch.cuda.synchronize()
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patched:
        for name in SWITCHES:
            patched.delenv(name, raising=False)
        offload.offload(torch.zeros(1), device=device)
        gc.collect()
        try:
            HostBuffer(LIMIT, device=device).free()
        except poorwill.OutOfMemoryError:
            return False
    return True


def place(device: str) -> Any:
    return torch.device("cpu" if device.startswith("host") else device)


def made(device: str, layers: int = 5) -> Any:
    torch.manual_seed(layers)
    return Model(layers).eval().to(place(device))


def words(device: str, seed: int = 0) -> Any:
    rng = random.Random(seed)
    return torch.tensor([[rng.randrange(WORDS) for _ in range(7)] for _ in range(3)], device=place(device))


def is_same(one: Any, other: Any) -> bool:
    return bool(torch.equal(one.cpu().view(torch.uint8), other.cpu().view(torch.uint8)))


def bytes_of(state: dict[str, Any]) -> dict[str, bytes]:
    return {
        name: tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in state.items()
    }


def nbytes_of(*parameters: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def names_of(parts: Any) -> set[str]:
    return {name for part in parts for name in part.names}
