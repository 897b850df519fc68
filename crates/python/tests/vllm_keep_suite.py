"""What our worker keeps of the KV cache, byte for byte; `test_vllm_suites.py` runs it."""

import importlib
import tempfile
from pathlib import Path
from typing import Any

import poorwill
import pytest
from lent_places import end_broker
from vllm_engines import MIB, Engine, Shape, Start, addresses, only

torch: Any = importlib.import_module("torch")

# A block of a layer is as large as a granule, so that all figures are exact.
PAGE = 2 * MIB
BLOCKS = 8
KEPT = [(2, 2), (5, 1), (BLOCKS - 1, 1)]
COUNT = 4
SMALL: dict[str, Any] = {"weights": (5 * MIB, 40_000), "buffers": (MIB,), "transient": 8 * MIB, "layers": 1}


def started(start: Start, **settings: Any) -> Engine:
    """With a cache of which each block has bytes of its own."""
    engine = start(settings.pop("shape", Shape(page=PAGE, **SMALL)), **settings).start(BLOCKS)
    fill(engine)
    return engine


def fill(engine: Engine) -> None:
    for number, cache in enumerate(engine.runner.every_cache()):
        for block in range(cache.numel() // PAGE):
            cache[block * PAGE : (block + 1) * PAGE].fill_(1 + number * 100 + block)


def blocks_of(cache: Any) -> list[bytes]:
    content = cache.numpy_bytes()
    return [content[start : start + PAGE] for start in range(0, len(content), PAGE)]


def kept_blocks() -> set[int]:
    return {first + number for first, count in KEPT for number in range(count)}


def assert_kept(engine: Engine, before: list[list[bytes]]) -> None:
    for cache, had in zip(engine.runner.every_cache(), before, strict=True):
        for number, content in enumerate(blocks_of(cache)):
            if number in kept_blocks():
                assert content == had[number]
            else:
                assert not content.strip(b"\0")


def test_blocks_come_back_byte_for_byte(start: Start) -> None:
    engine = started(start)
    for _ in range(2):
        before = [blocks_of(cache) for cache in engine.runner.every_cache()]
        where = addresses(engine.caches())
        engine.worker.poorwill_can_keep(KEPT)
        engine.worker.sleep(1, KEPT)
        assert engine.arena.stats().mapped_bytes == 0
        engine.worker.wake_up()
        assert engine.is_awake()
        assert addresses(engine.caches()) == where
        assert_kept(engine, before)
    # What no sleep keeps any more is gone.
    engine.worker.sleep(1)
    engine.worker.wake_up()
    assert engine.cache_is_zero()


def test_only_they_are_backed_up(start: Start) -> None:
    engine = started(start)
    engine.prepared()
    engine.worker.poorwill_prepare(wait=True)
    engine.events()
    engine.worker.sleep(1, KEPT)
    [slept] = engine.events("sleep")
    assert slept["copied_bytes"] == COUNT * PAGE


def test_a_wake_by_tag_brings_them_back(start: Start) -> None:
    engine = started(start)
    before = [blocks_of(cache) for cache in engine.runner.every_cache()]
    engine.worker.sleep(1, KEPT)
    engine.worker.wake_up(["weights"])
    # Another sleep of what is awake does not take them away.
    engine.worker.sleep(1)
    engine.worker.wake_up(["weights"])
    engine.worker.wake_up(["kv_cache"])
    assert engine.is_awake()
    assert_kept(engine, before)


# From 0.29 on no layout has them so.
@only("0.20.2")
def test_keys_before_values(start: Start) -> None:
    shape = Shape(page=2 * PAGE, has_keys_first=True, **SMALL)
    engine = started(start, shape=shape)
    [cache] = engine.runner.every_cache()
    engine.worker.sleep(1, [(3, 1)])
    engine.worker.wake_up()
    content = blocks_of(cache)
    found = {number for number, block in enumerate(content) if block.strip(b"\0")}
    assert found == {3, BLOCKS + 3}


def test_a_layout_that_is_not_known_is_kept_as_a_whole(start: Start) -> None:
    engine = started(start)
    engine.config.compilation_config.static_forward_context.clear()
    before = [blocks_of(cache) for cache in engine.runner.every_cache()]
    engine.worker.sleep(1, KEPT)
    engine.worker.wake_up()
    assert [blocks_of(cache) for cache in engine.runner.every_cache()] == before


def test_too_little_host_memory_is_said_before(start: Start) -> None:
    engine = started(start, POORWILL_HOST_BUDGET="24MiB")
    assert engine.worker.poorwill_can_keep([]) is None
    most = [(0, BLOCKS)]
    for refuses in (engine.worker.poorwill_can_keep, lambda kept: engine.worker.sleep(1, kept)):
        with pytest.raises(
            poorwill.PoorwillError,
            match=r"keeps .* GiB \(.* of it for the KV cache .*POORWILL_HOST_BUDGET allows",
        ):
            refuses(most)
    assert engine.is_awake()
    assert not engine.cache_is_zero()
    engine.worker.sleep(1, [(0, 1)])
    engine.worker.wake_up()


def test_backups_of_other_blocks_make_way(start: Start) -> None:
    engine = started(start, POORWILL_HOST_BUDGET="24MiB")
    for first in (0, BLOCKS // 2):
        before = [blocks_of(cache) for cache in engine.runner.every_cache()]
        engine.worker.sleep(1, [(first, BLOCKS // 2)])
        engine.worker.wake_up()
        for cache, had in zip(engine.runner.every_cache(), before, strict=True):
            part = slice(first, first + BLOCKS // 2)
            assert blocks_of(cache)[part] == had[part]
        fill(engine)


def test_a_failed_sleep_drops_nothing(start: Start, faults: Any) -> None:
    engine = started(start, POORWILL_PREPARE="0")
    before = [blocks_of(cache) for cache in engine.runner.every_cache()]
    failed = 0
    for number in faults.calls_of(lambda: (engine.worker.sleep(1, KEPT), engine.worker.wake_up())):
        fill(engine)
        if faults.fail(number, lambda: engine.worker.sleep(1, KEPT)) is not None and engine.is_awake():
            failed += 1
            assert [blocks_of(cache) for cache in engine.runner.every_cache()] == before
        else:
            engine.worker.wake_up()
            assert_kept(engine, before)
    assert failed


def test_lent_blocks_come_back(start: Start) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "broker.sock")
        engine = started(start, POORWILL_LEND="1", POORWILL_BROKER=path)
        before = [blocks_of(cache) for cache in engine.runner.every_cache()]
        engine.worker.sleep(1, KEPT)
        [slept] = engine.events("sleep")
        assert slept["lend_refused"] is None
        engine.worker.wake_up()
        assert_kept(engine, before)
        end_broker(path)
