"""What frontends and vLLM's route of `/sleep` say to sleeps that keep requests and prefixes."""

import asyncio
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fake_vllm.clients import EngineProcesses, asynchronous, in_process, synchronous
from poorwill import PoorwillError
from poorwill.vllm import _frontend, _metrics, _routes
from poorwill.vllm._keep import KeepUnsupportedError
from vllm_routes import called, install_fastapi, routes_of
from vllm_sources import needs_sources

pytest_plugins = ["vllm_cores"]
pytestmark = needs_sources

CONNECTOR = SimpleNamespace(kv_connector="NixlConnector")
REFUSED = (
    "sleep: requests and prefixes cannot be kept, since the KV connector NixlConnector has its own part of "
    "the requests' blocks: sleep with mode=wait or abort, without keep_tags"
)


@pytest.fixture(autouse=True)
def around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_metrics, "record", lambda statuses: None)


def runs(test: Callable[..., Any]) -> Callable[..., None]:
    """A test that is a coroutine."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


async def awaited(call: Callable[[], Any]) -> None:
    """A call of whichever frontend."""
    answer = call()
    if asyncio.iscoroutine(answer):
        await answer


def blocks(core: Any, **hashes: bytes | None) -> list[int]:
    """Gives a core's pool some blocks; if its name begins with `r`, one is a request's. Returns evictions."""
    evicted: list[int] = []
    pool = core.scheduler.kv_cache_manager.block_pool
    pool.blocks[:] = [
        SimpleNamespace(block_id=number, is_null=False, ref_cnt=int(name[0] == "r"), block_hash=given)
        for number, (name, given) in enumerate(hashes.items())
    ]
    pool.evict_blocks = evicted.extend
    return evicted


def kept(core: Any) -> list[Any]:
    """What each sleep of each rank was to keep."""
    for worker in core.model_executor.workers:
        stock, worker.kept = worker.sleep, []
        worker.sleep = lambda level=1, kept=(), *, to=worker.kept, stock=stock: (
            to.append([tuple(run) for run in kept]),
            stock(level),
        )[1]
    return [worker.kept for worker in core.model_executor.workers]


MIXED: dict[str, bytes | None] = {"r0": None, "f1": b"1", "r2": b"2", "f3": None, "f4": b"4"}
LIVE, WITH_PREFIXES = [(0, 1), (2, 1)], [(0, 3), (4, 1)]


@pytest.mark.parametrize(
    ("mode", "tags", "keeps", "forgotten"),
    [
        ("keep", (), LIVE, {1, 4}),
        ("keep", ("kv_cache",), WITH_PREFIXES, set()),
        ("abort", "kv_cache", WITH_PREFIXES, set()),
        ("abort", (), [], set()),
    ],
)
@runs
async def test_each_frontend_passes_it_on(
    vllm: Any, mode: str, tags: Any, keeps: Any, forgotten: set[int]
) -> None:
    processes = EngineProcesses(vllm.engine(count=2))
    servers = EngineProcesses(vllm.engine(count=2))
    alone, inside = vllm.engine(count=2), vllm.engine("EngineCore")
    for frontend, core in (
        (in_process(vllm, inside), inside),
        (synchronous(vllm, processes), processes.cores[0]),
        (asynchronous(vllm, EngineProcesses(alone)), alone),
        # The second of two servers.
        ([asynchronous(vllm, servers, index=number, count=2) for number in range(2)][1], servers.cores[0]),
    ):
        evicted, seen = blocks(core, **MIXED), kept(core)
        await awaited(functools.partial(frontend.sleep, 1, mode, tags))
        assert seen == [[keeps]] * len(seen)
        assert set(evicted) == forgotten
        await awaited(frontend.wake_up)


@runs
async def test_a_refusal_has_a_class_of_its_own(vllm: Any) -> None:
    for make in (synchronous, asynchronous):
        processes = EngineProcesses(vllm.engine(count=1))
        frontend = make(vllm, processes)
        processes.cores[0].vllm_config.kv_transfer_config = CONNECTOR
        with pytest.raises(KeepUnsupportedError, match="NixlConnector"):
            await awaited(functools.partial(frontend.sleep, 1, "keep"))
        assert not processes.cores[0].is_scheduler_paused()
        assert issubclass(KeepUnsupportedError, PoorwillError)


@runs
async def test_several_engines_keep_nothing(vllm: Any) -> None:
    processes = EngineProcesses(*(vllm.engine(count=1, index=index) for index in range(2)))
    frontend = asynchronous(vllm, processes, "DPLBAsyncMPClient")
    with pytest.raises(KeepUnsupportedError, match="several data parallel engines"):
        await frontend.sleep(1, "keep")
    assert not any(core.is_scheduler_paused() for core in processes.cores)


def test_an_engine_of_vllms_own_keeps_no_tags(vllm: Any) -> None:
    core = vllm.engine("EngineCore")
    core.vllm_config.parallel_config.worker_cls = "vllm.v1.worker.gpu_worker.Worker"
    for frontend in (core, in_process(vllm, core)):
        with pytest.raises(ValueError, match="keep_tags needs an engine that sleeps with Poorwill"):
            frontend.sleep(1, "abort", ["kv_cache"])
    assert not core.is_scheduler_paused()


# By HTTP.


@runs
async def test_the_route_passes_tags_on(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fastapi(monkeypatch)
    core = vllm.engine(count=1)
    frontend = asynchronous(vllm, EngineProcesses(core))
    module = routes_of(vllm.loader.version)
    for _ in range(2):
        _routes.install(module)
    for tags in ("kv_cache", "kv_cache, kv_cache"):
        blocks(core, **MIXED)
        [seen] = kept(core)
        await called(module, frontend, "/sleep", keep_tags=tags)
        assert seen == [WITH_PREFIXES]
        await called(module, frontend, "/wake_up")
    with pytest.raises(ValueError, match="keep_tags has 'weights'"):
        await called(module, frontend, "/sleep", keep_tags="kv_cache,weights")
    assert not core.is_scheduler_paused()


@pytest.mark.parametrize("query", [{"mode": "keep"}, {"keep_tags": "kv_cache"}])
@runs
async def test_what_cannot_be_kept_is_answered_with_501(
    vllm: Any, monkeypatch: pytest.MonkeyPatch, query: dict[str, str]
) -> None:
    install_fastapi(monkeypatch)
    core = vllm.engine(count=1)
    core.vllm_config.kv_transfer_config = CONNECTOR
    frontend = asynchronous(vllm, EngineProcesses(core))
    module = routes_of(vllm.loader.version)
    _routes.install(module)
    assert await called(module, frontend, "/sleep", **query) == (501, REFUSED)
    assert not core.is_scheduler_paused()


def test_offline_tags_reach_the_engine(vllm: Any) -> None:
    class LLM:
        """vLLM's, as far as it sleeps."""

        def __init__(self, engine: Any) -> None:
            self.llm_engine = engine

        def sleep(self, level: int = 1, mode: str = "abort") -> None:
            self.llm_engine.sleep(level=level, mode=mode)

    module = SimpleNamespace(LLM=LLM)
    _frontend.install_offline(module)
    core = vllm.engine("EngineCore")
    blocks(core, **MIXED)
    [seen] = kept(core)
    llm: Any = LLM(in_process(vllm, core))
    llm.sleep(keep_tags=["kv_cache"])
    llm.llm_engine.wake_up()
    llm.sleep()
    assert seen == [WITH_PREFIXES, []]
