"""The hooks on EngineCore after a sleep at level 2, in all versions: the weights have to be written again."""

from typing import Any

import fake_vllm
import pytest
from fake_vllm.engines import Request, turn, turn_until_idle
from poorwill import PoorwillError
from poorwill.vllm._engine import NotReadyError
from vllm_cores import NOT_WRITTEN, asleep, is_serving, last, step, workers
from vllm_sources import needs_sources

pytest_plugins = ["vllm_cores"]
pytestmark = needs_sources
since_registry = pytest.mark.parametrize("vllm", ["0.33.0"], indirect=True)


def test_weights_that_were_dropped_keep_the_scheduler(engine: Any) -> None:
    engine.add_request(Request("early"))
    engine.sleep(2, "keep")
    assert engine.poorwill_not_ready() is None
    assert engine.wake_up() in (None, True)
    assert asleep(engine) == frozenset()
    assert engine.poorwill_not_ready().startswith(NOT_WRITTEN)
    assert step(engine) == {}
    assert engine.collective_rpc("reload_weights") == ["reloaded"] * len(workers(engine))
    assert engine.poorwill_not_ready() is None
    assert step(engine) == {"early": ["token"]}


@pytest.mark.parametrize("method", ["poorwill_mark_restored", "extension", fake_vllm.Worker.extension])
def test_other_calls_that_write_the_weights(engine: Any, method: Any) -> None:
    engine.sleep(2)
    engine.wake_up()
    engine.collective_rpc(method)
    assert is_serving(engine)


def test_weights_are_written_before_the_cache_wakes(engine: Any) -> None:
    engine.sleep(2)
    engine.wake_up(["weights"])
    assert engine.poorwill_not_ready().startswith(NOT_WRITTEN)
    engine.collective_rpc("reload_weights")
    assert engine.poorwill_not_ready() is None
    assert engine.is_scheduler_paused()
    engine.wake_up(["kv_cache"])
    assert is_serving(engine)


def test_one_rank_without_weights_is_enough(vllm: Any) -> None:
    engine = vllm.engine()
    engine.sleep(2)
    engine.wake_up()
    last(engine).fails["reload_weights"] = [PoorwillError("no such file")]
    with pytest.raises(PoorwillError, match="reload_weights: 1 of 3 ranks failed: rank 2: no such file"):
        engine.collective_rpc("reload_weights")
    assert engine.poorwill_status()["not_ready"].startswith(NOT_WRITTEN)
    assert engine.is_scheduler_paused()
    engine.collective_rpc("reload_weights")
    assert is_serving(engine)


def test_an_engine_that_is_not_ready_can_sleep_again(engine: Any) -> None:
    engine.sleep(2)
    engine.wake_up()
    engine.sleep(2)
    # Weights that sleep are no reason to refuse.
    assert engine.poorwill_not_ready() is None
    assert engine.poorwill_status()["not_ready"] is None
    engine.wake_up()
    assert engine.poorwill_not_ready().startswith(NOT_WRITTEN)
    engine.collective_rpc("reload_weights")
    assert is_serving(engine)


def test_a_sleep_that_is_refused_leaves_what_the_engine_waits_for(vllm: Any) -> None:
    engine = vllm.engine("EngineCore", count=1)
    engine.sleep(2)
    engine.wake_up()
    last(engine).fails["sleep"] = [PoorwillError("weights are not whole")]
    with pytest.raises(PoorwillError, match="weights are not whole"):
        engine.sleep(1)
    assert engine.is_scheduler_paused()
    engine.collective_rpc("reload_weights")
    assert is_serving(engine)


def test_a_resume_is_refused_until_there_is_something_to_compute_with(engine: Any) -> None:
    engine.sleep(2)
    with pytest.raises(NotReadyError, match=r"resume: the engine sleeps \(kv_cache, weights\): call wake_up"):
        engine.resume_scheduler()
    engine.wake_up()
    with pytest.raises(NotReadyError, match=f"resume: {NOT_WRITTEN}"):
        engine.resume_scheduler()
    assert engine.is_scheduler_paused()
    for worker in workers(engine):
        worker.reload_weights()
    engine.resume_scheduler()
    assert is_serving(engine)


@since_registry
def test_a_refused_resume_leaves_what_a_pause_refuses(vllm: Any) -> None:
    engine = vllm.engine()
    engine.pause_generation("abort")
    engine.sleep(1)
    with pytest.raises(NotReadyError):
        engine.resume_scheduler()
    assert engine.reject_new_requests
    engine.wake_up()
    assert not engine.reject_new_requests


def test_in_this_process_a_request_is_refused_by_an_error(vllm: Any) -> None:
    engine = vllm.engine("EngineCore")
    engine.sleep(2)
    engine.wake_up()
    with pytest.raises(NotReadyError, match=NOT_WRITTEN):
        engine.add_request(Request("asked"))
    assert not engine.scheduler.waiting


def test_elsewhere_a_request_is_refused_by_an_answer(vllm: Any, process: Any) -> None:
    process.sleep(2)
    turn_until_idle(process)
    process.wake_up()
    process.input_queue.put_nowait(
        (vllm.core.EngineCoreRequestType.ADD, (Request("asked", client_index=3), 0))
    )
    turn(process)
    client, answer = process.output_queue.get_nowait()
    assert client == 3
    (output,) = answer.outputs
    assert (output.request_id, output.finish_reason) == ("asked", vllm.core.FinishReason.ERROR)
    assert not process.scheduler.waiting
    if vllm.minor >= 33:
        assert output.error.message.startswith(NOT_WRITTEN)
        assert output.error.retryable


@since_registry
def test_what_continues_a_request_or_ends_one_is_not_refused(vllm: Any) -> None:
    engine = vllm.engine()
    engine.add_request(Request("session"))
    engine.sleep(2, "keep")
    engine.wake_up()
    engine.add_request(Request("session"))
    assert len(engine.scheduler.waiting) == 2
    engine.add_request(Request("ended", abort_immediately=True))
    engine.add_request(Request("refused", kv_transfer_params={"remote": 1}))
    assert engine.scheduler.finished == ["ended", "refused"]


@pytest.mark.parametrize(
    ("reported", "says"),
    [
        ({"is_updating": True}, "an update of them has begun and not ended; call finish_weight_update"),
        ({"is_updating": False}, "tensors whose memory is hidden; call reload_weights"),
    ],
)
def test_what_holds_an_engine_with_all_weights_is_reported(
    vllm: Any, monkeypatch: pytest.MonkeyPatch, reported: dict[str, bool], says: str
) -> None:
    engine = vllm.engine("EngineCore", count=1)
    engine.sleep(2)
    nothing = {"tensors": 0, "of_tensors": 3, "bytes": 0, "of_bytes": 30, "is_all": True, "names": []}
    monkeypatch.setattr(last(engine), "_reported", lambda: {**nothing, **reported})
    engine.wake_up()
    with pytest.raises(NotReadyError, match=says) as refused:
        engine.add_request(Request("asked"))
    assert "0 of 3" not in str(refused.value)
