"""A fake of the part of PyTorch that poorwill's pools use, for tests without PyTorch and without a GPU.

Its heart is a model of the caching allocator (`allocator`), which calls real C functions where a pool has
an allocator of its own. Below that lies a machine: the fake libcuda (`Driver`), or one that only counts
(`Paper`).

    with fake_torch.installed(fake_torch.Driver()) as world:
        import poorwill.torch

`import torch` then gives the fake, until the end of the block.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from imports import imported_anew
from poorwill import _native

from . import nn
from .dispatch import COMPOSITE, TorchDispatchMode, infer
from .dispatch import modes as modes_of_this_thread
from .driver import Driver, Pluggable
from .errors import OutOfMemoryError
from .machine import Paper
from .pools import CUDAPluggableAllocator, Memory
from .streams import Runtime
from .tensors import DTYPES, STRIDED, Device, DType, Library, Storage, Tensor
from .world import World

__all__ = [
    "Driver",
    "OutOfMemoryError",
    "Paper",
    "World",
    "install",
    "installed",
    "modes_of_this_thread",
    "modules",
]

VERSION = "2.11.0+cu130"
FUNCTIONS = (
    *("empty", "zeros", "empty_like", "empty_strided", "equal", "eq", "mm", "addmm"),
    *("from_dlpack", "frombuffer"),
)
_call_afterwards = _native.torch_call_afterwards
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


class inference_mode(contextlib.ContextDecorator):
    """`torch.inference_mode`: nothing here has gradients, but modes see other operations in it."""

    def __init__(self, mode: bool = True) -> None:
        self.mode = mode

    def __enter__(self) -> None:
        infer(1)

    def __exit__(self, *raised: object) -> None:
        infer(-1)


def modules(world: World) -> dict[str, ModuleType]:
    """PyTorch's modules over a world, by name."""
    library, runtime, memory = Library(world), Runtime(world), Memory(world)
    of_memory: dict[str, Any] = {
        "MemPool": memory.pool_type,
        "CUDAPluggableAllocator": CUDAPluggableAllocator,
        "_snapshot": memory.snapshot,
        "_record_memory_history": memory.record_memory_history,
        "empty_cache": runtime.empty_cache,
        "get_allocator_backend": lambda: "native",
    }
    for name in (
        *("memory_snapshot", "memory_reserved", "memory_allocated", "memory_stats", "mem_get_info"),
        *("reset_peak_memory_stats", "use_mem_pool"),
    ):
        of_memory[name] = getattr(memory, name)
    of_cuda: dict[str, Any] = {
        **of_memory,
        "OutOfMemoryError": OutOfMemoryError,
        "Stream": runtime.stream_type,
        "Event": runtime.event_type,
        "CUDAGraph": runtime.graph_type,
        "graph": runtime.capture_type,
        "graph_pool_handle": lambda: (0, world.number()),
        "current_blas_handle": library.blas_handle,
    }
    for name in (
        *("init", "is_initialized", "is_available", "device_count", "current_device", "set_device", "device"),
        *("synchronize", "current_stream", "stream", "is_current_stream_capturing"),
    ):
        of_cuda[name] = getattr(runtime, name)
    of_torch: dict[str, Any] = {
        "__version__": VERSION,
        "version": SimpleNamespace(cuda="13.0", hip=None),
        "device": Device,
        "dtype": DType,
        "Tensor": Tensor,
        "UntypedStorage": Storage,
        "strided": STRIDED,
        "OutOfMemoryError": OutOfMemoryError,
        "inference_mode": inference_mode,
        "ops": SimpleNamespace(),
        "ops_for_tests": library.operations,
        **{dtype.name: dtype for dtype in DTYPES},
        **{name: getattr(library, name) for name in FUNCTIONS},
    }
    made = {
        "torch": _module("torch", of_torch),
        "torch._C": _module(
            "torch._C",
            {
                **memory.c_functions(),
                "_cuda_CUDAAllocator": Pluggable,
                "_len_torch_dispatch_stack": lambda: len(modes_of_this_thread()),
                "DispatchKey": SimpleNamespace(CompositeImplicitAutograd=COMPOSITE),
            },
        ),
        "torch.cuda": _module("torch.cuda", of_cuda),
        "torch.cuda.memory": _module("torch.cuda.memory", of_memory),
        "torch.cuda.graphs": _module("torch.cuda.graphs", {"graph": runtime.capture_type}),
        "torch.nn": _module("torch.nn", {"Module": nn.Module, "Parameter": nn.Parameter}),
        "torch.func": _module("torch.func", {"functional_call": nn.functional_call}),
        "torch.utils": _module("torch.utils", {}),
        "torch.utils._python_dispatch": _module(
            "torch.utils._python_dispatch", {"TorchDispatchMode": TorchDispatchMode}
        ),
    }
    for name, module in made.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(made[parent], own, module)
    return made


def install(machine: Driver, *, first_wins: bool = False, empties_default: bool = False) -> World:
    """Has `import torch` give the fake from now on, with the settings of the environment."""
    conf = next((os.environ[name] for name in VARIABLES if name in os.environ), None)
    world = World(machine, conf, first_wins=first_wins, empties_default=empties_default)
    sys.modules.update(modules(world))
    # What Python calls between two instructions, it cannot call within PyTorch's allocator.
    _native.torch_call_afterwards = lambda look: _call_afterwards(look and partial(world.interrupt, look))
    return world


@contextlib.contextmanager
def installed(machine: Driver, *, first_wins: bool = False, empties_default: bool = False) -> Iterator[World]:
    """The same for a block. Afterwards PyTorch is what it was, and so is what stands on it."""
    try:
        with imported_anew("torch"):
            yield install(machine, first_wins=first_wins, empties_default=empties_default)
    finally:
        _native.torch_call_afterwards = _call_afterwards


def _module(name: str, contents: dict[str, Any]) -> ModuleType:
    module = ModuleType(name, f"The fake's {name}.")
    module.__dict__.update(contents)
    if name in ("torch", "torch.cuda", "torch.utils"):
        module.__path__ = []
    return module
