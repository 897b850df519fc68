"""The hooks on EngineCore: over vLLM's versions, with one worker in the process and several outside."""

import inspect
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import pytest
from fake_vllm.engines import Batch, Request, make_config, turn_until_idle
from fake_vllm.worker import WEIGHTS, MemoryFault
from poorwill import PoorwillError
from poorwill.vllm import _engine, _generations
from poorwill.vllm._engine import NotReadyError
from vllm_cores import BOTH, NOT_WRITTEN, asleep, draining, is_serving, last, step, workers
from vllm_sources import needs_sources

OURS = Path(_engine.__file__).parents[1]

pytest_plugins = ["vllm_cores"]
pytestmark = needs_sources
since_registry = pytest.mark.parametrize("vllm", ["0.33.0"], indirect=True)


# What the hooks are for


def test_without_the_hooks_a_partial_wake_computes_on_nothing() -> None:
    engine = fake_vllm.Vllm("0.20.2").engine("EngineCore")
    engine.sleep(1)
    engine.add_request(Request("early"))
    engine.wake_up(["weights"])
    with pytest.raises(MemoryFault):
        engine.step()


def test_without_the_hooks_answers_come_one_call_late() -> None:
    engine = fake_vllm.Vllm("0.33.0").engine()
    workers(engine)[0].fails["sleep"] = [PoorwillError("no")]
    with pytest.raises(RuntimeError, match="Worker failed"):
        engine.sleep(1)
    reported = engine.collective_rpc("poorwill_status")
    assert [status and status["rank"] for status in reported] == [0, None, None]


# Sleeping and waking


def test_a_sleep_and_a_wake_are_as_vllms(engine: Any) -> None:
    assert engine.sleep(1) is None
    assert asleep(engine) == BOTH
    assert engine.is_sleeping()
    assert engine.wake_up() in (None, True)
    assert asleep(engine) == frozenset()
    assert is_serving(engine)


def test_what_was_there_before_a_sleep_is_answered_after_it(engine: Any) -> None:
    engine.add_request(Request("early"))
    engine.sleep(1, "keep")
    assert step(engine) == {}
    engine.wake_up()
    assert list(step(engine)) == ["early"]


def test_level_0_only_pauses(engine: Any) -> None:
    engine.sleep(0)
    assert asleep(engine) == frozenset()
    assert engine.is_sleeping()
    engine.wake_up(["scheduling"])
    assert is_serving(engine)
    engine.sleep(0)
    engine.sleep(1)
    assert asleep(engine) == BOTH


@pytest.mark.parametrize("level", [3, -1, "1", None, True, 1.5])
def test_no_other_levels(engine: Any, level: Any) -> None:
    with pytest.raises(ValueError, match=r"sleep: level is .*; it is 0 .*1 .*2"):
        engine.sleep(level)
    assert is_serving(engine)


def test_the_same_level_again_does_nothing(engine: Any) -> None:
    engine.add_request(Request("early"))
    engine.sleep(1, "keep")
    calls = [list(worker.calls) for worker in workers(engine)]
    assert engine.sleep(1) is None
    assert [worker.calls for worker in workers(engine)] == calls
    engine.wake_up()
    assert list(step(engine)) == ["early"]


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1), (1, 0)])
def test_another_level_while_asleep_is_refused(engine: Any, first: int, second: int) -> None:
    engine.sleep(first)
    with pytest.raises(
        PoorwillError, match=f"sleeps at level {first} already; wake it up .* at level {second}"
    ):
        engine.sleep(second)
    assert asleep(engine) == BOTH


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_without_its_cache_can_sleep(engine: Any, level: int) -> None:
    engine.sleep(1)
    engine.wake_up(["weights"])
    engine.sleep(level)
    assert asleep(engine) == BOTH
    assert workers(engine)[0].dropped == (level == 2)


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_sleeps_without_its_weights_does_not_sleep_further(
    engine: Any, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine.sleep(level)
    engine.wake_up(["kv_cache"])
    with pytest.raises(PoorwillError, match=f"sleeps at level {level} already"):
        engine.sleep(3 - level)
    engine.sleep(level)
    assert asleep(engine) == {"weights"}
    assert "the engine sleeps already, and kv_cache stays awake" in caplog.text
    assert engine.is_scheduler_paused()
    # So the wake of what slept is the whole of it.
    engine.wake_up(["weights"])
    engine.collective_rpc("reload_weights")
    assert is_serving(engine)


def test_what_a_failed_sleep_could_not_wake_again_sleeps_further(engine: Any) -> None:
    last(engine).fails.update(
        sleep=[PoorwillError("a shortfall")], wake_up=[PoorwillError("the card is full")]
    )
    last(engine).asleep = {"weights"}
    with pytest.raises(PoorwillError, match="weights could not be woken again"):
        engine.sleep(1)
    engine.sleep(1)
    assert asleep(engine) == BOTH
    engine.wake_up()
    assert is_serving(engine)


def test_half_awake_it_stays_when_the_rest_does_not_sleep(engine: Any) -> None:
    engine.sleep(1)
    engine.wake_up(["weights"])
    last(engine).fails["sleep"] = [PoorwillError("a shortfall")]
    with pytest.raises(PoorwillError, match="a shortfall"):
        engine.sleep(1)
    assert asleep(engine) == {"kv_cache"}
    assert engine.is_scheduler_paused()
    engine.wake_up()
    assert is_serving(engine)


@pytest.mark.parametrize("tags", [["wheights"], ["weights", "kv"], [""], ["kv_cache", "scheduling", "x"]])
def test_unknown_tags_wake_nothing(engine: Any, tags: list[str]) -> None:
    engine.sleep(1)
    with pytest.raises(ValueError, match=r"no tag '.*'; there are weights, kv_cache, scheduling"):
        engine.wake_up(tags)
    assert asleep(engine) == BOTH
    assert engine.is_scheduler_paused()


@pytest.mark.parametrize("order", [("weights", "kv_cache"), ("kv_cache", "weights")])
def test_nothing_is_computed_before_all_is_awake(engine: Any, order: tuple[str, str]) -> None:
    engine.add_request(Request("early"))
    engine.sleep(1, "keep")
    assert engine.wake_up([order[0]]) in (None, False)
    assert asleep(engine) == {order[1]}
    assert step(engine) == {}
    assert engine.wake_up([order[1]]) in (None, True)
    assert step(engine) == {"early": ["token"]}


def test_tags_that_are_awake_already_do_not_keep_the_others_asleep(engine: Any) -> None:
    engine.sleep(1)
    engine.wake_up(["weights"])
    engine.wake_up(["weights", "kv_cache", "kv_cache"])
    assert asleep(engine) == frozenset()
    assert is_serving(engine)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("tags", [None, ["kv_cache"], ["weights", "kv_cache"]])
def test_weights_that_are_kept_awake_are_not_waited_for(
    engine: Any, level: int, tags: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POORWILL_KEEP_AWAKE", "weights")
    for _ in range(2):
        engine.sleep(level)
        assert asleep(engine) == {"kv_cache"}
        engine.wake_up(["weights"])
        assert asleep(engine) == {"kv_cache"}
        assert engine.is_scheduler_paused()
        engine.wake_up(tags)
        assert asleep(engine) == frozenset()
        assert is_serving(engine)


def test_a_wake_of_nothing_that_sleeps_does_nothing(engine: Any) -> None:
    assert engine.wake_up() in (None, True)
    assert engine.wake_up(["weights"]) in (None, True)
    assert is_serving(engine)
    engine.sleep(1)
    engine.wake_up(["scheduling"])
    assert asleep(engine) == BOTH
    assert engine.is_scheduler_paused()


@since_registry
def test_the_connector_hears_of_the_cache_that_woke(vllm: Any) -> None:
    engine = vllm.engine()
    reported: list[Any] = []
    engine.scheduler.connector = SimpleNamespace(set_xfer_handshake_metadata_pp_aware=reported.append)
    engine.sleep(1)
    engine.wake_up(["weights"])
    assert reported == []
    engine.wake_up()
    assert reported == [{rank: "shaken" for rank in range(3)}]


@since_registry
@pytest.mark.parametrize("wakes", [True, False])
def test_it_hears_of_a_cache_that_a_failed_sleep_has_registered_anew(vllm: Any, wakes: bool) -> None:
    engine = vllm.engine()
    reported: list[Any] = []
    engine.scheduler.connector = SimpleNamespace(set_xfer_handshake_metadata_pp_aware=reported.append)
    if not wakes:
        last(engine).asleep = {"kv_cache"}
        last(engine).fails["wake_up"] = [PoorwillError("the card is full")]
    fails_to_sleep(engine, "a shortfall", "awake again" if wakes else "kv_cache could not be woken again")
    assert reported == ([{rank: "shaken" for rank in range(3)}] if wakes else [])
    if not wakes:
        engine.wake_up()
        assert len(reported) == 1
    assert is_serving(engine)


@since_registry
def test_a_cache_without_a_listener_counts_as_asleep(vllm: Any) -> None:
    engine = vllm.engine()
    reported: list[Any] = [PoorwillError("no peer")]

    def tell(metadata: Any) -> None:
        if reported:
            raise reported.pop()

    engine.scheduler.connector = SimpleNamespace(set_xfer_handshake_metadata_pp_aware=tell)
    fails_to_sleep(engine, "a shortfall", r"kv_cache, weights could not be woken again \(no peer\)")
    engine.wake_up()
    assert is_serving(engine)


# Failures


def fails_to_sleep(engine: Any, why: str, says: str, *, level: int = 1, rank: int = -1) -> None:
    """One rank does not sleep, and the engine says what comes of it."""
    workers(engine)[rank].fails["sleep"] = [PoorwillError(why)]
    with pytest.raises(PoorwillError, match=says):
        engine.sleep(level)


@pytest.mark.parametrize("rank", [0, -1])
def test_a_failed_sleep_leaves_an_engine_that_serves(engine: Any, rank: int) -> None:
    fails_to_sleep(
        engine, "a shortfall", "a shortfall; all ranks are awake again and the engine serves", rank=rank
    )
    assert asleep(engine) == frozenset()
    assert is_serving(engine)
    engine.sleep(1)
    assert asleep(engine) == BOTH
    engine.wake_up()
    assert is_serving(engine)


def test_all_ranks_that_failed_are_named(vllm: Any) -> None:
    engine = vllm.engine()
    for rank, error in ((0, PoorwillError("too little host memory")), (2, KeyError("layer"))):
        workers(engine)[rank].fails["sleep"] = [error]
    with pytest.raises(
        PoorwillError, match=r"2 of 3 ranks failed: rank 0: too little host memory; rank 2: KeyError: 'layer'"
    ):
        engine.sleep(1)


def test_a_failed_sleep_leaves_a_pause_as_it_was(engine: Any) -> None:
    engine.pause_scheduler("keep")
    fails_to_sleep(engine, "no", "all ranks are awake again, and the engine is as it was")
    assert asleep(engine) == frozenset()
    assert engine.is_scheduler_paused()


def test_ranks_that_cannot_be_woken_leave_an_engine_that_can_be(engine: Any) -> None:
    failing = last(engine)
    failing.fails["sleep"] = [PoorwillError("a shortfall")]
    failing.asleep = {"weights"}
    failing.fails["wake_up"] = [PoorwillError("the card is full"), PoorwillError("the card is full")]
    with pytest.raises(
        PoorwillError,
        match=r"a shortfall; weights could not be woken again \(.*the card is full\).*call wake_up",
    ):
        engine.sleep(1)
    assert engine.model_executor.is_sleeping
    assert engine.is_scheduler_paused()
    with pytest.raises(
        PoorwillError, match=r"the card is full; weights count as asleep.*call wake_up to try again"
    ):
        engine.wake_up()
    assert engine.is_scheduler_paused()
    engine.wake_up()
    assert asleep(engine) == frozenset()
    assert is_serving(engine)


def test_ranks_of_which_nothing_is_known_count_as_asleep(engine: Any) -> None:
    last(engine).fails["sleep"] = [PoorwillError("a shortfall")]
    last(engine).fails["poorwill_status"] = [PoorwillError("lost")]
    with pytest.raises(PoorwillError, match=r"kv_cache, weights could not be woken again \(.*lost\)"):
        engine.sleep(1)
    assert engine.model_executor.is_sleeping
    engine.wake_up()
    assert asleep(engine) == frozenset()
    assert is_serving(engine)


def test_a_failed_level_2_sleep_says_what_is_lost(vllm: Any) -> None:
    engine = vllm.engine()
    fails_to_sleep(engine, "no room", "no room; all ranks are awake again and the engine serves", level=2)
    # All have dropped their weights, and one of them says that some memory was not released.
    last(engine).fails["decided"] = [PoorwillError("a shortfall")]
    with pytest.raises(PoorwillError, match=f"a shortfall; all ranks are awake, but {NOT_WRITTEN}"):
        engine.sleep(2)
    assert engine.is_scheduler_paused()
    engine.collective_rpc("reload_weights")
    assert is_serving(engine)


@since_registry
def test_what_was_asleep_before_a_failed_sleep_stays_so(vllm: Any) -> None:
    engine = vllm.engine()
    engine.pause_scheduler()
    engine.release_kv_cache_memory()
    fails_to_sleep(engine, "no", "no; all ranks are awake again")
    assert asleep(engine) == {"kv_cache"}
    engine.wake_up()
    assert is_serving(engine)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("wake_up", "a fault; kv_cache, weights count as asleep, and nothing is computed: call wake_up"),
        ("poorwill_status", "a fault; the memory is awake, but the scheduler is paused: call wake_up"),
        ("nothing woke", "wake_up: kv_cache, weights still sleep on some rank"),
    ],
)
def test_a_failed_wake_leaves_the_engine_asleep(engine: Any, what: str, says: str) -> None:
    engine.sleep(1)
    last(engine).fails[what] = [PoorwillError("a fault")]
    last(engine).wakes_nothing = what == "nothing woke"
    with pytest.raises(PoorwillError, match=says):
        engine.wake_up()
    assert engine.model_executor.is_sleeping == (what != "poorwill_status")
    assert engine.is_scheduler_paused()
    last(engine).wakes_nothing = False
    engine.wake_up()
    assert is_serving(engine)


ENDED = "the process of a rank has ended, and the engine ends with it: start it again"


def test_a_rank_that_has_ended_is_named_as_the_reason(vllm: Any) -> None:
    engine = vllm.engine()
    engine.sleep(1)
    engine.model_executor.is_failed = True
    with pytest.raises(PoorwillError, match=f"^wake_up: {ENDED}$"):
        engine.wake_up()
    assert engine.is_scheduler_paused()


def test_a_rank_that_ends_in_a_sleep_is_not_woken_again(vllm: Any) -> None:
    engine = vllm.engine()
    executor, hook, asked = engine.model_executor, _engine._engine_of(engine), []
    assert hook is not None
    answers, stock = executor.response_mqs[-1], hook._stock_rpc
    dequeue = answers.dequeue

    def ends(timeout: float | None) -> Any:
        if "sleep" not in last(engine).calls:
            return dequeue(timeout)
        # As vLLM's monitor of workers does it.
        executor.is_failed = True
        raise OSError("cancelled")

    def ask(*args: Any, **kwargs: Any) -> Any:
        asked.append(executor.is_failed)
        return stock(*args, **kwargs)

    answers.dequeue, hook._stock_rpc = ends, ask
    with pytest.raises(PoorwillError, match=f"^cancelled; {ENDED}$"):
        engine.sleep(1)
    assert asked
    assert not any(asked)
    assert engine.is_scheduler_paused()


@pytest.mark.parametrize("mode", ["now", ""])
def test_an_unknown_mode_changes_nothing(engine: Any, mode: str) -> None:
    with pytest.raises(ValueError, match="Invalid pause mode"):
        engine.sleep(1, mode)
    assert not any("wake_up" in worker.calls for worker in workers(engine))
    assert is_serving(engine)


@since_registry
def test_a_pause_that_fails_is_undone(vllm: Any) -> None:
    engine = vllm.engine()
    engine.scheduler.reset_prefix_cache = lambda *_: False
    with pytest.raises(RuntimeError, match="Failed to reset the KV connector cache"):
        engine.sleep(1)
    assert asleep(engine) == frozenset()
    assert is_serving(engine)


# Two sleeps at once, of several servers


@pytest.mark.parametrize("paused_by", [None, "a pause", "level 0"])
def test_the_second_of_two_sleeps_does_not_take_the_first_ones_pause_for_the_users(
    engine: Any, paused_by: str | None
) -> None:
    if paused_by == "a pause":
        engine.pause_scheduler("keep")
    elif paused_by == "level 0":
        engine.poorwill_part("pause", ["the user's", 0, "keep"])
    for sleep in ("first", "second"):
        engine.poorwill_part("pause", [sleep, 1, "keep"])
    last(engine).fails["sleep"] = [PoorwillError("a shortfall")]
    assert "a shortfall" in engine.poorwill_part("act", ["second", [1], 1, None])["error"]
    state = engine.poorwill_part("take_back", ["second", 1])
    given_up = engine.poorwill_part("act", ["first", [1], 1, None])
    assert "given up, because the engine was resumed" in given_up["error"]
    assert engine.poorwill_part("take_back", ["first", 1]) is None
    assert asleep(engine) == frozenset()
    if paused_by is None:
        assert state.endswith("and the engine serves")
        assert is_serving(engine)
    else:
        # A pause of the user's own outlives both.
        assert engine.is_scheduler_paused()


# Requests that finish first


def test_requests_finish_before_the_engine_sleeps(vllm: Any, process: Any) -> None:
    slept = draining(process)
    assert not slept.done()
    assert asleep(process) == frozenset()
    assert turn_until_idle(process)[-1].finish_reason is vllm.core.FinishReason.STOP
    assert slept.result(timeout=0) is None
    assert asleep(process) == BOTH
    assert process.sleep(1) is None
    process.wake_up()
    assert is_serving(process)


def test_the_same_sleep_is_waited_for_twice(process: Any) -> None:
    slept = draining(process)
    assert process.sleep(1, "wait") is slept
    with pytest.raises(PoorwillError, match="about to sleep at level 1 and waits for its requests"):
        process.sleep(2, "wait")
    turn_until_idle(process)
    assert asleep(process) == BOTH


def test_a_sleep_that_fails_behind_its_requests(vllm: Any) -> None:
    process = vllm.engine(count=2)
    slept = draining(process)
    last(process).fails["sleep"] = [PoorwillError("a shortfall")]
    turn_until_idle(process)
    with pytest.raises(PoorwillError, match="a shortfall; all ranks are awake again and the engine serves"):
        slept.result(timeout=0)
    assert asleep(process) == frozenset()
    assert is_serving(process)


def test_a_wake_while_requests_finish_calls_the_sleep_off(vllm: Any) -> None:
    process = vllm.engine(count=2)
    slept = draining(process)
    process.wake_up()
    turn_until_idle(process)
    with pytest.raises(PoorwillError, match="given up, because the engine was resumed"):
        slept.result(timeout=0)
    assert not any("sleep" in worker.calls for worker in workers(process))
    assert is_serving(process)


def test_level_0_waits_as_vllms(process: Any) -> None:
    slept = draining(process, level=0)
    assert isinstance(slept, Future)
    turn_until_idle(process)
    assert slept.result(timeout=0) is None
    assert asleep(process) == frozenset()


def test_one_of_several_data_parallel_ranks_does_not_go_on_alone(vllm: Any) -> None:
    process = vllm.engine("DPEngineCoreProc", 2)
    met = vllm.data_parallel.met
    slept = draining(process)
    last(process).fails["sleep"] = [PoorwillError("a shortfall")]
    turn_until_idle(process)
    with pytest.raises(
        PoorwillError, match="awake again, but the scheduler is paused: call wake_up, in which all"
    ):
        slept.result(timeout=0)
    # Where ranks meet to go on together, this one has not waited for the others.
    assert vllm.minor == 20 or vllm.data_parallel.met == met
    assert asleep(process) == frozenset()
    assert process.is_scheduler_paused()
    process.wake_up()
    assert is_serving(process)


def sleep_in_turns(engine: Any, level: int) -> None:
    """Data parallel engines agree on a pause in a step."""
    slept = engine.sleep(level)
    if isinstance(slept, Future):
        turn_until_idle(engine)
        slept.result(timeout=0)


def held(engine: Any) -> Any:
    """The engine misses weights, which are written where its core does not see it."""
    sleep_in_turns(engine, 2)
    engine.wake_up()
    for worker in workers(engine):
        worker.load_weights(WEIGHTS)
    assert engine.is_scheduler_paused()
    return engine


@pytest.mark.parametrize("wakes", [True, False])
def test_an_engine_that_waits_for_weights_does_so_behind_a_failed_sleep(engine: Any, wakes: bool) -> None:
    held(engine)
    if not wakes:
        last(engine).asleep = {"weights"}
        last(engine).fails["wake_up"] = [PoorwillError("the card is full")]
    # Behind the commit, also where ranks sleep together.
    last(engine).fails["sleep" if len(workers(engine)) == 1 else "decided"] = [PoorwillError("a shortfall")]
    with pytest.raises(PoorwillError, match="engine is as it was" if wakes else "could not be woken again"):
        engine.sleep(1)
    if not wakes:
        engine.wake_up()
    engine.poorwill_status()
    assert asleep(engine) == frozenset()
    assert is_serving(engine)


def test_a_data_parallel_engine_waits_for_the_others_behind_two_failures(vllm: Any) -> None:
    process = held(vllm.engine("DPEngineCoreProc", 2))
    met = vllm.data_parallel.met
    last(process).fails.update(
        decided=[PoorwillError("a shortfall")], wake_up=[PoorwillError("the card is full")]
    )
    with pytest.raises(PoorwillError, match="could not be woken again"):
        sleep_in_turns(process, 1)
    process.wake_up()
    assert asleep(process) == frozenset()
    # Their frontend has all of them go on.
    assert process.is_scheduler_paused()
    assert vllm.data_parallel.met == met
    assert process.poorwill_status()["is_held"]
    process.poorwill_go_on()
    assert is_serving(process)


def test_what_is_refused_asleep_is_answered_by_every_rank(vllm: Any) -> None:
    engine = vllm.engine()
    assert engine.collective_rpc("add_lora") == [True] * 3
    engine.sleep(1)
    with pytest.raises(PoorwillError, match=r"add_lora: 3 of 3 ranks failed: rank 0: add_lora: the weights"):
        engine.collective_rpc("add_lora")
    # No answer is left behind for the next call.
    engine.wake_up()
    assert not engine.is_scheduler_paused()
    assert engine.collective_rpc("add_lora") == [True] * 3


# The cache alone


@since_registry
def test_the_cache_alone_can_be_given_back(vllm: Any) -> None:
    engine = vllm.engine()
    engine.pause_scheduler()
    last(engine).fails["discard"] = [PoorwillError("busy")]
    with pytest.raises(PoorwillError, match="discard: 1 of 3 ranks failed: rank 2: busy"):
        engine.release_kv_cache_memory()
    assert engine.model_executor.sleeping_tags == {"kv_cache"}
    engine.wake_up()
    assert is_serving(engine)
    engine.pause_scheduler()
    engine.release_kv_cache_memory()
    assert asleep(engine) == {"kv_cache"}
    with pytest.raises(NotReadyError, match="kv_cache"):
        engine.resume_scheduler()
    engine.wake_up(["kv_cache"])
    assert is_serving(engine)


# What frontends ask


def test_a_wake_asks_each_rank_once(engine: Any) -> None:
    engine.sleep(1)
    engine.wake_up()
    assert [worker.calls.count("poorwill_status") for worker in workers(engine)] == [1] * len(workers(engine))


def test_the_status_tells_each_event_once(engine: Any) -> None:
    engine.sleep(1)
    engine.wake_up()
    status = engine.poorwill_status()
    assert (status["engine"], status["not_ready"]) == (0, None)
    assert [rank["rank"] for rank in status["ranks"]] == list(range(len(workers(engine))))
    for rank in status["ranks"]:
        assert [event["operation"] for event in rank["events"]] == ["sleep", "wake"]
    assert all(rank["events"] == [] for rank in engine.poorwill_status()["ranks"])


def test_the_status_tells_of_failures(engine: Any) -> None:
    last(engine).fails["sleep"] = [PoorwillError("a shortfall")]
    with pytest.raises(PoorwillError):
        engine.sleep(1)
    events = engine.poorwill_status()["ranks"][-1]["events"]
    assert [event["error"] for event in events if event["operation"] == "sleep"] == ["a shortfall"]


def test_readiness_is_reported_without_asking_the_ranks(engine: Any) -> None:
    calls = list(last(engine).calls)
    assert engine.poorwill_not_ready() is None
    assert last(engine).calls == calls


# Installing


def test_other_workers_keep_vllms_own_methods(vllm: Any) -> None:
    engine = vllm.engine("EngineCore", config=make_config(worker_cls="vllm.v1.worker.gpu_worker.Worker"))
    engine.sleep(1)
    engine.sleep(2)
    engine.add_request(Request("early"))
    engine.wake_up()
    engine.resume_scheduler()
    assert "poorwill_status" not in workers(engine)[0].calls
    assert engine.scheduler.pause_state is vllm.core.PauseState.UNPAUSED
    assert engine.poorwill_not_ready() is None
    with pytest.raises(PoorwillError, match=r"worker_cls is not poorwill\.vllm\.worker\.Worker"):
        engine.poorwill_status()


def test_installing_again_does_nothing(vllm: Any) -> None:
    before = {
        of: dict(vars(getattr(vllm.core, of))) for of in ("EngineCore", "EngineCoreProc", "DPEngineCoreProc")
    }
    _engine.install_core(vllm.core, vllm.generation)
    assert {of: dict(vars(getattr(vllm.core, of))) for of in before} == before


def test_hooks_look_like_what_they_replace(vllm: Any) -> None:
    for name in ("sleep", "wake_up", "collective_rpc", "add_request", "resume_scheduler"):
        hook = getattr(vllm.core.EngineCore, name)
        assert inspect.signature(hook) == inspect.signature(hook.__wrapped__)
        assert OURS not in Path(hook.__wrapped__.__code__.co_filename).parents
        assert OURS in Path(hook.__code__.co_filename).parents


def test_a_version_without_a_method_is_refused() -> None:
    class EngineCore:
        def sleep(self) -> None:
            pass

    with pytest.raises(PoorwillError, match="vLLM's EngineCore has no wake_up of its own"):
        _engine.install_core(SimpleNamespace(EngineCore=EngineCore), _generations.of("0.33.0"))


def test_other_calls_pass_as_they_are(vllm: Any) -> None:
    engine = vllm.engine()
    engine.sleep(0)
    rpc = engine.model_executor.collective_rpc
    assert rpc("synchronize_device", unique_reply_rank=1) is None
    assert rpc("execute_model", None, (Batch(["a"]),), None, True).result() == [{"a": "token"}] * 3
    assert rpc("reload_weights", non_block=True).result() == ["reloaded"] * 3


@pytest.fixture
def three(vllm: Any) -> Any:
    """An engine of three ranks, which sleep together."""
    return vllm.engine()


def test_ranks_that_hear_of_no_failure_of_their_own_are_not_named(three: Any) -> None:
    workers(three)[1].fails["wake_up"] = [PoorwillError("the card is full")]
    three.sleep(1)
    with pytest.raises(PoorwillError, match="wake_up: 1 of 3 ranks failed: rank 1: the card is full"):
        three.wake_up()
    # No rank is awake, where before two were.
    assert asleep(three) == BOTH
    three.wake_up()
    assert is_serving(three)


@pytest.mark.parametrize("reason", ["elsewhere", "no folder"])
def test_ranks_without_a_folder_act_by_themselves(
    three: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    if reason == "elsewhere":
        workers(three)[2].reaches = False
    else:
        # Others may write there.
        tmp_path.chmod(0o777)
        monkeypatch.setenv("POORWILL_RANKS_FOLDER", str(tmp_path))
    workers(three)[2].fails["sleep"] = [PoorwillError("no")]
    with pytest.raises(PoorwillError, match="all ranks are awake again and the engine serves"):
        three.sleep(1)
    assert "one rank may sleep while another cannot" in caplog.text
    assert [worker.calls.count("sleep") for worker in workers(three)] == [1, 1, 1]
    assert is_serving(three)


def test_ranks_elsewhere_sleep_together_by_a_shared_folder(
    three: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("POORWILL_RANKS_FOLDER", str(tmp_path))
    workers(three)[2].fails["sleep"] = [PoorwillError("no")]
    with pytest.raises(PoorwillError, match="all ranks are awake again and the engine serves"):
        three.sleep(1)
    assert [worker.calls.count("sleep") for worker in workers(three)] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == []


def test_a_core_whose_other_ranks_have_their_own_acts_alone(vllm: Any) -> None:
    """As with an external launcher: the engine has two ranks, and each core calls one."""
    engine = vllm.engine("EngineCore", config=make_config(2))
    engine.sleep(1)
    assert workers(engine)[0].calls.count("sleep") == 1
    engine.wake_up()
    assert is_serving(engine)
