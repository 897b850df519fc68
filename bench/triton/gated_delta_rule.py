"""The gated delta rule's kernels of flash-linear-attention, without the package around them.

The package wants PyTorch and looks for a GPU when it is imported. Its kernels need neither to be compiled, so
their two files are read on their own, and stand-ins take the places of what they import.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import triton

STAND_INS = [
    "torch",
    "fla",
    "fla.backends",
    "fla.ops",
    "fla.ops.common",
    "fla.ops.utils",
    "fla.ops.utils.cache",
    "fla.ops.utils.graph",
    "fla.utils",
]


class StandIn(ModuleType):
    """A module that has every name: features are absent, types are `object`, decorators change nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith(("IS_", "TRITON_")):
            return False
        if name.endswith("_kwargs"):
            return {}
        if self.__name__ == "torch":
            return object
        return lambda *_args, **_kwargs: lambda function: function


def kernel(file: str, name: str) -> "triton.JITFunction[Any]":
    """The kernel `name` of `fla/ops/common/FILE.py`, without its heuristics and its tuner."""
    module = sys.modules.get(f"fla.ops.common.{file}") or read(file)
    function = getattr(module, name)
    while not isinstance(function, triton.JITFunction):
        function = function.fn
    return function


def read(file: str) -> ModuleType:
    found = importlib.util.find_spec("fla") if "fla" not in sys.modules else None
    if found is not None:
        locations = list(found.submodule_search_locations or [])
        sys.modules.update({name: StandIn(name) for name in STAND_INS})
        sys.modules["fla"].__path__ = locations
        execute("fla.ops.utils.op")
    return execute(f"fla.ops.common.{file}")


def execute(name: str) -> ModuleType:
    folder = Path(sys.modules["fla"].__path__[0])
    path = folder.parent / f"{name.replace('.', '/')}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"flash-linear-attention has no {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
