"""Puts the workers of a version where vLLM has them, over the stand-in for PyTorch, with modules of ours that
no test has touched.

    with workers.installed("0.20.2") as vllm:
        worker = vllm.Worker(config, 0, 0, "")
"""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from fake_vllm import worker_parts

FILES = {"0.20.2": "worker20.py", "0.33.0": "worker33.py"}

WORKER_MODULE = "vllm.v1.worker.gpu_worker"
PACKAGES = ("vllm", "vllm.utils", "vllm.device_allocator", "vllm.v1", "vllm.v1.worker")
MODULES = (
    *("vllm.version", "vllm.logger", "vllm.platforms"),
    *("vllm.utils.mem_utils", "vllm.device_allocator.cumem"),
)


def modules(version: str) -> dict[str, ModuleType]:
    """vLLM's modules, by name."""
    made = {name: ModuleType(name, f"The stand-in's {name}.") for name in (*PACKAGES, *MODULES)}
    for name in PACKAGES:
        made[name].__path__ = []
    made["vllm.version"].__dict__.update(__version__=version)
    made["vllm.logger"].__dict__.update(init_logger=worker_parts.init_logger)
    made["vllm.platforms"].__dict__.update(current_platform=worker_parts.current_platform)
    path = Path(__file__).with_name(FILES[version])
    spec = importlib.util.spec_from_file_location(WORKER_MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    made[WORKER_MODULE] = importlib.util.module_from_spec(spec)
    # What is defined there asks by its name for the module that it is in.
    sys.modules[WORKER_MODULE] = made[WORKER_MODULE]
    spec.loader.exec_module(made[WORKER_MODULE])
    made[WORKER_MODULE].put(made)
    for name, module in made.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(made[parent], own, module)
    return made


@contextlib.contextmanager
def installed(version: str) -> Iterator[ModuleType]:
    """Our worker's module over this version, fresh; afterwards everything is as it was."""
    before = {name: module for name, module in sys.modules.items() if _concerns(name)}
    for name in before:
        del sys.modules[name]
    package = sys.modules["poorwill"]
    ours = package.__dict__.pop("vllm", None)
    try:
        sys.modules.update(modules(version))
        hooks: Any = importlib.import_module("poorwill.vllm._platform")
        registry = sys.modules.get("vllm.device_allocator.sleep_mode_backend")
        if registry is not None:
            hooks.install_backend(registry)
        yield importlib.import_module("poorwill.vllm.worker")
    finally:
        for name in [name for name in sys.modules if _concerns(name)]:
            del sys.modules[name]
        sys.modules.update(before)
        package.__dict__.pop("vllm", None)
        if ours is not None:
            package.__dict__["vllm"] = ours


def _concerns(name: str) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in ("vllm", "poorwill.vllm"))
