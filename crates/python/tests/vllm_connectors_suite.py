"""What our worker promises beside a KV connector: none of the cache is registered while it sleeps, and all of
it once it is awake. `test_vllm_suites.py` runs it, over vLLM's own worker and a connector that records.
"""

import contextlib
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_engines import Engine, Faults, Start, free_bytes, only

UNREGISTERED = ("unregistered", "awake")
RESTORED = ("restored", "awake")


class Connector:
    """One that registers the cache. It records its calls and the cache's state then. Repeated calls do
    nothing, as vLLM requires of connectors.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.is_registered = True
        self.done: list[tuple[str, str]] = []
        self.fails: list[Exception] = []
        self.pool: Any = None

    def unregister_kv_caches(self) -> None:
        self._become(False, "unregistered")

    def restore_kv_caches(self) -> None:
        self._become(True, "restored")

    def get_mem_pool_context(self) -> Any:
        return self.pool

    def _become(self, is_registered: bool, what: str) -> None:
        if self.is_registered is is_registered:
            return
        if self.fails:
            raise self.fails.pop()
        self.is_registered = is_registered
        self.done.append((what, self.engine.states()["kv_cache"]))

    def take(self) -> list[tuple[str, str]]:
        done, self.done = self.done, []
        return done


def connected(engine: Engine, connector: Any) -> Any:
    """Has the worker find a connector in its process, as after its start."""
    engine.module.gpu_worker.has_kv_transfer_group = lambda: True
    engine.module.gpu_worker.get_kv_transfer_group = lambda: connector
    return connector


def beside(engine: Engine) -> Any:
    return connected(engine, Connector(engine))


@only("0.33.0")
@pytest.mark.parametrize("level", [1, 2])
def test_the_cache_sleeps_unregistered(start: Start, level: int) -> None:
    engine = start().start()
    connector = beside(engine)
    for _ in range(2):
        engine.worker.sleep(level)
        assert engine.states()["kv_cache"] == "asleep_dropped"
        assert connector.take() == [UNREGISTERED]
        engine.worker.wake_up()
        assert connector.take() == [RESTORED]
        engine.worker.reload_weights()


@only("0.33.0")
@pytest.mark.parametrize("level", [1, 2])
def test_it_is_registered_with_the_wake_of_its_own_tag(start: Start, level: int) -> None:
    engine = start().start()
    connector = beside(engine)
    for order in (["weights", "kv_cache"], ["kv_cache", "weights"]):
        engine.worker.sleep(level)
        assert connector.take() == [UNREGISTERED]
        for tag in order:
            engine.worker.wake_up([tag])
            assert connector.take() == ([RESTORED] if tag == "kv_cache" else [])
        engine.worker.reload_weights()


@only("0.33.0")
@pytest.mark.parametrize("level", [1, 2])
def test_it_is_unregistered_by_a_sleep_of_what_is_half_awake(start: Start, level: int) -> None:
    engine = start().start()
    connector = beside(engine)
    for woken in ("kv_cache", "weights"):
        engine.worker.sleep(level)
        engine.worker.wake_up([woken])
        if woken == "weights":
            engine.worker.reload_weights()
        connector.take()
        engine.worker.sleep(level)
        assert free_bytes() == engine.free_at_start
        # What sleeps has nothing to unregister.
        assert connector.take() == ([UNREGISTERED] if woken == "kv_cache" else [])
        engine.worker.wake_up()
        assert connector.take() == [RESTORED]
        engine.worker.reload_weights()


@only("0.33.0")
def test_a_discard_unregisters(start: Start) -> None:
    engine = start().start()
    connector = beside(engine)
    engine.worker.discard(("kv_cache",))
    assert engine.states()["kv_cache"] == "asleep_dropped"
    assert connector.take() == [UNREGISTERED]
    engine.worker.sleep(1)
    assert connector.take() == []
    engine.worker.wake_up()
    assert connector.take() == [RESTORED]


@only("0.33.0")
@pytest.mark.parametrize("level", [1, 2])
def test_a_failed_sleep_that_is_taken_back_registers_once(start: Start, faults: Faults, level: int) -> None:
    engine = start().start()
    engine.prepared()
    connector = beside(engine)
    taken_back = 0
    for number in faults.calls_of(lambda: engine.worker.sleep(level)):
        engine.worker.wake_up()
        engine.worker.reload_weights()
        connector.take()
        error = faults.fail(number, lambda: engine.worker.sleep(level))
        is_unregistered = not connector.is_registered
        taken_back += error is not None and is_unregistered
        # What the engine's core does then.
        engine.worker.wake_up()
        assert connector.take() == ([UNREGISTERED, RESTORED] if is_unregistered else [])
        assert connector.is_registered
        engine.worker.reload_weights()
        engine.worker.sleep(level)
    assert taken_back


@only("0.33.0")
def test_a_sleep_that_is_refused_unregisters_nothing(start: Start) -> None:
    engine = start().start()
    connector = beside(engine)
    connector.fails = [RuntimeError("a transfer hangs")]
    with pytest.raises(RuntimeError, match="a transfer hangs"):
        engine.worker.sleep(2)
    assert engine.is_awake()
    assert connector.is_registered
    engine.worker.wake_up()
    assert connector.take() == []


@only("0.33.0")
def test_half_awake_it_is_refused_as_well(start: Start) -> None:
    engine = start().start()
    connector = beside(engine)
    engine.worker.sleep(1)
    engine.worker.wake_up(["kv_cache"])
    connector.take()
    connector.fails = [RuntimeError("a transfer hangs")]
    with pytest.raises(RuntimeError, match="a transfer hangs"):
        engine.worker.sleep(1)
    assert engine.states()["kv_cache"] == "awake"
    assert connector.is_registered


@only("0.33.0")
def test_a_wake_that_cannot_register_is_tried_again(start: Start) -> None:
    engine = start().start()
    connector = beside(engine)
    engine.worker.sleep(2)
    connector.take()
    connector.fails = [RuntimeError("no locked memory")]
    with pytest.raises(RuntimeError, match="no locked memory"):
        engine.worker.wake_up()
    engine.worker.wake_up()
    assert connector.take() == [RESTORED]
    # Also what vLLM writes behind that.
    assert set(engine.buffers()["rotary.0"].numpy_bytes()) == {101}


def test_a_connector_that_registers_nothing_is_left_alone(start: Start) -> None:
    engine = start().start()
    if engine.version == "0.20.2":
        connected(engine, object())
    else:
        connected(engine, SimpleNamespace(unregister_kv_caches=lambda: None, restore_kv_caches=lambda: None))
    for tags in (["kv_cache"], None):
        engine.worker.sleep(1)
        engine.worker.wake_up(tags)
    assert engine.is_awake()


@only("0.33.0")
def test_a_pool_of_the_connectors_own_is_refused_at_the_start(start: Start) -> None:
    engine = start().load()
    connector = beside(engine)
    connector.pool = contextlib.nullcontext()
    refusal = importlib.import_module("poorwill.vllm._platform").ConfigurationError
    with pytest.raises(
        refusal, match=r"Connector allocates the KV cache in a memory pool of its own.*custom_mem_pool"
    ):
        engine.start_cache()
    assert "kv_cache" not in engine.states()
    connector.pool = None
    engine.start_cache()
    assert engine.states()["kv_cache"] == "awake"


@only("0.33.0")
def test_communicators_sleep_again_with_what_is_half_awake(start: Start) -> None:
    engine = start().start()
    engine.config.model_config.enable_nccl_comm_suspend = True
    done: list[str] = []
    communicators = engine.worker._communicators
    communicators.suspend = lambda: done.append("suspended")
    communicators.resume = lambda: done.append("resumed")
    engine.worker.sleep(1)
    engine.worker.wake_up(["kv_cache"])
    engine.worker.sleep(1)
    assert done == ["suspended", "resumed", "suspended"]
    engine.worker.wake_up()
    assert done[3:] == ["resumed"]
