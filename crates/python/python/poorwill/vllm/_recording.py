"""Records what a rank's start asks PyTorch's allocator for: `POORWILL_RECORD` names a folder.

A rank has one file for `poorwill replay`, like `rank0.pickle`. It is written after each phase, so a start
that dies leaves those that came before. Later starts of a process have files of their own. The methods are
wrapped in vLLM's own worker, so an engine with any allocator is recorded. No start fails over a record: a
warning says why there is none.
"""

import contextlib
import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
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
"""The worker's methods in their order, and what their phases are called."""

# A start has no setting for it. Only events that come take memory.
_MAX_ENTRIES = 4_000_000

_start: tuple[Callable[[], Any], Recording] | None = None
"""The worker that starts, and its record: there is one in a process."""
_begun: list[Recording] = []
"""The records of this process."""


def install(gpu_worker: ModuleType) -> None:
    """Has vLLM's worker record its start."""
    worker: Any = gpu_worker.__dict__["Worker"]
    methods = [name for name in PHASES if hasattr(worker, name)]
    for name, phase in PHASES.items():
        if name in methods:
            ends = (name == methods[0], name == methods[-1])
            setattr(worker, name, _recorded(getattr(worker, name), phase, *ends))
        else:
            logger.warning("this vLLM's worker has no %s: %s is not recorded", name, phase)


def _recorded(stock: Callable[..., Any], phase: str, is_first: bool, is_last: bool) -> Callable[..., Any]:
    @functools.wraps(stock)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _start
        if is_first:
            _begin(self)
        if _start is None or _start[0]() is not self:
            return stock(self, *args, **kwargs)
        recording = _start[1]
        with _no_failure(phase):
            recording.phase(phase)
        try:
            done = stock(self, *args, **kwargs)
        except BaseException as error:
            _start = None
            with contextlib.suppress(Exception):
                recording.finish(error)
            raise
        if is_last:
            _start = None
        with _no_failure(phase):
            recording.write(is_end=is_last)
            logger.info("what the %s allocates is recorded in %s", phase, recording.path)
        return done

    return recorded


def _begin(worker: Any) -> None:
    global _start
    folder = _environment.record_folder()
    if folder is None:
        return
    unfinished, _start = _start, None
    if unfinished is not None:
        # That start ended between two phases.
        with _no_failure("earlier start"):
            unfinished[1].finish(None)
    with _no_failure("start"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        recording = _new(Path(folder), _name(worker))
        recording.begin(worker)
        _begun.append(recording)
        _start = weakref.ref(worker), recording


def _new(folder: Path, name: str) -> Recording:
    """One to a file that this process has not written."""
    written = {recording.path for recording in _begun if recording.is_written}
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    records = (Recording(folder / f"{each}.pickle", max_entries=_MAX_ENTRIES) for each in names)
    return next(recording for recording in records if recording.path not in written)


@contextlib.contextmanager
def _no_failure(phase: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        logger.warning("the start goes on without a record of the %s: %s", phase, error)


def _name(worker: Any) -> str:
    """The rank within its engine, after the engine's number if that is not the first of a server."""
    engine = getattr(worker.vllm_config.parallel_config, "data_parallel_index", 0)
    return f"dp{engine}-rank{worker.rank}" if engine else f"rank{worker.rank}"
