"""Engines off their GPUs: the routes for it, and what a hibernating engine answers. vLLM's versions, all
clients; the driver is played here.
"""

import asyncio
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_vllm import VERSIONS
from fake_vllm.clients import HANGS_SECONDS, EngineProcesses, asynchronous, synchronous
from fake_vllm.engines import PARAMS, make_config
from fake_vllm.worker import WEIGHTS
from poorwill import HibernateError, PoorwillError
from poorwill.vllm import (
    _engines,
    _frontend,
    _hibernation,
    _liveness,
    _metrics,
    _processes,
)
from vllm_routes import HTTPException, called, install_fastapi, routes_of
from vllm_sources import needs_sources

pytest_plugins = ["vllm_cores"]
pytestmark = needs_sources


def failure(kind: str, message: str) -> HibernateError:
    error = HibernateError(message)
    error.kind = kind
    return error


class Driver:
    """NVIDIA's, as far as it knows where processes stand, and the library above it."""

    def __init__(self) -> None:
        self.states: dict[int, str] = {}
        self.opened = 0
        self.suspended_communicators = 0
        self.calls: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
        self.free = threading.Event()
        self.entered = threading.Event()
        self.free.set()
        self.answers = threading.Event()
        self.answers.set()

    def open_driver(self) -> None:
        self.opened += 1

    def process_state(self, pid: int) -> str:
        assert self.answers.wait(HANGS_SECONDS)
        if pid not in self.states:
            raise failure("unsupported", "the driver is too old")
        if self.states[pid] == "no_answer":
            raise failure("no_answer", "the driver has not answered")
        return self.states[pid]

    def hibernate(
        self,
        pids: Any,
        *,
        wait_max: float = 5.0,
        host_bytes_max: str | None = None,
        suspended_communicators: int = 0,
    ) -> dict[str, Any]:
        self.suspended_communicators = suspended_communicators
        return self._change("hibernate", "checkpointed", pids, wait_max, host_bytes_max)

    def resume(self, pids: Any) -> dict[str, Any]:
        return self._change("resume", "running", pids)

    def _change(self, call: str, state: str, pids: Any, *given: Any) -> dict[str, Any]:
        self.calls.append((call, tuple(pids), *given))
        self.entered.set()
        assert self.free.wait(HANGS_SECONDS)
        if self.error is not None:
            raise self.error
        self.put(state, *pids)
        return {"total_ms": 1.5}

    def put(self, state: str, *pids: int) -> None:
        for pid in pids:
            self.states[pid] = state


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    monkeypatch.setattr(_processes, "process_state", driver.process_state)
    monkeypatch.setattr(_processes, "open_driver", driver.open_driver)
    monkeypatch.setattr(_hibernation, "take_off", driver.hibernate)
    monkeypatch.setattr(_hibernation, "put_back", driver.resume)
    monkeypatch.setattr(_processes, "_STATE_TIMEOUT_SECONDS", HANGS_SECONDS)
    yield driver
    driver.free.set()
    driver.answers.set()


@pytest.fixture(autouse=True)
def around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_frontend, "_HEALTH_TIMEOUT_SECONDS", HANGS_SECONDS)
    monkeypatch.setattr(_liveness, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(_metrics, "record", lambda statuses: None)
    install_fastapi(monkeypatch)


def runs(test: Callable[..., Any]) -> Callable[..., None]:
    """A test that is a coroutine."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class Server:
    """vLLM's own routes beside ours, in front of a frontend."""

    def __init__(self, vllm: Any, frontend: Any) -> None:
        self.frontend = frontend
        self.module = routes_of(vllm.loader.version)
        _hibernation.install_routes(self.module)

    async def call(self, path: str, **query: str) -> Any:
        """A route's answer, or its status and sentence."""
        return await called(self.module, self.frontend, path, **query)


FIRST_PID = 1_000_001


def engine(vllm: Any, driver: Driver, count: int = 1, kind: str = "EngineCoreProc", index: int = 0) -> Any:
    """An engine whose ranks are other processes."""
    core = vllm.engine(kind, count, index)
    for number, worker in enumerate(core.model_executor.workers):
        pid = FIRST_PID + index * count + number
        worker.process = {**_processes.this_process(), "pid": pid}
        driver.put("running", pid)
    return core


def server(vllm: Any, driver: Driver, count: int = 1) -> Server:
    return Server(vllm, asynchronous(vllm, EngineProcesses(engine(vllm, driver, count))))


def ranks(frontend: Any) -> list[Any]:
    return [worker for core in frontend.processes.cores for worker in core.model_executor.workers]


async def texts(outputs: Any) -> list[str]:
    return [text async for output in outputs for text in output.new_token_ids]


def generate(frontend: Any, request_id: str = "asked") -> Any:
    return frontend.generate(2, PARAMS, request_id)


AWAY = f"the engine hibernates: process {FIRST_PID} is checkpointed; call POST /hibernate/resume, or run"

PASSED_ON: dict[str, Callable[[Any], Any]] = {
    "sleep": lambda frontend: frontend.sleep(1),
    "wake": lambda frontend: frontend.wake_up(),
    "resume": lambda frontend: frontend.resume_generation(),
    "rpc": lambda frontend: frontend.collective_rpc("poorwill_status"),
    "request": lambda frontend: texts(generate(frontend)),
}


async def refused(frontend: Any, match: str) -> None:
    """Nothing is passed on to the engine."""
    before = [list(worker.calls) for worker in ranks(frontend)]
    for name, call in PASSED_ON.items():
        with pytest.raises(HTTPException) as error:
            await call(frontend)
        assert error.value.status_code == (503 if name == "request" else 409), name
        assert match in error.value.detail, name
    assert [worker.calls for worker in ranks(frontend)] == before


async def away(frontend: Any, match: str) -> None:
    """It is refused what it would wait for, and is alive."""
    await frontend.check_health()
    await refused(frontend, match)


@pytest.mark.parametrize("level", [1, 2])
@runs
async def test_an_engine_hibernates_and_comes_back_asleep(vllm: Any, driver: Driver, level: int) -> None:
    at = server(vllm, driver)
    frontend = at.frontend
    await frontend.sleep(level)
    assert await at.call("/is_hibernating") == {
        "is_hibernating": False,
        "processes": [{"pid": FIRST_PID, "state": "running"}],
    }
    hibernating = await at.call("/hibernate")
    assert hibernating == {"status": "hibernating", "pids": [FIRST_PID], "total_ms": 1.5}
    assert (await at.call("/is_hibernating"))["is_hibernating"]
    assert (await at.call("/is_sleeping")) == {"is_sleeping": True}
    await away(frontend, AWAY)
    status, sentence = await at.call("/wake_up")
    assert (status, sentence.startswith(AWAY)) == (409, True)
    # Before anything is iterated, so that a stream has not begun.
    with pytest.raises(HTTPException) as error:
        generate(frontend)
    assert error.value.status_code == 503
    # Again, it is done already.
    assert (await at.call("/hibernate"))["status"] == "hibernating"
    assert await at.call("/hibernate/resume") == {"status": "resumed", "pids": [FIRST_PID], "total_ms": 1.5}
    assert await at.call("/hibernate/resume") == {"status": "resumed", "pids": []}
    assert (await at.call("/is_sleeping")) == {"is_sleeping": True}
    await at.call("/wake_up")
    if level == 2:
        await frontend.collective_rpc("reload_weights")
    await frontend.check_health()
    assert await texts(generate(frontend)) == ["token"] * 2
    assert driver.calls == [("hibernate", (FIRST_PID,), 5.0, None), ("resume", (FIRST_PID,))]


@runs
async def test_requests_from_before_a_sleep_wait_as_ever(vllm: Any, driver: Driver) -> None:
    at = server(vllm, driver)
    await at.frontend.sleep(0)
    early = asyncio.ensure_future(texts(generate(at.frontend)))
    while not at.frontend.processes.cores[0].scheduler.waiting:
        await asyncio.sleep(0)
    await at.frontend.sleep(1, "keep")
    await at.call("/hibernate")
    await at.call("/hibernate/resume")
    assert not early.done()
    await at.frontend.wake_up()
    assert await early == ["token"] * 2


@pytest.mark.parametrize("tags", [None, ["weights"], ["kv_cache"]])
@runs
async def test_an_awake_engine_is_refused(vllm: Any, driver: Driver, tags: list[str] | None) -> None:
    at = server(vllm, driver, 2)
    if tags is not None:
        await at.frontend.sleep(1)
        await at.frontend.wake_up(tags)
    status, sentence = await at.call("/hibernate")
    assert status == 409
    assert "the engine is awake on ranks 0, 1: put it to sleep first, by POST /sleep?level=1" in sentence
    assert driver.calls == []
    await at.frontend.wake_up()
    assert await texts(generate(at.frontend)) == ["token"] * 2


@runs
async def test_what_another_program_hibernates_is_refused_and_comes_back(vllm: Any, driver: Driver) -> None:
    at = server(vllm, driver)
    frontend = at.frontend
    await frontend.sleep(1)
    driver.put("checkpointed", FIRST_PID)
    # The first to find out, by its stream; later ones before they have one.
    with pytest.raises(HTTPException) as error:
        await texts(generate(frontend))
    assert error.value.status_code == 503
    with pytest.raises(HTTPException):
        generate(frontend)
    await away(frontend, AWAY)
    driver.put("locked", FIRST_PID)
    await away(frontend, f"process {FIRST_PID} is locked")
    driver.put("running", FIRST_PID)
    # Refused by what is known, and asked beside that.
    with pytest.raises(HTTPException):
        generate(frontend)
    await frontend._poorwill.processes._soon
    with pytest.raises(HTTPException, match=r"the engine sleeps \(kv_cache, weights\): call wake_up"):
        await texts(generate(frontend))
    await frontend.wake_up()
    assert await texts(generate(frontend)) == ["token"] * 2


@pytest.mark.parametrize("call", PASSED_ON)
@runs
async def test_a_second_server_asks_before_its_first_call(vllm: Any, driver: Driver, call: str) -> None:
    processes = EngineProcesses(engine(vllm, driver))
    first, second = (asynchronous(vllm, processes, index=index, count=2) for index in range(2))
    await first.sleep(1)
    await Server(vllm, first).call("/hibernate")
    if call == "request":
        # As its load balancer does.
        await second.check_health()
    with pytest.raises(HTTPException) as error:
        await PASSED_ON[call](second)
    assert AWAY in error.value.detail
    await Server(vllm, second).call("/hibernate/resume")
    await second.wake_up()
    assert await texts(generate(second)) == ["token"] * 2
    assert await texts(generate(first)) == ["token"] * 2


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("call", ["sleep", "wake"])
@runs
async def test_a_second_server_waits_while_the_first_takes_the_engine_off(
    vllm: Any, driver: Driver, call: str, engines: int
) -> None:
    """By then it hears that it hibernates. Nothing is passed on to it."""
    processes = EngineProcesses(
        *(engine(vllm, driver, 2, "EngineCoreProc", index) for index in range(engines))
    )
    kind = "DPLBAsyncMPClient" if engines > 1 else "AsyncMPClient"
    first, second = (asynchronous(vllm, processes, kind, index, 2) for index in range(2))
    await first.sleep(1)
    await second.check_health()
    driver.free.clear()
    hibernating = asyncio.ensure_future(Server(vllm, first).call("/hibernate"))
    await asyncio.to_thread(driver.entered.wait)
    before = [list(rank.calls) for rank in ranks(first)]
    passed_on = asyncio.ensure_future(PASSED_ON[call](second))
    # Longer than a call takes that is not waiting.
    for _ in range(3):
        await second._poorwill.processes.look_async()
    assert not passed_on.done()
    driver.free.set()
    assert (await hibernating)["status"] == "hibernating"
    with pytest.raises(HTTPException, match="the engine hibernates") as error:
        await passed_on
    assert error.value.status_code == 409
    assert [rank.calls for rank in ranks(first)] == before
    await Server(vllm, second).call("/hibernate/resume")
    await second.wake_up()
    assert await texts(generate(first)) == ["token"] * 2


def watched_turn(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Is set once a frontend tries to take a turn."""
    is_tried = asyncio.Event()
    stock = _engines._is_taken

    def is_taken(*args: Any) -> bool:
        is_tried.set()
        return stock(*args)

    monkeypatch.setattr(_engines, "_is_taken", is_taken)
    return is_tried


# Data parallel engines of 0.20 do not agree on a pause.
@pytest.mark.parametrize("server", [0, 1])
@pytest.mark.parametrize(
    ("vllm", "kind"),
    [
        (version, kind)
        for kind in ("DPEngineCoreProc", "EngineCoreProc")
        for version in VERSIONS
        if kind == "EngineCoreProc" or not version.startswith("0.20.")
    ],
    indirect=["vllm"],
)
@runs
async def test_engines_that_finish_their_requests_are_refused_at_once(
    vllm: Any, driver: Driver, kind: str, server: int
) -> None:
    """Those of a model with experts do so in a turn."""
    processes = EngineProcesses(*(engine(vllm, driver, 1, kind, index) for index in range(2)))
    servers = [asynchronous(vllm, processes, "DPLBAsyncMPClient", index, 2) for index in range(2)]
    running = asyncio.ensure_future(texts(servers[0].generate(1 << 40, PARAMS, "long")))
    while not processes.cores[0].scheduler.running:
        await asyncio.sleep(0.001)
    sleeping = asyncio.ensure_future(servers[0].sleep(1, "wait"))
    while not all(core.is_scheduler_paused() for core in processes.cores):
        await asyncio.sleep(0.001)
    answered = Server(vllm, servers[server]).call("/hibernate")
    status, sentence = await asyncio.wait_for(answered, HANGS_SECONDS)
    assert (status, "the engine is awake on" in sentence) == (409, True)
    assert not sleeping.done()
    assert driver.calls == []
    while not running.done():
        for request in processes.cores[0].scheduler.running:
            request.steps = min(request.steps, 5)
        await asyncio.sleep(0.001)
    await sleeping
    assert (await Server(vllm, servers[server]).call("/hibernate"))["status"] == "hibernating"


@runs
async def test_engines_that_do_not_answer_are_taken_off_in_turn(
    vllm: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server does it. What looks whether they sleep would have its answer once they are back."""
    processes = EngineProcesses(*(engine(vllm, driver, 1, "EngineCoreProc", index) for index in range(2)))
    first, second = (asynchronous(vllm, processes, "DPLBAsyncMPClient", index, 2) for index in range(2))
    await first.sleep(1)
    await second.check_health()
    await second._poorwill.engines.first(second.engine_core)
    async with first._poorwill.engines.turn(first.engine_core):
        processes.is_by_hand = True
        is_waiting = watched_turn(monkeypatch)
        hibernating = asyncio.ensure_future(Server(vllm, second).call("/hibernate"))
        await is_waiting.wait()
        driver.put("checkpointed", FIRST_PID, FIRST_PID + 1)
    assert (await hibernating)["status"] == "hibernating"
    assert [core.input_queue.qsize() for core in processes.cores] == [1, 1]
    assert driver.calls == []
    driver.put("running", FIRST_PID, FIRST_PID + 1)
    processes.is_by_hand = False
    await second.wake_up()
    assert await texts(generate(second)) == ["token"] * 2


@runs
async def test_engines_that_were_taken_off_meanwhile_do_not_go_on(
    vllm: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request finds that their weights are there, and another server has its turn."""
    processes = EngineProcesses(*(engine(vllm, driver, 1, "DPEngineCoreProc", index) for index in range(2)))
    first, second = (asynchronous(vllm, processes, "DPLBAsyncMPClient", index, 2) for index in range(2))
    await first.sleep(2)
    await first.wake_up()
    with pytest.raises(HTTPException, match="were dropped by a level 2 sleep"):
        await second.check_health()
    for rank in ranks(first):
        rank.load_weights(WEIGHTS)
    async with first._poorwill.engines.turn(first.engine_core):
        is_waiting = watched_turn(monkeypatch)
        asked = asyncio.ensure_future(texts(generate(second)))
        while not (is_waiting.is_set() or asked.done()):
            await asyncio.sleep(0.001)
        await _frontend._ask_async(first, "sleep", 1, "abort")
        driver.put("checkpointed", FIRST_PID, FIRST_PID + 1)
    with pytest.raises(HTTPException, match="the engine hibernates") as error:
        await asked
    assert error.value.status_code == 503
    driver.put("running", FIRST_PID, FIRST_PID + 1)
    await second.wake_up()
    assert await texts(generate(second, "again")) == ["token"] * 2


@runs
async def test_all_ranks_of_all_engines_are_one_set(vllm: Any, driver: Driver) -> None:
    cores = [engine(vllm, driver, 2, "DPEngineCoreProc", index) for index in range(2)]
    at = Server(vllm, asynchronous(vllm, EngineProcesses(*cores), "DPLBAsyncMPClient"))
    await at.frontend.sleep(1)
    await at.call("/hibernate", wait_max="0.5", host_bytes_max="1GiB")
    pids = tuple(range(FIRST_PID, FIRST_PID + 4))
    assert driver.calls == [("hibernate", pids, 0.5, "1GiB")]
    # Half of it, as a failure may leave it.
    driver.put("running", *pids[2:])
    status, sentence = await at.call("/wake_up")
    assert status == 409
    assert f"processes {pids[0]}, {pids[1]} are checkpointed" in sentence
    assert f"--pid {pids[0]} --pid {pids[1]}`" in sentence
    status, sentence = await at.call("/hibernate")
    assert (status, "are checkpointed" in sentence) == (409, True)
    await at.call("/hibernate/resume")
    assert driver.calls[1:] == [("resume", pids[:2])]
    await at.frontend.wake_up()
    assert await texts(generate(at.frontend)) == ["token"] * 2


@pytest.mark.parametrize(
    ("kind", "status"),
    [("obstacles", 409), ("busy", 409), ("own_process", 409), ("unsupported", 409), ("failed", 500)],
)
@runs
async def test_what_is_refused_leaves_the_engine_asleep(
    vllm: Any, driver: Driver, kind: str, status: int
) -> None:
    at = server(vllm, driver, 2)
    await at.frontend.sleep(1)
    driver.error = failure(kind, "a communicator between ranks that is not suspended (NCCL)")
    assert await at.call("/hibernate") == (status, str(driver.error))
    assert not (await at.call("/is_hibernating"))["is_hibernating"]
    await at.call("/wake_up")
    assert await texts(generate(at.frontend)) == ["token"] * 2


@runs
async def test_a_resume_that_fails_leaves_it_hibernating(vllm: Any, driver: Driver) -> None:
    at = server(vllm, driver)
    await at.frontend.sleep(1)
    await at.call("/hibernate")
    driver.error = failure("out_of_device_memory", "make room, and resume it again")
    assert await at.call("/hibernate/resume") == (409, "make room, and resume it again")
    await away(at.frontend, AWAY)
    driver.error = None
    await at.call("/hibernate/resume")
    await at.frontend.wake_up()


@runs
async def test_ranks_with_suspended_communicators_are_taken_off(vllm: Any, driver: Driver) -> None:
    at = server(vllm, driver, 2)
    for rank, count in zip(ranks(at.frontend), (3, 2), strict=True):
        rank.communicators = [{"name": f"tp:{number}"} for number in range(count)]
    await at.frontend.sleep(1)
    await at.call("/hibernate")
    assert driver.suspended_communicators == 2
    await at.call("/hibernate/resume")
    await at.frontend.wake_up()
    ranks(at.frontend)[1].cannot_hibernate = "NCCL's communicators tp:0 (not asked for) are not suspended"
    await at.frontend.sleep(1)
    assert await at.call("/hibernate") == (
        409,
        "hibernate: rank 1: NCCL's communicators tp:0 (not asked for) are not suspended",
    )
    ranks(at.frontend)[1].cannot_hibernate = None
    ranks(at.frontend)[0].shared = [{"name": "symmetric memory"}]
    status, sentence = await at.call("/hibernate")
    assert (status, "map memory of rank 0 (symmetric memory)" in sentence) == (409, True)
    assert [call for call, *_ in driver.calls] == ["hibernate", "resume"]
    await at.frontend.wake_up()
    assert await texts(generate(at.frontend)) == ["token"] * 2


@runs
async def test_a_rank_elsewhere_is_refused(vllm: Any, driver: Driver) -> None:
    at = server(vllm, driver, 2)
    ranks(at.frontend)[1].process["pid_namespace"] = "another"
    await at.frontend.sleep(1)
    status, sentence = await at.call("/hibernate")
    assert status == 409
    assert "rank 1 runs on another machine or in another container" in sentence
    assert driver.calls == []
    await at.frontend.wake_up()


@runs
async def test_parameters_that_cannot_be_read(vllm: Any, driver: Driver) -> None:
    at = server(vllm, driver)
    await at.frontend.sleep(1)
    said = "hibernate: wait_max='soon' is no number of seconds"
    assert await at.call("/hibernate", wait_max="soon") == (400, said)
    driver.error = ValueError("`plenty` is not a size")
    assert await at.call("/hibernate", host_bytes_max="plenty") == (400, "`plenty` is not a size")


@pytest.mark.parametrize(("begin", "word"), [("/hibernate", "taken off"), ("/hibernate/resume", "put back")])
@runs
async def test_nothing_passes_while_it_changes(vllm: Any, driver: Driver, begin: str, word: str) -> None:
    at = server(vllm, driver)
    await at.frontend.sleep(1)
    if begin != "/hibernate":
        await at.call("/hibernate")
    driver.free.clear()
    driver.entered.clear()
    changing = asyncio.ensure_future(at.call(begin))
    await asyncio.to_thread(driver.entered.wait)
    await away(at.frontend, f"the engine is being {word}")
    # The next one waits its turn, and the first goes on without the client that asked for it.
    other = asyncio.ensure_future(at.call("/hibernate/resume"))
    changing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await changing
    assert not other.done()
    driver.free.set()
    assert (await other)["status"] == "resumed"
    await at.frontend.wake_up()
    assert await texts(generate(at.frontend)) == ["token"] * 2


@runs
async def test_a_driver_that_does_not_answer_is_not_waited_for(
    vllm: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_processes, "_STATE_TIMEOUT_SECONDS", 0.01)
    at = server(vllm, driver)
    await at.frontend.sleep(1)
    driver.answers.clear()
    await away(at.frontend, f"whether process {FIRST_PID} may use the GPU")
    assert (await at.call("/hibernate/resume"))[0] == 409
    assert (await at.call("/hibernate"))[0] == 409
    assert (await at.call("/is_hibernating"))["processes"] == [{"pid": FIRST_PID, "state": None}]
    driver.answers.set()
    monkeypatch.setattr(_processes, "_STATE_TIMEOUT_SECONDS", HANGS_SECONDS)
    # The library, too, waits for it no longer than this.
    driver.put("no_answer", FIRST_PID)
    await away(at.frontend, f"whether process {FIRST_PID} may use the GPU")
    driver.put("running", FIRST_PID)
    await at.frontend.wake_up()


@runs
async def test_an_engine_whose_driver_never_answers_is_unhealthy(
    vllm: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(_processes, "time", SimpleNamespace(monotonic=lambda: now))
    at = server(vllm, driver)
    await at.frontend.sleep(1)
    for _ in range(2):
        driver.put("no_answer", FIRST_PID)
        for passed in (30, 30):
            await away(at.frontend, f"whether process {FIRST_PID} may use the GPU")
            now += passed
        await at.frontend.check_health()
        now += 1
        with pytest.raises(HTTPException, match="does not say") as error:
            await at.frontend.check_health()
        assert error.value.status_code == 503
        driver.put("running", FIRST_PID)
        await at.frontend.check_health()
    # Not asked in between.
    driver.put("no_answer", FIRST_PID)
    for _ in range(2):
        await at.frontend.check_health()
        now += 300


@runs
async def test_a_driver_that_cannot_tell_has_taken_nothing_off(vllm: Any, driver: Driver) -> None:
    at = server(vllm, driver)
    driver.states.clear()
    await at.frontend.sleep(1)
    await at.frontend.check_health()
    await at.frontend.wake_up()
    assert await texts(generate(at.frontend)) == ["token"] * 2


@runs
async def test_the_driver_is_opened_behind_a_sleep_and_not_before(vllm: Any, driver: Driver) -> None:
    processes = EngineProcesses(engine(vllm, driver))
    first, second = (asynchronous(vllm, processes, index=index, count=2) for index in range(2))
    for frontend in (first, second):
        await frontend.check_health()
        await frontend.collective_rpc("synchronize_device")
    assert driver.opened == 0
    await first.sleep(1)
    await first._poorwill.processes._opening
    assert driver.opened == 1
    await first.wake_up()
    await second.check_health()
    assert driver.opened == 1


@runs
async def test_an_engine_that_lost_its_gpu_says_so(vllm: Any, driver: Driver) -> None:
    at = server(vllm, driver)
    await at.frontend.sleep(1)
    driver.put("failed", FIRST_PID)
    for _ in range(2):
        with pytest.raises(HTTPException, match="lost the GPU") as error:
            await at.frontend.check_health()
        assert error.value.status_code == 503
        await refused(at.frontend, f"process {FIRST_PID} lost the GPU: restart the engine")


@runs
async def test_an_engine_that_is_not_poorwills_has_no_such_routes(vllm: Any, driver: Driver) -> None:
    core = vllm.engine(config=make_config(worker_cls="vllm.v1.worker.gpu_worker.Worker"))
    at = Server(vllm, asynchronous(vllm, EngineProcesses(core)))
    for frontend in (at.frontend, None):
        at.frontend = frontend
        for path in ("/hibernate", "/hibernate/resume", "/is_hibernating"):
            assert await at.call(path) == (404, "Not Found")
    assert driver.calls == []


def test_a_frontend_without_asyncio_asks_as_well(vllm: Any, driver: Driver) -> None:
    frontend = synchronous(vllm, EngineProcesses(engine(vllm, driver)))
    frontend.sleep(1)
    driver.put("checkpointed", FIRST_PID)
    for name, *given in (
        ("wake_up",),
        ("sleep", 1),
        ("collective_rpc", "poorwill_status"),
        ("add_request", "asked", 1, PARAMS),
    ):
        with pytest.raises(PoorwillError, match=AWAY):
            getattr(frontend, str(name))(*given)
    driver.put("running", FIRST_PID)
    frontend.wake_up()
    frontend.add_request("asked", 1, PARAMS)
    assert [token for output in frontend.step() for token in output.new_token_ids] == ["token"]


def test_an_engine_in_this_process_is_not_asked(driver: Driver) -> None:
    processes = _processes.Processes()
    processes.take([_processes.this_process()])
    driver.put("checkpointed", os.getpid())
    assert processes.pids == (os.getpid(),)
    assert processes.look() is None


def test_routes_are_added_once_where_sleeping_is(vllm: Any) -> None:
    module = routes_of(vllm.loader.version)
    for _ in range(2):
        _hibernation.install_routes(module)
    added = [route for route in module.router.routes if "hibernat" in route.path]
    assert [(route.path, route.methods) for route in added] == [
        ("/hibernate", ["POST"]),
        ("/hibernate/resume", ["POST"]),
        ("/is_hibernating", ["GET"]),
    ]
    for route in added:
        # FastAPI takes the request by it.
        assert route.endpoint.__annotations__ == {"raw_request": sys.modules["fastapi"].Request}
