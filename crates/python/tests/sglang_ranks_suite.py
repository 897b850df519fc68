"""Ranks of SGLang, each a process over the fakes: they release and resume together, or not at all."""

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_sglang
import pytest
from sglang_rank import CACHED, Order, State, main

WEIGHTS, CACHE, GRAPHS = "weights", "kv_cache", "cuda_graph"
ALL = {WEIGHTS, CACHE, GRAPHS}
HAS_MEMORY = {WEIGHTS, CACHE}
HAS_QUEUES = fake_sglang.GENERATION.has_queues
# What a rank raises, and where.
FAULTS_OF_RELEASE = {
    "step": "MemoryError: no memory for the buffers",
    "hold": "a network card",
    **({"deregister": "OSError: connections were not closed"} if HAS_QUEUES else {}),
}
FAULTS_OF_RESUME = {
    "full": "WakeError|OutOfMemoryError",
    "step": "MemoryError: no memory for the buffers",
    "late": "OSError: a report could not be written",
    **({"register": "OSError: the cache was not registered"} if HAS_QUEUES else {}),
}


class Pair:
    """Two ranks, or two stages."""

    def __init__(self, folder: Path, *, is_pipeline: bool = False) -> None:
        self.folder = folder
        context = multiprocessing.get_context("spawn")
        links, passed = context.Pipe(), context.Pipe()
        self._orders = []
        self.processes = []
        for rank in range(2):
            orders, theirs = context.Pipe()
            process = context.Process(
                target=main, args=(theirs, links[rank], passed[rank], rank, is_pipeline), daemon=True
            )
            process.start()
            theirs.close()
            self._orders.append(orders)
            self.processes.append(process)
        # A rank that ends is an error for the other.
        for end in (*links, *passed):
            end.close()

    def begin(self, call: str, *tags: str, faults: dict[int, str] | None = None, **settings: str) -> None:
        """Has both begin a request."""
        # Memory that a rank lacks here does not come.
        settings = {"POORWILL_RANKS_FOLDER": str(self.folder), "POORWILL_WAKE_TIMEOUT": "0", **settings}
        for rank, orders in enumerate(self._orders):
            orders.send(Order(call, tags, (faults or {}).get(rank, ""), tuple(settings.items())))

    def end(self, rank: int) -> State:
        """How one has ended it."""
        state: State = self._orders[rank].recv()
        return state

    def do(self, call: str, *tags: str, faults: dict[int, str] | None = None, **settings: str) -> list[State]:
        """How both have ended a request."""
        self.begin(call, *tags, faults=faults, **settings)
        states = [self.end(rank) for rank in range(2)]
        # All ranks know the same.
        assert len({state.error for state in states}) == 1, states
        assert list(self.folder.iterdir()) == []
        return states

    def stop(self) -> None:
        """Ends both."""
        for orders, process in zip(self._orders, self.processes, strict=True):
            if process.is_alive():
                orders.send(None)
            process.join()


@pytest.fixture(scope="module", params=["ranks", "stages"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("ranks"), is_pipeline=request.param == "stages")
    yield made
    made.stop()


def is_active(states: list[State], cached: int = CACHED) -> bool:
    return all(
        (s.raised, s.released, s.offload_tags, s.is_equal, s.cached, s.is_registered)
        == (None, set(), set(), True, cached, True)
        for s in states
    )


def is_released(states: list[State], offloaded: set[str] = ALL) -> bool:
    return all(
        (s.raised, s.released, s.offload_tags) == (None, HAS_MEMORY, offloaded)
        and s.is_registered is not HAS_QUEUES
        for s in states
    )


def is_done(states: list[State]) -> bool:
    return all(state.error is None for state in states)


def failed(states: list[State], pattern: str) -> None:
    assert states[0].error is not None
    assert re.search(pattern, states[0].error), states[0].error


def release(pair: Pair) -> None:
    states = pair.do("release")
    assert is_done(states)
    assert is_released(states)


def resume(pair: Pair, cached: int = 0) -> None:
    states = pair.do("resume")
    assert is_done(states)
    assert is_active(states, cached)


def test_all_release_and_resume(pair: Pair) -> None:
    for _ in range(2):
        release(pair)
        resume(pair)


def test_repeated_and_by_parts(pair: Pair) -> None:
    [one, other] = pair.do("release", WEIGHTS, WEIGHTS)
    assert one.released == other.released == one.offload_tags == {WEIGHTS}
    release(pair)
    release(pair)
    [one, other] = pair.do("resume", CACHE)
    assert one.released == other.released == {WEIGHTS}
    resume(pair, CACHED)
    resume(pair, CACHED)


def test_an_unknown_tag(pair: Pair) -> None:
    [one, other] = pair.do("release", "nonsense")
    assert (one.error, one.released, one.offload_tags) == (None, set(), {"nonsense"})
    assert other.offload_tags == {"nonsense"}
    states = pair.do("resume", "nonsense")
    assert is_done(states)
    assert is_active(states)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", FAULTS_OF_RELEASE)
def test_a_release_that_one_cannot_do(pair: Pair, fault: str, rank: int) -> None:
    states = pair.do("release", faults={rank: fault})
    failed(states, rf"^release_memory_occupation: rank {rank}: .*({FAULTS_OF_RELEASE[fault]}).*as it was$")
    assert is_active(states)
    release(pair)
    resume(pair)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", FAULTS_OF_RESUME)
def test_a_resume_that_one_cannot_do(pair: Pair, fault: str, rank: int) -> None:
    release(pair)
    states = pair.do("resume", faults={rank: fault})
    failed(states, rf"^resume_memory_occupation: rank {rank}: .*({FAULTS_OF_RESUME[fault]}).*as it was$")
    assert is_released(states)
    resume(pair)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_resume_waits_for_memory_that_is_about_to_come(pair: Pair, rank: int) -> None:
    """More than a stalled machine takes."""
    release(pair)
    states = pair.do("resume", faults={rank: "soon"}, POORWILL_WAKE_TIMEOUT="3600")
    assert is_done(states)
    assert is_active(states, 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tag_that_was_released_before_stays_so(pair: Pair, rank: int) -> None:
    pair.do("release", CACHE)
    states = pair.do("release", faults={rank: "hold"})
    failed(states, "a network card")
    assert [(s.released, s.offload_tags, s.is_equal) for s in states] == [({CACHE}, {CACHE}, True)] * 2
    resume(pair)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_after_all_have_released(pair: Pair, rank: int) -> None:
    """What was dropped is gone, and both have released it."""
    states = pair.do("release", faults={rank: "late"})
    failed(states, rf"rank {rank}: OSError: .*; all ranks have released their memory$")
    assert is_released(states)
    resume(pair)


def test_both_fail(pair: Pair) -> None:
    states = pair.do("release", faults={0: "step", 1: "step"})
    failed(states, "rank 0: MemoryError: .*; rank 1: MemoryError: .*; everything is as it was")
    assert is_active(states)


@pytest.mark.parametrize("timeout", ["soon", "-1"])
def test_a_setting_that_is_wrong(pair: Pair, timeout: str) -> None:
    states = pair.do("release", POORWILL_RANKS_TIMEOUT=timeout)
    failed(states, "rank 0: ValueError: POORWILL_RANKS_TIMEOUT=")
    assert is_active(states)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_is_stopped_finds_the_others_as_they_were(pair: Pair, rank: int) -> None:
    pair.begin("release", faults={rank: "stop"}, POORWILL_RANKS_TIMEOUT="0.05")
    while not list(pair.folder.glob("**/undo")):
        time.sleep(0.005)
    pid = pair.processes[rank].pid
    assert pid is not None
    os.kill(pid, signal.SIGCONT)
    states = [pair.end(each) for each in range(2)]
    failed(states, "UndoneError: .*; everything is as it was")
    assert is_active(states)
    release(pair)
    resume(pair)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("call", ["release", "resume"])
def test_ranks_without_a_shared_folder_warn_and_go_back_by_themselves(
    pair: Pair, call: str, rank: int
) -> None:
    if call == "resume":
        release(pair)
    fault = "hold" if call == "release" else "full"
    states = pair.do(call, POORWILL_RANKS_FOLDER="/no/such/folder", faults={rank: fault})
    failed(states, rf"rank {rank}: .*; everything is as it was")
    if call == "release":
        assert is_active(states[rank : rank + 1])
        # What the other had dropped is gone.
        assert is_active(states[1 - rank : 2 - rank], cached=0)
        release(pair)
    assert is_released([*states] if call == "resume" else pair.do("release"))
    resume(pair)


def test_a_rank_that_is_busy(tmp_path: Path) -> None:
    """SGLang's own refusal does not end it any more, except in a pipeline."""
    pair = Pair(tmp_path)
    states = pair.do("release", faults={1: "busy"})
    failed(
        states, "rank 1: AssertionError: should be called only when server is idle; everything is as it was$"
    )
    assert is_active(states)
    pair.stop()


@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_is_killed_leaves_the_others_memory(tmp_path: Path, rank: int) -> None:
    """SGLang ends then. What is left has its bytes."""
    pair = Pair(tmp_path)
    pair.begin("release", faults={rank: "kill"}, POORWILL_RANKS_TIMEOUT="0.05")
    state = pair.end(1 - rank)
    assert (state.released, state.is_equal, state.cached) == (set(), True, CACHED)
    assert state.raised is not None
    [verdict] = [path.name for path in tmp_path.glob("**/undo")]
    assert verdict == "undo"
    pair.stop()


def test_ranks_warn_once(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    said: list[Any] = []
    for faults in ({1: "apart"}, {0: "apart"}, {}):
        for call in ("release", "resume"):
            states = pair.do(call, faults=faults)
            assert is_done(states)
            said += [state.warnings for state in states]
    assert "rank 1 does not reach" in said[0][0]
    assert "POORWILL_RANKS_FOLDER" in said[0][0]
    assert sum(map(len, said)) == 1
    pair.stop()
