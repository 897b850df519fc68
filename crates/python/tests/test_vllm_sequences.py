"""All sequences of a few sleeps and wakes by tag, beside an engine of vLLM's own: its core, executor, worker
and allocator from its sources.

What sleeps in the end is what sleeps there. Where it answers, so does ours. Where it has a request wait for
good, faults, or answers from memory that no one wrote, ours says at once what is missing.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import fake_vllm
import pytest
from fake_vllm.clients import EngineProcesses, asynchronous, in_process, synchronous
from fake_vllm.engines import PARAMS, is_busy, make_config
from fake_vllm.stock import Stock
from fake_vllm.worker import MemoryFault
from poorwill import PoorwillError
from poorwill.vllm._engine import NotReadyError
from poorwill.vllm._versions import RUN
from vllm_cores import NOT_WRITTEN
from vllm_sources import needs_sources

pytest_plugins = ["vllm_cores"]
pytestmark = needs_sources

NEWEST = RUN[-1]

Operation = tuple[str, Any]
Sequence = tuple[Operation, ...]

OPERATIONS: tuple[Operation, ...] = (
    *(("sleep", level) for level in (0, 1, 2)),
    *(("wake_up", tags) for tags in (None, ["weights"], ["kv_cache"], ["scheduling"])),
)

WAITS, FAULTS, GIBBERISH, TOKEN = "waits for good", "faults", "gibberish", "token"
BREAKS = "faults before a request comes"

ANOTHER_LEVEL = r"sleep: the engine sleeps at level . already; wake it up before it sleeps at level .$"


def sequences(length: int) -> Iterator[Sequence]:
    """Each of this length. Shorter ones are their beginnings, and have tests of their own."""
    yield from product(OPERATIONS, repeat=length)


@dataclass(frozen=True)
class Answer:
    """What an engine of vLLM's own comes to."""

    asleep: frozenset[str]
    is_whole: bool
    """Whether the weights are awake and have their bytes."""
    said: str
    """To a request."""


class Own:
    """Engines of one version without our plugin."""

    def __init__(self, version: str) -> None:
        self.vllm = fake_vllm.Vllm(version)
        self.vllm.make_worker = Stock(version).worker
        self.config = make_config(worker_cls="vllm.v1.worker.gpu_worker.Worker")
        self._answers: dict[str, Answer] = {}

    def answer(self, sequence: Sequence) -> Answer:
        key = repr(sequence)
        if key not in self._answers:
            self._answers[key] = self._find(sequence)
        return self._answers[key]

    def _find(self, sequence: Sequence) -> Answer:
        core = self.vllm.engine("EngineCore", config=self.config)
        [worker] = core.model_executor.workers
        frontend = in_process(self.vllm, core)
        try:
            for name, argument in sequence:
                getattr(frontend, name)(argument)
        except MemoryFault:
            return Answer(frozenset(), False, BREAKS)
        asleep = frozenset(worker.asleep())
        is_whole = "weights" not in asleep and worker.is_whole()
        try:
            frontend.add_request("asked", 1, PARAMS)
            tokens = [token for output in frontend.step() for token in output.new_token_ids]
            assert tokens or not core.scheduler.has_requests()
            return Answer(asleep, is_whole, *tokens or [WAITS])
        except MemoryFault:
            return Answer(asleep, is_whole, FAULTS)


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """Whatever is logged would be kept for a failure."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def newest() -> Own:
    return Own(NEWEST)


@pytest.fixture(scope="module")
def own(vllm: Any) -> Own:
    return Own(vllm.loader.version)


def sleeps_twice(sequence: Sequence) -> bool:
    """Whether it puts an engine to sleep whose cache alone sleeps."""
    asleep: set[str] = set()
    for name, argument in sequence:
        if name == "wake_up":
            asleep -= {"weights", "kv_cache"} if argument is None else set(argument)
        elif argument and asleep == {"kv_cache"}:
            return True
        elif argument and not asleep:
            asleep = {"weights", "kv_cache"}
    return False


def expected(vllm: Any, own: Own, newest: Own, sequence: Sequence) -> Answer:
    """vLLM's outcome, and for these sequences that of a newer one.

    - Up to 0.30 a sleep of an engine whose cache sleeps leaves the weights on the GPU, and answers 200. A
      rotation or trainer counts on their memory.
    - Up to 0.30 a wake of all behind one by tag maps memory twice. Up to 0.26 a wake of the cache from level
      2 copies buffers of the model to where nothing is mapped. Either ends the engine.
    """
    answer = own.answer(sequence)
    if vllm.minor <= 30 and (answer.said == BREAKS or sleeps_twice(sequence)):
        return newest.answer(sequence)
    assert answer.said != BREAKS
    return answer


def refusal(answer: Answer) -> str | None:
    """What ours says instead, as a pattern; None if it answers as well.

    - vLLM has a request wait until someone wakes what sleeps, and no one might. Up to 0.23 any wake has the
      scheduler go on, and a step reads memory that is not mapped.
    - After level 2 vLLM answers from weights that no one wrote.
    - At level 0 it has the request wait as well.
    """
    missing = [] if answer.is_whole or "weights" in answer.asleep else [f"{NOT_WRITTEN}.*"]
    if answer.asleep:
        assert answer.said in (WAITS, FAULTS)
        tags = ", ".join(sorted(answer.asleep))
        return "^" + "; ".join([rf"the engine sleeps \({tags}\): call wake_up", *missing]) + "$"
    if missing:
        assert answer.said in (WAITS, GIBBERISH)
        return f"^{missing[0]}$"
    if answer.said == WAITS:
        return r"^the engine sleeps \(scheduling\): call wake_up"
    assert answer.said == TOKEN
    return None


def drops(sequence: Sequence) -> bool:
    return ("sleep", 2) in sequence


class InTurns:
    """A frontend without asyncio."""

    def __init__(self, frontend: Any, core: Any) -> None:
        self.frontend = frontend
        [self.worker] = core.model_executor.workers
        self.core = core

    def command(self, name: str, argument: Any) -> None:
        getattr(self.frontend, name)(argument)

    def ask(self) -> str:
        self.frontend.add_request("asked", 1, PARAMS)
        [token] = [token for output in self.frontend.step() for token in output.new_token_ids]
        return str(token)

    def write(self) -> None:
        self.frontend.collective_rpc("reload_weights")


class WithAsyncio(InTurns):
    """A server's."""

    loop = asyncio.new_event_loop()

    def command(self, name: str, argument: Any) -> None:
        self.loop.run_until_complete(getattr(self.frontend, name)(argument))

    def ask(self) -> str:
        return self.loop.run_until_complete(self._ask())

    async def _ask(self) -> str:
        asked = asyncio.ensure_future(self._tokens())
        while not asked.done():
            await asyncio.sleep(0)
            if self.core.scheduler.waiting and not is_busy(self.core):
                # As vLLM documents it, level 0 stops nothing but scheduling, and another request may end it.
                assert self.core.is_scheduler_paused()
                assert not self.worker.asleep
                asked.cancel()
                await asyncio.wait({asked})
                raise NotReadyError("the engine sleeps (scheduling): call wake_up")
        return str((await asked)[0])

    async def _tokens(self) -> list[str]:
        outputs = self.frontend.generate(1, PARAMS, "asked")
        return [text async for output in outputs for text in output.new_token_ids]

    def write(self) -> None:
        self.loop.run_until_complete(self.frontend.collective_rpc("reload_weights"))


def inside(vllm: Any) -> InTurns:
    core = vllm.engine("EngineCore")
    return InTurns(in_process(vllm, core), core)


def outside(vllm: Any) -> InTurns:
    core = vllm.engine(count=1)
    return InTurns(synchronous(vllm, EngineProcesses(core)), core)


def served(vllm: Any) -> InTurns:
    core = vllm.engine(count=1)
    return WithAsyncio(asynchronous(vllm, EngineProcesses(core)), core)


def check(ours: InTurns, sequence: Sequence, answer: Answer) -> None:
    for name, argument in sequence:
        before = set(ours.worker.asleep)
        try:
            ours.command(name, argument)
        except PoorwillError as error:
            # vLLM says yes, and does nothing either.
            if "weights" not in before or re.search(ANOTHER_LEVEL, str(error)) is None:
                raise
            assert ours.worker.asleep == before
    assert ours.worker.asleep == answer.asleep, sequence
    says = refusal(answer)
    if says is None:
        assert ours.ask() == TOKEN, sequence
    else:
        with pytest.raises(NotReadyError, match=says):
            ours.ask()
    if drops(sequence):
        ours.command("wake_up", None)
        ours.write()
    else:
        # Nothing was lost.
        ours.command("wake_up", None)
    assert ours.worker.asleep == set()
    assert not ours.worker.unwritten
    assert not ours.core.is_scheduler_paused()


MAKERS: list[Callable[[Any], InTurns]] = [inside, outside, served]


CASES = [
    *((make, length) for make in MAKERS for length in range(3)),
    (inside, 3),
    pytest.param(inside, 4, marks=pytest.mark.long),
]
# There are 16 807 of five.
LONG_CASES = [(outside, 3), (served, 3), (inside, 5)]


@pytest.mark.parametrize(("make", "length"), CASES)
def test_sequences(vllm: Any, own: Own, newest: Own, make: Callable[[Any], InTurns], length: int) -> None:
    for sequence in sequences(length):
        check(make(vllm), sequence, expected(vllm, own, newest, sequence))


@pytest.mark.long
@pytest.mark.parametrize("vllm", RUN, indirect=True)
@pytest.mark.parametrize(("make", "length"), LONG_CASES)
def test_more_sequences(
    vllm: Any, own: Own, newest: Own, make: Callable[[Any], InTurns], length: int
) -> None:
    for sequence in sequences(length):
        check(make(vllm), sequence, expected(vllm, own, newest, sequence))
