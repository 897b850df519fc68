"""Records what a rank's start asks PyTorch's allocator for: `POORWILL_RECORD` names a folder.

Each phase is a file for `poorwill replay`, like `rank0-load.pickle`. The methods are wrapped in vLLM's own
worker, so an engine with any allocator is recorded. No start fails over a record: a warning says why there is
none.
"""

import contextlib
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from poorwill._record import Recording
from poorwill.vllm import _environment

logger = logging.getLogger("vllm.poorwill")

PHASES = {
    "load_model": "load",
    "determine_available_memory": "profile",
    "initialize_from_config": "cache",
    "compile_or_warm_up_model": "capture",
}
"""The worker's methods, and what their files are called."""


def install(gpu_worker: ModuleType) -> None:
    """Has vLLM's worker record its start."""
    worker: Any = gpu_worker.__dict__["Worker"]
    for name, phase in PHASES.items():
        stock = getattr(worker, name, None)
        if stock is None:
            logger.warning("this vLLM's worker has no %s: %s is not recorded", name, phase)
        else:
            setattr(worker, name, _recorded(stock, phase))


def _recorded(stock: Callable[..., Any], phase: str) -> Callable[..., Any]:
    @functools.wraps(stock)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        recording = _begun(self, phase)
        if recording is None:
            return stock(self, *args, **kwargs)
        try:
            done = stock(self, *args, **kwargs)
        except BaseException as error:
            with contextlib.suppress(Exception):
                recording.finish(error)
            raise
        try:
            recording.finish(None)
            logger.info("what the %s allocates is recorded in %s", phase, recording.path)
        except Exception as error:
            logger.warning("the start goes on without a record of the %s: %s", phase, error)
        return done

    return recorded


def _begun(worker: Any, phase: str) -> Recording | None:
    folder = _environment.record_folder()
    if folder is None:
        return None
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        recording = Recording(Path(folder) / f"{_name(worker)}-{phase}.pickle")
        recording.begin()
    except Exception as error:
        logger.warning("the start goes on without a record of the %s: %s", phase, error)
        return None
    return recording


def _name(worker: Any) -> str:
    """The rank within its engine, after the engine's number if that is not the first of a server."""
    engine = getattr(worker.vllm_config.parallel_config, "data_parallel_index", 0)
    return f"dp{engine}-rank{worker.rank}" if engine else f"rank{worker.rank}"
