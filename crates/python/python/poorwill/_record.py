"""Records a load: what PyTorch's allocator is asked for, as a snapshot that `poorwill replay` reads.

PyTorch keeps one history for all threads and GPUs of a process. A record turns it on, writes a snapshot at
its end, and turns it off. A history that was on before stays on. Phases and cards are a key of our own in the
snapshot.
"""

import contextlib
import gc
import importlib
import logging
import os
import pickle
import shlex
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from poorwill import _native
from poorwill._native import PoorwillError

__all__ = ["ADVICE", "Record", "Recording", "is_open", "record"]

ADVICE = "record the load with poorwill.record(PATH), and ask `poorwill replay PATH` what would fit"
"""The end of an out-of-memory error."""

_OLDEST = (2, 4)
# Every PyTorch's Python reads it.
_PROTOCOL = 4

_log = logging.getLogger("poorwill.record")


class Record:
    """What `record` gives to its block."""

    path: Path
    """Where it is written to."""
    _phases: list[dict[str, str | int]]

    def phase(self, name: str) -> None:
        """What follows is a phase of this name, until the next one. `poorwill replay` shows them.

        Raises TypeError or ValueError for a name that cannot be printed, and PoorwillError outside of the
        block.
        """
        if not isinstance(name, str):
            raise TypeError(f"a phase's name is {name!r}; it is a text")
        if not name.strip() or not name.isprintable():
            raise ValueError(f"a phase's name is {name!r}; it is a text that can be printed")
        if _open is not self:
            raise PoorwillError(
                f"phase {name!r}: nothing is recorded to {self.path}: name phases within the record's block"
            )
        # PyTorch's entries are on this clock. A text of another class would be code in the file.
        self._phases.append({"name": str.__str__(name), "time_us": time.time_ns() // 1000})


def record(
    path: str | os.PathLike[str],
    *,
    max_entries: int = 1_000_000,
    stacks: Literal["python", "all"] = "python",
    device: object = None,
) -> AbstractContextManager[Record]:
    """Records what PyTorch's allocator is asked for in the block, and writes it to `path` at the end.

    Works for any load in this process, also in `poorwill.pool`. Ask `poorwill replay PATH` what it would have
    needed. The file is a pickle as of `torch.cuda.memory._dump_snapshot`: dicts, lists, texts and numbers,
    with sizes in bytes and times in microseconds. It is complete or not there, and replaces an earlier one.
    It is written after an exception, too, which gets a note with the path (in the log before Python 3.11).
    The block gets a `Record`, which marks phases.

    `max_entries` is the number of events that are kept of each GPU, the last ones; one may take some KiB of
    host memory. `stacks` are those of Python, or "all" with C++. With a `device` the file has this GPU alone.

    There is one record at a time in a process. A history of PyTorch's that is on already stays on, as its
    owner set it: the record has its earlier events, and its limit counts. A history that code in the block
    starts is not seen, and off afterwards. The log (`poorwill.record`) says what a record lacks.

    Raises ValueError or TypeError for wrong arguments, and OSError for a path that cannot be written. Raises
    PoorwillError within another record, without a GPU, for a PyTorch before 2.4, and for an allocator that is
    not PyTorch's native one. All of that comes before the block. A record that cannot be written at the end
    is a PoorwillError, or a note on the block's own exception.
    """
    return _Record(Recording(path, max_entries=max_entries, stacks=stacks, device=device))


class _Record(AbstractContextManager[Record]):
    def __init__(self, recording: "Recording") -> None:
        self._recording = recording

    def __enter__(self) -> Record:
        self._recording.begin()
        return self._recording

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._recording.finish(exc_value)


class Recording(Record):
    """One record, begun and ended by calls. The arguments and errors are those of `record`."""

    is_written: bool
    """Whether its file has what it recorded so far."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_entries: int = 1_000_000,
        stacks: str = "python",
        device: object = None,
    ) -> None:
        if not isinstance(max_entries, int) or isinstance(max_entries, bool):
            raise TypeError(f"max_entries is {max_entries!r}; it is a number of events")
        if max_entries < 1:
            raise ValueError(f"max_entries is {max_entries}; a record keeps at least 1 event")
        if stacks not in ("python", "all"):
            raise ValueError(f'stacks is {stacks!r}; it is "python" or "all"')
        # The working directory may change meanwhile. A link stays one.
        self.path = Path(os.path.realpath(os.fspath(path)))
        self._max_entries = max_entries
        self._stacks = stacks
        self._ordinal = None if device is None else _native.cuda_ordinal(device)
        self._is_ours = True
        self._owner: weakref.ref[Any] | None = None
        self._phases = []
        self.is_written = False

    def begin(self, owner: object = None) -> None:
        """Turns the history on.

        A record with an owner ends once that is gone. Its file stays as it was written last.
        """
        global _open
        opened = _open
        if opened is not None and opened._owner is not None:
            # An owner that is gone may wait for the collector.
            gc.collect()
        with _locked():
            if orphan := _orphan():
                orphan._end()
            if _open is not None:
                raise PoorwillError(
                    f"recording to {self.path}: the record to {_open.path} has not ended, and PyTorch has "
                    "one history for all threads: end that one first, or drop the engine whose start it "
                    "records"
                )
            self._owner = None if owner is None else weakref.ref(owner, _end_orphan)
            torch = _import(self._ordinal)
            self._refuse_path()
            try:
                self._is_ours = not torch._C._cuda_isHistoryEnabled()
                if self._is_ours:
                    # Stacks of frees, too: they tell `empty_cache` from what the allocator releases itself.
                    torch.cuda.memory._record_memory_history(
                        enabled="all",
                        context="all",
                        stacks=self._stacks,
                        max_entries=self._max_entries,
                    )
            except Exception as error:
                raise PoorwillError(
                    f"recording to {self.path}: PyTorch {torch.__version__} keeps no history here: {error}"
                ) from error
            self._phases = []
            self.is_written = False
            _open = self
        if not self._is_ours:
            _log.warning(
                "PyTorch's memory history is on already, and stays as it is: the record to %s has what came "
                "before, and as many events as its owner keeps",
                self.path,
            )

    def finish(self, error: BaseException | None) -> None:
        """Ends the record. The block's exception, if any, gets a note.

        Raises PoorwillError if the record cannot be written and there is no such exception.
        """
        if _open is not self:
            # It has ended, or is that of the process that forked.
            return
        try:
            self.write(is_end=True)
        except PoorwillError as failure:
            if error is None:
                raise
            _note(error, f"poorwill: {failure}")
            return
        if error is not None:
            command = f"poorwill replay {shlex.quote(str(self.path))}"
            _note(error, f"poorwill: the load is recorded in {self.path}: `{command}` says what would fit")

    def write(self, *, is_end: bool = False) -> None:
        """Writes what there is so far. The record goes on, unless this is its end."""
        with _locked():
            torch: Any = importlib.import_module("torch")
            memory = torch.cuda.memory
            try:
                try:
                    is_on = bool(torch._C._cuda_isHistoryEnabled())
                    snapshot = memory._snapshot()
                finally:
                    if is_end:
                        self._end()
                if self.is_written and not is_on:
                    raise RuntimeError(
                        "PyTorch's memory history was turned off meanwhile: the file has what came before"
                    )
                if self._ordinal is not None:
                    _keep_one(snapshot, self._ordinal)
                snapshot["poorwill"] = {"phases": self._phases, "cards": self._cards(memory, snapshot)}
                _write(self.path, snapshot)
                self.is_written = True
            except Exception as error:
                raise PoorwillError(f"the record to {self.path} could not be written: {error}") from error
        if is_end:
            self._tell_gaps(snapshot, is_on)

    def _end(self) -> None:
        """Ends it while the lock is held."""
        global _open
        _open = None
        if self._is_ours:
            # This forgets the events, so it comes last.
            importlib.import_module("torch").cuda.memory._record_memory_history(enabled=None)

    def _cards(self, memory: Any, snapshot: dict[str, Any]) -> list[dict[str, int]]:
        """The GPUs that have events or segments, and what of them is not PyTorch's in this process."""
        held = {ordinal: 0 for ordinal, trace in enumerate(snapshot["device_traces"]) if trace}
        for segment in snapshot["segments"]:
            held[segment["device"]] = held.get(segment["device"], 0) + segment["total_size"]
        cards = []
        try:
            for ordinal, held_bytes in sorted(held.items()):
                free_bytes, total_bytes = memory.mem_get_info(ordinal)
                taken_bytes = max(total_bytes - free_bytes - held_bytes, 0)
                cards.append({"device": ordinal, "total_bytes": total_bytes, "taken_bytes": taken_bytes})
        except Exception as error:
            # A GPU on which something failed may say nothing any more.
            _log.warning("the record to %s does not say how large the GPU is: %s", self.path, error)
        return cards

    def _refuse_path(self) -> None:
        """Raises OSError if the file could not be written at the end."""
        part = _part(self.path)
        try:
            is_other = self.path.exists() and not self.path.is_file()
            if not is_other:
                part.touch()
                part.unlink()
        except OSError as error:
            kind = type(error)
            raise kind(
                error.errno,
                f"recording to {self.path}: nothing can be written in {self.path.parent} ({error.strerror}): "
                "name a folder that is there and writable",
            ) from error
        if is_other:
            raise FileExistsError(f"recording to {self.path}: it is no file: name one in a folder")

    def _tell_gaps(self, snapshot: dict[str, Any], is_on: bool) -> None:
        counts = {ordinal: len(trace) for ordinal, trace in enumerate(snapshot["device_traces"])}
        if not is_on:
            _log.warning(
                "the record to %s lacks events: PyTorch's memory history was turned off in the block",
                self.path,
            )
        elif not any(counts.values()):
            _log.warning(
                "the record to %s is empty: this process allocated nothing on a GPU. Record in the process "
                "that loads; for vLLM set POORWILL_RECORD to a folder",
                self.path,
            )
        elif self._is_ours:
            for ordinal in [ordinal for ordinal, count in counts.items() if count >= self._max_entries]:
                _log.warning(
                    "the record to %s has only the last %d events of cuda:%d: record again with a larger "
                    "max_entries, or with POORWILL_RECORD a model of fewer layers",
                    *(self.path, self._max_entries, ordinal),
                )
        elif max(counts.values()) == 1:
            # PyTorch's other mode.
            _log.warning(
                "the record to %s has one event: PyTorch's memory history was on already, and keeps no more "
                '(enabled="state"). Turn it off before',
                self.path,
            )


def is_open() -> bool:
    """Whether a record is being made."""
    return _open is not None


_open: Recording | None = None
_lock = threading.Lock()


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    try:
        with _lock:
            yield
    finally:
        _end_orphan()


def _orphan() -> Recording | None:
    """The record that is being made, if its owner is gone."""
    opened = _open
    is_orphan = opened is not None and opened._owner is not None and opened._owner() is None
    return opened if is_orphan else None


def _end_orphan(_: object = None) -> None:
    """Ends the record whose owner is gone.

    It is called when that goes, in the midst of anything in any thread. So it neither raises nor waits for
    the lock: who holds that calls this afterwards.
    """
    with contextlib.suppress(Exception):
        while _orphan() and _lock.acquire(blocking=False):
            try:
                # Another thread may have ended it meanwhile.
                if orphan := _orphan():
                    orphan._end()
            finally:
                _lock.release()


def _forget_others() -> None:
    # In a fork: the parent's record, and another thread that may have held the lock.
    global _open, _lock
    _open, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_others)


def _import(ordinal: int | None) -> Any:
    """PyTorch, if it keeps a history here."""
    oldest = ".".join(map(str, _OLDEST))
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise PoorwillError(
            f"recording a load: PyTorch cannot be imported ({error}): install torch {oldest} or later"
        ) from error
    parts = str(torch.__version__).split("+")[0].split(".")[:2]
    if tuple(int(part) if part.isdecimal() else 0 for part in parts) < _OLDEST:
        raise PoorwillError(
            f"recording a load: PyTorch {torch.__version__} is too old: install torch {oldest} or later"
        )
    if not torch.cuda.is_available():
        raise PoorwillError(
            "recording a load: PyTorch finds no GPU here: record where there is one, with a torch that was "
            "built for it"
        )
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise PoorwillError(
            f"recording a load: PyTorch's allocator is {backend} here, which has no history: take `backend` "
            "out of PYTORCH_ALLOC_CONF, and let nothing call change_current_allocator"
        )
    if ordinal is not None and ordinal >= torch.cuda.device_count():
        raise ValueError(f"recording cuda:{ordinal}: PyTorch finds {torch.cuda.device_count()} GPUs here")
    return torch


def _keep_one(snapshot: dict[str, Any], ordinal: int) -> None:
    snapshot["segments"] = [segment for segment in snapshot["segments"] if segment["device"] == ordinal]
    snapshot["device_traces"] = [
        trace if number == ordinal else [] for number, trace in enumerate(snapshot["device_traces"])
    ]


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def _write(path: Path, snapshot: dict[str, Any]) -> None:
    part = _part(path)
    try:
        with open(part, "wb") as file:
            pickle.dump(snapshot, file, protocol=_PROTOCOL)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _note(error: BaseException, note: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        _log.warning("%s", note)
