"""Sequences of sleeps and wakes that public reports name, in vLLM's worker; `test_vllm_suites.py` runs it.

Reports: vllm#45619 and #45617 (buffers and calibrated scales), #36651 and vllm-omni#4473 (mixed levels).
"""

import itertools
from typing import Any

import poorwill
import pytest
from vllm_engines import LORA, Engine, Shape, Start, contents

ORDERS: list[list[list[str] | None]] = [
    [None],
    [["kv_cache"], ["weights"]],
    [["weights"], ["kv_cache"]],
    [["runtime"], ["kv_cache"], ["weights"]],
    [["kv_cache"], ["kv_cache"], None],
]


def reloaded(engine: Engine, level: int) -> dict[str, Any]:
    if level == 2:
        engine.worker.reload_weights()
    assert engine.worker.poorwill_status()["undefined"] == []
    return contents(engine.kept())


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_buffers_come_back_in_any_order_of_tags(
    start: Start, order: list[list[str] | None], level: int
) -> None:
    engine = start(LORA).start()
    engine.prepared()
    before = contents(engine.kept())
    for _ in range(2):
        engine.worker.sleep(level)
        for tags in order:
            engine.worker.wake_up(tags)
        assert engine.worker.poorwill_status()["sleeping"] == []
        assert reloaded(engine, level) == before


def test_levels_may_change_and_sleeps_repeat(start: Start) -> None:
    engine = start(Shape(scale=3)).start()
    engine.prepared()
    before = contents(engine.kept())
    for levels in itertools.product((1, 2), repeat=3):
        for level in levels:
            engine.worker.sleep(level)
            engine.worker.sleep(level)
            with pytest.raises(poorwill.PoorwillError, match="sleep"):
                engine.worker.sleep(3 - level)
            for _ in range(2):
                engine.worker.wake_up()
            assert reloaded(engine, level) == before, levels
