"""What our worker promises of an engine that sleeps, in any version; `test_vllm_suites.py` runs it."""

import gc
import importlib
import logging
import os
import sys
from types import SimpleNamespace
from typing import Any

import poorwill
import pytest
from fake_vllm.worker_parts import kv_config
from poorwill.vllm._versions import TESTED
from vllm_engines import (
    BLOCKS,
    LORA,
    MIB,
    Shape,
    Start,
    addresses,
    contents,
    filled,
    free_bytes,
    minor,
    only,
)

torch: Any = importlib.import_module("torch")

GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "cudagraph_mode": "FULL",
    "sleep_mode_offload_cudagraph": True,
}


# Starting


def test_the_allocator_takes_the_place_of_vllms(start: Start, version: str) -> None:
    engine = start(LORA).start()
    cumem = importlib.import_module("vllm.device_allocator.cumem")
    assert cumem.CuMemAllocator is type(engine.allocator)
    assert cumem.CuMemAllocator.get_instance() is engine.allocator
    requested = engine.worker.requested_memory
    assert engine.arena.limit_bytes == requested == 768 * MIB
    tags = {tag.tag: tag.live_bytes for tag in engine.arena.stats().tags}
    weights = sum((*engine.shape.weights, *engine.shape.buffers))
    assert weights <= tags["weights"] <= weights + 8 * MIB
    assert tags["kv_cache"] == engine.shape.layers * engine.shape.page * BLOCKS
    assert tags["runtime"] >= 2 * engine.shape.builder + sum(engine.shape.lora)
    assert ("workspace" in tags) == (minor(version) >= 32)


def test_loading_is_bounded(start: Start) -> None:
    shape = Shape(weights=(22 * MIB,) * 6, transient=150 * MIB)
    engine = start(shape).load()
    stats = engine.arena.stats()
    live = sum((*shape.weights, *shape.buffers))
    assert stats.peak_mapped_bytes <= 1.1 * live + shape.transient
    assert stats.mapped_bytes <= 1.1 * live
    [load] = engine.events()
    assert (load["operation"], load["error"]) == ("load", None)


def test_the_weights_are_backed_up_behind_the_start(start: Start) -> None:
    engine = start().start()
    engine.prepared()
    [prepared] = engine.events("prepare")
    assert prepared["copied_bytes"] > sum(engine.shape.weights)
    engine.worker.sleep(1)
    [slept] = engine.events("sleep")
    assert (slept["copied_bytes"], slept["error"]) == (0, None)
    assert slept["skipped_bytes"] > sum(engine.shape.weights)


def test_that_can_be_turned_off(start: Start) -> None:
    engine = start(POORWILL_PREPARE="0").start()
    assert engine.worker._preparation is None
    engine.worker.sleep(1)
    [slept] = engine.events("sleep")
    assert slept["copied_bytes"] > sum(engine.shape.weights)
    assert engine.events() == []
    engine.worker.wake_up()
    assert engine.worker.poorwill_prepare() is None
    report = engine.worker.poorwill_prepare(wait=True)
    assert report["unchanged_bytes"] > 0


def test_backups_are_dropped_on_request(start: Start) -> None:
    engine = start().start()
    engine.worker.poorwill_prepare(wait=True)
    engine.worker.sleep(1)
    # What sleeps has nothing else.
    assert engine.worker.poorwill_drop_backups() == 0
    held = engine.arena.stats().backup_raw_bytes
    assert held > sum(engine.shape.weights)
    engine.worker.wake_up()
    assert engine.arena.stats().backup_raw_bytes == held
    assert engine.worker.poorwill_drop_backups() > 0
    assert engine.worker.poorwill_status()["host_bytes"] == 0
    engine.worker.sleep(1)
    slept = engine.events("sleep")[-1]
    assert slept["copied_bytes"] == held


@pytest.mark.long
def test_backups_need_not_stay(start: Start) -> None:
    engine = start(POORWILL_KEEP_BACKUPS="0", POORWILL_PREPARE="0").start()
    for _ in range(2):
        engine.worker.sleep(1)
        assert engine.arena.stats().backup_raw_bytes > sum(engine.shape.weights)
        engine.worker.wake_up()
        assert engine.arena.stats().backup_raw_bytes == 0


def test_a_cache_limit_is_the_arenas(start: Start) -> None:
    engine = start(POORWILL_CACHE_LIMIT="128MiB").start()
    assert engine.arena.cache_limit_bytes == 128 * MIB


def test_what_is_held_keeps_the_engine_awake(start: Start) -> None:
    engine = start(POORWILL_PREPARE="0").start()
    with engine.arena.hold("kv_cache", "NIXL"):
        with pytest.raises(poorwill.TagError, match="`kv_cache` is held by NIXL"):
            engine.worker.sleep(1)
        assert set(engine.arena.state().values()) == {"awake"}
    engine.worker.sleep(1)
    engine.worker.wake_up()


class Exchange:
    """What a worker does with NCCL's communicators."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails = False

    def suspend(self) -> None:
        self.calls.append("suspend")
        if self.fails:
            raise poorwill.PoorwillError("not suspended")

    def resume(self) -> None:
        self.calls.append("resume")

    def decline(self, operation: str, error: BaseException, ranks: int) -> None:
        self.calls.append(f"declines to {operation} among {ranks}: {error}")

    def status(self) -> list[Any]:
        return []


suspends_communicators = pytest.mark.parametrize(
    "version", [version for version in TESTED if minor(version) >= 30], indirect=True
)


def exchanging(start: Start) -> tuple[Any, Exchange]:
    engine = start(POORWILL_PREPARE="0").start()
    engine.worker.vllm_config.model_config.enable_nccl_comm_suspend = True
    engine.worker._communicators = exchange = Exchange()
    return engine, exchange


@suspends_communicators
def test_a_rank_that_fails_lets_those_go_that_wait_for_it(start: Start) -> None:
    engine, exchange = exchanging(start)
    with engine.arena.hold("kv_cache", "NIXL"), pytest.raises(poorwill.TagError):
        engine.worker.sleep(1)
    assert len(exchange.calls) == 1
    assert exchange.calls[0].startswith("declines to suspend among 1: ")
    assert "held by NIXL" in exchange.calls.pop()
    exchange.fails = True
    with pytest.raises(poorwill.PoorwillError, match="not suspended"):
        engine.worker.sleep(1)
    engine.worker.wake_up()
    assert exchange.calls == ["suspend", "resume"]


@suspends_communicators
def test_a_rank_that_fails_with_all_others_has_none_to_let_go(start: Start, tmp_path: Any) -> None:
    engine, exchange = exchanging(start)
    decision = poorwill.Decision.create(str(tmp_path))
    call: Any = ("sleep", (1,), {}, str(decision.path), 0, 2)
    with engine.arena.hold("kv_cache", "NIXL"), pytest.raises(poorwill.TagError):
        engine.worker.poorwill_together(*call)
    assert exchange.calls == []
    assert decision.verdict == "undo"
    with pytest.raises(poorwill.UndoneError):
        engine.worker.poorwill_together(*call)
    assert exchange.calls == []


@suspends_communicators
def test_a_rank_that_fails_behind_the_commit_lets_the_others_go(
    start: Start, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, exchange = exchanging(start)
    decision = poorwill.Decision.create(str(tmp_path))
    stock = type(engine.allocator).suspend

    def suspend(allocator: Any, level: int) -> None:
        stock(allocator, level)
        raise RuntimeError("behind it")

    monkeypatch.setattr(type(engine.allocator), "suspend", suspend)
    with pytest.raises(RuntimeError, match="behind it"):
        engine.worker.poorwill_together("sleep", (1,), {}, str(decision.path), 0, 1)
    assert exchange.calls == ["declines to suspend among 1: behind it"]


@suspends_communicators
@pytest.mark.parametrize("fault", ["the decision is gone", "an exchange that fails"])
def test_what_fails_while_a_rank_declines_does_not_hide_its_error(
    start: Start, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    engine, exchange = exchanging(start)
    decision = poorwill.Decision.create(str(tmp_path))
    stock = type(engine.allocator).suspend

    def suspend(allocator: Any, level: int) -> None:
        stock(allocator, level)
        if fault == "the decision is gone":
            decision.remove()
        else:
            del exchange.calls
        raise RuntimeError("behind it")

    monkeypatch.setattr(type(engine.allocator), "suspend", suspend)
    with pytest.raises(RuntimeError, match="behind it"):
        engine.worker.poorwill_together("sleep", (1,), {}, str(decision.path), 0, 1)
    assert not getattr(exchange, "calls", None)


@pytest.mark.long
def test_every_preparation_is_reported(start: Start) -> None:
    engine = start(Shape(weights=(90 * MIB, 90 * MIB))).start()
    engine.worker.poorwill_prepare()
    engine.worker.poorwill_prepare(wait=True)
    reported = engine.events("prepare")
    assert [event["error"] for event in reported] == [None] * 3
    # Together they have copied everything, and nothing twice.
    copied = sum(event["copied_bytes"] for event in reported)
    assert copied == engine.arena.stats().backup_raw_bytes
    engine.worker.sleep(1)
    [slept] = engine.events("sleep")
    assert slept["copied_bytes"] == 0


def test_a_preparation_that_fails_is_an_event(start: Start) -> None:
    engine = start(POORWILL_PREPARE="0", POORWILL_HOST_BUDGET="1MiB", POORWILL_COMPRESS="off").start()
    engine.worker.poorwill_prepare()
    with pytest.raises(poorwill.PoorwillError):
        engine.worker._preparation.wait()
    [failed] = engine.events("prepare")
    assert "POORWILL" in failed["error"] or "host" in failed["error"]
    with pytest.raises(poorwill.PoorwillError):
        engine.worker.poorwill_prepare(wait=True)
    [failed] = engine.events("prepare")
    assert failed["error"]
    assert engine.is_awake()


def test_drafters_are_configured_in_the_workers_process(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POORWILL_SLEEP_MODE", "1")
    platform = importlib.import_module("poorwill.vllm._platform")
    drafter = SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=False),
        parallel_config=SimpleNamespace(worker_cls=platform.STOCK_WORKER),
    )
    with pytest.raises(platform.ConfigurationError, match="sleep mode is off"):
        platform.decide(drafter)
    start()
    platform.decide(drafter)
    assert not platform.is_active(drafter)


@only("0.20.2")
@pytest.mark.parametrize("level", [1, 2])
def test_the_second_runner_keeps_what_is_made_around_its_cache(
    start: Start, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_USE_V2_MODEL_RUNNER", True, raising=False)
    engine = start(LORA).start()
    assert type(engine.runner).__name__ == "SecondGPUModelRunner"
    made_by = sys.modules["vllm.v1.worker.gpu.model_runner"].init_kv_cache
    assert not hasattr(made_by, "__wrapped__")
    before = contents(engine.kept())
    engine.worker.sleep(level)
    engine.worker.wake_up()
    if level == 2:
        engine.worker.reload_weights()
    assert contents(engine.kept()) == before
    assert engine.cache_is_zero()


def test_before_there_is_a_gpu_there_is_a_sentence(start: Start) -> None:
    engine = start()
    with pytest.raises(poorwill.PoorwillError, match="init_device"):
        engine.worker.poorwill_status()


def test_one_process_has_one_gpu(start: Start) -> None:
    start().load()
    other = start(device=1)
    with pytest.raises(poorwill.PoorwillError, match=r"sleeps on cuda:0.*a process of its own"):
        other.worker.init_device()
    torch.cuda.set_device(0)


def test_another_vllm_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.import_module("vllm.version")
    monkeypatch.setattr(known, "__version__", "0.99.0")
    with pytest.raises(poorwill.PoorwillError, match=r"vLLM 0\.99\.0"):
        start()
    monkeypatch.undo()
    snapshot = importlib.import_module("vllm.utils.mem_utils").MemorySnapshot
    monkeypatch.delattr(snapshot, "measure")
    with pytest.raises(poorwill.PoorwillError, match=r"MemorySnapshot\.measure is missing"):
        start()


# Level 1


def test_level_1_brings_everything_back(start: Start) -> None:
    engine = start(LORA).start()
    before, places = contents(engine.kept()), addresses({**engine.kept(), **engine.caches()})
    torch.cuda.empty_cache()
    free = free_bytes()
    for cycle in range(3):
        engine.worker.sleep(1)
        assert free_bytes() == engine.free_at_start, cycle
        assert engine.arena.stats().mapped_bytes == 0
        engine.worker.wake_up()
        assert free_bytes() >= free, "what lives comes back, and nothing else"
        free = free_bytes()
        assert contents(engine.kept()) == before, cycle
        assert addresses({**engine.kept(), **engine.caches()}) == places
        assert engine.cache_is_zero()
        assert engine.is_awake()
        engine.use_cache()
        # What has changed between two sleeps comes back changed.
        engine.weights()["layers.1.weight"].fill_(99 - cycle)
        engine.runner.lora[0].fill_(89 - cycle)
        before = contents(engine.kept())
    status = engine.worker.poorwill_status()
    assert (status["undefined"], status["sleeping"]) == ([], [])


def test_status_is_of_plain_values_and_tells_events_once(start: Start) -> None:
    engine = start().start()
    status = engine.worker.poorwill_status()
    assert status["unaccounted_bytes"] is None
    assert [event["operation"] for event in status["events"]] == ["load"]
    engine.prepared()
    engine.worker.sleep(1)
    status = engine.worker.poorwill_status()
    assert (status["rank"], status["device"], status["pid"]) == (0, "cuda:0", os.getpid())
    process = engine.worker.poorwill_process()
    assert process == {name: status[name] for name in ("pid", "pid_namespace")}
    assert {"weights", "kv_cache", "runtime"} <= set(status["sleeping"])
    assert status["host_bytes"] > 0
    assert [event["operation"] for event in status["events"]] == ["prepare", "sleep"]
    slept = status["events"][-1]
    assert status["unaccounted_bytes"] == slept["unaccounted_bytes"] is not None
    assert slept["released_bytes"] > 0
    assert slept["release"] in ("confirmed", "ledger")
    assert slept["seconds"] > 0
    assert engine.worker.poorwill_status()["events"] == []
    engine.worker.wake_up()
    status = engine.worker.poorwill_status()
    [woken] = status["events"]
    assert (woken["operation"], woken["error"], status["sleeping"]) == ("wake", None, [])
    assert woken["copied_bytes"] >= sum(engine.shape.weights)

    def are_plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(isinstance(key, str) and are_plain(held) for key, held in value.items())
        if isinstance(value, list):
            return all(map(are_plain, value))
        return type(value) in (str, int, float, bool, type(None))

    assert are_plain(status)


def test_twice_asleep_and_twice_awake_is_once(start: Start) -> None:
    engine = start().start()
    before = contents(engine.kept())
    for level in (1, 2):
        engine.worker.wake_up()
        for _ in range(2):
            engine.worker.sleep(level)
            assert free_bytes() == engine.free_at_start
        for _ in range(2):
            engine.worker.wake_up()
        engine.runner.model.load_weights()
        assert engine.worker.poorwill_mark_restored() == (["weights"] if level == 2 else [])
        assert contents(engine.kept()) == before
        assert engine.is_awake()


def test_what_sleeps_at_one_level_is_not_put_to_sleep_at_another(start: Start) -> None:
    engine = start().start()
    before = contents(engine.kept())
    engine.worker.sleep(1)
    with pytest.raises(poorwill.PoorwillError, match="wake"):
        engine.worker.sleep(2)
    engine.worker.wake_up()
    assert contents(engine.kept()) == before
    engine.worker.sleep(2)
    with pytest.raises(poorwill.PoorwillError, match="wake"):
        engine.worker.sleep(1)
    engine.worker.wake_up()
    assert contents(engine.buffers()) == {name: before[name] for name in engine.buffers()}


def test_unknown_tags_wake_nothing(start: Start) -> None:
    engine = start().start()
    engine.worker.sleep(1)
    with pytest.raises(ValueError, match=r"no tag 'weigths'.*kv_cache.*weights"):
        engine.worker.wake_up(["kv_cache", "weigths"])
    assert free_bytes() == engine.free_at_start
    engine.worker.wake_up()
    assert engine.is_awake()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("order", [["weights", "kv_cache"], ["kv_cache", "weights"]])
def test_waking_by_tag(start: Start, order: list[str], level: int) -> None:
    engine = start(LORA).start()
    before = contents(engine.kept())
    engine.worker.sleep(level)
    first, second = order
    engine.worker.wake_up([first])
    states = engine.states()
    assert "asleep" not in states[first]
    assert "asleep" in states[second]
    # Every wake brings back what cannot be left asleep.
    assert states["runtime"] == "awake"
    assert contents(engine.runtime()) == {name: before[name] for name in engine.runtime()}
    engine.worker.wake_up([second])
    assert contents(engine.buffers()) == {name: before[name] for name in engine.buffers()}
    if level == 1:
        assert contents(engine.kept()) == before
        assert engine.is_awake()
    assert engine.cache_is_zero()


def test_level_2_again_while_only_the_cache_is_awake(start: Start) -> None:
    engine = start().start()
    before = contents(engine.buffers())
    engine.worker.sleep(2)
    engine.worker.wake_up(["kv_cache"])
    engine.worker.sleep(2)
    assert free_bytes() == engine.free_at_start
    engine.worker.wake_up()
    assert contents(engine.buffers()) == before
    assert engine.worker.poorwill_status()["undefined"] == ["weights"]


# Level 2


def test_level_2_says_what_is_gone(start: Start) -> None:
    engine = start(LORA).start()
    before = contents(engine.kept())
    engine.prepared()
    held = engine.arena.stats().backup_raw_bytes
    engine.worker.sleep(2)
    assert free_bytes() == engine.free_at_start
    assert engine.arena.stats().backup_raw_bytes < held - sum(engine.shape.weights)
    engine.worker.wake_up()
    status = engine.worker.poorwill_status()
    assert status["undefined"] == ["weights"]
    assert status["state"]["weights"] == "undefined"
    kept = {**engine.buffers(), **engine.runtime()}
    assert contents(kept) == {name: before[name] for name in kept}
    # What is undefined has nothing that could be kept.
    with pytest.raises(poorwill.PoorwillError, match="weights"):
        engine.worker.sleep(1)
    engine.events()
    engine.worker.reload_weights()
    assert contents(engine.kept()) == before
    assert engine.is_awake()
    # Who drops the weights has no use for a backup of them, and who does not makes it when it is due.
    assert engine.worker._preparation is None
    engine.worker.sleep(1)
    [slept] = engine.events("sleep")
    assert slept["copied_bytes"] >= sum(engine.shape.weights)
    engine.worker.wake_up()
    assert contents(engine.kept()) == before


def test_a_reload_that_fails_lifts_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(LORA).start()
    before = contents(engine.kept())
    engine.prepared()
    engine.worker.sleep(2)
    engine.worker.wake_up()
    engine.events()

    def reload_weights(*args: Any, **kwargs: Any) -> None:
        raise KeyError("layers.0.weight")

    with monkeypatch.context() as broken:
        broken.setattr(engine.runner, "reload_weights", reload_weights)
        with pytest.raises(KeyError):
            engine.worker.reload_weights()
    status = engine.worker.poorwill_status()
    assert status["undefined"] == ["weights"]
    [failed] = status["events"]
    assert (failed["operation"], failed["error"]) == ("load", "KeyError: 'layers.0.weight'")
    # Nothing is backed up before it is written.
    assert engine.worker._preparation is None
    engine.worker.sleep(2)
    engine.worker.wake_up()
    assert engine.worker.poorwill_status()["undefined"] == ["weights"]
    engine.worker.reload_weights()
    assert engine.is_awake()
    assert contents(engine.kept()) == before


def test_weights_are_written_when_they_are_awake(start: Start) -> None:
    engine = start(weight_transfer_config="trainer").start()
    engine.worker.sleep(2)
    with pytest.raises(poorwill.PoorwillError, match="reload_weights needs the weights, which sleep"):
        engine.worker.reload_weights()
    with pytest.raises(poorwill.PoorwillError, match="update_weights needs the weights, which sleep"):
        engine.worker.update_weights({})
    engine.worker.wake_up(["weights"])
    engine.worker.reload_weights()
    assert engine.worker.poorwill_status()["undefined"] == []
    engine.worker.wake_up()
    assert engine.is_awake()


@only("0.20.2")
def test_an_update_restores_where_it_is_a_whole(start: Start) -> None:
    engine = start(weight_transfer_config="trainer").start()
    before = contents(engine.kept())
    engine.worker.sleep(2)
    engine.worker.wake_up()
    engine.worker.weight_transfer_engine.fails = RuntimeError("the trainer is gone")
    with pytest.raises(RuntimeError, match="trainer is gone"):
        engine.worker.update_weights({})
    assert engine.worker.poorwill_status()["undefined"] == ["weights"]
    engine.worker.update_weights({})
    assert engine.worker.poorwill_status()["undefined"] == []
    assert contents(engine.kept()) == before


@only("0.33.0")
def test_an_update_restores_at_its_end(start: Start) -> None:
    engine = start(weight_transfer_config="trainer").start()
    before = contents(engine.kept())
    engine.worker.sleep(2)
    engine.worker.wake_up()
    with pytest.raises(RuntimeError, match="without a matching start_weight_update"):
        engine.worker.finish_weight_update()
    engine.runner.draft = object()
    engine.worker.start_draft_weight_update()
    engine.worker.finish_weight_update()
    assert engine.worker.poorwill_status()["undefined"] == ["weights"]
    engine.worker.start_weight_update()
    engine.worker.update_weights({})
    assert engine.worker.poorwill_status()["undefined"] == ["weights"]
    engine.worker.finish_weight_update()
    assert engine.worker.poorwill_status()["undefined"] == []
    assert contents(engine.kept()) == before


@only("0.20.2")
@pytest.mark.parametrize("level", [1, 2])
def test_state_is_kept_where_vllm_has_no_pool_for_it_yet(
    start: Start, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in 0.23 to 0.31, which have the function that 0.32 pools state with, and do not use it so."""
    allocators = importlib.import_module("vllm.device_allocator")
    cumem = importlib.import_module("vllm.device_allocator.cumem")
    asks = lambda: cumem.CuMemAllocator.get_instance()  # noqa: E731
    monkeypatch.setattr(allocators, "get_mem_allocator_instance", asks, raising=False)
    engine = start(LORA).start()
    before = contents(engine.runtime())
    engine.worker.sleep(level)
    engine.worker.wake_up()
    assert contents(engine.runtime()) == before


# What does not survive with vLLM's own allocator


@pytest.mark.long
@pytest.mark.parametrize("level", [1, 2])
def test_lists_of_state_tensors_and_scales_survive(start: Start, level: int) -> None:
    engine = start(Shape(is_hybrid=True, scale=7), cache_dtype="fp8_e4m3").start()
    scales = [engine.buffers()["attention.k_scale"]]
    assert isinstance(engine.runner.kv_caches[1], list)
    for tags in (None, ["kv_cache", "weights"]):
        engine.worker.sleep(level)
        engine.worker.wake_up(tags)
        assert [scale.numpy_bytes() for scale in scales] == [b"\x07"]
        assert engine.cache_is_zero()
        engine.runner.model.load_weights()
        engine.worker.poorwill_mark_restored()
        engine.use_cache()


@only("0.20.2")
def test_a_cache_for_a_connector_is_dropped(start: Start) -> None:
    engine = start(is_uniform=True).start()
    tags = {tag.tag: tag.live_bytes for tag in engine.arena.stats().tags}
    assert tags["kv_cache"] == engine.shape.layers * engine.shape.page * BLOCKS
    engine.worker.sleep(1)
    assert engine.states()["kv_cache"] == "asleep_dropped"
    engine.worker.wake_up()
    assert engine.cache_is_zero()
    assert "allocate_uniform_kv_caches" not in vars(engine.runner)


@pytest.mark.long
def test_graphs_replay_after_a_sleep(start: Start, version: str) -> None:
    engine = start(**GRAPHS).start()
    tags = {tag.tag for tag in engine.arena.stats().tags if tag.live_bytes}
    # Before there were pools for them, graphs stay where they are.
    assert ("cudagraph" in tags) == (minor(version) >= 32)
    for cycle in range(3):
        for _, _, result in engine.runner.graphs:
            result.fill_(cycle + 50)
        engine.worker.sleep(1)
        engine.worker.wake_up()
        for graph, weight, result in engine.runner.graphs:
            assert result.numpy_bytes() == bytes([cycle + 50]) * result.numel()
            graph.replay()
            assert torch.equal(weight, result)


@only("0.33.0")
def test_graphs_share_a_pool_until_it_is_released(start: Start) -> None:
    engine = start(**GRAPHS).start()
    assert len(engine.runner.graphs) == 2
    with engine.allocator.cudagraph_pool() as first, engine.allocator.cudagraph_pool() as second:
        assert first == second
        place = tuple(first)
    del first, second
    engine.runner.graphs.clear()
    gc.collect()
    engine.allocator.release_pools()
    assert not [tag for tag in engine.arena.stats().tags if tag.tag == "cudagraph" and tag.live_bytes]
    engine.allocator.close()
    with engine.allocator.cudagraph_pool() as third:
        assert tuple(third) != place


def test_no_tag_sleeps_during_a_capture(start: Start) -> None:
    engine = start().start()
    weight = engine.weights()["layers.0.weight"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = weight.clone()
        with pytest.raises((poorwill.PoorwillError, RuntimeError), match="captur"):
            engine.worker.sleep(1)
    assert engine.is_awake()
    graph.replay()
    assert torch.equal(weight, result)
    del graph, result


# What a sleep has to cover


def test_weights_outside_the_pool_are_refused_before_anything_happens(start: Start) -> None:
    engine = start(Shape(outside=(20 * MIB, 4 * MIB))).start()
    before = contents(engine.kept())
    engine.prepared()
    engine.events()
    for level in (1, 2):
        with pytest.raises(poorwill.PoorwillError) as refused:
            engine.worker.sleep(level)
        said = str(refused.value)
        assert "0.03 GiB of the weights' 0.05 GiB, 57% where it has to be 90%" in said
        assert "2 tensors" in said
        assert "outside.0.weight with 0.02 GiB is the largest" in said
        assert engine.worker._sleep_saved_buffers == {}
    assert engine.events() == []
    assert engine.is_awake()
    assert contents(engine.kept()) == before


def test_weights_that_leave_the_pool_between_sleeps_are_noticed(start: Start) -> None:
    engine = start(Shape()).start()
    engine.worker.sleep(1)
    engine.worker.wake_up()
    for name, inside in list(engine.runner.model._parameters.items()):
        engine.runner.model._parameters[name] = filled(inside.numel(), 60)
    del inside
    with pytest.raises(poorwill.PoorwillError, match="3 tensors were allocated outside the pool"):
        engine.worker.sleep(1)
    assert engine.is_awake()


@pytest.mark.long
@pytest.mark.parametrize(("outside", "is_enough"), [(10 * MIB, True), (10 * MIB + 512, False)])
def test_nine_tenths_are_enough(start: Start, outside: int, is_enough: bool) -> None:
    # The scale is a byte more.
    shape = Shape(weights=(64 * MIB, 26 * MIB - 1), buffers=(), outside=(outside,))
    engine = start(shape).start()
    if is_enough:
        engine.worker.sleep(1)
        assert free_bytes() == engine.free_at_start - 10 * MIB
    else:
        with pytest.raises(poorwill.PoorwillError, match="90% where it has to be 90%"):
            engine.worker.sleep(1)


def test_weights_in_host_memory_do_not_count(start: Start) -> None:
    engine = start(Shape(offloaded=(40 * MIB,)))
    engine.start()
    offloaded = engine.weights()["offloaded.60.weight"]
    assert offloaded._vllm_is_uva_offloaded
    inside = dict(engine.runner.model._parameters)
    # As vLLM has it, they are nowhere that sleeps.
    engine.runner.model._parameters["offloaded.60.weight"] = outside = filled(40 * MIB, 60)
    del inside, offloaded
    with pytest.raises(poorwill.PoorwillError, match=r"offloaded\.60\.weight"):
        engine.worker.sleep(1)
    outside._vllm_is_uva_offloaded = True
    engine.worker.sleep(1)
    engine.worker.wake_up()
    assert outside.numpy_bytes() == bytes([61]) * outside.numel()


# The host's budget


def test_a_host_budget_that_is_too_small_is_reported_at_start(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "vllm.poorwill"):
        engine = start(LORA, POORWILL_HOST_BUDGET="16MiB").start()
    [warning] = [record.getMessage() for record in caplog.records if record.name == "vllm.poorwill"]
    assert "POORWILL_HOST_BUDGET allows 0.02 GiB" in warning
    before = contents(engine.kept())
    assert engine.worker._preparation is None
    engine.events()
    with pytest.raises(poorwill.PoorwillError, match=r"POORWILL_HOST_BUDGET.*level 2"):
        engine.worker.sleep(1)
    assert engine.events() == []
    assert contents(engine.kept()) == before
    engine.worker.sleep(2)
    assert free_bytes() == engine.free_at_start
    engine.worker.wake_up()
    engine.worker.reload_weights()
    assert contents(engine.kept()) == before


def test_a_host_budget_for_the_weights_alone_is_reported_as_well(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    shape = Shape(builder=12 * MIB)
    with caplog.at_level(logging.WARNING, "vllm.poorwill"):
        engine = start(shape, POORWILL_HOST_BUDGET="44MiB").load()
        assert not caplog.records
        engine.worker.initialize_from_config(kv_config(shape, BLOCKS))
        engine.worker.compile_or_warm_up_model()
    assert "POORWILL_HOST_BUDGET" in caplog.text


@pytest.mark.long
def test_a_host_budget_that_is_just_enough_is_enough(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(LORA, POORWILL_PREPARE="0").start()
    engine.worker.sleep(1)
    needed = engine.arena.stats().backup_raw_bytes
    engine.worker.wake_up()
    engine.end()
    monkeypatch.setenv("POORWILL_HOST_BUDGET", str(needed))
    engine = start(LORA).start()
    # What was freed since, and PyTorch has not given back, counts for nothing.
    with engine.allocator.use_memory_pool("runtime"):
        kept = [filled(24 * MIB, 1)]
    kept.clear()
    before = contents(engine.kept())
    engine.worker.sleep(1)
    engine.worker.wake_up()
    assert contents(engine.kept()) == before
    engine.end()
    monkeypatch.setenv("POORWILL_HOST_BUDGET", str(needed - 1))
    engine = start(LORA).start()
    with pytest.raises(poorwill.PoorwillError, match="POORWILL_HOST_BUDGET"):
        engine.worker.sleep(1)


# Others


def test_memory_that_another_process_takes_is_not_the_sleeps_fault(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start().start()
    real, shares = torch.cuda.mem_get_info, iter([900 * MIB, 100 * MIB])

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        free, total = real(device)
        return next(shares, free), total

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "vllm.poorwill"):
        patch.setattr(torch.cuda, "mem_get_info", mem_get_info)
        engine.worker.sleep(1)
    assert "another process took it" in caplog.text
    assert free_bytes() == engine.free_at_start
    engine.worker.wake_up()


@pytest.mark.long
@pytest.mark.parametrize("level", [1, 2])
def test_an_assertion_with_nothing_asleep_is_raised(
    start: Start, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    engine = start().start()
    # The backend, where there is one, has the allocator sleep as well.
    fails = (type(engine.allocator), "suspend")

    def fail(self: Any, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("something else")

    with monkeypatch.context() as patch:
        patch.setattr(*fails, fail)
        with pytest.raises(AssertionError, match="something else"):
            engine.worker.sleep(level)
    assert engine.is_awake()
    # What was saved for the wake that does not come is not written by the next.
    engine.buffers()["rotary.0"].fill_(88)
    engine.worker.sleep(1)
    engine.worker.wake_up()
    assert set(engine.buffers()["rotary.0"].numpy_bytes()) == {88}


def test_nothing_is_in_use_when_everything_was_freed(start: Start) -> None:
    engine = start(LORA).start()
    assert engine.allocator.get_current_usage() > 0
    arena = engine.arena
    engine.end()
    assert engine.allocator.get_current_usage() == 0
    assert arena.stats().mapped_bytes == 0
    assert free_bytes() == engine.free_at_start


@pytest.mark.long
def test_another_engine_in_its_place_has_limits_of_its_own(start: Start) -> None:
    engine = start().start()
    # While the first is there, vLLM itself has none of it.
    second = start(gpu_memory_utilization=0.5)
    second.worker.init_device()
    assert second.allocator is engine.allocator
    with pytest.raises(AssertionError, match="for one instance per process"):
        second.worker.load_model()
    engine.end()
    second = start(gpu_memory_utilization=0.5).start()
    assert second.allocator is not engine.allocator
    assert second.arena.limit_bytes == second.worker.requested_memory == 512 * MIB
    before = contents(second.kept())
    second.worker.sleep(1)
    second.worker.wake_up()
    assert second.is_awake()
    assert contents(second.kept()) == before
