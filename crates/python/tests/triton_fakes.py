"""What stands in for Triton's and PyTorch's things where `poorwill.triton` is tested."""

import inspect
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


class FakeKernel:
    """What Triton's decorators return: a kernel is launched as `kernel[grid](…)`."""

    fn: Any

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError


class FakeJit(FakeKernel):
    """Like what `triton.jit` returns: compiles once for what it is launched with, and remembers that."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.arg_names = list(inspect.signature(fn).parameters)
        self.compiled: list[dict[str, Any]] = []

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch = dict(zip(self.arg_names, args, strict=False)) | kwargs
        if launch not in self.compiled:
            self.compiled.append(launch)


class FakeAutotuner(FakeKernel):
    """Like Triton's, which tries each configuration that is left of several, once for what its key says."""

    def __init__(self, fn: Any, configs: list[Any], key: list[str], prune_configs_by: Any) -> None:
        self.fn, self.configs, self.keys = fn, configs, key
        self.arg_names = list(fn.arg_names)
        self.early_config_prune = (prune_configs_by or {}).get("early_config_prune")
        self.cache: dict[Any, Any] = {}

    def run(self, *args: Any, **kwargs: Any) -> None:
        named = dict(zip(self.arg_names, args, strict=False))
        key = tuple({**named, **kwargs}[name] for name in self.keys)
        if len(self.configs) > 1 and key not in self.cache:
            left = self.configs
            if self.early_config_prune:
                left = self.early_config_prune(self.configs, named, **kwargs)
                assert left, "Triton wants at least one configuration"
            for config in left:
                self.fn.run(*args, **kwargs, **config.all_kwargs())
            self.cache[key] = left[0]
        picked = self.cache.get(key, self.configs[0])
        self.fn.run(*args, **kwargs, **picked.all_kwargs())


class FakeHeuristics(FakeKernel):
    """Like `triton.heuristics`: arguments that are computed from the others."""

    def __init__(self, fn: Any, values: dict[str, Any]) -> None:
        self.fn, self.values, self.arg_names = fn, values, fn.arg_names

    def run(self, *args: Any, **kwargs: Any) -> None:
        named = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        self.fn.run(*args, **kwargs, **{name: value(named) for name, value in self.values.items()})


def fake_triton() -> Any:
    """The package, as far as kernels are defined with it."""

    def jit(fn: Any = None, **_: Any) -> Any:
        return FakeJit if fn is None else FakeJit(fn)

    def autotune(configs: list[Any], key: list[str], prune_configs_by: Any = None, **_: Any) -> Any:
        return lambda fn: FakeAutotuner(fn, configs, key, prune_configs_by)

    def config(kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 3) -> Config:
        return Config(kwargs, num_stages, num_warps)

    return SimpleNamespace(
        jit=jit,
        autotune=autotune,
        heuristics=lambda values: lambda fn: FakeHeuristics(fn, values),
        Config=config,
    )
