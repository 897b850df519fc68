"""Regions as pools of PyTorch's, in one arena for each GPU.

A pause or resume takes all GPUs or none. While a tag sleeps, its regions cannot be entered.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any, Literal

import poorwill
from poorwill import _native
from poorwill._native import Arena, PoorwillError, SleepReport, WakeReport
from poorwill._ranks import Together
from poorwill.compat.torch_memory_saver import _environment
from poorwill.compat.torch_memory_saver._errors import SaverError
from poorwill.compat.torch_memory_saver._flags import Flags, Symbols
from poorwill.compat.torch_memory_saver._kinds import Backup, Kind
from poorwill.compat.torch_memory_saver._shared import shared_tensor
from poorwill.torch import GraphPool, Pool, graph_pool
from poorwill.torch._import import torch

logger = logging.getLogger("poorwill.torch_memory_saver")

ARENA = "torch_memory_saver"
"""The name of the arenas."""

AWAKE = ("awake", "undefined")

Stored = Literal["compact", "viewable"]


class Pools:
    """The memory saver over pools."""

    def __init__(self, stored: Stored = "viewable") -> None:
        self.stored: Stored = stored
        """How backups lie in host memory. Only viewable ones can be read without a copy."""
        self.retain = _environment.retains_cpu_backup()
        self.reports: list[SleepReport | WakeReport] = []
        """Of the last pause or resume: for each GPU, what is backed up, and what is dropped."""
        self._keeps = _environment.keeps_backups()
        self._disk = _environment.disk_folder()
        self._margin_bytes = 0
        self._lock = threading.RLock()
        self._arenas: dict[int, Arena] = {}
        self._kinds: set[Kind] = set()
        # On each GPU, what was resumed while backups were retained.
        self._retained: set[tuple[str, Kind]] = set()
        self._mem_pools: dict[tuple[str, bool, bool, str, int], Pool] = {}
        self._graph_pools: dict[tuple[Kind, int, tuple[int, int]], GraphPool] = {}
        self._flags = Flags()
        self._binary_wrapper = _Binary(self._flags)

    # Regions

    @contextlib.contextmanager
    def region(
        self,
        tag: str = "default",
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        kind = kind_of(tag, enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
        with self._pool(kind), self._flags.entered(kind):
            yield

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = "default",
        enable_cpu_backup: bool = False,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        kind = kind_of(tag, enable_cpu_backup, False, cpu_backup_backend)
        ours = self._graph_pool(kind, pool)
        with torch.cuda.graph(cuda_graph, pool=ours, stream=stream, capture_error_mode=capture_error_mode):
            yield

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        if self._flags.innermost is None:
            raise AssertionError(
                "disable() leaves a region, and this thread is in none: enter region() first"
            )
        with self._flags.left():
            yield

    def _pool(self, kind: Kind) -> Pool:
        ordinal = int(torch.cuda.current_device())
        backend = kind.backup if kind.is_readable else ""
        key = (kind.tag, kind.is_readable, kind.backup == "disk", backend, ordinal)
        with self._lock:
            pool = self._mem_pools.get(key)
            if pool is None:
                pool = Pool(self._declared(kind, ordinal), kind.name, watch="segments")
                self._mem_pools[key] = pool
            return pool

    def _graph_pool(self, kind: Kind, handle: Any) -> GraphPool:
        """Graphs with one handle share a pool of ours."""
        ordinal = int(torch.cuda.current_device())
        with self._lock:
            arena = self._declared(kind, ordinal)
            if handle is None:
                return graph_pool(arena, kind.name)
            key = (kind, ordinal, (handle[0], handle[1]))
            if key not in self._graph_pools:
                self._graph_pools[key] = graph_pool(arena, kind.name)
            return self._graph_pools[key]

    def _declared(self, kind: Kind, ordinal: int) -> Arena:
        """The GPU's arena, with the kind's policy."""
        arena = self._arenas.get(ordinal)
        if arena is None:
            arena = poorwill.arena(
                f"cuda:{ordinal}",
                ARENA,
                host_limit=_environment.host_budget(),
                compress=_environment.compress(),
                disk=self._disk,
                lend=_environment.lending(),
                peer_copies=_environment.peer_copies(),
            )
            _native.torch_set_margin(arena, self._margin_bytes)
            self._arenas[ordinal] = arena
        if kind.backup == "disk" and self._disk is None:
            raise SaverError(
                f"a region `{kind.tag}` on disk has no folder: call set_disk_backup_dir, or set "
                "TMS_DISK_BACKUP_DIR, before the first region"
            )
        if kind in self._kinds and kind.name in arena.state():
            return arena
        level: Literal["backup", "drop"] = "backup" if kind.is_backed_up else "drop"
        viewable = self.stored == "viewable" and kind.is_readable
        arena.declare(
            kind.name,
            level1=level,
            level2=level,
            dropped="zeros",
            backups="viewable" if viewable else "compact",
        )
        self._kinds.add(kind)
        return arena

    # Pause and resume

    def pause(self, tag: str | None = None) -> None:
        self.pause_all((tag,) if tag else None)

    def resume(self, tag: str | None = None) -> None:
        self.resume_all((tag,) if tag else None)

    def pause_all(self, tags: Collection[str] | None, together: Together | None = None) -> bool:
        """Pauses several tags, or none of them. Returns whether anything changed.

        With `together` it is one rank of several, which all pause or none. Raises UndoneError where another
        rank cannot.
        """
        with self._lock:
            self.reports = []
            turns = self._turns("pause", tags, wanted=lambda state: state in AWAKE)
            group = _in_group(turns, together)
            done: list[tuple[Arena, list[str]]] = []
            try:
                # A group decides on one step.
                for arena, kinds in turns if group else _backed_up_first(turns):
                    names = [kind.name for kind in kinds]
                    self.reports.append(arena.sleep(1, names, **group))
                    done.append((arena, names))
                    if on_disk := [kind.name for kind in kinds if kind.backup == "disk"]:
                        arena.spill(on_disk)
            except BaseException:
                # What a group has decided stays.
                if not group:
                    undo("pause", [partial(arena.wake, names) for arena, names in reversed(done)])
                raise
            return bool(turns)

    def resume_all(self, tags: Collection[str] | None, together: Together | None = None) -> bool:
        """Resumes several tags, as `pause_all` pauses them. Waits a while for memory that others release."""
        with self._lock:
            self.reports = []
            timeout = _environment.wake_timeout_s() or None
            turns = self._turns("resume", tags, wanted=lambda state: state not in AWAKE)
            group = _in_group(turns, together)
            done: list[tuple[Arena, list[str]]] = []
            try:
                for arena, kinds in turns:
                    names = [kind.name for kind in kinds]
                    self.reports.append(arena.wake(names, timeout=timeout, **group))
                    done.append((arena, names))
            except BaseException:
                if not group:
                    undo("resume", [partial(arena.sleep, 1, names) for arena, names in reversed(done)])
                raise
            for arena, kinds in turns:
                resumed = {(arena.device, kind) for kind in kinds if kind.is_readable}
                self._retained = self._retained | resumed if self.retain else self._retained - resumed
                if self.retain:
                    continue
                gone = [k.name for k in kinds if k.is_backed_up and (k.backup == "mmap" or not self._keeps)]
                if gone:
                    arena.drop_backups(gone)
            return bool(turns)

    def _turns(
        self, call: str, tags: Collection[str] | None, wanted: Callable[[str], bool]
    ) -> list[tuple[Arena, list[Kind]]]:
        """For each arena, the kinds of tags, or of all, whose memory changes. Logs what is left out."""
        turns, others = [], set()
        for arena in self._arenas.values():
            states = arena.state()
            kinds = [k for k in sorted(self._kinds) if k.name in states and (tags is None or k.tag in tags)]
            if turned := [kind for kind in kinds if wanted(states[kind.name])]:
                turns.append((arena, turned))
            others |= {kind.tag for kind in kinds if not wanted(states[kind.name])}
        said = f"{call}({'None' if tags is None else ', '.join(map(repr, tags))})"
        what = "everything" if tags is None else ", ".join(f"`{tag}`" for tag in tags) or "no tag"
        if turns:
            if tags and others:
                logger.warning("%s: part of %s was there already", said, what)
        elif others:
            state = "paused" if call == "pause" else "active"
            logger.warning("%s does nothing: %s is %s already", said, what, state)
        else:
            logger.info("%s does nothing: there is no memory under %s", said, what)
        return turns

    def last_report(self) -> list[dict[str, Any]]:
        return [report.as_dict() for report in self.reports]

    # Backups

    def get_cpu_backup(self, tensor: Any, zero_copy: bool = False) -> Any:
        arena, kind, state = self._place(tensor)
        if state in AWAKE and (arena.device, kind) not in self._retained:
            return None
        if not kind.is_backed_up:
            raise SaverError(
                f"the region `{kind.tag}` is paused without backup: give region() enable_cpu_backup=True to "
                "read it"
            )
        if state in AWAKE and not _has_backup(arena, kind):
            return None
        address, nbytes = int(tensor.data_ptr()), int(tensor.nbytes)
        if nbytes == 0:
            return torch.empty(tuple(tensor.shape), dtype=tensor.dtype)
        if zero_copy:
            view = arena.view_backup(address, nbytes)
            return shared_tensor(view.address, tensor, view)
        flat = torch.frombuffer(arena.read_backup(address, nbytes), dtype=torch.uint8)
        return flat.view(tensor.dtype).view(tuple(tensor.shape))

    def _place(self, tensor: Any) -> tuple[Arena, Kind, str]:
        """Where a tensor is, and the state of its tag."""
        address = int(tensor.data_ptr())
        with self._lock:
            arenas, kinds = list(self._arenas.values()), {kind.name: kind for kind in self._kinds}
        for arena in arenas:
            name = _native.torch_tag_at(arena, address)
            if name in kinds:
                return arena, kinds[name], arena.state().get(name, "awake")
        raise SaverError(
            f"no region has the {int(tensor.nbytes)} bytes at {address:#x} ({tensor.device}): only tensors "
            "that were allocated in a region() have backups"
        )

    # Settings

    def set_disk_backup_dir(self, path: str) -> None:
        with self._lock:
            if self._arenas and path != self._disk:
                raise SaverError(
                    f"the disk's folder was settled with the first region, as {self._disk}: call "
                    f"set_disk_backup_dir({path!r}) before it"
                )
            self._disk = path

    def set_memory_margin(self, margin_bytes: int) -> None:
        with self._lock:
            self._margin_bytes = margin_bytes
            for arena in self._arenas.values():
                _native.torch_set_margin(arena, margin_bytes)

    @contextlib.contextmanager
    def _with_region_config(
        self,
        *,
        tag: str,
        enable_cpu_backup: bool,
        cpu_backup_backend: str | None,
        enable_disk_backup: bool = False,
    ) -> Iterator[None]:
        # Frees need no region here.
        yield


class _Binary:
    """What holds the symbols."""

    def __init__(self, flags: Flags) -> None:
        self.cdll = Symbols(flags)


def _backed_up_first(turns: list[tuple[Arena, list[Kind]]]) -> Iterator[tuple[Arena, list[Kind]]]:
    """What is dropped comes last, when nothing else can fail: it could not be brought back."""
    for is_backed_up in (True, False):
        for arena, kinds in turns:
            if chosen := [kind for kind in kinds if kind.is_backed_up == is_backed_up]:
                yield arena, chosen


def _in_group(turns: list[tuple[Arena, list[Kind]]], together: Together | None) -> dict[str, Any]:
    """What the arena's call is given as that of one rank."""
    if together is None:
        return {}
    if len(turns) > 1:
        devices = ", ".join(arena.device for arena, _ in turns)
        raise SaverError(
            f"ranks release and resume together with one GPU in each process, and this one has regions on "
            f"{devices}: give it one of them"
        )
    if not turns:
        # There is nothing that can fail.
        together["decision"].note_staged()
    return {**together}


def _has_backup(arena: Arena, kind: Kind) -> bool:
    return any(of_tag.tag == kind.name and of_tag.backup_raw_bytes for of_tag in arena.stats().tags)


def kind_of(tag: str, cpu: bool, disk: bool, backend: str | None) -> Kind:
    """The kind of a region."""
    backup: Backup = "none"
    if disk:
        backup = "disk"
    elif cpu:
        chosen = backend or _environment.backend()
        backup = "mmap" if chosen == "mmap" else "pinned"
    return Kind(tag, backup)


def undo(call: str, steps: Iterable[Callable[[], Any]]) -> None:
    """Takes back what a failed call did. What cannot be taken back is logged, and the call's error stays."""
    for step in steps:
        try:
            step()
        except PoorwillError:
            logger.exception("what a failed %s did on another GPU could not be undone", call)
