"""Data parallel engines behind a sleep at level 2, and servers before them: they go on together, once."""

import asyncio
import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import test_vllm_frontend as frontends
from fake_vllm import VERSIONS
from fake_vllm.clients import HANGS_SECONDS, EngineProcesses, asynchronous
from fake_vllm.engines import PARAMS, Meeting, is_busy
from fake_vllm.worker import WEIGHTS
from poorwill import PoorwillError
from poorwill.vllm import _engine, _engines, _frontend, _together
from poorwill.vllm._engine import NotReadyError
from test_vllm_frontend import NOT_WRITTEN, generate, runs, texts
from vllm_sources import needs_sources

pytest_plugins = ["vllm_cores"]
pytestmark = needs_sources
health_timeout, recorded, no_http = frontends.health_timeout, frontends.recorded, frontends.no_http


@runs
async def test_data_parallel_engines_go_on_together(vllm: Any) -> None:
    """As soon as the last has its weights, though none heard of a call."""
    processes = EngineProcesses(*(vllm.engine("DPEngineCoreProc", 1, index) for index in range(3)))
    frontend = asynchronous(vllm, processes, "DPLBAsyncMPClient")
    await frontend.sleep(2)
    await frontend.wake_up()
    for core in processes.cores:
        with pytest.raises(NotReadyError, match=NOT_WRITTEN):
            await frontend.check_health()
        assert [core.is_scheduler_paused() for core in processes.cores] == [True] * 3
        core.model_executor.workers[0].load_weights(WEIGHTS)
    await frontend.check_health()
    assert [core.is_scheduler_paused() for core in processes.cores] == [False] * 3
    assert [status["is_held"] for status in await _frontend._ask_async(frontend, "poorwill_status")] == [
        False
    ] * 3
    assert await texts(generate(frontend)) == ["token"] * 2


@pytest.mark.parametrize("how", ["an update that fails", "a wake"])
@runs
async def test_a_data_parallel_engine_that_is_whole_waits_for_the_others(vllm: Any, how: str) -> None:
    """vLLM's ranks meet when they go on: one that did so alone would never answer."""
    processes = EngineProcesses(*(vllm.engine("DPEngineCoreProc", 1, index) for index in range(3)))
    frontend = asynchronous(vllm, processes, "DPLBAsyncMPClient")
    ranks = [core.model_executor.workers[0] for core in processes.cores]
    await frontend.sleep(2)
    if how == "a wake":
        await frontend.wake_up(["weights"])
        for rank in ranks[:2]:
            rank.load_weights(WEIGHTS)
        await frontend.wake_up(["kv_cache"])
    else:
        await frontend.wake_up()
        ranks[2].fails["reload_weights"] = [PoorwillError("the trainer is gone")]
        with pytest.raises(PoorwillError, match="the trainer is gone"):
            await frontend.collective_rpc("reload_weights")
    assert [core.is_scheduler_paused() for core in processes.cores] == [True] * 3
    with pytest.raises(NotReadyError, match=NOT_WRITTEN):
        await frontend.check_health()
    await frontend.collective_rpc("reload_weights")
    assert [core.is_scheduler_paused() for core in processes.cores] == [False] * 3
    assert await texts(generate(frontend)) == ["token"] * 2
    # So it is where all are whole before the wake.
    await frontend.sleep(2)
    await frontend.wake_up(["weights"])
    await frontend.collective_rpc("reload_weights")
    await frontend.wake_up(["kv_cache"])
    assert [core.is_scheduler_paused() for core in processes.cores] == [False] * 3


def fleet(vllm: Any, servers: int = 2) -> list[Any]:
    """Several processes of one server in front of three data parallel engines."""
    processes = EngineProcesses(*(vllm.engine("DPEngineCoreProc", 1, index) for index in range(3)))
    return [asynchronous(vllm, processes, "DPLBAsyncMPClient", index, servers) for index in range(servers)]


def paused(frontend: Any) -> list[bool]:
    return [core.is_scheduler_paused() for core in frontend.processes.cores]


@runs
async def test_data_parallel_engines_resume_whichever_frontend_had_them_written(vllm: Any) -> None:
    """By a server that knows of no sleep, and by an unknown method."""
    first, second = fleet(vllm)
    await first.sleep(2)
    await first.wake_up()
    await second.collective_rpc("extension")
    assert paused(first) == [False] * 3
    assert await texts(generate(second)) == ["token"] * 2


@runs
async def test_data_parallel_engines_meet_once(vllm: Any) -> None:
    """However many servers find out that all are ready."""
    first, second = fleet(vllm)
    await first.sleep(2)
    await first.wake_up()
    for core in first.processes.cores:
        core.model_executor.workers[0].load_weights(WEIGHTS)
    resumed = []
    for core in first.processes.cores:
        assert callable(vars(core)["_poorwill"]._resume)
        vars(core)["_poorwill"]._resume = lambda: resumed.append(1)
    for frontend in (first, second, first):
        watch = _frontend.watch_of(frontend)
        assert watch is not None
        await _frontend.look_at_engines(frontend, watch)
        await _frontend._ask_async(frontend, "poorwill_go_on")
    assert len(resumed) == 3


@pytest.mark.parametrize("how", ["wake", "resume"])
@runs
async def test_one_data_parallel_engine_that_is_not_ready_keeps_all(vllm: Any, how: str) -> None:
    [frontend] = fleet(vllm, 1)
    await frontend.sleep(2)
    await frontend.wake_up()
    for core in frontend.processes.cores[1:]:
        core.model_executor.workers[0].load_weights(WEIGHTS)
    if how == "wake":
        await frontend.wake_up()
    else:
        with pytest.raises(NotReadyError, match=f"resume: {NOT_WRITTEN}"):
            await frontend.resume_generation()
    assert paused(frontend) == [True] * 3
    frontend.processes.cores[0].model_executor.workers[0].load_weights(WEIGHTS)
    await frontend.check_health()
    assert paused(frontend) == [False] * 3


@runs
async def test_a_health_check_queries_a_stale_state(vllm: Any) -> None:
    [frontend] = fleet(vllm, 1)
    await frontend.sleep(2)
    await frontend.wake_up()
    for core in frontend.processes.cores:
        core.model_executor.workers[0].load_weights(WEIGHTS)
        vars(core)["_poorwill"].look()
    frontend._poorwill.know(None)
    frontend._poorwill.invalidate()
    await frontend.check_health()
    assert paused(frontend) == [False] * 3


# Together

BOTH = {"weights", "kv_cache"}


@pytest.fixture
def shared_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("POORWILL_RANKS_FOLDER", str(tmp_path))
    return tmp_path


def decisions(folder: Path) -> list[Path]:
    """Those that were not removed, and whatever else was left."""
    return list(folder.iterdir())


def group_of(vllm: Any, kind: str) -> Any:
    """Two engines of two ranks each behind one server."""
    processes = EngineProcesses(*(vllm.engine(kind, 2, index) for index in range(2)))
    if kind == "DPEngineCoreProc":
        Meeting(processes.cores)
    return asynchronous(vllm, processes, "DPLBAsyncMPClient")


def ranks_of(frontend: Any) -> list[Any]:
    return [worker for core in frontend.processes.cores for worker in core.model_executor.workers]


def asleep(frontend: Any) -> list[set[str]]:
    return [set(rank.asleep) for rank in ranks_of(frontend)]


async def serves(frontend: Any) -> bool:
    groups = [vars(core).get("dp_group") for core in frontend.processes.cores]
    for core in frontend.processes.cores:
        # No coordinator has the others step.
        core.dp_group = groups[0] and object()
    served = await texts(generate(frontend))
    while any(map(is_busy, frontend.processes.cores)):
        await asyncio.sleep(0.001)
    for core, group in zip(frontend.processes.cores, groups, strict=True):
        core.dp_group = group
    return paused(frontend) == [False] * 2 and served == ["token"] * 2


# Data parallel engines of 0.20 do not agree on a pause, which has a test of its own.
KINDS = pytest.mark.parametrize(
    ("vllm", "kind"),
    [
        (version, kind)
        for kind in ("DPEngineCoreProc", "EngineCoreProc")
        for version in VERSIONS
        if kind == "EngineCoreProc" or not version.startswith("0.20.")
    ],
    indirect=["vllm"],
)
"""Those of a model with experts, and those of others, which do not meet in each step."""


@KINDS
@runs
async def test_several_engines_sleep_and_wake_together(vllm: Any, kind: str, shared_folder: Path) -> None:
    frontend = group_of(vllm, kind)
    for _ in range(2):
        await frontend.sleep(1)
        assert asleep(frontend) == [BOTH] * 4
        assert decisions(shared_folder) == []
        await frontend.wake_up()
        assert asleep(frontend) == [set()] * 4
        assert await serves(frontend)


def test_a_sleep_of_vllms_core_is_a_pause_and_the_executors_sleep(vllm: Any) -> None:
    """Engines that sleep together do the two one after the other."""
    stock = vllm.core.EngineCore.sleep.__wrapped__
    assert set(stock.__code__.co_names) - {"Any", "logger", "info"} == {
        *("pause_scheduler", "model_executor", "sleep", "Future", "add_done_callback")
    }


@runs
async def test_a_pause_of_the_user_stays_behind_a_sleep_that_failed(vllm: Any) -> None:
    frontend = group_of(vllm, "EngineCoreProc")
    await frontend.sleep(0)
    await frontend.resume_generation()
    await frontend.pause_generation()
    ranks_of(frontend)[0].fails["sleep"] = [PoorwillError("no host memory")]
    with pytest.raises(PoorwillError, match="no host memory"):
        await frontend.sleep(1)
    assert paused(frontend) == [True] * 2
    await frontend.resume_generation()
    assert await serves(frontend)


@pytest.mark.parametrize("rank", [0, 3])
@KINDS
@runs
async def test_a_rank_that_cannot_sleep_keeps_all_engines_awake(
    vllm: Any, kind: str, rank: int, shared_folder: Path
) -> None:
    frontend = group_of(vllm, kind)
    ranks_of(frontend)[rank].fails["sleep"] = [PoorwillError("no host memory")]
    said = rf"sleep: 1 of 2 engines failed: engine {rank // 2}: .*rank {rank % 2}: no host memory"
    with pytest.raises(PoorwillError, match=said):
        await frontend.sleep(1)
    assert [each.calls.count("sleep") for each in ranks_of(frontend)] == [0] * 4
    assert await serves(frontend)
    assert decisions(shared_folder) == []
    await frontend.sleep(1)
    assert asleep(frontend) == [BOTH] * 4


@pytest.mark.parametrize("rank", [0, 3])
@KINDS
@runs
async def test_a_sleep_that_fails_behind_the_commit_is_taken_back(vllm: Any, kind: str, rank: int) -> None:
    frontend = group_of(vllm, kind)
    ranks_of(frontend)[rank].fails["decided"] = [PoorwillError("not released")]
    with pytest.raises(PoorwillError, match=r"not released.*; .*all ranks are awake again"):
        await frontend.sleep(1)
    assert asleep(frontend) == [set()] * 4
    assert await serves(frontend)


@KINDS
@runs
async def test_a_rank_that_cannot_wake_leaves_all_engines_asleep(vllm: Any, kind: str) -> None:
    frontend = group_of(vllm, kind)
    await frontend.sleep(1)
    ranks_of(frontend)[3].fails["wake_up"] = [PoorwillError("the card is full")]
    with pytest.raises(PoorwillError, match=r"wake_up: 1 of 2 engines failed: engine 1: .*the card is full"):
        await frontend.wake_up()
    assert asleep(frontend) == [BOTH] * 4
    await frontend.wake_up()
    assert await serves(frontend)


@KINDS
@runs
async def test_a_wake_that_fails_behind_the_commit_has_to_be_repeated(vllm: Any, kind: str) -> None:
    """The engine counts as asleep. A sleep that did nothing would leave the memory on the GPU."""
    frontend = group_of(vllm, kind)
    await frontend.sleep(1)
    ranks_of(frontend)[0].fails["decided"] = [PoorwillError("a fault")]
    with pytest.raises(PoorwillError, match=r"engine 0: .*a fault; kv_cache, weights count as asleep"):
        await frontend.wake_up()
    assert asleep(frontend) == [set()] * 4
    with pytest.raises(PoorwillError, match="engine 0: sleep: the last wake_up failed once memory was awake"):
        await frontend.sleep(1)
    await frontend.wake_up()
    assert await serves(frontend)
    await frontend.sleep(1)
    assert asleep(frontend) == [BOTH] * 4


@KINDS
@runs
async def test_an_engine_that_refuses_leaves_the_others_alone(vllm: Any, kind: str) -> None:
    """None of them has paused."""
    frontend = group_of(vllm, kind)
    vars(_engine._engine_of(frontend.processes.cores[1]))["has_to_sleep"] = lambda level: _refuse()
    for core in frontend.processes.cores:
        core.pause_scheduler = None
    with pytest.raises(PoorwillError, match="sleep: 1 of 2 engines failed: engine 1: not now"):
        await frontend.sleep(1)
    assert asleep(frontend) == [set()] * 4
    assert await serves(frontend)


def _refuse() -> None:
    raise PoorwillError("not now")


@KINDS
@runs
async def test_an_engine_that_sleeps_already_does_not_hold_the_others(vllm: Any, kind: str) -> None:
    """It takes no part in a pause, for which the others would wait."""
    frontend = group_of(vllm, kind)
    ranks_of(frontend)[2].fails["decided"] = [PoorwillError("not released")]
    ranks_of(frontend)[0].fails["wake_up"] = [PoorwillError("the card is full")]
    said = r"engine 1: .*not released; engine 0: .*not be woken again .*the card is full.*; engine 1: all"
    with pytest.raises(PoorwillError, match=said):
        await frontend.sleep(1)
    assert asleep(frontend) == [BOTH] * 2 + [set()] * 2
    await frontend.sleep(1)
    assert asleep(frontend) == [BOTH] * 4
    await frontend.wake_up()
    assert await serves(frontend)


@KINDS
@runs
async def test_ranks_that_wake_together_go_back_together(vllm: Any, kind: str) -> None:
    """Those whose communicators are suspended."""
    frontend = group_of(vllm, kind)
    together = threading.Barrier(4, timeout=HANGS_SECONDS)
    for rank in ranks_of(frontend):
        rank.meets = together.wait
    ranks_of(frontend)[0].fails["decided"] = [PoorwillError("not released")]
    with pytest.raises(PoorwillError, match="not released"):
        await frontend.sleep(1)
    assert asleep(frontend) == [set()] * 4
    assert await serves(frontend)


class Drain:
    """A request of the first engine, which goes on until it is to end."""

    def __init__(self, frontend: Any) -> None:
        self._core = frontend.processes.cores[0]
        self._texts = asyncio.ensure_future(texts(frontend.generate(1 << 40, PARAMS, "long")))

    async def begun(self) -> "Drain":
        while not self._core.scheduler.running:
            await asyncio.sleep(0.001)
        return self

    async def sleeping(self, frontend: Any) -> "asyncio.Future[Any]":
        """A sleep that waits for it. All engines have paused."""
        sleeping: asyncio.Future[Any] = asyncio.ensure_future(frontend.sleep(1, "wait"))
        while not all(paused(frontend)):
            await asyncio.sleep(0.001)
        return sleeping

    def give_up(self) -> None:
        self._texts.cancel()

    async def end(self) -> None:
        while not self._texts.done():
            for request in self._core.scheduler.running:
                request.steps = min(request.steps, 5)
            await asyncio.sleep(0.001)


def draining_group(vllm: Any, kind: str) -> Any:
    """The same behind one of two servers. Other engines are taken to be as far as each one."""
    processes = EngineProcesses(*(vllm.engine(kind, 2, index) for index in range(2)))
    return asynchronous(vllm, processes, "DPLBAsyncMPClient", 0, 2)


@KINDS
@runs
async def test_an_engine_answers_while_another_finishes_its_requests(vllm: Any, kind: str) -> None:
    """So a decision does not expire meanwhile."""
    frontend = draining_group(vllm, kind)
    drain = await Drain(frontend).begun()
    sleeping = await drain.sleeping(frontend)
    engines = frontend.engine_core.core_engines
    await _frontend._ask_async(frontend, "poorwill_status", engines=engines[1:])
    assert not sleeping.done()
    await drain.end()
    await sleeping
    assert asleep(frontend) == [BOTH] * 4
    await frontend.wake_up()
    assert await serves(frontend)


@pytest.mark.parametrize("server", [0, 1])
@KINDS
@runs
async def test_a_wake_while_requests_finish(vllm: Any, kind: str, server: int) -> None:
    """It calls the sleep off; where engines agree on pauses it waits for it."""
    frontend = draining_group(vllm, kind)
    second = asynchronous(vllm, frontend.processes, "DPLBAsyncMPClient", 1, 2)
    drain = await Drain(frontend).begun()
    sleeping = await drain.sleeping(frontend)
    waking = asyncio.ensure_future((frontend, second)[server].wake_up())
    if kind == "EngineCoreProc":
        await waking
        assert paused(frontend) == [False] * 2
        await drain.end()
        with pytest.raises(PoorwillError, match="given up, because the engine was resumed"):
            await sleeping
    else:
        await drain.end()
        await sleeping
        await waking
    assert asleep(frontend) == [set()] * 4
    assert await serves(frontend)


@pytest.mark.parametrize("server", [0, 1])
@KINDS
@runs
async def test_a_resumption_while_requests_finish(vllm: Any, kind: str, server: int) -> None:
    """It does as a wake. Where it waits for the sleep, it hears that the engines sleep."""
    frontend = draining_group(vllm, kind)
    second = asynchronous(vllm, frontend.processes, "DPLBAsyncMPClient", 1, 2)
    drain = await Drain(frontend).begun()
    sleeping = await drain.sleeping(frontend)
    resuming = asyncio.ensure_future((frontend, second)[server].resume_generation())
    if kind == "EngineCoreProc":
        await resuming
        assert paused(frontend) == [False] * 2
        await drain.end()
        with pytest.raises(PoorwillError, match="given up, because the engine was resumed"):
            await sleeping
    else:
        await asyncio.wait({resuming}, timeout=0)
        await drain.end()
        await sleeping
        with pytest.raises(PoorwillError, match=r"resume: the engine sleeps .*: call wake_up"):
            await resuming
        assert asleep(frontend) == [BOTH] * 4
        await second.wake_up()
    assert asleep(frontend) == [set()] * 4
    assert await serves(frontend)


@KINDS
@runs
async def test_a_resumption_goes_on_without_its_caller(vllm: Any, kind: str) -> None:
    """So its turn lasts until all engines have resumed."""
    frontend = group_of(vllm, kind)
    second = asynchronous(vllm, frontend.processes, "DPLBAsyncMPClient", 1, 2)
    await frontend.sleep(0)
    async with frontend._poorwill.engines.turn(frontend.engine_core):
        resuming = asyncio.ensure_future(second.resume_generation())
        while not (under_way(second) or resuming.done()):
            await asyncio.sleep(0)
        resuming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await resuming
        assert paused(frontend) == [True] * 2
        [carried] = under_way(second)
    await carried
    assert await serves(frontend)


def under_way(frontend: Any) -> set[Any]:
    watch = _frontend.watch_of(frontend)
    assert watch is not None
    return watch.engines._under_way


@pytest.mark.parametrize("sleeps", [True, False])
@runs
async def test_engines_whose_weights_are_there_go_on_in_turn(
    vllm: Any, sleeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some would go on and others would sleep. What happens before the turn counts."""
    first, second = fleet(vllm)
    await first.sleep(2)
    await first.wake_up()
    is_waiting = asyncio.Event()
    stock = _engines._is_taken

    def is_taken(*args: Any) -> bool:
        is_waiting.set()
        return stock(*args)

    async with first._poorwill.engines.turn(first.engine_core):
        monkeypatch.setattr(_engines, "_is_taken", is_taken)
        writing = asyncio.ensure_future(second.collective_rpc("extension"))
        while not (is_waiting.is_set() or writing.done()):
            await asyncio.sleep(0.001)
        assert paused(first) == [True] * 3
        if sleeps:
            await _frontend._ask_async(first, "sleep", 1, "abort")
    await writing
    assert asleep(first) == [BOTH if sleeps else set()] * 3
    assert paused(first) == [sleeps] * 3
    await first.wake_up()
    assert await texts(generate(second)) == ["token"] * 2


@runs
async def test_a_sleep_that_was_called_off_does_not_begin_at_another_pause(vllm: Any) -> None:
    frontend = draining_group(vllm, "EngineCoreProc")
    drain = await Drain(frontend).begun()
    sleeping = await drain.sleeping(frontend)
    await frontend.wake_up()
    # Through its own loop, which may not have ended its turn.
    await _frontend._ask_async(frontend, "pause_scheduler", "abort", False)
    await drain.end()
    with pytest.raises(PoorwillError, match="given up, because the engine was resumed"):
        await sleeping
    assert asleep(frontend) == [set()] * 4


@pytest.mark.parametrize("fails", [False, True])
@KINDS
@runs
async def test_a_sleep_goes_on_without_its_caller(
    vllm: Any, kind: str, fails: bool, shared_folder: Path
) -> None:
    frontend = draining_group(vllm, kind)
    drain = await Drain(frontend).begun()
    sleeping = await drain.sleeping(frontend)
    sleeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeping
    if fails:
        ranks_of(frontend)[3].fails["decided"] = [PoorwillError("not released")]
    [carried] = frontend._poorwill.engines._under_way
    await drain.end()
    await asyncio.wait({carried})
    assert isinstance(carried.exception(), PoorwillError) == fails
    assert asleep(frontend) == [set() if fails else BOTH] * 4
    assert decisions(shared_folder) == []
    await frontend.wake_up()
    assert await serves(frontend)


@KINDS
@runs
async def test_a_sleep_ends_with_an_engine(vllm: Any, kind: str) -> None:
    """And so does its turn."""
    frontend = draining_group(vllm, kind)
    drain = await Drain(frontend).begun()
    sleeping = await drain.sleeping(frontend)
    waking = asyncio.ensure_future(frontend.wake_up()) if kind == "DPEngineCoreProc" else None
    frontend.processes.die()
    frontend.processes.cores[0].scheduler.running.clear()
    for each in filter(None, (sleeping, waking)):
        with pytest.raises(vllm.async_llm.EngineDeadError):
            await each
    assert not frontend._poorwill.engines._under_way
    async with frontend._poorwill.engines.turn(frontend.engine_core):
        drain.give_up()


@runs
async def test_engines_that_come_or_go_call_a_sleep_off(vllm: Any, shared_folder: Path) -> None:
    frontend = draining_group(vllm, "EngineCoreProc")
    client = frontend.engine_core
    drain = await Drain(frontend).begun()
    sleeping = await drain.sleeping(frontend)
    gone = client.core_engines.pop()
    await drain.end()
    with pytest.raises(PoorwillError, match="sleep: engines came or went meanwhile; call it again"):
        await sleeping
    client.core_engines.append(gone)
    assert asleep(frontend) == [set()] * 4
    assert decisions(shared_folder) == []
    assert await serves(frontend)
    # Engines that are new are asked for their ranks.
    await frontend.sleep(1)
    await frontend.wake_up()
    client.core_engines = [gone, *client.core_engines[:1]]
    await frontend.sleep(1)
    assert asleep(frontend) == [BOTH] * 4


@KINDS
@runs
async def test_a_turn_that_cannot_be_taken_leaves_all_as_it_is(
    vllm: Any, kind: str, shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend = group_of(vllm, kind)

    def bind(*_: object) -> None:
        raise PermissionError(errno.EPERM, "not here")

    with monkeypatch.context() as patch:
        patch.setattr(_engines, "_bind", bind)
        with pytest.raises(PoorwillError, match=r"waiting for other servers of engine process .*not here"):
            await frontend.sleep(1)
    assert decisions(shared_folder) == []
    assert await serves(frontend)


@pytest.mark.parametrize("what", ["an engine", "a rank"])
@KINDS
@runs
async def test_a_decision_stays_for_those_that_have_not_answered(
    vllm: Any, kind: str, what: str, shared_folder: Path
) -> None:
    """They may still look for the verdict."""
    frontend = group_of(vllm, kind)
    await frontend.sleep(1)
    await frontend.wake_up()
    engine = _engine._engine_of(frontend.processes.cores[1])
    assert engine is not None
    if what == "an engine":
        vars(engine.part)["act"] = lambda *_: _refuse()
    else:
        stock = engine._stock_rpc

        def rpc(method: Any, timeout: Any, args: Any, *rest: Any, **options: Any) -> Any:
            if args and args[0] == "poorwill_together" and args[1][0] == "sleep":
                raise TimeoutError("no answer")
            return stock(method, timeout, args, *rest, **options)

        engine._stock_rpc = rpc
    with pytest.raises(PoorwillError, match=r"engine 1: .*(not now|no answer)"):
        await frontend.sleep(1)
    [decision] = decisions(shared_folder)
    assert (decision / "undo").exists()
    assert asleep(frontend) == [set()] * 4
    assert await serves(frontend)


@runs
async def test_a_wake_by_another_server_calls_off_a_sleep_of_one_engine(vllm: Any) -> None:
    processes = EngineProcesses(vllm.engine(count=2))
    first, second = (asynchronous(vllm, processes, index=index, count=2) for index in range(2))
    processes.is_by_hand = True
    drain = Drain(first)
    turning = asyncio.ensure_future(turn_by_hand(processes))
    sleeping = await (await drain.begun()).sleeping(first)
    await second.wake_up()
    assert paused(first) == [False]
    await drain.end()
    with pytest.raises(PoorwillError, match="sleep: given up, because the engine was resumed"):
        await sleeping
    await first.sleep(1)
    assert asleep(second) == [BOTH] * 2
    await second.wake_up()
    turning.cancel()
    assert asleep(second) == [set()] * 2


async def turn_by_hand(processes: EngineProcesses) -> None:
    while True:
        processes.turn()
        await asyncio.sleep(0.001)


@KINDS
@runs
async def test_servers_that_act_at_once_take_turns(vllm: Any, kind: str) -> None:
    """Engines that began in different orders would wait for each other."""
    frontend = group_of(vllm, kind)
    second = asynchronous(vllm, frontend.processes, "DPLBAsyncMPClient", 1, 2)
    for number, server in enumerate((frontend, second)):
        reach_late(server.engine_core, server.engine_core.core_engines[1 - number])
    for _ in range(2):
        await asyncio.gather(frontend.sleep(1), second.sleep(1))
        assert asleep(frontend) == [BOTH] * 4
        await asyncio.gather(second.wake_up(), frontend.wake_up())
        assert await serves(frontend)


def reach_late(client: Any, late: Any) -> None:
    """Has what the client asks of one engine come after what it asks of the others."""
    stock = client._call_utility_async

    async def call(method: str, *args: Any, engine: Any) -> Any:
        if engine == late:
            await asyncio.sleep(0.02)
        return await stock(method, *args, engine=engine)

    client._call_utility_async = call


class Watched:
    """A decision whose files are on a network, so that no call of it may hold up the loop."""

    def __init__(self, decision: Any, called: list[tuple[str, bool]]) -> None:
        self.path, self.called, self._decision = decision.path, called, decision

    def decide(self, verdict: str) -> Any:
        self._note("decide")
        return self._decision.decide(verdict)

    def remove(self) -> None:
        self._note("remove")
        self._decision.remove()

    def _note(self, call: str) -> None:
        self.called.append((call, is_beside_the_loop()))


def is_beside_the_loop() -> bool:
    return threading.current_thread() is not threading.main_thread()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The calls of decisions, and whether they were beside the loop."""
    called: list[tuple[str, bool]] = []
    stock = _together.open_decision
    monkeypatch.setattr(_engines, "open_decision", lambda what: Watched(stock(what), called))
    return called


@pytest.mark.parametrize("what", ["all", "a rank elsewhere", "an engine"])
@KINDS
@runs
async def test_files_of_a_decision_do_not_hold_up_a_server(
    vllm: Any, kind: str, what: str, shared_folder: Path, watched: list[tuple[str, bool]]
) -> None:
    frontend = group_of(vllm, kind)
    if what == "an engine":
        engine = _engine._engine_of(frontend.processes.cores[1])
        assert engine is not None
        vars(engine.part)["act"] = lambda *_: _refuse()
        with pytest.raises(PoorwillError, match=r"engine 1: .*not now"):
            await frontend.sleep(1)
    else:
        ranks_of(frontend)[2].reaches = what == "all"
        await frontend.sleep(1)
        await frontend.wake_up()
        assert decisions(shared_folder) == []
    assert watched == ([("decide", True)] if what == "an engine" else [("remove", True)] * 2)
    assert await serves(frontend)


@pytest.mark.parametrize("call", ["open_decision", "remove"])
@KINDS
@runs
async def test_a_sleep_that_ends_with_an_engine_leaves_no_decision(
    vllm: Any, kind: str, call: str, shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are under way then, and no caller waits for their outcome."""
    frontend = group_of(vllm, kind)
    has_begun, may_end, has_ended = (threading.Event() for _ in range(3))
    stock = getattr(_engines, call)

    def slow(*args: Any) -> Any:
        has_begun.set()
        try:
            assert is_beside_the_loop()
            assert may_end.wait(HANGS_SECONDS)
            return stock(*args)
        finally:
            has_ended.set()

    monkeypatch.setattr(_engines, call, slow)
    monkeypatch.setattr(_engines.Operation, "__aexit__", releasing(_engines.Operation.__aexit__, may_end))
    sleeping = asyncio.ensure_future(frontend.sleep(1))
    await asyncio.to_thread(has_begun.wait, HANGS_SECONDS)
    frontend.processes.die()
    with pytest.raises(vllm.async_llm.EngineDeadError):
        await sleeping
    assert not frontend._poorwill.engines._under_way
    await asyncio.to_thread(has_ended.wait, HANGS_SECONDS)
    assert decisions(shared_folder) == []


def releasing(stock: Any, event: threading.Event) -> Any:
    """Sets an event once a call of a coroutine waits."""

    async def call(*args: Any) -> Any:
        asyncio.get_running_loop().call_soon(event.set)
        return await stock(*args)

    return call


@KINDS
@runs
async def test_engines_that_share_no_folder_act_by_themselves(
    vllm: Any, kind: str, caplog: pytest.LogCaptureFixture, shared_folder: Path
) -> None:
    frontend = group_of(vllm, kind)
    ranks_of(frontend)[2].reaches = False
    await frontend.sleep(1)
    assert "one engine may sleep while another cannot: engine 1 does not reach" in caplog.text
    assert asleep(frontend) == [BOTH] * 4
    await frontend.wake_up()
    assert await serves(frontend)
    assert decisions(shared_folder) == []


@runs
async def test_engines_without_an_agreed_pause_act_by_themselves(
    vllm: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, shared_folder: Path
) -> None:
    monkeypatch.setattr(type(vllm.generation), "pauses_together", False)
    processes = EngineProcesses(*(vllm.engine("DPEngineCoreProc", 2, index) for index in range(2)))
    frontend = asynchronous(vllm, processes, "DPLBAsyncMPClient")
    answers = await _frontend._ask_async(frontend, "poorwill_part", "reached", ["/anywhere"])
    assert answers == [[], []]
    await frontend.sleep(1)
    assert asleep(frontend) == [BOTH] * 4
    # They would reach any folder.
    assert (
        "one engine may sleep while another cannot: this vLLM has engines of a model with experts pause each "
        "by itself; vLLM 0.21 and later have them pause together"
    ) in caplog.text
    assert "folder" not in caplog.text
    assert str(shared_folder) not in caplog.text
    assert decisions(shared_folder) == []
