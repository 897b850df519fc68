"""What stands in for Triton's and PyTorch's things where `poorwill.triton` is tested."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

KIB = 1 << 10


@dataclass
class Config:
    """Like `triton.Config`."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    num_stages: int = 3
    num_warps: int = 4

    def all_kwargs(self) -> dict[str, Any]:
        return {**self.kwargs, "num_stages": self.num_stages, "num_warps": self.num_warps}


@dataclass
class Tensor:
    element_bytes: int
    dtype: Any = None

    def element_size(self) -> int:
        return self.element_bytes


def sized(*sizes_bytes: int) -> list[Config]:
    """Configurations that say themselves what they take."""
    return [Config({"size_bytes": size_bytes}) for size_bytes in sizes_bytes]


def own_size(parameters: dict[str, Any]) -> int:
    size_bytes: int = parameters["size_bytes"]
    return size_bytes


def whole_numbers(element_bytes: int) -> Tensor:
    """A tensor of offsets, say."""
    return Tensor(element_bytes, SimpleNamespace(is_floating_point=False))
