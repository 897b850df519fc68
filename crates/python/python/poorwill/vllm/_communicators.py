"""NCCL's communicators of one rank: their memory goes for a sleep, and comes back with the wake.

`Communicators.suspend` and `resume` are collective over all ranks of the engine. The ranks first exchange
what each has. Then all do the same in the same order, so that none waits for another inside of NCCL:

- A communicator that some rank cannot suspend stays as it is on all of them, and `status` has the reason.
- A suspension that fails on any rank is undone on every rank, and each raises the same error.
- A resumption begins only where every rank has the memory for it.

NCCL cannot undo anything within one communicator. One that was suspended on some ranks and failed on others
is lost (`LostCommunicatorError`), and the engine has to be restarted.

Only communicators that vLLM made for its own ranks are touched. Those with a trainer, and PyTorch's default
group, may be in use while the engine sleeps.
"""

import contextlib
import importlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from poorwill._native import PoorwillError
from poorwill.vllm import _versions
from poorwill.vllm._nccl import Figures, Nccl, is_refusal

__all__ = [
    *("Communicator", "CommunicatorError", "Communicators", "LostCommunicatorError", "Operation", "Released"),
    *("SHARES_HOST_MEMORY", "cannot_hibernate", "find", "groups"),
]

SHARES_HOST_MEMORY = "NCCL_CUMEM_HOST_ENABLE"
"""NCCL's switch: where it is 0, ranks of one machine share host memory by files, and not by CUDA."""

Key = tuple[str, tuple[int, ...]]
"""A communicator as all its ranks call it: its name, and their global ranks."""

Failure = tuple[bool, str] | None
"""Whether a failed call has changed nothing, and its words; None for one that succeeded."""

Operation = Literal["suspend", "resume"]

Share = Callable[[Any], Mapping[int, Any]]
"""Gives a value to all ranks of the engine, and returns that of each, by global rank."""

_Part = TypeVar("_Part")

_READY, _SUSPENDED = "ready", "suspended"

# How often a rank tries to take a communicator's memory while the others wait for it inside of NCCL.
_TRIES = 3

_log = logging.getLogger(__name__)
_was_said: set[str] = set()


class CommunicatorError(PoorwillError):
    """Communicators could not be suspended or resumed. They are as they were before the call."""


class LostCommunicatorError(CommunicatorError):
    """A communicator is neither suspended nor usable: the engine has to be restarted."""


@dataclass(frozen=True)
class Released:
    """What one communicator gave back, or took again."""

    name: str
    released_bytes: int


@dataclass(frozen=True)
class _Declined:
    """What a rank gives in the place of its part."""

    reason: str


class Communicator(Protocol):
    """One communicator of this rank."""

    @property
    def key(self) -> Key:
        """Its name and its global ranks."""

    def problem(self) -> str | None:
        """Why it cannot be suspended; None if it can."""

    def figures(self) -> Figures:
        """Its memory. Raises an error where NCCL has no figures."""

    def suspend(self) -> None:
        """Gives its memory back, as all its ranks do. An error leaves it unusable unless `is_refusal`."""

    def resume(self) -> None:
        """Takes its memory again, as all its ranks do. May be repeated after an error."""

    def restore(self) -> None:
        """After a suspension that all its ranks were refused: takes back what was done beside."""


class Communicators:
    """All of a rank."""

    def __init__(
        self,
        find: Callable[[], Sequence[Communicator]],
        share: Share,
        *,
        count: Callable[[], int],
        free_bytes: Callable[[], int],
        relieve: Callable[[], None],
    ) -> None:
        """`find` lists them in the same order on all ranks.

        `count` is the number of ranks that `share` waits for. `free_bytes` is what the device has left, and
        `relieve` returns unused memory of this process to it.
        """
        self._find = find
        self._share = share
        self._count = count
        self._free_bytes = free_bytes
        self._relieve = relieve
        self._suspended: list[tuple[Communicator, Released]] = []
        self._stays: dict[str, str] = {}

    @property
    def is_suspended(self) -> bool:
        """Whether any is suspended by us."""
        return bool(self._suspended)

    def suspend(self) -> list[Released]:
        """Suspends all that can be, on every rank. Returns what each gave back; nothing the second time.

        No collective operation may be under way. Raises CommunicatorError with none suspended, or
        LostCommunicatorError.
        """
        if self._suspended:
            return []
        chosen = self._choose()
        # A rank that stopped at a failure would leave the others waiting in the next communicator.
        own = {communicator.key: _failure(communicator.suspend) for communicator, _ in chosen}
        failures = self._exchange("have suspended", own)
        if not any(failure for each in failures.values() for failure in each.values()):
            self._suspended = chosen
            return [released for _, released in chosen]
        self._undo([communicator for communicator, _ in chosen], failures)
        raise CommunicatorError(f"{_words(failures)}; all communicators are as they were")

    def resume(self) -> list[Released]:
        """Resumes what `suspend` has suspended, on every rank. Returns what each took; then nothing.

        Raises CommunicatorError with all suspended as before where a rank lacks the memory. Raises
        LostCommunicatorError if NCCL fails on this rank, for which the others may wait.
        """
        if not self._suspended:
            return []
        taken = [released for _, released in self._suspended]
        self._refuse_shortage(sum(each.released_bytes for each in taken))
        while self._suspended:
            self._resume(self._suspended[0][0])
            del self._suspended[0]
        return taken

    def decline(self, operation: Operation, error: BaseException, ranks: int) -> None:
        """Gives the ranks that wait in this operation the reason why this one is not in it. They raise it.

        `ranks` is the number of those that carry it out. Where the exchange has more, it would wait for ranks
        that were perhaps never called. Then only a warning says so.
        """
        if bool(self._suspended) != (operation == "resume"):
            return
        if ranks < self._count():
            _log.warning(
                "%s NCCL's communicators: this rank failed before (%s). Of %d others it does not know "
                "whether they take part; those that do wait for it until PyTorch's time limit",
                operation,
                _text(error),
                self._count() - 1,
            )
            return
        self._decline(operation, error)

    def status(self) -> list[dict[str, Any]]:
        """Each communicator with its device memory, in bytes; None where NCCL cannot say.

        Asks no other rank.
        """
        return [self._status(communicator) for communicator in self._find()]

    # Parts

    def _decline(self, operation: str, error: BaseException) -> None:
        with contextlib.suppress(CommunicatorError):
            self._exchange(operation, _Declined(_text(error)))

    def _own(self, operation: str, part: Callable[[], _Part]) -> _Part:
        """What this rank brings to an exchange. The others learn of an error, and do not wait."""
        try:
            return part()
        except BaseException as error:
            self._decline(operation, error)
            raise

    def _exchange(self, operation: str, value: Any) -> dict[int, Any]:
        """What each rank gives, by rank, where all do the same.

        Raises CommunicatorError where they do not, and LostCommunicatorError where a rank does not answer.
        """
        try:
            given = dict(self._share((operation, value)))
        except Exception as error:
            raise LostCommunicatorError(
                f"NCCL's communicators: the engine's ranks do not reach each other ({_text(error)}): restart "
                "the engine"
            ) from error
        operations = {rank: of_rank for rank, (of_rank, _) in given.items()}
        if set(operations.values()) != {operation}:
            raise CommunicatorError(
                "NCCL's communicators: all ranks have to suspend or resume together, and "
                f"{_reason(operations)}; call the same on all of them"
            )
        values = {rank: of_rank for rank, (_, of_rank) in given.items()}
        declined = {rank: each.reason for rank, each in values.items() if isinstance(each, _Declined)}
        if declined:
            raise CommunicatorError(
                f"{operation} NCCL's communicators: not begun, since a rank had failed: {_listed(declined)}"
            )
        return values

    def _status(self, communicator: Communicator) -> dict[str, Any]:
        name = communicator.key[0]
        problem, figures = _looked(communicator)
        return {
            "name": name,
            "held_bytes": None if figures is None else figures.held_bytes,
            "suspendable_bytes": None if figures is None else figures.suspendable_bytes,
            "is_suspended": figures is not None and figures.is_suspended,
            "stays_because": problem or self._stays.get(name),
        }

    def _choose(self) -> list[tuple[Communicator, Released]]:
        """Those that all their ranks are ready to suspend, and what that will give back."""
        found = self._own("suspend", lambda: [(each, *_state(each)) for each in self._find()])
        own = {communicator.key: state for communicator, state, _ in found}
        states = self._exchange("suspend", own)
        self._stays = {}
        chosen = []
        for communicator, _, released_bytes in found:
            name, ranks = communicator.key
            of_ranks = {rank: states.get(rank, {}).get(communicator.key, "not there") for rank in ranks}
            if set(of_ranks.values()) == {_READY}:
                chosen.append((communicator, Released(name, released_bytes)))
            elif set(of_ranks.values()) != {_SUSPENDED}:
                self._stay(name, _reason(of_ranks))
        return chosen

    def _stay(self, name: str, reason: str) -> None:
        self._stays[name] = reason
        words = f"NCCL's communicator {name} keeps its memory during sleeps: {reason}"
        if words not in _was_said:
            _was_said.add(words)
            _log.warning("%s", words)

    def _undo(self, chosen: Sequence[Communicator], failures: Mapping[int, Mapping[Key, Failure]]) -> None:
        """Resumes those that no rank failed in. Raises LostCommunicatorError if there are others."""
        lost = set(_lost(failures))
        for communicator in reversed(chosen):
            if communicator.key in lost:
                continue
            if failures[communicator.key[1][0]][communicator.key] is None:
                self._resume(communicator)
            else:
                communicator.restore()
        if lost:
            names = ", ".join(sorted({name for name, _ in lost}))
            raise LostCommunicatorError(
                f"{_words(failures)}; {names} cannot be used any more: restart the engine"
            )

    def _resume(self, communicator: Communicator) -> None:
        for left in reversed(range(_TRIES)):
            try:
                communicator.resume()
            except Exception as error:
                if left:
                    # NCCL goes on where it lacked memory, and the others wait for this rank.
                    self._relieve()
                    continue
                raise LostCommunicatorError(
                    f"resuming NCCL's communicator {communicator.key[0]}: {error}; other ranks may wait for "
                    "this one: restart the engine"
                ) from error
            return

    def _relieved(self, needed: int) -> int:
        """What the device has left, after a relief if that is too little."""
        if self._free_bytes() < needed:
            self._relieve()
        return self._free_bytes()

    def _refuse_shortage(self, needed: int) -> None:
        free_bytes = self._own("resume", lambda: self._relieved(needed))
        shares = self._exchange("resume", (needed, free_bytes))
        short = [
            f"rank {rank} needs {needs} bytes and its GPU has {has}"
            for rank, (needs, has) in sorted(shares.items())
            if has < needs
        ]
        if short:
            raise CommunicatorError(
                f"resuming NCCL's communicators: {'; '.join(short)}; all are suspended as before: free "
                "memory, and wake again"
            )


def cannot_hibernate(status: Sequence[Mapping[str, Any]]) -> str | None:
    """Why a process with these communicators would not come back from hibernation; None if it would."""
    awake = [each for each in status if not each["is_suspended"]]
    if awake:
        names = ", ".join(f"{each['name']} ({each['stays_because'] or 'not asked for'})" for each in awake)
        return f"NCCL's communicators {names} are not suspended: start with --enable-nccl-comm-suspend"
    if status and os.environ.get(SHARES_HOST_MEMORY) != "0":
        return f"NCCL's ranks may share host memory by CUDA: start with {SHARES_HOST_MEMORY}=0, or without it"
    return None


def _looked(communicator: Communicator) -> tuple[str | None, Figures | None]:
    """Why it cannot be suspended, or its figures."""
    problem = communicator.problem()
    if problem is not None:
        return problem, None
    try:
        return None, communicator.figures()
    except Exception as error:
        return _text(error), None


def _state(communicator: Communicator) -> tuple[str, int]:
    """What this rank can do with it, for the other ranks, and the bytes that it can give back."""
    problem, figures = _looked(communicator)
    if figures is None:
        return str(problem), 0
    if figures.is_suspended:
        return _SUSPENDED, 0
    if not figures.suspendable_bytes:
        # As without CUDA's virtual memory (NCCL_CUMEM_ENABLE=0).
        return "NCCL says that none of its memory can be suspended", 0
    return _READY, figures.suspendable_bytes


def _failure(call: Callable[[], None]) -> Failure:
    try:
        call()
    except Exception as error:
        return is_refusal(error), _text(error)
    return None


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _lost(failures: Mapping[int, Mapping[Key, Failure]]) -> Iterator[Key]:
    """Communicators that failed on some of their ranks alone, or half-way."""
    for key in {key for each in failures.values() for key in each}:
        outcomes = [failures[rank][key] for rank in key[1]]
        if any(outcomes) and not all(outcome is not None and outcome[0] for outcome in outcomes):
            yield key


def _words(failures: Mapping[int, Mapping[Key, Failure]]) -> str:
    failed = [
        f"{name} on rank {rank}: {failure[1]}"
        for rank, each in sorted(failures.items())
        for (name, _), failure in each.items()
        if failure is not None
    ]
    return f"suspending NCCL's communicators: {'; '.join(failed)}"


def _reason(states: Mapping[int, str]) -> str:
    return next(iter(states.values())) if len(set(states.values())) == 1 else _listed(states)


def _listed(states: Mapping[int, str]) -> str:
    return "; ".join(f"rank {rank}: {state}" for rank, state in sorted(states.items()))


# What vLLM has


def find() -> Communicators:
    """Those of the engine that this process is a rank of."""
    torch: Any = importlib.import_module("torch")
    parallel: Any = importlib.import_module("vllm.distributed.parallel_state")

    def share(value: Any) -> Mapping[int, Any]:
        world = parallel.get_world_group()
        if world.world_size == 1:
            return {world.rank: value}
        gathered: list[Any] = [None] * world.world_size
        torch.distributed.all_gather_object(gathered, (world.rank, value), group=world.cpu_group)
        return dict(gathered)

    return Communicators(
        lambda: list(_communicators(torch, parallel)),
        share,
        count=lambda: int(parallel.get_world_group().world_size),
        free_bytes=lambda: int(torch.cuda.mem_get_info()[0]),
        relieve=torch.cuda.empty_cache,
    )


def are_described() -> bool:
    """Whether vLLM's communicators say themselves what they have."""
    return _versions.DESCRIPTIONS in _versions.extensions(_versions.imported)


def groups(parallel: Any) -> Iterator[Any]:
    """vLLM's groups of several ranks, in the order in which all ranks made them."""
    if are_described():
        yield from parallel.get_device_groups()
        return
    for reference in list(parallel._groups.values()):
        group = reference()
        if group is not None and group.world_size > 1:
            yield group


def _communicators(torch: Any, parallel: Any) -> Iterator[Communicator]:
    for group in groups(parallel):
        name, ranks = group.unique_name, tuple(group.ranks)
        device = group.device_communicator
        for library, handle in _of_nccl(device):
            yield _OfVllm((name, ranks), device, handle, Nccl(library))
        backend = _used_backend(torch, group.device_group)
        if backend is not None:
            yield _OfTorch((f"{name} of PyTorch", ranks), backend)


def _of_nccl(device: Any) -> Iterator[tuple[Any, Any]]:
    """NCCL's library and its communicator of one of vLLM's, if it has one."""
    if device is not None and are_described():
        found = device.nccl_communicator()
        if found is not None:
            yield found
        return
    pynccl = getattr(device, "pynccl_comm", None)
    if pynccl is not None and not pynccl.disabled:
        yield pynccl.nccl.lib, pynccl.comm


def _used_backend(torch: Any, process_group: Any) -> Any:
    """NCCL's backend of a process group once it has a communicator, which the first operation makes."""
    try:
        backend = process_group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return None
    is_initialized = getattr(backend, "_is_initialized", None)
    return backend if is_initialized is not None and is_initialized() else None


@dataclass(frozen=True)
class _OfVllm:
    """The communicator of one of vLLM's groups.

    From 0.30 on vLLM suspends and resumes it itself, and from 0.32 on FlashInfer's workspaces with it.
    """

    key: Key
    device: Any
    handle: Any
    nccl: Nccl

    def problem(self) -> str | None:
        return self.nccl.problem()

    def figures(self) -> Figures:
        return self.nccl.figures(self.handle)

    def suspend(self) -> None:
        if self._is_vllms:
            self.device.suspend()
        else:
            self.nccl.suspend(self.handle)

    def resume(self) -> None:
        if self._is_vllms:
            self.device.resume()
        else:
            self.nccl.resume(self.handle)

    def restore(self) -> None:
        if self._is_vllms:
            # It passes a communicator by that it has not suspended.
            self.device.resume()

    @property
    def _is_vllms(self) -> bool:
        return hasattr(self.device, "suspend")


@dataclass(frozen=True)
class _OfTorch:
    """The communicator of a process group that vLLM made. PyTorch suspends it from 2.12 on."""

    key: Key
    backend: Any

    def problem(self) -> str | None:
        missing = [name for name in ("suspend", "resume", "memory_stats") if not hasattr(self.backend, name)]
        return f"PyTorch's backend has no {', '.join(missing)}, which came with 2.12" if missing else None

    def figures(self) -> Figures:
        stats = self.backend.memory_stats()
        return Figures(int(stats["total"]), int(stats["suspend"]), bool(stats["suspended"]))

    def suspend(self) -> None:
        self.backend.suspend()

    def resume(self) -> None:
        self.backend.resume()

    def restore(self) -> None:
        """Nothing was done beside."""
