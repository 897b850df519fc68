"""Our worker when calls of the driver fail, and our allocator and backend for their callers.
`test_vllm_suites.py` runs it.
"""

import importlib
from typing import Any

import poorwill
import pytest
from vllm_engines import BLOCKS, LORA, MIB, Faults, Start, contents, filled, free_bytes, only

torch: Any = importlib.import_module("torch")


# Calls of the driver that fail


@pytest.mark.parametrize("level", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_sleep_that_fails_leaves_the_engine_awake(start: Start, faults: Faults, level: int) -> None:
    engine = start(LORA).start()
    engine.prepared()
    before = contents(engine.kept())

    def restored() -> None:
        engine.worker.wake_up()
        engine.runner.model.load_weights()
        engine.worker.poorwill_mark_restored()
        engine.prepared()
        engine.events()

    def sleep() -> None:
        engine.worker.sleep(level)

    calls = faults.calls_of(sleep)
    restored()
    raised = 0
    for number in calls:
        fails = faults.fail(number, sleep)
        states = engine.states()
        if fails is None:
            restored()
            continue
        raised += 1
        if isinstance(fails, poorwill.PoorwillError):
            if getattr(fails, "report", None) is None:
                assert set(states.values()) == {"awake"}, (number, fails, states)
                assert contents(engine.kept()) == before, (number, fails)
            else:
                assert str(fails).startswith("asleep, but")
                assert not {"awake", "undefined"} & set(states.values()), (number, fails, states)
        # Where it sleeps nevertheless, the engine's core wakes the rank.
        engine.worker.wake_up()
        assert engine.worker.poorwill_mark_restored() in ([], ["weights"])
        engine.worker.sleep(level)
        assert free_bytes() == engine.free_at_start, (number, fails)
        restored()
        assert contents(engine.kept()) == before, (number, fails)
    assert raised


def test_a_wake_that_fails_leaves_the_engine_asleep(start: Start, faults: Faults) -> None:
    engine = start(LORA).start()
    before = contents(engine.kept())
    engine.worker.sleep(1)
    raised = 0
    for number in faults.calls_of(engine.worker.wake_up):
        engine.worker.sleep(1)
        engine.events()
        fails = faults.fail(number, engine.worker.wake_up)
        if fails is not None:
            raised += 1
            if isinstance(fails, poorwill.PoorwillError):
                assert not {"awake", "undefined"} & set(engine.states().values()), (number, fails)
                [reported] = engine.events("wake")
                assert type(fails).__name__ in reported["error"]
                assert free_bytes() == engine.free_at_start, (number, fails)
            engine.worker.wake_up()
        assert engine.is_awake()
        assert contents(engine.kept()) == before, (number, fails)
        assert engine.cache_is_zero()
    assert raised


# The allocator, by what vLLM calls


def test_pools_by_tag(start: Start) -> None:
    engine = start().load()
    allocator = engine.allocator
    assert allocator.default_tag == "default"
    with allocator.use_memory_pool():
        kept = filled(4 * MIB, 3)
    with allocator.use_memory_pool(tag="kv_cache"):
        cache = filled(4 * MIB, 4)
    assert {"default", "kv_cache"} <= set(engine.states())
    allocator.sleep()
    allocator.wake_up(("weights",))
    assert engine.states()["default"] == "awake"
    assert set(kept.numpy_bytes()) == {4}
    assert engine.states()["kv_cache"] == "asleep_dropped"
    allocator.wake_up()
    assert not any(cache.numpy_bytes())
    elsewhere = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    covered = [
        any(begin <= tensor.data_ptr() < end for begin, end in allocator.ranges())
        for tensor in (cache, elsewhere)
    ]
    assert covered == [True, False]
    del kept, cache


@pytest.mark.parametrize("kept", [(), ("weights",), ("default", "mine"), "mine"])
def test_who_sleeps_by_tags_keeps_these_and_no_others(start: Start, kept: tuple[str, ...] | str) -> None:
    engine = start(POORWILL_PREPARE="0").start()
    tensors = {"weights": next(iter(engine.weights().values()))}
    for tag in ("default", "mine"):
        with engine.allocator.use_memory_pool(tag):
            tensors[tag] = filled(2 * MIB, 5)
    before = contents(tensors)
    engine.allocator.sleep(kept)
    torch.cuda.empty_cache()
    assert free_bytes() == engine.free_at_start
    states = engine.states()
    for tag in tensors:
        wanted = "asleep_backed_up" if tag in kept else "asleep_dropped"
        assert states[tag] == wanted, tag
    engine.allocator.wake_up()
    after = contents(tensors)
    assert {tag for tag in tensors if after[tag] == before[tag]} == {tag for tag in tensors if tag in kept}


@pytest.mark.long
def test_a_sleep_by_tags_that_fails_loses_nothing_that_it_keeps(start: Start, faults: Faults) -> None:
    engine = start().start()
    weights = engine.weights()
    before = contents(weights)

    def sleep() -> None:
        engine.allocator.sleep(("weights",))

    raised = 0
    for number in faults.calls_of(sleep):
        engine.allocator.wake_up()
        raised += faults.fail(number, sleep) is not None
        engine.allocator.wake_up()
        assert contents(weights) == before, number
    assert raised


def test_what_no_sleep_keeps_cannot_be_asked_for(start: Start) -> None:
    engine = start().start()
    with pytest.raises(poorwill.PoorwillError, match=r"kv_cache.*discard it"):
        engine.allocator.sleep(("weights", "kv_cache"))
    assert engine.is_awake()


def test_discarding(start: Start) -> None:
    engine = start().start()
    before = contents(engine.kept())
    engine.prepared()
    engine.events()
    engine.allocator.discard("kv_cache")
    assert engine.states()["kv_cache"] == "asleep_dropped"
    [discarded] = engine.events()
    assert (discarded["operation"], discarded["error"]) == ("discard", None)
    assert discarded["released_bytes"] >= engine.shape.layers * engine.shape.page * BLOCKS
    # What sleeps stays as it is, and what is not there is nothing.
    engine.allocator.discard(("kv_cache", "nothing"))
    assert engine.events() == []
    engine.worker.sleep(1)
    with pytest.raises(poorwill.PoorwillError, match="weights sleeps with a backup"):
        engine.allocator.discard(("kv_cache", "weights"))
    engine.worker.wake_up()
    assert contents(engine.kept()) == before
    assert engine.cache_is_zero()


# To look at, as vLLM's allocator can be


def test_what_there_is_can_be_looked_at(start: Start) -> None:
    engine = start(LORA).start()
    allocator = engine.allocator
    assert (allocator.current_tag, allocator.is_sleeping) == ("default", False)
    with allocator.use_memory_pool("weights"):
        assert allocator.current_tag == "weights"
        with allocator.renaming({"kv_cache": "runtime"}), allocator.use_memory_pool("kv_cache"):
            assert allocator.current_tag == "runtime"
        assert allocator.current_tag == "weights"
    assert allocator.current_tag == "default"
    for asleep in (set(), {"weights", "kv_cache", "runtime"}, {"kv_cache"}):
        if asleep:
            engine.worker.sleep(1)
            engine.worker.wake_up([] if len(asleep) > 1 else ["weights"])
        reported = allocator.pointer_to_data
        assert {data.tag for data in reported.values() if data.is_asleep} <= asleep
        assert {"weights", "kv_cache"} & asleep <= {data.tag for data in reported.values() if data.is_asleep}
        assert all(data.handle == (0, data.handle[1], address, 0) for address, data in reported.items())
        lies = [
            (address, address + data.handle[1]) for address, data in reported.items() if data.tag == "weights"
        ]
        assert lies == allocator.ranges("weights")
        assert allocator.is_sleeping == bool(asleep)
    with pytest.raises(TypeError):
        reported[0] = None
    with pytest.raises(AttributeError):
        allocator.current_tag = "weights"


def test_who_asks_first_opens_it(start: Start) -> None:
    """Over all of the current GPU; the engine that comes then has its own share."""
    module = importlib.import_module("poorwill.vllm.allocator")
    engine = start()
    module.Allocator.instance = None
    allocator = module.Allocator.get_instance()
    assert allocator.arena.device == "cuda:0"
    assert module.Allocator.get_instance() is allocator
    allocator_limit = allocator.arena.limit_bytes
    with allocator.use_memory_pool():
        tensor = filled(MIB, 3)
    before = contents({"mine": tensor})
    allocator.sleep()
    assert [data.is_asleep for data in allocator.pointer_to_data.values()] == [True]
    allocator.wake_up()
    assert contents({"mine": tensor}) == before
    del tensor
    engine.start()
    assert engine.allocator is not allocator
    assert engine.arena.limit_bytes < allocator_limit


# The backend of the registry


@only("0.33.0")
def test_the_backend(start: Start) -> None:
    engine = start().start()
    backend = engine.worker.sleep_mode_backend
    assert type(backend).__module__ == "poorwill.vllm.backend"
    before = contents(engine.kept())
    assert backend.state() == "RUNNING"
    engine.worker.sleep(1)
    assert backend.state() == "SUSPENDED"
    engine.worker.wake_up(["kv_cache"])
    assert backend.state() == "SUSPENDED"
    engine.worker.wake_up()
    assert backend.state() == "RUNNING"
    assert contents(engine.kept()) == before
    engine.worker.discard(("kv_cache",))
    assert backend.state() == "SUSPENDED"
    engine.worker.wake_up(["kv_cache"])
    assert backend.state() == "RUNNING"
    flags = {
        name: getattr(type(backend), name)()
        for name in (
            *("is_supported", "preserves_communicators", "preserves_compiled_artifacts"),
            *("preserves_graphs_with_communicators", "supports_durable_storage"),
        )
    }
    assert [name for name, is_so in flags.items() if not is_so] == ["supports_durable_storage"]


@only("0.33.0")
def test_a_backend_that_fails_says_where_it_is(start: Start, faults: Faults) -> None:
    engine = start().start()
    backend = engine.worker.sleep_mode_backend
    with pytest.raises(ValueError, match="no tag"):
        backend.resume(["nothing"])
    assert backend.state() == "RUNNING"
    faults.arm(0, 100_000)
    with pytest.raises(poorwill.PoorwillError):
        backend.suspend(1)
    faults.disarm()
    states = engine.states()
    assert backend.state() == ("RUNNING" if engine.is_awake() else "SUSPENDED"), states
    backend.resume()
    backend.suspend(1)
    with pytest.raises(poorwill.PoorwillError, match="weights sleeps with a backup"):
        backend.discard(("weights",))
    assert backend.state() == "SUSPENDED"
    faults.arm(0, 100_000)
    with pytest.raises(poorwill.PoorwillError):
        backend.resume()
    faults.disarm()
    assert backend.state() == "SUSPENDED"
    backend.resume()
    assert backend.state() == "RUNNING"
    assert engine.is_awake()
