"""Data parallel engines behind a sleep at level 2, and servers before them: they go on together, once."""

from typing import Any

import pytest
import test_vllm_frontend as frontends
from fake_vllm.clients import EngineProcesses, asynchronous
from fake_vllm.worker import WEIGHTS
from poorwill import PoorwillError
from poorwill.vllm import _frontend
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
