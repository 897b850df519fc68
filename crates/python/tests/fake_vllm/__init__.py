"""A stand-in for the part of vLLM that poorwill's hooks on engines and frontends touch.

`load(version)` gives fresh classes that behave as that version's do, its faults included. They have no
processes: `clients` hands messages to an engine's loop, and turns the loop until it has nothing to do.

Workers that have memory are those of `worker20` and `worker33`: `workers` puts them where vLLM has its own.
They need the stand-in for PyTorch.

What is compared with the sources of vLLM are the classes of these four, by name and signature.
"""

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from .worker import Worker

__all__ = ["VERSIONS", "Worker", "config", "load"]

VERSIONS = {"0.20.2": "v20", "0.33.0": "v33"}

WORKER = "poorwill.vllm.worker.Worker"


def load(version: str) -> Any:
    """The classes of a version, which no test has put hooks on."""
    name = VERSIONS[version]
    spec = importlib.util.spec_from_file_location(
        f"{__name__}.fresh_{name}", Path(__file__).with_name(f"{name}.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config(world_size: int = 1, worker_cls: str = WORKER, **of_parallel: Any) -> Any:
    """What of vLLM's configuration the stand-in and the hooks read."""
    parallel = SimpleNamespace(worker_cls=worker_cls, world_size=world_size, **of_parallel)
    return SimpleNamespace(parallel_config=parallel)
