"""EngineCores and frontends of vLLM's versions with our hooks, and what tests ask of the former.

As a plugin of pytest it brings the fixtures.
"""

from typing import Any

import fake_vllm
import pytest
from fake_vllm.engines import Request, turn
from poorwill import _ranks
from poorwill.vllm import _engine, _frontend

BOTH = frozenset({"weights", "kv_cache"})
NOT_WRITTEN = "the weights were dropped by a level 2 sleep and have not been written again since"


@pytest.fixture(scope="module", params=fake_vllm.VERSIONS)
def vllm(request: pytest.FixtureRequest) -> Any:
    vllm = fake_vllm.Vllm(request.param)
    _engine.install_core(vllm.core, vllm.generation)
    _frontend.install_async(vllm.async_llm, vllm.generation)
    _frontend.install_sync(vllm.llm_engine, vllm.generation)
    return vllm


@pytest.fixture(autouse=True)
def _nothing_said() -> None:
    """Warnings come once for each process."""
    _ranks._was_warned.clear()


@pytest.fixture(params=["in this process", "one rank", "three ranks"])
def engine(request: pytest.FixtureRequest, vllm: Any) -> Any:
    """An EngineCore, whatever holds its workers."""
    if request.param == "in this process":
        return vllm.engine("EngineCore")
    return vllm.engine(count=1 if request.param == "one rank" else 3)


def workers(engine: Any) -> Any:
    return engine.model_executor.workers


def last(engine: Any) -> Any:
    return workers(engine)[-1]


def step(engine: Any) -> dict[str, list[str]]:
    """What one step answers, by request."""
    outputs, _ = engine.step()
    return {output.request_id: output.new_token_ids for each in outputs.values() for output in each.outputs}


def asleep(engine: Any) -> frozenset[str]:
    """What sleeps, once the ranks and vLLM's own bookkeeping agree on it."""
    executor = engine.model_executor
    reported = frozenset(executor.sleeping_tags)
    assert executor.is_sleeping == bool(reported)
    for worker in workers(engine):
        assert worker.asleep == reported
    return reported


def is_serving(engine: Any) -> bool:
    """Whether a request is answered with a token."""
    if engine.is_scheduler_paused():
        return False
    engine.add_request(Request("asked"))
    assert step(engine) == {"asked": ["token"]}
    return True


def draining(engine: Any, level: int = 1, mode: str = "wait") -> Any:
    engine.add_request(Request("long", steps=3))
    turn(engine)
    return engine.sleep(level, mode)


@pytest.fixture(params=["EngineCoreProc", "DPEngineCoreProc"])
def process(request: pytest.FixtureRequest, vllm: Any) -> Any:
    return vllm.engine(request.param, 2)
