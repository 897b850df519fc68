"""A worker in a vLLM with the patches of `contrib/upstream/vllm`, which `test_upstream_vllm.py` applies, and
runs this with.
"""

import importlib

import pytest
from vllm_engines import LORA, Start, contents, only

pytestmark = only("0.33.0")

CUMEM = "vllm.device_allocator.cumem"


def test_the_backend_brings_the_allocator(start: Start) -> None:
    cumem = importlib.import_module(CUMEM)
    stock = cumem.CuMemAllocator
    allocators = importlib.import_module("vllm.device_allocator")
    engine = start(LORA).start()
    assert cumem.CuMemAllocator is stock
    assert stock.__module__ == CUMEM
    assert allocators.get_mem_allocator_instance() is engine.allocator
    tags = {tag.tag: tag.live_bytes for tag in engine.arena.stats().tags}
    assert tags["weights"] >= sum((*engine.shape.weights, *engine.shape.buffers))
    assert {"weights", "kv_cache", "runtime", "workspace"} <= tags.keys()


@pytest.mark.parametrize("level", [1, 2])
def test_all_comes_back(start: Start, level: int) -> None:
    engine = start(LORA).start()
    before = contents(engine.kept())
    engine.worker.sleep(level)
    assert engine.arena.stats().mapped_bytes == 0
    engine.worker.wake_up()
    if level == 2:
        assert engine.worker.poorwill_status()["undefined"] == ["weights"]
        engine.worker.reload_weights()
    assert engine.is_awake()
    assert contents(engine.kept()) == before
    assert engine.cache_is_zero()


def test_the_next_engine_may_have_vllms_own_backend(start: Start) -> None:
    engine = start().start()
    engine.end()
    allocators = importlib.import_module("vllm.device_allocator")
    start(sleep_mode_backend="cumem")
    # What the fakes have in the place of vLLM's own allocator says this.
    with pytest.raises(AssertionError, match="vLLM's own allocator is asked for"):
        allocators.get_mem_allocator_instance()


def test_what_was_not_begun_leaves_nothing_to_release(start: Start) -> None:
    allocator = importlib.import_module("poorwill.vllm.allocator").Allocator
    engine = start()
    engine.worker.shutdown()
    assert allocator.instance is None
