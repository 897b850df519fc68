"""What an engine refuses while it sleeps, leaves behind when it ends, and does for weights that vLLM offloads
beside it; `test_vllm_suites.py` runs it.
"""

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import poorwill
import pytest
from vllm_engines import LORA, MIB, Shape, Start, contents, minor, only

torch: Any = importlib.import_module("torch")


def test_what_sleeps_is_not_touched(start: Start, version: str) -> None:
    engine = start(LORA, weight_transfer_config="trainer").start()
    generations = importlib.import_module("poorwill.vllm._generations")
    there = generations.chosen().touching
    assert "add_lora" in there
    assert ("start_weight_update" in there) == (minor(version) >= 21)
    for level in (1, 2):
        engine.worker.sleep(level)
        for name in there:
            with pytest.raises(poorwill.PoorwillError, match=f"^{name} needs the weights, which sleep"):
                getattr(engine.worker, name)()
        engine.worker.wake_up()
    assert engine.worker.add_lora("adapter") is True
    # Those that a version does not have, ours has not, either.
    ever = frozenset().union(*(each.touching for each in generations.ALL))
    assert not [name for name in ever - there if hasattr(engine.worker, name)]


def test_a_start_that_fails_leaves_vllms_allocator_in_its_place(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    cumem = importlib.import_module("vllm.device_allocator.cumem")
    stock = cumem.CuMemAllocator

    def fails(*_: Any) -> None:
        raise poorwill.BudgetError("there is nothing to be had")

    with monkeypatch.context() as patch:
        patch.setattr(engine.module, "Envelope", fails)
        with pytest.raises(poorwill.BudgetError, match="nothing to be had"):
            engine.worker.init_device()
    assert cumem.CuMemAllocator is stock
    engine.start()
    assert cumem.CuMemAllocator is type(engine.allocator)


@only("0.33.0")
def test_an_update_that_a_sleep_interrupts_goes_on_behind_it(start: Start) -> None:
    engine = start(weight_transfer_config="trainer").start()
    engine.worker.start_weight_update()
    engine.worker.sleep(2)
    with pytest.raises(poorwill.PoorwillError, match="finish_weight_update needs the weights"):
        engine.worker.finish_weight_update()
    engine.worker.wake_up()
    assert engine.worker.poorwill_status()["undefined"] == ["weights"]
    engine.worker.update_weights({})
    engine.worker.finish_weight_update()
    assert engine.is_awake()


def test_an_assertion_of_others_behind_the_sleep_is_raised(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start().start()
    real = torch.cuda.mem_get_info
    asked: list[None] = []

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        asked.append(None)
        if len(asked) > 1:
            raise AssertionError("a communicator would not be suspended")
        return tuple(real(device))

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", mem_get_info)
        with pytest.raises(AssertionError, match="communicator"):
            engine.worker.sleep(1)
    engine.worker.wake_up()
    assert engine.is_awake()


def test_vllms_allocator_has_its_place_back_when_the_engine_ends(start: Start) -> None:
    cumem = importlib.import_module("vllm.device_allocator.cumem")
    stock = cumem.CuMemAllocator
    engine = start().start()
    ours = cumem.CuMemAllocator
    assert ours is not stock
    # One that could not begin beside it takes nothing away.
    second = start()
    second.worker.init_device()
    second.worker.shutdown()
    assert cumem.CuMemAllocator is ours
    engine.worker.sleep(1)
    engine.worker.wake_up()
    # Nor one that ends late, when another has come.
    first = engine.worker
    engine.runner.__dict__.clear()
    gc.collect()
    third = start()
    third.worker.init_device()
    assert third.allocator is not first._allocator
    first.shutdown()
    assert cumem.CuMemAllocator is ours
    third.worker.shutdown()
    assert cumem.CuMemAllocator is stock


def test_a_worker_that_ends_early_ends(start: Start) -> None:
    engine = start()
    engine.worker.shutdown()


def test_a_preparation_ends_with_the_engine(start: Start) -> None:
    engine = start(Shape(weights=(90 * MIB, 90 * MIB))).load()
    engine.worker.poorwill_prepare()
    preparation = engine.worker._preparation
    engine.worker.shutdown()
    with contextlib.suppress(poorwill.PoorwillError):
        preparation.wait()
    assert preparation.is_ended


# Weights that vLLM offloads beside it


class Offloader:
    """One of ours, as far as a worker asks it, that takes down where the weights are meanwhile."""

    is_poorwills = True
    host_bytes = 0

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.seen: list[tuple[str, bool]] = []

    def _note(self, what: str) -> None:
        self.seen.append((what, "weights" in self.engine.allocator.sleeping()))

    def refill(self) -> None:
        self._note("refill")

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        self._note("writing")
        yield
        self._note("written")


@pytest.mark.parametrize("by_tag", [False, True])
def test_offloaded_weights_are_brought_in_again_when_there_is_memory_for_them(
    start: Start, monkeypatch: pytest.MonkeyPatch, by_tag: bool
) -> None:
    engine = start().start()
    ours = importlib.import_module("poorwill.vllm._offload")
    ours.install_worker(importlib.import_module("vllm.v1.worker.gpu_worker"))
    offloader = Offloader(engine)
    base = SimpleNamespace(get_offloader=lambda: offloader)
    monkeypatch.setitem(sys.modules, f"{ours.OFFLOADER}.base", base)
    before = contents(engine.weights())
    for level in (1, 2):
        engine.worker.sleep(level)
        assert offloader.seen == []
        with pytest.raises(poorwill.PoorwillError, match="reload_weights needs the weights"):
            engine.worker.reload_weights()
        for tags in (["weights"], ["kv_cache"]) if by_tag else (None,):
            engine.worker.wake_up(tags)
        assert offloader.seen == [("refill", False)]
        offloader.seen.clear()
    engine.worker.reload_weights()
    assert offloader.seen == [("writing", False), ("written", False)]
    assert contents(engine.weights()) == before
    # What our worker demands of vLLM's is there as before.
    start()


def test_offloaded_weights_are_of_the_same_host_budget(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(LORA, POORWILL_PREPARE="0", POORWILL_HOST_BUDGET="512MiB").start()
    held = importlib.import_module("poorwill.vllm._offload")
    monkeypatch.setattr(held, "held_bytes", lambda: 500 * MIB)
    with pytest.raises(poorwill.PoorwillError, match=r"beside 0\.49 GiB of offloaded weights"):
        engine.worker.sleep(1)
    assert engine.is_awake()
    monkeypatch.undo()
    engine.worker.sleep(1)
