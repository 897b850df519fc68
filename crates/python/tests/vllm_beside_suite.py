"""What our worker does for weights that vLLM offloads beside it; `test_vllm_worker.py` runs it."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import poorwill
import pytest
from vllm_engines import LORA, MIB, Start, contents


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
    monkeypatch.setenv("POORWILL_PREPARE", "0")
    monkeypatch.setenv("POORWILL_HOST_BUDGET", "512MiB")
    engine = start(LORA).start()
    held = importlib.import_module("poorwill.vllm._offload")
    monkeypatch.setattr(held, "held_bytes", lambda: 500 * MIB)
    with pytest.raises(poorwill.PoorwillError, match=r"beside 0\.49 GiB of offloaded weights"):
        engine.worker.sleep(1)
    assert engine.is_awake()
    monkeypatch.undo()
    engine.worker.sleep(1)
