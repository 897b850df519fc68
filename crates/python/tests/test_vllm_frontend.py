"""The hooks on AsyncLLM and LLMEngine, over engines that have theirs: vLLM's versions, all clients."""

import asyncio
import functools
import inspect
import re
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fake_vllm.clients import HANGS_SECONDS, EngineProcesses, asynchronous, in_process, synchronous
from fake_vllm.engines import PARAMS, make_config
from fake_vllm.worker import WEIGHTS
from poorwill import PoorwillError
from poorwill.vllm import _frontend, _liveness, _metrics
from poorwill.vllm._engine import NotReadyError
from vllm_sources import needs_sources

ASLEEP = "the engine sleeps (kv_cache, weights): call wake_up"
NOT_WRITTEN = "the weights were dropped by a level 2 sleep and have not been written again since"

pytest_plugins = ["vllm_cores"]
pytestmark = needs_sources
since_registry = pytest.mark.parametrize("vllm", ["0.33.0"], indirect=True)


class HTTPException(Exception):
    """FastAPI's."""

    def __init__(self, status_code: int, detail: Any = None, headers: Any = None) -> None:
        self.status_code, self.detail, self.headers = status_code, detail, headers

    def __str__(self) -> str:
        return f"{self.status_code}: {self.detail}"


@pytest.fixture(autouse=True)
def health_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine here is busy unless a test says so."""
    monkeypatch.setattr(_frontend, "_HEALTH_TIMEOUT_SECONDS", HANGS_SECONDS)
    monkeypatch.setattr(_liveness, "_POLL_SECONDS", 0.01)


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the metrics get: engine, rank, operation, error."""
    reported: list[dict[str, Any]] = []
    monkeypatch.setattr(_metrics, "record", reported.extend)
    return reported


@pytest.fixture
def http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", SimpleNamespace(HTTPException=HTTPException))


@pytest.fixture(autouse=True)
def no_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fastapi", raising=False)


def operations(recorded: list[dict[str, Any]]) -> list[str]:
    return [event["operation"] for status in recorded for rank in status["ranks"] for event in rank["events"]]


def worker(frontend: Any) -> Any:
    """The first engine's last rank."""
    client = frontend.engine_core
    core = client.engine_core if hasattr(client, "engine_core") else frontend.processes.cores[0]
    return core.model_executor.workers[-1]


def alone(vllm: Any) -> Any:
    """A server with one process in front of its engine."""
    return asynchronous(vllm, EngineProcesses(vllm.engine(count=1)))


def refused_by_core(vllm: Any) -> type[Exception]:
    """What a server that knows of no sleep hears; before 0.33 it asks for the reason."""
    error: type[Exception] = vllm.async_llm.GenerationError if vllm.minor >= 33 else NotReadyError
    return error


def pair(vllm: Any) -> tuple[Any, Any]:
    """Two processes of one server in front of the same engine."""
    processes = EngineProcesses(vllm.engine(count=1))
    return asynchronous(vllm, processes, index=0, count=2), asynchronous(vllm, processes, index=1, count=2)


async def texts(outputs: Any) -> list[str]:
    return [text async for output in outputs for text in output.new_token_ids]


def generate(frontend: Any, request_id: str = "asked") -> Any:
    return frontend.generate(2, PARAMS, request_id)


def encode(frontend: Any, request_id: str = "asked") -> Any:
    return frontend.encode(2, PARAMS, request_id)


REQUESTS: list[Callable[..., Any]] = [generate, encode]


# With asyncio


def runs(test: Callable[..., Any]) -> Callable[..., None]:
    """A test that is a coroutine."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@pytest.mark.parametrize("request_", REQUESTS)
@runs
async def test_requests_before_during_and_after_a_sleep_of_level_1(
    vllm: Any, request_: Any, http: None, recorded: list[dict[str, Any]]
) -> None:
    frontend = alone(vllm)
    assert await texts(request_(frontend, "a")) == ["token"] * 2
    await frontend.sleep(1)
    assert await frontend.is_sleeping()
    await frontend.check_health()
    with pytest.raises(HTTPException) as refused:
        # Before anything is iterated, so that a stream has not begun.
        request_(frontend, "b")
    assert (refused.value.status_code, refused.value.detail) == (503, ASLEEP)
    assert await frontend.wake_up() is (True if vllm.minor >= 32 else None)
    assert await texts(request_(frontend, "c")) == ["token"] * 2
    assert frontend.sleep_states == [(1, 1), (0, 0)]
    await frontend.check_health()
    assert operations(recorded) == ["sleep", "wake"]


@pytest.mark.parametrize("request_", REQUESTS)
@runs
async def test_requests_are_refused_until_the_weights_are_written(
    vllm: Any, request_: Any, http: None
) -> None:
    frontend = alone(vllm)
    await frontend.sleep(2)
    await frontend.wake_up()
    with pytest.raises(HTTPException) as refused:
        # Before anything is iterated, so that a stream has not begun.
        request_(frontend)
    assert refused.value.status_code == 503
    assert refused.value.detail.startswith(NOT_WRITTEN)
    assert str(refused.value) == refused.value.detail
    assert isinstance(refused.value, NotReadyError)
    with pytest.raises(HTTPException, match=NOT_WRITTEN):
        await frontend.check_health()
    assert await frontend.collective_rpc("reload_weights") == ["reloaded"]
    await frontend.check_health()
    assert await texts(request_(frontend)) == ["token"] * 2


@pytest.mark.parametrize("operation", ["sleep", "wake"])
@pytest.mark.parametrize("servers", [1, 2])
@runs
async def test_a_request_waits_for_the_operation_that_is_in_progress(
    vllm: Any, operation: str, servers: int
) -> None:
    frontend = alone(vllm) if servers == 1 else pair(vllm)[0]
    await frontend.sleep(1)
    if operation == "sleep":
        await frontend.wake_up()
    processes = frontend.processes
    processes.is_by_hand = True
    changing = asyncio.ensure_future(OPERATIONS[operation](frontend))
    while not frontend.engine_core.utility_results:
        await asyncio.sleep(0)
    asked = asyncio.ensure_future(texts(generate(frontend)))
    await asyncio.sleep(0)
    assert not asked.done()
    processes.is_by_hand = False
    while not changing.done():
        processes.turn()
        await asyncio.sleep(0)
    await changing
    if operation == "wake":
        assert await asked == ["token"] * 2
    else:
        with pytest.raises(NotReadyError, match=re.escape(ASLEEP)):
            await asked


@runs
async def test_a_request_that_comes_while_others_finish_waits_for_the_sleep(vllm: Any) -> None:
    frontend = alone(vllm)
    [core] = frontend.processes.cores
    await frontend.sleep(1)
    await frontend.wake_up()
    frontend.processes.is_by_hand = True
    running = asyncio.ensure_future(texts(generate(frontend, "running")))
    while core.input_queue.empty():
        await asyncio.sleep(0)
    frontend.processes.turn()
    sleeping = asyncio.ensure_future(frontend.sleep(1, "wait"))
    while not frontend.engine_core.utility_results:
        await asyncio.sleep(0)
    assert not sleeping.done()
    late = asyncio.ensure_future(texts(generate(frontend, "late")))
    await asyncio.sleep(0)
    frontend.processes.is_by_hand = False
    while not sleeping.done():
        frontend.processes.turn()
        await asyncio.sleep(0)
    await sleeping
    assert await running == ["token"] * 2
    with pytest.raises(NotReadyError, match=re.escape(ASLEEP)):
        await late
    # Nothing of it is left for the time behind the wake.
    assert not core.scheduler.waiting


@runs
async def test_a_second_frontend_learns_that_the_engine_sleeps(vllm: Any) -> None:
    first, second = pair(vllm)
    await first.sleep(1)
    with pytest.raises(refused_by_core(vllm), match=re.escape(ASLEEP)):
        await texts(generate(second, "a"))
    await second.collective_rpc("synchronize_device")
    with pytest.raises(NotReadyError, match=re.escape(ASLEEP)):
        await texts(generate(second, "b"))
    # Which does not hear of the wake.
    await first.wake_up()
    assert await texts(generate(second, "c")) == ["token"] * 2


@pytest.mark.parametrize("is_woken", [False, True])
@runs
async def test_a_pooling_request_that_the_core_refuses_hears_of_the_reason(
    vllm: Any, monkeypatch: pytest.MonkeyPatch, is_woken: bool
) -> None:
    """It gets nothing that looks like an output, also if the engine is awake when its server asks why."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(empty=lambda size: Embedding(size)))
    first, second = pair(vllm)
    await first.sleep(1)
    [core] = first.processes.cores
    asked: list[Any] = []
    add = second.engine_core.add_request_async

    async def add_pooling(request: Any) -> None:
        request.pooling_params = SimpleNamespace(task="embed")
        asked.append(request)
        await add(request)
        if is_woken:
            core.wake_up()

    second.engine_core.add_request_async = add_pooling
    says = "the engine slept when the request came" if is_woken and vllm.minor < 33 else re.escape(ASLEEP)
    with pytest.raises(refused_by_core(vllm), match=says):
        await texts(encode(second))
    assert len(asked) == 1
    assert not core.scheduler.waiting


class Embedding:
    """An output of a pooling model, of so many numbers."""

    def __init__(self, size: int) -> None:
        self._size = size

    def numel(self) -> int:
        return self._size


@runs
async def test_a_request_finds_out_that_another_program_has_woken_the_engine(vllm: Any) -> None:
    frontend = alone(vllm)
    await frontend.sleep(1)
    frontend.processes.cores[0].wake_up()
    with pytest.raises(NotReadyError, match=re.escape(ASLEEP)):
        await texts(generate(frontend))
    await frontend._poorwill._look
    assert await texts(generate(frontend)) == ["token"] * 2


@runs
async def test_a_second_frontend_learns_that_the_engine_is_not_ready(vllm: Any) -> None:
    first, second = pair(vllm)
    await first.sleep(2)
    await first.wake_up()
    with pytest.raises(refused_by_core(vllm), match=NOT_WRITTEN):
        await texts(generate(second, "a"))
    with pytest.raises(NotReadyError, match=NOT_WRITTEN):
        await second.check_health()
    with pytest.raises(NotReadyError, match=NOT_WRITTEN):
        await texts(generate(second, "b"))


@runs
async def test_a_second_frontend_learns_that_the_engine_is_ready(vllm: Any) -> None:
    first, second = pair(vllm)
    await first.sleep(2)
    await first.wake_up()
    with pytest.raises(NotReadyError):
        await texts(generate(first))
    await second.collective_rpc("reload_weights")
    assert await texts(generate(first)) == ["token"] * 2
    assert await texts(generate(first, "again")) == ["token"] * 2
    await first.check_health()


@runs
async def test_an_output_stream_that_is_given_up_is_closed(vllm: Any) -> None:
    first, second = pair(vllm)
    await first.sleep(2)
    await first.wake_up()
    await second.collective_rpc("reload_weights")
    outputs = generate(first)
    assert (await anext(outputs)).new_token_ids == ["token"]
    await outputs.aclose()


def test_an_engine_that_is_busy_keeps_the_health_that_is_known(
    vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_frontend, "_HEALTH_TIMEOUT_SECONDS", 0.0)

    async def story() -> None:
        first, second = pair(vllm)
        await first.sleep(2)
        await first.wake_up()
        processes = first.processes
        processes.is_by_hand = True
        with pytest.raises(NotReadyError, match=NOT_WRITTEN):
            await first.check_health()
        await second.check_health()
        # Answers without a waiting caller.
        while processes.turn():
            pass

    asyncio.run(story())


@runs
async def test_a_dead_engine_is_reported_first(vllm: Any) -> None:
    frontend = alone(vllm)
    await frontend.sleep(2)
    await frontend.wake_up()
    frontend.processes.die()
    with pytest.raises(vllm.client.EngineDeadError):
        await frontend.check_health()


@runs
async def test_loads_are_counted_also_when_nothing_was_missing(
    vllm: Any, recorded: list[dict[str, Any]]
) -> None:
    frontend = alone(vllm)
    await frontend.collective_rpc("reload_weights")
    await frontend.collective_rpc("synchronize_device")
    assert operations(recorded) == ["load"]
    assert len(recorded) == 1


@runs
async def test_a_resume_while_asleep_is_refused(vllm: Any) -> None:
    frontend = alone(vllm)
    await frontend.resume_generation()
    await frontend.sleep(1)
    with pytest.raises(PoorwillError, match=r"the engine sleeps \(kv_cache, weights\): call wake_up"):
        await frontend.resume_generation()


@runs
async def test_an_abandoned_call_makes_the_state_stale(vllm: Any) -> None:
    frontend = alone(vllm)
    await frontend.sleep(2)
    processes = frontend.processes
    processes.is_by_hand = True
    waking = asyncio.ensure_future(frontend.wake_up())
    while not frontend.engine_core.utility_results:
        await asyncio.sleep(0)
    waking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waking
    while processes.turn():
        pass
    processes.is_by_hand = False
    with pytest.raises(NotReadyError, match=NOT_WRITTEN):
        await texts(generate(frontend))


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "sleep": lambda frontend: frontend.sleep(1),
    "wake": lambda frontend: frontend.wake_up(),
    "resume": lambda frontend: frontend.resume_generation(),
    "reload": lambda frontend: frontend.collective_rpc("reload_weights"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@runs
async def test_an_operation_ends_with_its_engine(vllm: Any, operation: str) -> None:
    frontend = alone(vllm)
    await frontend.sleep(1)
    await frontend.wake_up()
    processes = frontend.processes
    processes.is_by_hand = True
    pending = asyncio.ensure_future(OPERATIONS[operation](frontend))
    while not frontend.engine_core.utility_results:
        await asyncio.sleep(0)
    assert not pending.done()
    processes.die()
    with pytest.raises(vllm.client.EngineDeadError):
        await asyncio.wait_for(pending, HANGS_SECONDS)
    # So does what comes later, at once.
    with pytest.raises(vllm.client.EngineDeadError):
        await asyncio.wait_for(frontend.sleep(1), HANGS_SECONDS)


@runs
async def test_a_request_that_asks_for_the_state_ends_with_its_engine(vllm: Any) -> None:
    frontend = alone(vllm)
    await frontend.sleep(1)
    frontend._poorwill.invalidate()
    processes = frontend.processes
    processes.is_by_hand = True
    pending = asyncio.ensure_future(texts(generate(frontend)))
    while not frontend.engine_core.utility_results:
        await asyncio.sleep(0)
    processes.die()
    with pytest.raises(vllm.client.EngineDeadError):
        await asyncio.wait_for(pending, HANGS_SECONDS)


@pytest.mark.parametrize("operation", ["sleep", "wake", "reload"])
def test_an_operation_in_a_thread_ends_with_its_engine(vllm: Any, operation: str) -> None:
    processes = EngineProcesses(vllm.engine(count=1))
    frontend = synchronous(vllm, processes)
    frontend.sleep(1)
    processes.is_by_hand = True

    def dies() -> None:
        while not frontend.engine_core.utility_results:
            time.sleep(0.001)
        processes.die()

    killer = threading.Thread(target=dies)
    killer.start()
    with pytest.raises(vllm.client.EngineDeadError):
        OPERATIONS[operation](frontend)
    killer.join()
    with pytest.raises(vllm.client.EngineDeadError):
        frontend.wake_up()
    assert not [thread for thread in threading.enumerate() if thread.name == "poorwill-vllm-engine"]


def test_metrics_that_fail_do_not_fail_an_operation(
    vllm: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_metrics, "record", lambda statuses: 1 // 0)

    async def story() -> None:
        frontend = alone(vllm)
        await frontend.sleep(1)
        await frontend.wake_up()

    asyncio.run(story())
    assert "could not be recorded" in caplog.text


@runs
async def test_all_engines_of_a_data_parallel_server_are_asked(
    vllm: Any, recorded: list[dict[str, Any]]
) -> None:
    processes = EngineProcesses(*(vllm.engine("DPEngineCoreProc", 1, index) for index in range(3)))
    frontend = asynchronous(vllm, processes, "DPLBAsyncMPClient")
    await frontend.sleep(2)
    await frontend.wake_up()
    for core in processes.cores[:2]:
        core.model_executor.workers[0].reload_weights()
    with pytest.raises(NotReadyError, match=NOT_WRITTEN):
        await frontend.check_health()
    with pytest.raises(NotReadyError, match=NOT_WRITTEN):
        generate(frontend)
    await frontend.collective_rpc("reload_weights")
    await frontend.check_health()
    assert await texts(generate(frontend)) == ["token"] * 2
    assert {status["engine"] for status in recorded} == {0, 1, 2}


@runs
async def test_other_workers_are_left_alone(vllm: Any, recorded: list[dict[str, Any]]) -> None:
    core = vllm.engine(config=make_config(worker_cls="vllm.v1.worker.gpu_worker.Worker"))
    frontend = asynchronous(vllm, EngineProcesses(core))
    await frontend.sleep(1)
    await frontend.wake_up()
    await frontend.collective_rpc("reload_weights")
    await frontend.resume_generation()
    await frontend.check_health()
    assert await texts(generate(frontend)) == ["token"] * 2
    assert "poorwill_status" not in core.model_executor.workers[0].calls
    assert recorded == []


# With asyncio and without


class Server:
    """A frontend, by calls that are the same with asyncio and without."""

    def __init__(self, frontend: Any) -> None:
        self.frontend = frontend
        self.is_asynchronous = hasattr(frontend, "generate")

    async def call(self, name: str, *args: Any) -> Any:
        done = getattr(self.frontend, name)(*args)
        return await done if self.is_asynchronous else done

    async def tokens(self) -> list[str]:
        if self.is_asynchronous:
            return (await texts(generate(self.frontend)))[:1]
        self.frontend.add_request("asked", 1, PARAMS)
        return [token for output in self.frontend.step() for token in output.new_token_ids]

    @property
    def fails(self) -> dict[str, list[Exception | None]]:
        """Of the engine's last rank."""
        fails: dict[str, list[Exception | None]] = worker(self.frontend).fails
        return fails


@pytest.fixture(params=["with asyncio", "elsewhere", "in this process"])
def server(request: pytest.FixtureRequest, vllm: Any) -> Server:
    if request.param == "in this process":
        return Server(in_process(vllm, vllm.engine("EngineCore")))
    make = asynchronous if request.param == "with asyncio" else synchronous
    return Server(make(vllm, EngineProcesses(vllm.engine(count=1))))


@runs
async def test_a_sleep_and_a_wake(vllm: Any, server: Server, recorded: list[dict[str, Any]]) -> None:
    await server.call("sleep", 1, "abort")
    assert await server.call("is_sleeping")
    assert await server.call("wake_up") is (True if vllm.minor >= 32 else None)
    assert await server.tokens() == ["token"]
    assert server.frontend.sleep_states == [(1, 1), (0, 0)]
    assert operations(recorded) == ["sleep", "wake"]


@runs
async def test_a_second_sleep_of_an_engine_without_its_weights_leaves_the_cache(server: Server) -> None:
    """vLLM's outcome, where a cache that had slept again would stay behind the wake of the weights."""
    await server.call("sleep", 1)
    await server.call("wake_up", ["kv_cache"])
    with pytest.raises(NotReadyError, match=r"the engine sleeps \(weights\): call wake_up"):
        await server.tokens()
    await server.call("sleep", 1)
    await server.call("wake_up", ["weights"])
    assert await server.tokens() == ["token"]


@pytest.mark.parametrize(("woken", "asleep"), [("weights", "kv_cache"), ("kv_cache", "weights")])
@runs
async def test_what_needs_no_memory_that_sleeps_works_half_awake(
    server: Server, woken: str, asleep: str
) -> None:
    """Trainers write the weights then."""
    await server.call("sleep", 1)
    await server.call("wake_up", [woken])
    with pytest.raises(NotReadyError, match=rf"the engine sleeps \({asleep}\): call wake_up"):
        await server.tokens()
    assert await server.call("collective_rpc", "synchronize_device") == [None]
    if woken == "weights":
        assert await server.call("collective_rpc", "reload_weights") == ["reloaded"]
    await server.call("wake_up", [asleep])
    assert await server.tokens() == ["token"]


@runs
async def test_both_reasons_are_named(server: Server) -> None:
    await server.call("sleep", 2)
    await server.call("wake_up", ["weights"])
    with pytest.raises(NotReadyError, match=rf"the engine sleeps \(kv_cache\): call wake_up; {NOT_WRITTEN}"):
        await server.tokens()


@pytest.mark.parametrize("level", [0, 1, 2])
@runs
async def test_a_step_of_a_sleeping_engine_says_that_it_sleeps(vllm: Any, level: int) -> None:
    """In `LLM`, which steps until all requests have ended, no one else could wake it."""
    processes = EngineProcesses(vllm.engine(count=1))
    for frontend in (in_process(vllm, vllm.engine("EngineCore")), synchronous(vllm, processes)):
        # The first asks whether the engine can, and its loop would answer a request meanwhile.
        frontend.sleep(1, "keep")
        frontend.wake_up()
        processes.is_by_hand = True
        frontend.add_request("asked", 1, PARAMS)
        processes.is_by_hand = False
        frontend.sleep(level, "keep")
        says = r"\(scheduling\): call wake_up; the requests wait" if level == 0 else re.escape(ASLEEP)
        with pytest.raises(NotReadyError, match=f"^{'the engine sleeps ' if level == 0 else ''}{says}"):
            frontend.step()
        frontend.wake_up()
        if level == 2:
            with pytest.raises(NotReadyError, match=f"^{NOT_WRITTEN}"):
                frontend.step()
            # By the model itself: no other part learns of it.
            worker(frontend).load_weights(WEIGHTS)
        assert [token for output in frontend.step() for token in output.new_token_ids] == ["token"]
        assert not frontend.output_processor.has_unfinished_requests()


@runs
async def test_what_came_before_the_sleep_is_handed_out_asleep(vllm: Any) -> None:
    frontend = synchronous(vllm, EngineProcesses(vllm.engine(count=1)))
    frontend.processes.is_by_hand = True
    frontend.add_request("asked", 1, PARAMS)
    frontend.processes.is_by_hand = False
    frontend.sleep(1, "abort")
    assert [output.finish_reason for output in frontend.step()] == [vllm.core.FinishReason.ABORT]


@runs
async def test_at_level_0_requests_are_taken_and_wait(vllm: Any) -> None:
    """As vLLM documents it: nothing but scheduling stops, and other requests can have it go on."""
    frontend = alone(vllm)
    await frontend.sleep(0)
    asked = asyncio.ensure_future(texts(generate(frontend)))
    while not frontend.processes.cores[0].scheduler.waiting:
        await asyncio.sleep(0)
    await frontend.wake_up(["scheduling"])
    assert await asked == ["token"] * 2


@pytest.mark.parametrize("method", ["reload_weights", "poorwill_mark_restored", "extension"])
@runs
async def test_requests_are_refused_until_something_writes_the_weights(
    vllm: Any, server: Server, method: str
) -> None:
    await server.call("sleep", 2)
    # As it says itself: it sleeps.
    assert await server.call("wake_up") is (False if vllm.minor >= 32 else None)
    assert await server.call("is_sleeping")
    with pytest.raises(NotReadyError, match=NOT_WRITTEN) as refused:
        await server.tokens()
    assert type(refused.value) is NotReadyError
    await server.call("collective_rpc", method)
    assert not await server.call("is_sleeping")
    assert await server.tokens() == ["token"]


@runs
async def test_failures_are_reported_and_counted(server: Server, recorded: list[dict[str, Any]]) -> None:
    server.fails["sleep"] = [PoorwillError("10 of 16 bytes were given back")]
    with pytest.raises(PoorwillError, match=r"10 of 16 bytes.*awake again and the engine serves"):
        await server.call("sleep", 1)
    assert operations(recorded) == ["sleep", "wake"]
    assert server.frontend.sleep_states == []
    assert await server.tokens() == ["token"]
    await server.call("sleep", 1)
    server.fails["wake_up"] = [PoorwillError("the card is full")]
    with pytest.raises(PoorwillError, match=r"the card is full; kv_cache, weights count as asleep"):
        await server.call("wake_up")
    assert await server.call("is_sleeping")
    events = [event for status in recorded for rank in status["ranks"] for event in rank["events"]]
    assert [event["error"] for event in events if event["error"]] == [
        "10 of 16 bytes were given back",
        "the card is full",
    ]


@since_registry
@runs
async def test_the_cache_alone_is_an_operation(server: Server, recorded: list[dict[str, Any]]) -> None:
    with pytest.raises((PoorwillError, RuntimeError), match="requires a completed pause"):
        await server.call("release_kv_cache_memory")
    await server.call("sleep", 0)
    await server.call("release_kv_cache_memory")
    assert await server.call("wake_up") is True
    assert await server.tokens() == ["token"]
    assert operations(recorded) == ["discard", "wake"]


@runs
async def test_an_engine_that_does_not_say_its_state_is_asked_again(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    await server.call("sleep", 2)
    # To the engine, which asks behind the wake, and not to the frontend.
    server.fails["poorwill_status"] = [None, PoorwillError("lost")]
    await server.call("wake_up")
    assert "did not say what state it is in (" in caplog.text
    with pytest.raises(NotReadyError, match=NOT_WRITTEN):
        await server.tokens()


@runs
async def test_the_engine_is_asked_behind_any_call_before_a_refusal(server: Server) -> None:
    await server.call("sleep", 2)
    await server.call("wake_up")
    worker(server.frontend).reload_weights()
    assert await server.call("collective_rpc", "synchronize_device") == [None]
    assert await server.tokens() == ["token"]


@runs
async def test_weights_that_are_written_past_the_engine_end_the_refusals(server: Server) -> None:
    """By the workers themselves, on any path: the next request finds out, or the one after it."""
    for ask in ("tokens", "check_health"):
        if ask == "check_health" and not server.is_asynchronous:
            continue
        await server.call("sleep", 2)
        await server.call("wake_up")
        with pytest.raises(NotReadyError, match=NOT_WRITTEN):
            await server.tokens()
        if server.is_asynchronous:
            # What was asked beside that request has its answer.
            await asyncio.wait_for(server.frontend._poorwill._look, HANGS_SECONDS)
        worker(server.frontend).load_weights(WEIGHTS)
        if ask == "check_health":
            await server.call(ask)
        elif server.is_asynchronous:
            with pytest.raises(NotReadyError, match=NOT_WRITTEN):
                await server.tokens()
            await server.frontend._poorwill._look
        assert await server.tokens() == ["token"]


def test_without_a_loop_a_request_is_refused_as_well(vllm: Any) -> None:
    frontend = alone(vllm)

    async def dropped() -> None:
        await frontend.sleep(2)
        await frontend.wake_up()

    asyncio.run(dropped())
    with pytest.raises(NotReadyError, match=NOT_WRITTEN):
        generate(frontend)


@runs
async def test_who_pauses_the_engine_is_who_resumes_it(vllm: Any) -> None:
    frontend = alone(vllm)
    await frontend.sleep(2)
    await frontend.wake_up()
    await frontend.pause_generation()
    await frontend.collective_rpc("reload_weights")
    [core] = frontend.processes.cores
    await frontend.check_health()
    assert core.is_scheduler_paused()
    await frontend.resume_generation()
    assert await texts(generate(frontend)) == ["token"] * 2
    # What was resumed once is not resumed again behind a later pause.
    await frontend.pause_generation()
    await frontend.collective_rpc("reload_weights")
    assert core.is_scheduler_paused()


@runs
async def test_an_interrupt_makes_the_state_stale(vllm: Any) -> None:
    server = Server(synchronous(vllm, EngineProcesses(vllm.engine(count=1))))
    await server.call("sleep", 1)
    await server.call("wake_up")
    watch = vars(server.frontend)["_poorwill"]
    with pytest.raises(KeyboardInterrupt):
        _frontend._operate(server.frontend, watch, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert not watch.is_clear
    assert await server.tokens() == ["token"]
    assert watch.is_clear


# Installing


def test_installing_again_does_nothing(vllm: Any) -> None:
    before = [dict(vars(of)) for of in (vllm.async_llm.AsyncLLM, vllm.llm_engine.LLMEngine)]
    _frontend.install_async(vllm.async_llm, vllm.generation)
    _frontend.install_sync(vllm.llm_engine, vllm.generation)
    assert [dict(vars(of)) for of in (vllm.async_llm.AsyncLLM, vllm.llm_engine.LLMEngine)] == before


def test_hooks_look_like_what_they_replace(vllm: Any) -> None:
    for of in (vllm.async_llm.AsyncLLM, vllm.llm_engine.LLMEngine):
        hooks = [hook for hook in vars(of).values() if hasattr(hook, "__wrapped__") and callable(hook)]
        assert len(hooks) >= 4
        for hook in hooks:
            assert inspect.signature(hook) == inspect.signature(hook.__wrapped__)
            assert inspect.iscoroutinefunction(hook) == inspect.iscoroutinefunction(hook.__wrapped__)


def test_a_ready_engine_costs_a_request_nothing_else(vllm: Any) -> None:
    frontend = alone(vllm)
    outputs = generate(frontend)
    assert outputs.__qualname__ == "AsyncLLM.generate"
    asyncio.run(outputs.aclose())
