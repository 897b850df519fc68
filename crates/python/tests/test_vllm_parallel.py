"""Data parallel engines behind a sleep at level 2, and servers before them: they go on together, once."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import test_vllm_frontend as frontends
from fake_vllm import VERSIONS
from fake_vllm.clients import EngineProcesses, asynchronous
from fake_vllm.worker import WEIGHTS
from poorwill import PoorwillError
from poorwill.vllm import _engine, _frontend
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
    """Those that were not removed, without the lock of the servers."""
    return [path for path in folder.iterdir() if path.suffix != ".lock"]


def group_of(vllm: Any, kind: str) -> Any:
    """Two engines of two ranks each behind one server."""
    processes = EngineProcesses(*(vllm.engine(kind, 2, index) for index in range(2)))
    return asynchronous(vllm, processes, "DPLBAsyncMPClient")


def ranks_of(frontend: Any) -> list[Any]:
    return [worker for core in frontend.processes.cores for worker in core.model_executor.workers]


def asleep(frontend: Any) -> list[set[str]]:
    return [set(rank.asleep) for rank in ranks_of(frontend)]


async def serves(frontend: Any) -> bool:
    return paused(frontend) == [False] * 2 and await texts(generate(frontend)) == ["token"] * 2


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
    with pytest.raises(PoorwillError, match=r"not released.*; the others: their sleep is taken back"):
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
async def test_an_engine_that_refuses_lets_the_others_go_at_once(vllm: Any, kind: str) -> None:
    """It asks none of its ranks."""
    frontend = group_of(vllm, kind)
    vars(_engine._engine_of(frontend.processes.cores[1]))["_has_to_sleep"] = lambda level: _refuse()
    with pytest.raises(PoorwillError, match="engine 1: not now"):
        await frontend.sleep(1)
    assert asleep(frontend) == [set()] * 4


def _refuse() -> None:
    raise PoorwillError("not now")


@KINDS
@runs
async def test_an_engine_that_sleeps_already_does_not_hold_the_others(vllm: Any, kind: str) -> None:
    frontend = group_of(vllm, kind)
    await frontend.sleep(1)
    await _frontend._ask_async(frontend, "wake_up", None, engines=frontend.engine_core.core_engines[:1])
    await frontend.sleep(1)
    assert asleep(frontend) == [BOTH] * 4


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
    vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(vllm.generation), "pauses_together", False)
    processes = EngineProcesses(*(vllm.engine("DPEngineCoreProc", 2, index) for index in range(2)))
    frontend = asynchronous(vllm, processes, "DPLBAsyncMPClient")
    answers = await _frontend._ask_async(frontend, "poorwill_reached", "/anywhere")
    assert [answer["ranks"] for answer in answers] == [[], []]
    await frontend.sleep(1)
    assert asleep(frontend) == [BOTH] * 4
