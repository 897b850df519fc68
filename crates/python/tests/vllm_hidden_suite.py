"""Tensors in the memory of the weights that are neither parameter nor buffer, and tags that stay awake.

`test_vllm_suites.py` runs it. Triggers: NeMo-RL#2631, vllm#53343 and #53507, vllm-ascend#16725.
"""

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fake_vllm import worker_parts
from vllm_engines import MIB, Engine, Shape, Start, addresses, contents

torch: Any = importlib.import_module("torch")

KIB = 1 << 10
SIZES = {"scale": 4, "table": 3 * MIB, "rows": 40_000, "bias": 512}
NAMES = {
    "scale": "embed_scale",
    "table": "tables['rotary'][1]",
    "rows": "quant_method.kernel.rows",
    "bias": "shared",
}


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets models made from now on hold tensors in every way but PyTorch's."""
    made = worker_parts.Model.__init__

    def init(self: Any, shape: Any, device: Any, outside: Any) -> None:
        made(self, shape, device, outside)
        scale, table, rows, bias = (
            worker_parts.filled(nbytes, 71 + number, device) for number, nbytes in enumerate(SIZES.values())
        )
        self.embed_scale = scale
        self.tables = {"rotary": [None, table]}
        self.quant_method = SimpleNamespace(kernel=SimpleNamespace(rows=rows), model=self)
        self.shared = self.also_shared = bias

    def begin() -> None:
        monkeypatch.setattr(worker_parts.Model, "__init__", init)

    return begin


def hidden(engine: Engine) -> dict[str, Any]:
    model = engine.runner.model
    return {
        "scale": model.embed_scale,
        "table": model.tables["rotary"][1],
        "rows": model.quant_method.kernel.rows,
        "bias": model.shared,
    }


@pytest.mark.parametrize("level", [1, 2])
def test_they_survive_each_level(start: Start, hide: Callable[[], None], level: int) -> None:
    hide()
    engine = start(Shape()).start()
    before, places = contents({**hidden(engine), **engine.kept()}), addresses(hidden(engine))
    for _ in range(2):
        engine.prepared()
        engine.worker.sleep(level)
        assert not engine.arena.stats().mapped_bytes
        engine.worker.wake_up()
        assert contents(hidden(engine)) == {name: before[name] for name in SIZES}
        if level == 2:
            assert engine.worker.poorwill_status()["undefined"] == ["weights"]
            engine.worker.reload_weights()
        assert engine.worker.poorwill_status()["undefined"] == []
        assert contents({**hidden(engine), **engine.kept()}) == before
        assert addresses(hidden(engine)) == places


def test_a_status_and_an_event_have_their_bytes_and_names(start: Start, hide: Callable[[], None]) -> None:
    hide()
    engine = start(Shape()).start()
    assert engine.worker.poorwill_status()["kept_at_level2_bytes"] == 0
    engine.prepared()
    engine.worker.sleep(2)
    status = engine.worker.poorwill_status()
    largest = sorted(SIZES, key=lambda name: -SIZES[name])
    assert status["kept_at_level2"] == [(NAMES[name], SIZES[name]) for name in largest]
    assert status["kept_at_level2_bytes"] == sum(SIZES.values())
    event = next(event for event in status["events"] if event["operation"] == "sleep")
    # In whole granules.
    least = sum(SIZES.values())
    assert least <= event["kept_at_level2_bytes"] <= least + 2 * 2 * MIB * len(SIZES)
    engine.worker.wake_up()


def test_what_was_freed_is_not_kept(start: Start, hide: Callable[[], None]) -> None:
    hide()
    engine = start(Shape()).start()
    engine.runner.model.tables = {}
    engine.prepared()
    engine.worker.sleep(2)
    status = engine.worker.poorwill_status()
    assert status["kept_at_level2_bytes"] < SIZES["table"]
    engine.worker.wake_up()
    engine.worker.reload_weights()


def test_a_model_that_hides_nothing_keeps_nothing(start: Start) -> None:
    engine = start(Shape()).start()
    engine.prepared()
    engine.worker.sleep(2)
    status = engine.worker.poorwill_status()
    assert (status["kept_at_level2_bytes"], status["kept_at_level2"]) == (0, [])
    sleeps = [event for event in status["events"] if event["operation"] == "sleep"]
    assert [event["kept_at_level2_bytes"] for event in sleeps] == [0]
    engine.worker.wake_up()


def test_dropped_weights_may_sleep_again_before_they_are_written(
    start: Start, hide: Callable[[], None]
) -> None:
    hide()
    engine = start(Shape()).start()
    before = contents(hidden(engine))
    engine.prepared()
    for _ in range(3):
        engine.worker.sleep(2)
        engine.worker.wake_up(["weights"])
        assert contents(hidden(engine)) == before
        assert engine.worker.poorwill_status()["undefined"] == ["weights"]
    engine.worker.reload_weights()
    engine.worker.wake_up()
    assert engine.worker.poorwill_status()["undefined"] == []


@pytest.mark.parametrize("level", [1, 2])
def test_tags_that_are_kept_awake_stay_in_gpu_memory(start: Start, level: int) -> None:
    """As Unsloth's standby has it, whose trainer computes with the engine's own tensors."""
    engine = start(Shape(), POORWILL_KEEP_AWAKE="weights, cudagraph").start()
    engine.prepared()
    assert engine.arena.stats().backup_bytes < sum(engine.runner.model.shape.weights)
    before, places = contents(engine.kept()), addresses(engine.kept())
    for _ in range(2):
        engine.worker.sleep(level)
        assert engine.states()["weights"] == "awake"
        assert "kv_cache" in engine.worker.poorwill_status()["sleeping"]
        # A trainer reads and writes them meanwhile.
        assert contents(engine.weights()) == {name: before[name] for name in engine.weights()}
        engine.worker.wake_up(["kv_cache"])
        assert engine.is_awake()
        assert contents(engine.kept()) == before
        assert addresses(engine.kept()) == places
        assert engine.worker.poorwill_status()["undefined"] == []


def test_a_tag_to_keep_awake_that_is_not_there_is_refused_by_name(start: Start) -> None:
    with pytest.raises(
        ValueError, match=r"POORWILL_KEEP_AWAKE='weights,cache' names cache, which is no tag .* kv_cache"
    ):
        start(Shape(), POORWILL_KEEP_AWAKE="weights,cache")
