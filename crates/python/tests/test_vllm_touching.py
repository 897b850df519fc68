"""What touches memory that sleeps is refused by the ranks, and no answer of theirs is left behind."""

from typing import Any

import fake_vllm
import pytest
from poorwill import PoorwillError
from poorwill.vllm import _engine


@pytest.mark.parametrize("version", fake_vllm.VERSIONS)
def test_what_is_refused_asleep_is_answered_by_every_rank(version: str) -> None:
    vllm: Any = fake_vllm.load(version)
    _engine.install_core(vllm)
    engine = vllm.EngineCoreProc(fake_vllm.config(3), vllm.MultiprocExecutor)
    assert engine.collective_rpc("add_lora") == [True] * 3
    engine.sleep(1)
    with pytest.raises(PoorwillError, match=r"add_lora: 3 of 3 ranks failed: rank 0: add_lora: the weights"):
        engine.collective_rpc("add_lora")
    # No answer is left behind for the next call.
    engine.wake_up()
    assert not engine.is_scheduler_paused()
    assert engine.collective_rpc("add_lora") == [True] * 3
