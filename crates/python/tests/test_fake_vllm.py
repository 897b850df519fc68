"""The stand-in for vLLM has the faults that the hooks are for."""

import fake_vllm
import pytest
from fake_vllm.scheduling import Request
from fake_vllm.worker import MemoryFault
from poorwill import PoorwillError


def test_without_the_hooks_a_partial_wake_computes_on_nothing() -> None:
    vllm = fake_vllm.load("0.20.2")
    engine = vllm.EngineCore(fake_vllm.config(), vllm.UniProcExecutor, False)
    engine.sleep(1)
    engine.add_request(Request("early"))
    engine.wake_up(["weights"])
    with pytest.raises(MemoryFault):
        engine.step()


def test_without_the_hooks_answers_come_one_call_late() -> None:
    vllm = fake_vllm.load("0.33.0")
    engine = vllm.EngineCoreProc(fake_vllm.config(3), vllm.MultiprocExecutor)
    engine.model_executor.workers[0].fails["sleep"] = [PoorwillError("no")]
    with pytest.raises(RuntimeError, match="Worker failed"):
        engine.sleep(1)
    assert [status and status["rank"] for status in engine.collective_rpc("poorwill_status")] == [
        0,
        None,
        None,
    ]
