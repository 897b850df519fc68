"""NCCL's communicators around a sleep: all suspended or none, on every rank, whichever call fails."""

import logging
import sys
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import nccl_fakes
import pytest
from fake_vllm.loader import Loader
from nccl_fakes import CUDA_ERROR, INVALID_USAGE, NEW, SYSTEM_ERROR, StuckError, World
from poorwill.vllm import _communicators
from poorwill.vllm._communicators import (
    CommunicatorError,
    Communicators,
    LostCommunicatorError,
    Released,
)
from poorwill.vllm._nccl import Figures, Nccl, NcclError, is_refusal
from vllm_sources import needs_sources, sources_of

NAMES = ("world:0", "tp:0", "ep:0")


@dataclass
class Plain:
    """A communicator of the fake, without vLLM."""

    world: World
    rank: int
    handle: int
    restored: int = 0

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        return NAMES[self.handle], self.world.comms[self.rank, self.handle].members

    @property
    def nccl(self) -> Nccl:
        return Nccl(self.world.library(self.rank))

    def problem(self) -> str | None:
        return self.nccl.problem()

    def figures(self) -> Figures:
        return self.nccl.figures(self.handle)

    def suspend(self) -> None:
        self.nccl.suspend(self.handle)

    def resume(self) -> None:
        self.nccl.resume(self.handle)

    def restore(self) -> None:
        self.restored += 1


class Engine:
    """Ranks that all have the same communicators, or those of `members`."""

    def __init__(
        self, ranks: int = 2, members: Collection[Collection[int]] | None = None, **of_world: Any
    ) -> None:
        self.world = World(ranks, **of_world)
        self.free = dict.fromkeys(range(ranks), 1 << 20)
        self.after_relief: dict[int, int] = {}
        self.relieved: list[int] = []
        for handle, each in enumerate([range(ranks)] * 3 if members is None else members):
            self.world.add(handle, list(each))
        self.plain = {key: Plain(self.world, *key) for key in sorted(self.world.comms)}
        self.ranks = [self._rank(rank) for rank in range(ranks)]

    def _rank(self, rank: int) -> Communicators:
        return Communicators(
            lambda: [plain for (of, _), plain in self.plain.items() if of == rank],
            self.world.share(rank),
            count=lambda: len(self.world.ranks),
            free_bytes=lambda: self.free[rank],
            relieve=lambda: self._relieve(rank),
        )

    def _relieve(self, rank: int) -> None:
        self.relieved.append(rank)
        self.free[rank] = self.after_relief.get(rank, self.free[rank])

    def suspend(self) -> list[Any]:
        return self.world.run(lambda rank: self.ranks[rank].suspend())

    def resume(self) -> list[Any]:
        return self.world.run(lambda rank: self.ranks[rank].resume())

    def status(self, rank: int = 0) -> dict[str, dict[str, Any]]:
        return {each["name"]: each for each in self.ranks[rank].status()}


def each_raised(outcomes: list[Any], kind: type[Exception]) -> str:
    assert [type(outcome) for outcome in outcomes] == [kind] * len(outcomes), outcomes
    assert len({str(outcome) for outcome in outcomes}) == 1
    return str(outcomes[0])


@pytest.fixture(autouse=True)
def _nothing_said() -> None:
    _communicators._was_said.clear()


# The library


def test_a_communicator_gives_its_memory_back_and_takes_it_again() -> None:
    world = World(1)
    world.add(0, [0], suspendable=700)
    nccl = Nccl(world.library(0))
    assert nccl.problem() is None
    assert nccl.figures(0) == Figures(total_bytes=703, suspendable_bytes=700, is_suspended=False)
    assert nccl.figures(0).held_bytes == 703
    nccl.suspend(0)
    assert nccl.figures(0).is_suspended
    assert nccl.figures(0).held_bytes == 3
    nccl.resume(0)
    assert nccl.figures(0).held_bytes == 703


@pytest.mark.parametrize("missing", [NEW, NEW[:1], NEW[1:2], NEW[2:]])
def test_a_library_without_the_functions_says_which(missing: tuple[str, ...]) -> None:
    world = World(1, missing)
    world.add(0, [0])
    nccl = Nccl(world.library(0))
    assert nccl.problem() == f"NCCL 2.28.9 has no {', '.join(missing)}, which came with 2.29.7"
    calls: dict[str, Callable[[], object]] = {
        "ncclCommSuspend": lambda: nccl.suspend(0),
        "ncclCommResume": lambda: nccl.resume(0),
        "ncclCommMemStats": lambda: nccl.figures(0),
    }
    for name in missing:
        with pytest.raises(NcclError, match=rf"{name}: NCCL 2\.28\.9 has no"):
            calls[name]()


def test_an_error_has_the_function_and_nccls_words() -> None:
    world = World(1)
    world.add(0, [0])
    world.fails[0, "ncclCommSuspend", 0] = CUDA_ERROR
    nccl = Nccl(world.library(0))
    with pytest.raises(NcclError, match="ncclCommSuspend failed with code 1: unhandled cuda error") as raised:
        nccl.suspend(0)
    assert not is_refusal(raised.value)
    with pytest.raises(NcclError, match="ncclCommResume failed with code 5: invalid usage") as raised:
        nccl.resume(0)
    assert is_refusal(raised.value)


def test_only_nccls_own_words_are_a_refusal() -> None:
    # As PyTorch and vLLM word them.
    torch = (
        "NCCL error in: NCCLUtils.cpp:603, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version"
    )
    assert is_refusal(RuntimeError(torch))
    vllm = "NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)\nLast error:\n"
    assert not is_refusal(RuntimeError(f"{vllm}Cuda failure 1 'invalid argument'"))
    assert not is_refusal(RuntimeError("CUDA error: invalid argument"))


# All or none


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_are_suspended_and_resumed_once(ranks: int) -> None:
    engine = Engine(ranks)
    for rank, released in enumerate(engine.suspend()):
        assert released == [Released(name, 100 + rank) for name in NAMES]
    assert engine.world.suspended() == set(engine.world.comms)
    assert all(each.is_suspended for each in engine.ranks)
    assert engine.status()["tp:0"] == {
        "name": "tp:0",
        "held_bytes": 3,
        "suspendable_bytes": 100,
        "is_suspended": True,
        "stays_because": None,
    }
    assert engine.suspend() == [[]] * ranks
    assert engine.world.count("ncclCommSuspend") == 3 * ranks
    for rank, taken in enumerate(engine.resume()):
        assert taken == [Released(name, 100 + rank) for name in NAMES]
    assert not engine.world.suspended()
    assert engine.resume() == [[]] * ranks
    assert engine.world.count("ncclCommResume") == 3 * ranks
    assert engine.status()["tp:0"]["held_bytes"] == 103
    # And again.
    engine.suspend()
    engine.resume()
    assert not engine.world.suspended()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("number", range(3))
def test_a_call_that_all_ranks_are_refused_leaves_all_as_they_were(ranks: int, number: int) -> None:
    engine = Engine(ranks)
    for rank in range(ranks):
        engine.world.fails[rank, "ncclCommSuspend", number] = INVALID_USAGE
    said = each_raised(engine.suspend(), CommunicatorError)
    assert f"{NAMES[number]} on rank 0: ncclCommSuspend failed with code 5: invalid usage" in said
    assert said.endswith("; all communicators are as they were")
    assert not engine.world.suspended()
    assert not any(each.is_suspended for each in engine.ranks)
    assert {key for key, plain in engine.plain.items() if plain.restored} == {
        (rank, number) for rank in range(ranks)
    }
    assert engine.resume() == [[]] * ranks
    assert all(isinstance(released, list) and len(released) == 3 for released in engine.suspend())


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("where", ["first", "last", "everywhere"])
def test_a_call_that_fails_half_way_costs_one_communicator_and_no_rank_waits(
    ranks: int, number: int, where: str
) -> None:
    engine = Engine(ranks)
    failing = {"first": [0], "last": [ranks - 1], "everywhere": range(ranks)}[where]
    for rank in failing:
        engine.world.fails[rank, "ncclCommSuspend", number] = CUDA_ERROR
    said = each_raised(engine.suspend(), LostCommunicatorError)
    assert said.endswith(f"; {NAMES[number]} cannot be used any more: restart the engine")
    assert {handle for _, handle in engine.world.suspended()} <= {number}
    assert not any(each.is_suspended for each in engine.ranks)


def test_a_loss_among_some_ranks_is_known_to_all() -> None:
    engine = Engine(4, [range(4), (0, 1), (2, 3)])
    engine.world.fails[3, "ncclCommSuspend", 1] = SYSTEM_ERROR
    said = each_raised(engine.suspend(), LostCommunicatorError)
    assert "ep:0 on rank 3: ncclCommSuspend failed with code 2" in said
    assert engine.world.suspended() == {(2, 2)}


def test_ranks_with_different_groups_do_the_same_in_the_same_order() -> None:
    # Two by two: tensor parallel rows, pipeline parallel columns.
    engine = Engine(4, [range(4), (0, 1), (2, 3)])
    assert all(isinstance(released, list) for released in engine.suspend())
    assert engine.world.suspended() == set(engine.world.comms)
    assert all(isinstance(taken, list) for taken in engine.resume())
    assert not engine.world.suspended()


def test_ranks_that_do_different_things_say_so_and_change_nothing() -> None:
    engine = Engine(2)
    engine.suspend()
    # One that has lost its memory of that.
    engine.ranks[1] = engine._rank(1)
    outcomes = engine.world.run(lambda rank: (engine.ranks[rank].resume, engine.ranks[rank].suspend)[rank]())
    assert each_raised(outcomes, CommunicatorError) == (
        "NCCL's communicators: all ranks have to suspend or resume together, and rank 0: resume; "
        "rank 1: suspend; call the same on all of them"
    )
    assert engine.world.suspended() == set(engine.world.comms)
    assert engine.world.count("ncclCommResume") == 0


@pytest.mark.parametrize("share", [1, 2, 3])
def test_a_rank_that_ends_is_a_loss(share: int) -> None:
    engine = Engine(1)
    given: list[Any] = []

    def gone(value: Any) -> dict[int, Any]:
        given.append(value)
        if len(given) == share:
            raise RuntimeError("Connection closed by peer")
        return {0: value}

    engine.ranks[0]._share = gone
    if share > 2:
        engine.suspend()
    (outcome,) = engine.suspend() if share < 3 else engine.resume()
    assert str(outcome) == (
        "NCCL's communicators: the engine's ranks do not reach each other (Connection closed by peer): "
        "restart the engine"
    )
    assert isinstance(outcome, LostCommunicatorError)


# What stays


def test_only_suspended_communicators_come_back_from_hibernation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_communicators.SHARES_HOST_MEMORY, "0")
    engine = Engine(2)
    for suspended in (False, True):
        if suspended:
            engine.suspend()
        words = _communicators.cannot_hibernate(engine.ranks[0].status())
        assert (words is None) == suspended, words
    for value in ("1", ""):
        monkeypatch.setenv(_communicators.SHARES_HOST_MEMORY, value)
        words = _communicators.cannot_hibernate(engine.ranks[0].status())
        assert words is not None
        assert "start with NCCL_CUMEM_HOST_ENABLE=0" in words
    assert _communicators.cannot_hibernate([]) is None


def test_an_old_library_is_named_once_and_keeps_its_memory(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(2, missing=NEW)
    with caplog.at_level(logging.WARNING):
        assert engine.suspend() == [[], []]
        assert engine.suspend() == [[], []]
    reason = f"NCCL 2.28.9 has no {', '.join(NEW)}, which came with 2.29.7"
    said = [record.getMessage() for record in caplog.records]
    assert sorted(said) == sorted(
        f"NCCL's communicator {name} keeps its memory during sleeps: {reason}" for name in NAMES
    )
    assert engine.status()["world:0"] == {
        "name": "world:0",
        "held_bytes": None,
        "suspendable_bytes": None,
        "is_suspended": False,
        "stays_because": reason,
    }
    assert engine.resume() == [[], []]


def test_a_library_that_counts_nothing_suspends_nothing() -> None:
    engine = Engine(2)
    engine.world.is_counting = False
    assert engine.suspend() == [[], []]
    assert "ncclCommMemStats failed with code 5" in engine.status()["tp:0"]["stays_because"]
    engine.world.is_counting = True
    for comm in engine.world.comms.values():
        comm.suspendable = 0
    assert engine.suspend() == [[], []]
    assert engine.status()["tp:0"]["stays_because"] == "NCCL says that none of its memory can be suspended"
    assert engine.world.count("ncclCommSuspend") == 0


@pytest.mark.parametrize("how", ["cannot", "has none", "is suspended"])
def test_what_one_rank_cannot_suspend_stays_on_all(how: str) -> None:
    engine = Engine(2)
    if how == "cannot":
        engine.world.comms[1, 1].suspendable = 0
    elif how == "has none":
        del engine.plain[1, 1]
    else:
        engine.world.comms[1, 1].is_suspended = True
    first, second = engine.suspend()
    assert [each.name for each in first] == [each.name for each in second] == ["world:0", "ep:0"]
    reason = engine.status(0)["tp:0"]["stays_because"]
    expected = {
        "cannot": "NCCL says that none of its memory can be suspended",
        "has none": "not there",
        "is suspended": "suspended",
    }
    assert reason == f"rank 0: ready; rank 1: {expected[how]}"
    engine.resume()
    assert engine.world.suspended() == ({(1, 1)} if how == "is suspended" else set())
    # As soon as it can, it no longer stays.
    engine.world.comms[1, 1].suspendable, engine.world.comms[1, 1].is_suspended = 1, False
    engine.plain[1, 1] = Plain(engine.world, 1, 1)
    engine.plain = dict(sorted(engine.plain.items()))
    assert [len(released) for released in engine.suspend()] == [3, 3]
    assert engine.status(0)["tp:0"]["stays_because"] is None


def test_what_is_suspended_already_is_not_ours_to_resume() -> None:
    engine = Engine(2)
    for rank in range(2):
        engine.world.comms[rank, 0].is_suspended = True
    assert [[each.name for each in released] for released in engine.suspend()] == [["tp:0", "ep:0"]] * 2
    assert engine.status()["world:0"]["stays_because"] is None
    engine.resume()
    assert engine.world.suspended() == {(0, 0), (1, 0)}


# Resuming


@pytest.mark.parametrize("short", [0, 1])
def test_a_wake_without_memory_on_one_rank_resumes_nothing_anywhere(short: int) -> None:
    engine = Engine(2)
    engine.suspend()
    engine.free[short] = 302 + 3 * short - 3
    said = each_raised(engine.resume(), CommunicatorError)
    assert f"rank {short} needs {300 + 3 * short} bytes and its GPU has {299 + 3 * short}" in said
    assert engine.world.suspended() == set(engine.world.comms)
    assert engine.world.count("ncclCommResume") == 0
    assert engine.relieved == [short]
    engine.after_relief[short] = 1 << 20
    assert all(isinstance(taken, list) and len(taken) == 3 for taken in engine.resume())
    assert not engine.world.suspended()


@pytest.mark.parametrize("operation", ["suspend", "resume"])
@pytest.mark.parametrize("failed", [0, 2])
def test_a_rank_that_failed_before_lets_the_others_go(operation: Any, failed: int) -> None:
    engine = Engine(3)
    if operation == "resume":
        engine.suspend()
    before = engine.world.suspended()

    def act(rank: int) -> Any:
        if rank == failed:
            return engine.ranks[rank].decline(operation, RuntimeError("the disk is full"), 3)
        return getattr(engine.ranks[rank], operation)()

    outcomes = engine.world.run(act)
    assert outcomes.pop(failed) is None
    said = each_raised(outcomes, CommunicatorError)
    assert f"rank {failed}: the disk is full" in said
    assert engine.world.suspended() == before
    # All together it works.
    getattr(engine, operation)()
    assert engine.world.suspended() != before


@pytest.mark.parametrize("operation", ["suspend", "resume"])
def test_a_rank_that_would_not_have_taken_part_does_not_decline(operation: Any) -> None:
    """The others do not wait for it, and it waits for none."""
    engine = Engine(2)
    if operation == "suspend":
        engine.suspend()
    engine.world.run(
        lambda rank: engine.ranks[0].decline(operation, RuntimeError(), 2) if rank == 0 else None
    )
    assert not engine.world.was_stuck


@pytest.mark.parametrize("operation", ["suspend", "resume"])
def test_a_rank_does_not_wait_for_engines_that_were_not_called(
    operation: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines behind an external load balancer share vLLM's world group, and each is called alone."""
    engine = Engine(3)
    if operation == "resume":
        engine.suspend()
    error = RuntimeError("the disk is full")
    engine.world.run(lambda rank: engine.ranks[0].decline(operation, error, 1) if rank == 0 else None)
    assert not engine.world.was_stuck
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"{operation} NCCL's communicators: this rank failed before (the disk is full)")
    assert "Of 2 others" in said


@pytest.mark.parametrize("failed", [0, 2])
@pytest.mark.parametrize(("operation", "part"), [("suspend", "_find"), ("resume", "_free_bytes")])
def test_a_rank_that_fails_before_the_exchange_lets_the_others_go(
    monkeypatch: pytest.MonkeyPatch, operation: str, part: str, failed: int
) -> None:
    engine = Engine(3)
    if operation == "resume":
        engine.suspend()
    before = engine.world.suspended()

    def fails() -> Any:
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.ranks[failed], part, fails)
        outcomes = getattr(engine, operation)()
    assert not engine.world.was_stuck
    assert str(outcomes.pop(failed)) == "CUDA error: out of memory"
    said = each_raised(outcomes, CommunicatorError)
    assert f"rank {failed}: CUDA error: out of memory" in said
    assert engine.world.suspended() == before
    getattr(engine, operation)()
    assert engine.world.suspended() != before


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("times", [1, 2])
def test_a_resumption_that_fails_is_tried_again_while_the_others_wait(number: int, times: int) -> None:
    engine = Engine(2)
    engine.suspend()
    for more in range(times):
        engine.world.fails[1, "ncclCommResume", number + more] = CUDA_ERROR
    assert all(isinstance(taken, list) and len(taken) == 3 for taken in engine.resume())
    assert engine.relieved == [1] * times
    assert not engine.world.suspended()


@pytest.mark.parametrize("number", range(3))
def test_a_resumption_that_keeps_failing_says_that_the_others_wait(number: int) -> None:
    engine = Engine(2)
    engine.suspend()
    for call in range(number, number + 3):
        engine.world.fails[1, "ncclCommResume", call] = CUDA_ERROR
    _, second = engine.resume()
    assert isinstance(second, LostCommunicatorError)
    assert str(second) == (
        f"resuming NCCL's communicator {NAMES[number]}: ncclCommResume failed with code 1: "
        f"{nccl_fakes.WORDS[CUDA_ERROR]}; other ranks may wait for this one: restart the engine"
    )
    assert {handle for _, handle in engine.world.suspended()} == set(range(number, 3))
    assert engine.ranks[1].is_suspended


def test_the_fake_finds_ranks_that_wait_for_each_other() -> None:
    engine = Engine(2)
    outcomes = engine.world.run(lambda rank: engine.plain[rank, rank].suspend())
    assert [str(outcome) for outcome in outcomes] == [
        f"ncclCommSuspend failed with code 2: {nccl_fakes.WORDS[SYSTEM_ERROR]}"
    ] * 2
    world = World(2)
    (stuck, left) = world.run(lambda rank: None if rank else world.share(0)(1))
    assert isinstance(stuck, StuckError)
    assert left is None


# What vLLM has


class Device:
    """A device communicator of vLLM's from 0.30 on."""

    def __init__(self, pynccl: Any) -> None:
        self.pynccl_comm = pynccl
        self.done: list[str] = []

    def suspend(self) -> None:
        self.done.append("suspended")
        self.pynccl_comm.nccl.suspend(self.pynccl_comm.comm)

    def resume(self) -> None:
        self.done.append("resumed")
        if self.pynccl_comm.nccl.figures(self.pynccl_comm.comm).is_suspended:
            self.pynccl_comm.nccl.resume(self.pynccl_comm.comm)


class Backend:
    """PyTorch's, over the fake."""

    def __init__(self, world: World, handle: int) -> None:
        self.nccl, self.handle = Nccl(world.library(0)), handle
        self.is_used = True

    def _is_initialized(self) -> bool:
        return self.is_used

    def memory_stats(self) -> dict[str, int]:
        figures = self.nccl.figures(self.handle)
        return {
            "total": figures.total_bytes,
            "suspend": figures.suspendable_bytes,
            "suspended": int(figures.is_suspended),
        }

    def suspend(self) -> None:
        self.nccl.suspend(self.handle)

    def resume(self) -> None:
        self.nccl.resume(self.handle)


class Vllm:
    """vLLM's groups of a process that is rank 0 of one: enough for `find`."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, is_new: bool = True, has_torch: bool = True
    ) -> None:
        self.world = World(1)
        for handle in range(2):
            self.world.add(handle, [0], suspendable=100 * (handle + 1))
        library = self.world.library(0)
        nccl = Nccl(library)
        nccl.lib = library  # type: ignore[attr-defined]
        self.pynccl = SimpleNamespace(comm=0, nccl=nccl, disabled=False)
        self.device = Device(self.pynccl) if is_new else SimpleNamespace(pynccl_comm=self.pynccl)
        self.backend: Any = Backend(self.world, 1)
        if not has_torch:
            self.backend = SimpleNamespace(_is_initialized=lambda: True)
        self.group = SimpleNamespace(
            unique_name="tp:0",
            ranks=[0],
            world_size=2,
            device_communicator=self.device,
            device_group=SimpleNamespace(_get_backend=self._backend),
        )
        self.parallel = ModuleType("vllm.distributed.parallel_state")
        alone = SimpleNamespace(unique_name="pp:0", world_size=1)
        self.alone = alone
        groups = {"gone": lambda: None, "pp:0": lambda: alone, "tp:0": lambda: self.group}
        self.parallel.__dict__.update(
            _groups=groups, get_world_group=lambda: SimpleNamespace(world_size=1, rank=0)
        )
        torch = ModuleType("torch")
        torch.__dict__.update(
            device=lambda name: name,
            cuda=SimpleNamespace(mem_get_info=lambda: (1 << 20, 1 << 21), empty_cache=lambda: None),
        )
        for module in (torch, ModuleType("vllm"), ModuleType("vllm.distributed"), self.parallel):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def _backend(self, device: str) -> Any:
        assert device == "cuda"
        if self.backend is None:
            raise RuntimeError("No backend type associated with device type cuda")
        return self.backend


@pytest.mark.parametrize("is_new", [True, False])
def test_vllms_communicators_and_pytorchs_are_suspended(
    monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    vllm = Vllm(monkeypatch, is_new=is_new)
    found = _communicators.find()
    expected = [Released("tp:0", 100), Released("tp:0 of PyTorch", 200)]
    assert found.suspend() == expected
    assert vllm.world.suspended() == {(0, 0), (0, 1)}
    assert [each["held_bytes"] for each in found.status()] == [3, 3]
    assert found.resume() == expected
    assert not vllm.world.suspended()
    if is_new:
        assert vllm.device.done == ["suspended", "resumed"]


@pytest.mark.parametrize("is_new", [True, False])
def test_what_vllm_does_beside_is_taken_back_after_a_refusal(
    monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    vllm = Vllm(monkeypatch, is_new=is_new)
    vllm.world.fails[0, "ncclCommSuspend", 0] = INVALID_USAGE
    with pytest.raises(CommunicatorError, match=r"tp:0 on rank 0.*as they were"):
        _communicators.find().suspend()
    assert not vllm.world.suspended()
    if is_new:
        assert vllm.device.done == ["suspended", "resumed"]


def test_an_older_pytorch_keeps_its_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    Vllm(monkeypatch, has_torch=False)
    found = _communicators.find()
    assert found.suspend() == [Released("tp:0", 100)]
    (_, of_torch) = found.status()
    assert of_torch["stays_because"] == (
        "PyTorch's backend has no suspend, resume, memory_stats, which came with 2.12"
    )
    found.resume()


def test_groups_without_a_communicator_are_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = Vllm(monkeypatch)
    vllm.backend.is_used = False
    vllm.pynccl.disabled = True
    assert _communicators.find().status() == []
    vllm.backend = None
    vllm.group.device_communicator = None
    assert _communicators.find().status() == []
    # As Gloo's.
    vllm.backend = SimpleNamespace()
    assert _communicators.find().status() == []


def test_the_world_group_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = Vllm(monkeypatch)
    asked: list[Any] = []

    def all_gather_object(into: list[Any], value: Any, *, group: Any) -> None:
        asked.append(group)
        # Another rank that has the same.
        into[:] = [value, (1, value[1])]

    sys.modules["torch"].__dict__["distributed"] = SimpleNamespace(all_gather_object=all_gather_object)
    world = SimpleNamespace(world_size=2, rank=0, cpu_group="gloo")
    vllm.parallel.__dict__["get_world_group"] = lambda: world
    vllm.group.ranks = [0, 1]
    found = _communicators.find()
    assert len(found.suspend()) == 2
    assert asked == ["gloo", "gloo"]
    # One of both engines.
    found.decline("resume", RuntimeError(), 1)
    assert asked == ["gloo", "gloo"]
    found.decline("resume", RuntimeError(), 2)
    assert asked == ["gloo"] * 3


# vLLM's own code


@needs_sources
@pytest.mark.parametrize("version", ["0.30.0", "0.33.0"])
def test_vllms_own_suspension_is_what_is_called(version: str) -> None:
    sources_of(version)
    package = "vllm.distributed.device_communicators"
    names = ("pynccl", "pynccl_wrapper", "cuda_communicator", "base_device_communicator")
    loader = Loader(version, [f"{package}.{name}" for name in names])
    world = World(1)
    world.add(7, [0])
    library = world.library(0)
    wrapper = loader.module(f"{package}.pynccl_wrapper").NCCLLibrary
    nccl = wrapper.__new__(wrapper)
    nccl.lib, nccl._funcs = library, {}
    for each in wrapper.exported_functions:
        if each.name in ("ncclCommSuspend", "ncclCommResume", "ncclGetErrorString"):
            nccl._funcs[each.name] = function = library[each.name]
            function.argtypes, function.restype = each.argtypes, each.restype
    of_vllm = loader.module(f"{package}.pynccl").PyNcclCommunicator
    pynccl = of_vllm.__new__(of_vllm)
    vars(pynccl).update(nccl=nccl, comm=7, disabled=False, _suspended=False)
    of_vllm = loader.module(f"{package}.cuda_communicator").CudaCommunicator
    device = of_vllm.__new__(of_vllm)
    vars(device).update(pynccl_comm=pynccl, cpu_group=object())
    found = _communicators._OfVllm(("tp:0", (0,)), device, 7, Nccl(library))
    engine = Communicators(
        lambda: [found],
        lambda value: {0: value},
        count=lambda: 1,
        free_bytes=lambda: 1 << 20,
        relieve=lambda: None,
    )
    assert engine.suspend() == [Released("tp:0", 100)]
    assert pynccl._suspended
    assert engine.resume() == [Released("tp:0", 100)]
    assert not pynccl._suspended
    # vLLM's switch and ours together: the second to come has nothing to do.
    device.suspend()
    assert engine.suspend() == []
    assert engine.resume() == []
    device.resume()
    world.fails[0, "ncclCommSuspend", world.count("ncclCommSuspend")] = INVALID_USAGE
    with pytest.raises(CommunicatorError, match=r"invalid usage.*as they were"):
        engine.suspend()
    assert not pynccl._suspended


class Group:
    """One of vLLM's, as far as it is registered."""

    unique_name, world_size = "tp:0", 2


@needs_sources
@pytest.mark.parametrize("version", ["0.20.2", "0.29.0", "0.30.0", "0.33.0"])
def test_vllms_groups_are_found_where_it_registers_them(version: str) -> None:
    sources_of(version)
    name = "vllm.distributed.parallel_state"
    parallel = Loader(version, [name]).module(name)
    group = Group()
    parallel._register_group(group)
    assert isinstance(parallel._groups["tp:0"], weakref.ref)
    assert list(_communicators.groups(parallel)) == [group]
    del group
    assert list(_communicators.groups(parallel)) == []
