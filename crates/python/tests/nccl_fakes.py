"""A fake of NCCL for ranks that are threads of one process: it waits for the other ranks where NCCL does.

    world = World(2)
    outcomes = world.run(lambda rank: Nccl(world.library(rank)).suspend(1))

Nothing here looks at a clock. Ranks that all wait for each other in different places are found, and each of
them gets an error.
"""

import ctypes
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INVALID_USAGE = 0, 1, 2, 5
WORDS = {
    CUDA_ERROR: "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    SYSTEM_ERROR: "unhandled system error (run with NCCL_DEBUG=INFO for details)",
    INVALID_USAGE: "invalid usage (run with NCCL_DEBUG=WARN for details)",
}

COMMUNICATOR = ctypes.c_void_p
NEW = ("ncclCommSuspend", "ncclCommResume", "ncclCommMemStats")
"""What came with 2.29.7."""


class StuckError(Exception):
    """All ranks wait, and none for what another one does."""


@dataclass
class Place:
    """Where some ranks meet."""

    given: dict[int, Any] = field(default_factory=dict)
    is_left: bool = False


class Meetings:
    """Places where ranks wait for each other."""

    def __init__(self, ranks: int) -> None:
        self._active = ranks
        self._waiting = 0
        self.is_stuck = False
        self._places: dict[Any, Place] = {}
        self._changed = threading.Condition()

    def meet(self, name: Any, members: Collection[int], rank: int, value: Any = None) -> dict[int, Any]:
        """Waits until all members are there. Returns what each brought."""
        with self._changed:
            place = self._places.setdefault(name, Place())
            place.given[rank] = value
            if set(place.given) == set(members):
                del self._places[name]
                place.is_left = True
                self._waiting -= len(members) - 1
                self._changed.notify_all()
                return place.given
            self._waiting += 1
            self._look()
            self._changed.wait_for(lambda: place.is_left or self.is_stuck)
            if not place.is_left:
                raise StuckError(f"rank {rank} waits at {name}")
            return place.given

    def leave(self) -> None:
        """A rank is at its end."""
        with self._changed:
            self._active -= 1
            self._look()

    def _look(self) -> None:
        if self._waiting and self._waiting == self._active:
            self.is_stuck = True
            self._changed.notify_all()


@dataclass
class Comm:
    """One rank's part of a communicator."""

    members: tuple[int, ...]
    suspendable: int
    persistent: int = 3
    is_suspended: bool = False
    is_damaged: bool = False


class World:
    """Ranks with communicators, and what is to fail."""

    def __init__(self, ranks: int, missing: Collection[str] = ()) -> None:
        self.ranks = tuple(range(ranks))
        self.missing = frozenset(missing)
        self.comms: dict[tuple[int, int], Comm] = {}
        """By rank and handle."""
        self.calls: dict[int, list[tuple[str, int]]] = {rank: [] for rank in self.ranks}
        self.fails: dict[tuple[int, str, int], int] = {}
        """The code of a rank's n-th call of a function, counted from 0."""
        self.is_counting = True
        self.begin()

    def begin(self) -> None:
        """No rank waits."""
        self.meetings = Meetings(len(self.ranks))

    def add(self, handle: int, members: Collection[int], suspendable: int = 100) -> None:
        for rank in members:
            self.comms[rank, handle] = Comm(tuple(members), suspendable + rank)

    def library(self, rank: int) -> "Library":
        return Library(self, rank)

    def share(self, rank: int) -> Callable[[Any], dict[int, Any]]:
        return lambda value: self.meetings.meet("share", self.ranks, rank, value)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What each rank returned or raised."""
        self.begin()

        def one(rank: int) -> Any:
            try:
                return work(rank)
            except Exception as error:
                return error
            finally:
                self.meetings.leave()

        with ThreadPoolExecutor(len(self.ranks)) as threads:
            return list(threads.map(one, self.ranks))

    @property
    def was_stuck(self) -> bool:
        """Whether all ranks have waited, since they last began."""
        return self.meetings.is_stuck

    def suspended(self) -> set[tuple[int, int]]:
        return {key for key, comm in self.comms.items() if comm.is_suspended}

    def count(self, name: str) -> int:
        return sum(called == name for calls in self.calls.values() for called, _ in calls)

    # The library

    def suspend(self, rank: int, handle: int, flags: int) -> int:
        comm = self.comms[rank, handle]
        code = self._code(rank, "ncclCommSuspend", handle)
        assert flags == 1, flags
        if code == INVALID_USAGE or comm.is_suspended or comm.is_damaged:
            return INVALID_USAGE
        self.meetings.meet(("suspend", handle, comm.members), comm.members, rank)
        if code:
            comm.is_damaged = True
            return code
        comm.is_suspended = True
        return SUCCESS

    def resume(self, rank: int, handle: int) -> int:
        comm = self.comms[rank, handle]
        code = self._code(rank, "ncclCommResume", handle)
        if not comm.is_suspended:
            return INVALID_USAGE
        if code:
            return code
        self.meetings.meet(("resume", handle, comm.members), comm.members, rank)
        comm.is_suspended = False
        return SUCCESS

    def stats(self, rank: int, handle: int, which: int, value: Any) -> int:
        comm = self.comms[rank, handle]
        if not self.is_counting:
            return INVALID_USAGE
        total = comm.suspendable + comm.persistent
        value[0] = (comm.suspendable, comm.is_suspended, comm.persistent, total)[which]
        return SUCCESS

    def _code(self, rank: int, name: str, handle: int) -> int:
        number = sum(called == name for called, _ in self.calls[rank])
        self.calls[rank].append((name, handle))
        return self.fails.get((rank, name, number), SUCCESS)


class Library:
    """A rank's, as `ctypes.CDLL` shows it: C functions, by name."""

    def __init__(self, world: World, rank: int) -> None:
        int_, counter = ctypes.c_int, ctypes.POINTER(ctypes.c_uint64)

        def caught(function: Callable[..., int], *types: Any) -> Any:
            def call(*args: Any) -> int:
                handle, *others = args
                try:
                    # A handle of 0 arrives as None.
                    return int(function(rank, handle or 0, *others))
                except StuckError:
                    return SYSTEM_ERROR

            return ctypes.CFUNCTYPE(int_, *types)(call)

        def version(value: Any) -> int:
            value[0] = 22809 if world.missing else 23007
            return SUCCESS

        self._words = {code: ctypes.create_string_buffer(words.encode()) for code, words in WORDS.items()}
        self._functions = {
            "ncclGetVersion": ctypes.CFUNCTYPE(int_, ctypes.POINTER(int_))(version),
            "ncclGetErrorString": ctypes.CFUNCTYPE(ctypes.c_void_p, int_)(
                lambda code: ctypes.addressof(self._words[code])
            ),
            "ncclCommSuspend": caught(world.suspend, COMMUNICATOR, int_),
            "ncclCommResume": caught(world.resume, COMMUNICATOR),
            "ncclCommMemStats": caught(world.stats, COMMUNICATOR, int_, counter),
        }
        self._missing = world.missing

    def __getitem__(self, name: str) -> Any:
        if name in self._missing or name not in self._functions:
            raise AttributeError(f"undefined symbol: {name}")
        return self._functions[name]
