"""What our worker does on a GPU that shares the computer's memory; `test_vllm_suites.py` runs it."""

import logging

import pytest
from vllm_engines import BLOCKS, Start


def test_backups_are_neither_prepared_nor_kept(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm.poorwill"):
        engine = start().start()
    assert engine.arena.shares_host_memory
    assert "shares the computer's memory" in caplog.text
    assert "Sleep at level 2, or set POORWILL_DISK" in caplog.text
    assert engine.worker.poorwill_status()["host_bytes"] == 0
    before = engine.arena.stats().mapped_bytes
    for _ in range(2):
        engine.worker.sleep(1)
        slept = engine.events("sleep")[-1]
        assert slept["copied_bytes"] > sum(engine.shape.weights)
        assert 0 <= slept["released_bytes"] <= before - slept["copied_bytes"]
        engine.worker.wake_up()
        assert engine.arena.stats().backup_raw_bytes == 0
        assert engine.worker.poorwill_status()["host_bytes"] == 0
    engine.worker.sleep(2)
    assert engine.events("sleep")[-1]["released_bytes"] > sum(engine.shape.weights)


def test_blocks_that_are_kept_take_what_they_release(start: Start) -> None:
    engine = start().start()
    before = [cache.numpy_bytes()[: engine.shape.page] for cache in engine.runner.every_cache()]
    released = []
    for kept in ([], [(0, BLOCKS)]):
        engine.use_cache()
        engine.worker.sleep(1, kept)
        released.append(engine.events("sleep")[-1]["released_bytes"])
        engine.worker.wake_up()
    assert [cache.numpy_bytes()[: engine.shape.page] for cache in engine.runner.every_cache()] == before
    assert released[0] - released[1] >= engine.shape.layers * engine.shape.page * BLOCKS


def test_what_is_set_is_done_with_a_warning(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm.poorwill"):
        engine = start(POORWILL_PREPARE="1", POORWILL_KEEP_BACKUPS="1").start()
    engine.prepared()
    assert "POORWILL_PREPARE=1 backs up the weights in the memory that cuda:0 shares" in caplog.text
    engine.worker.sleep(1)
    slept = engine.events("sleep")[-1]
    assert slept["copied_bytes"] == 0
    engine.worker.wake_up()
    assert engine.arena.stats().backup_raw_bytes > sum(engine.shape.weights)
