"""A small transformer to offload, and what the suites of offloaded modules ask about it."""

import random
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from offload_tensors import DEVICES as DEVICES
from offload_tensors import NO_UVA as NO_UVA
from offload_tensors import is_nothing_held as is_nothing_held
from offload_tensors import place as place
from offload_tensors import torch as torch

nn: Any = import_module("torch.nn")

WIDTH, WORDS = 32, 50


@pytest.fixture(params=["in place", "copied"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    chosen: str = request.param
    if chosen == "copied":
        monkeypatch.setenv(NO_UVA, "1")
    return chosen


@pytest.fixture(autouse=True)
def no_gradients(no_switches: None) -> Iterator[None]:
    with torch.no_grad():
        yield


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


class Nested(nn.Module):  # type: ignore[misc]
    """One that calls itself, and has its weight on the device each time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Any, depth: int) -> Any:
        inner = self(x, depth - 1) if depth else x
        assert self.weight.device == x.device
        return inner @ self.weight


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
