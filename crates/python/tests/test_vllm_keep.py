"""Sleeps that keep requests and prefixes: vLLM's own schedulers, over ranks that lose what is not kept."""

import random
from typing import Any

import pytest
from fake_vllm.engines import Vllm
from fake_vllm.schedulers import SCHEDULER, Scheduled, following
from helpers import cases
from poorwill import PoorwillError
from poorwill.vllm import _engine
from poorwill.vllm._blocks import runs_of
from poorwill.vllm._engine import NotReadyError
from poorwill.vllm._keep import KeepUnsupportedError
from poorwill.vllm._versions import RUN
from vllm_sources import needs_sources

pytestmark = needs_sources

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
KINDS = {
    "in this process": ("EngineCore", 1),
    "one rank": ("EngineCoreProc", 1),
    "ranks": ("EngineCoreProc", 3),
}


@pytest.fixture(scope="module", params=RUN)
def vllm(request: pytest.FixtureRequest) -> Any:
    vllm = Vllm(request.param, SCHEDULER)
    _engine.install_core(vllm.core, vllm.generation)
    return vllm


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest, vllm: Any) -> Scheduled:
    return Scheduled(vllm, *KINDS[request.param])


def running(engine: Scheduled, *names: str, steps: int = 3) -> Scheduled:
    """With requests in the middle of their answers, without a prefix in common."""
    for number, name in enumerate(names):
        engine.ask(name, prompt(number), 8)
    for _ in range(steps):
        engine.step()
    return engine


def prompt(number: int) -> list[int]:
    return [number + 1, *PROMPT]


def test_requests_go_on_where_they_were(engine: Scheduled) -> None:
    running(engine, "a", "b")
    live, before = engine.live(), [rank.model.computed for rank in engine.ranks]
    for _ in range(2):
        engine.sleep()
        assert all(rank.kept[-1] == runs_of(engine.live()) for rank in engine.ranks)
        engine.core.wake_up()
    assert live <= engine.live()
    engine.run()
    for number, name in enumerate("ab"):
        assert engine.answers[name] == following(prompt(number), 8)
    # Nothing is computed twice.
    computed = [rank.model.computed - had for rank, had in zip(engine.ranks, before, strict=True)]
    assert max(computed) <= 2 * 8


def test_without_the_mode_nothing_is_kept(engine: Scheduled) -> None:
    running(engine, "a")
    engine.sleep("abort")
    assert engine.ranks[0].kept == [[]]
    assert not engine.live() | engine.cached()


@pytest.mark.parametrize("level", [0, 2])
def test_other_levels_are_as_ever(engine: Scheduled, level: int) -> None:
    running(engine, "a")
    engine.sleep(level=level)
    assert not any(kept for rank in engine.ranks for kept in rank.kept)
    engine.core.wake_up()
    engine.core.collective_rpc("reload_weights")
    engine.run()
    assert engine.answers["a"] == following(prompt(0), 8)


def test_prefixes_that_are_dropped_are_not_found(engine: Scheduled) -> None:
    running(engine, "done")
    engine.run()
    running(engine, "a", "b")
    assert engine.cached() - engine.live()
    engine.sleep()
    assert engine.cached() <= engine.live()
    engine.core.wake_up()
    for name in "cd":
        engine.ask(name, [*prompt(0), 3, 4, 5], 4)
    engine.run()
    assert engine.answers["c"] == engine.answers["d"] == following([*prompt(0), 3, 4, 5], 4)


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_what_is_written_next_lies_together(engine: Scheduled, mode: str) -> None:
    running(engine, "a", "b", "c", steps=2)
    engine.run()
    running(engine, "d")
    engine.sleep(mode)
    engine.core.wake_up()
    before = engine.live()
    engine.ask("e", prompt(7), 8)
    engine.step()
    new = sorted(engine.live() - before)
    free = [block.block_id for block in engine.pool.blocks[1:] if block.block_id not in before]
    assert new
    assert new == free[: len(new)]
    engine.run()
    assert engine.answers["e"] == following(prompt(7), 8)


def test_prefixes_are_forgotten_in_their_order(vllm: Any) -> None:
    engine = Scheduled(vllm)
    for number, name in enumerate("abc"):
        engine.ask(name, prompt(number), 4)
        engine.run()
    before = engine.forgotten_first()
    assert len(before) >= 3
    engine.sleep("wait", keep_tags=["kv_cache"])
    engine.core.wake_up()
    assert engine.forgotten_first() == before


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_prefixes_are_kept_on_request(vllm: Any, mode: str) -> None:
    engine = running(Scheduled(vllm), "a")
    engine.sleep(mode, keep_tags=["kv_cache"])
    cached = engine.cached()
    assert len(cached) >= len(PROMPT) // 4
    assert engine.ranks[0].kept[-1] == runs_of(cached | engine.live())
    engine.core.wake_up()
    before = engine.ranks[0].model.computed
    engine.ask("again", [*prompt(0), 3, 4], 1)
    engine.run()
    assert engine.answers["again"] == following([*prompt(0), 3, 4], 1)
    if mode != "keep":
        assert engine.ranks[0].model.computed - before < len(PROMPT)


@pytest.mark.parametrize("method", ["reload_weights", "a_method_of_an_extension", "a second sleep"])
def test_whatever_may_have_written_weights_has_requests_computed_again(
    engine: Scheduled, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = type(engine.ranks[0])
    monkeypatch.setattr(rank, "a_method_of_an_extension", lambda _: None, raising=False)
    running(engine, "a")
    engine.sleep()
    engine.core.wake_up(["weights"])
    if method == "a second sleep":
        engine.sleep()
        engine.core.wake_up(["weights"])
        method = "reload_weights"
    engine.core.collective_rpc(method)
    before = engine.ranks[0].model.computed
    engine.core.wake_up(["kv_cache"])
    engine.run()
    assert engine.answers["a"] == following(prompt(0), 8)
    assert engine.ranks[0].model.computed - before >= len(PROMPT)


# In this process vLLM waits for no requests.
@pytest.mark.parametrize(
    ("kind", "mode"), [(kind, "keep") for kind in KINDS] + [("one rank", "wait"), ("ranks", "wait")]
)
def test_keys_of_other_weights_answer_for_nothing(vllm: Any, kind: str, mode: str) -> None:
    engine = running(Scheduled(vllm, *KINDS[kind]), "a")
    engine.sleep(mode, keep_tags=["kv_cache"])
    assert engine.cached()
    engine.core.wake_up(["weights"])
    engine.core.collective_rpc("reload_weights")
    engine.core.wake_up(["kv_cache"])
    assert not engine.cached()
    before = engine.ranks[0].model.computed
    engine.run()
    assert engine.answers["a"] == following(prompt(0), 8)
    # All of a kept request is computed again.
    assert (engine.ranks[0].model.computed - before >= len(PROMPT)) == (mode == "keep")


def test_a_client_that_leaves_frees_its_blocks_in_the_pause(engine: Scheduled) -> None:
    running(engine, "a", "b")
    engine.sleep()
    engine.core.abort_requests(["a"])
    live = engine.live()
    engine.core.wake_up()
    engine.run()
    assert engine.answers["b"] == following(prompt(1), 8)
    assert len(engine.answers["a"]) < 8
    assert live
    assert not engine.live()
    # Its prefix was kept with it, and is a prefix like others.
    engine.ask("c", prompt(0), 4)
    engine.run()
    assert engine.answers["c"] == following(prompt(0), 4)


def test_requests_that_come_in_the_pause_are_refused(vllm: Any) -> None:
    engine = running(Scheduled(vllm, "EngineCore"), "a")
    engine.sleep()
    with pytest.raises(NotReadyError, match="the engine sleeps"):
        engine.ask("late", PROMPT, 1)
    engine.core.wake_up(["weights"])
    engine.core.wake_up(["kv_cache"])
    engine.run()
    assert engine.answers["a"] == following(prompt(0), 8)


def test_a_batch_in_flight_is_waited_for(vllm: Any) -> None:
    engine = running(Scheduled(vllm, overlaps=True), "a", "b", "c")
    if not engine.core.batch_queue:
        engine.step()
    assert engine.core.batch_queue
    engine.sleep()
    assert not engine.core.batch_queue
    engine.core.wake_up()
    engine.run()
    for number, name in enumerate("abc"):
        assert engine.answers[name] == following(prompt(number), 8)


def test_who_resumes_in_the_pause_loses_nothing(vllm: Any) -> None:
    engine = running(Scheduled(vllm, overlaps=True), "done")
    engine.run()
    running(engine, "a", "b", steps=1)
    cached = engine.cached()
    slept = engine.core.sleep(1, "keep")
    engine.core.resume_scheduler()
    engine.run()
    engine.step()
    with pytest.raises(PoorwillError, match="given up, because the engine was resumed"):
        slept.result()
    assert engine.cached() >= cached
    assert engine.ranks[0].kept == []
    assert engine.answers["a"] == following(prompt(0), 8)


def test_a_pause_of_another_frontend_takes_nothing_away(vllm: Any) -> None:
    """As servers do that share an engine: each pauses it first, and then acts."""
    engine = running(Scheduled(vllm), "a")
    part = engine.core.poorwill_part
    for sleep, level in (("first", 1), ("second", 0)):
        paused = part("pause", (sleep, level, "keep"))
        while paused is not None and not paused.done():
            engine.step()
    assert part("act", ("first", [1], 1, None))["error"] is None
    assert engine.ranks[0].kept == [runs_of(engine.live())]
    assert part("act", (None, [None], 1, None))["error"] is None
    engine.run()
    assert engine.answers["a"] == following(prompt(0), 8)


@pytest.mark.parametrize("fault", ["poorwill_can_keep", "sleep"])
def test_a_failed_sleep_leaves_the_requests_going_on(engine: Scheduled, fault: str) -> None:
    fails(engine, fault)


@pytest.mark.parametrize("vllm", ["0.33.0"], indirect=True)
def test_a_failed_pause_leaves_the_requests_going_on(vllm: Any) -> None:
    fails(Scheduled(vllm), "synchronize_device")


def fails(engine: Scheduled, fault: str) -> None:
    running(engine, "a", "b")
    engine.ranks[-1].fails[fault] = [PoorwillError("a fault")]
    with pytest.raises(Exception, match=r"a fault"):
        engine.sleep()
    assert not engine.core.model_executor.is_sleeping
    engine.run()
    for number, name in enumerate("ab"):
        assert engine.answers[name] == following(prompt(number), 8)


def test_too_little_host_memory_changes_nothing(engine: Scheduled) -> None:
    running(engine, "done")
    engine.run()
    running(engine, "a", "b")
    cached, blocks = engine.cached(), len(engine.live())
    engine.ranks[-1].most_blocks = blocks - 1
    with pytest.raises(PoorwillError, match=f"keeps {blocks} blocks, and host memory has {blocks - 1}"):
        engine.sleep()
    assert engine.cached() == cached
    assert not any(rank.kept for rank in engine.ranks)
    engine.run()
    assert engine.answers["b"] == following(prompt(1), 8)


# What is refused.


def connector(engine: Scheduled) -> None:
    engine.config.kv_transfer_config = type("Config", (), {"kv_connector": "NixlConnector"})()


def shared_inputs(engine: Scheduled) -> None:
    engine.config.model_config.multimodal_config = type("Config", (), {"mm_processor_cache_type": "shm"})()


def host_pool(engine: Scheduled) -> None:
    engine.scheduler.kv_cache_manager.coordinator.single_type_managers[0].block_pool = object()


def group(engine: Scheduled) -> None:
    engine.core.dp_group = object()


REFUSED = {
    connector: "the KV connector NixlConnector",
    shared_inputs: "mm_processor_cache_type=shm",
    host_pool: "several pools",
    group: "several data parallel engines",
}


@pytest.mark.parametrize("make", REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(vllm: Any, make: Any) -> None:
    engine = running(Scheduled(vllm, "EngineCore"), "a")
    make(engine)
    said = f"{REFUSED[make]}.*sleep with mode=wait or abort"
    for mode, tags in (("keep", ()), ("abort", ("kv_cache",))):
        with pytest.raises(KeepUnsupportedError, match=said):
            engine.sleep(mode, keep_tags=tags)
        assert not engine.core.is_scheduler_paused()
    assert engine.ranks[0].kept == []
    assert len(engine.live()) > 0


@pytest.mark.parametrize(
    ("level", "tags", "said"),
    [
        (1, ["weights"], r"keep_tags has 'weights'; it may have kv_cache"),
        (2, ["kv_cache"], "needs level 1, and level is 2"),
        (0, ["kv_cache"], "needs level 1, and level is 0"),
    ],
)
def test_other_tags_and_levels_are_wrong(engine: Scheduled, level: int, tags: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        engine.core.sleep(level, "keep", tags)
    assert not engine.core.is_scheduler_paused()


def test_a_cache_that_stays_awake_needs_nothing(engine: Scheduled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POORWILL_KEEP_AWAKE", "kv_cache")
    running(engine, "a")
    cached = engine.cached()
    engine.sleep()
    assert engine.cached() >= cached
    assert "poorwill_can_keep" not in engine.ranks[0].calls


# At random.


@pytest.mark.parametrize("case", cases(60))
def test_any_cuts_give_the_tokens_of_none(vllm: Any, case: int) -> None:
    draw = random.Random(case)
    kind, ranks = draw.choice(list(KINDS.values()))
    settings: dict[str, bool] = draw.choice([{}, {}, {"overlaps": True}, {"runs_ahead": True}])
    blocks = draw.choice([16, 24, 64])
    engine = Scheduled(vllm, kind, ranks, blocks, is_hybrid=draw.random() < 0.4, **settings)
    wanted: dict[str, tuple[list[int], int]] = {}
    gone: set[str] = set()
    for number in range(draw.randint(2, 12)):
        for _ in range(draw.randint(0, 3)):
            name = f"{number}.{len(wanted)}"
            wanted[name] = (prompt(draw.randint(0, 2))[: draw.randint(1, 10)], draw.randint(1, 12))
            engine.ask(name, *wanted[name])
        for _ in range(draw.randint(0, 4)):
            engine.step()
        cut(engine, draw, wanted, gone)
    engine.run()
    for name, (given, count) in wanted.items():
        whole = following(given, count)
        answer = engine.answers.get(name, [])
        assert answer == whole[: len(answer)]
        assert name in gone or answer == whole


def cut(engine: Scheduled, draw: random.Random, wanted: Any, gone: set[str]) -> None:
    """One sleep and wake, in which clients may leave."""
    mode = draw.choice(["keep", "keep", "abort"])
    # 0.20 itself loses count of requests that it preempts while they run ahead.
    level = 2 if draw.random() < 0.1 and not engine.core.async_scheduling else 1
    tags = ("kv_cache",) if level == 1 and draw.random() < 0.3 else ()
    if mode == "abort":
        gone |= set(wanted)
    if draw.random() < 0.2:
        engine.ranks[-1].fails["sleep"] = [PoorwillError("a fault")]
        with pytest.raises(PoorwillError, match="a fault"):
            engine.sleep(mode, level, tags)
        return
    engine.sleep(mode, level, tags)
    if level == 1:
        kept = engine.live() | (engine.cached() if tags else set())
        assert all(rank.kept[-1] == runs_of(kept) for rank in engine.ranks)
        assert engine.cached() <= kept
    if wanted and draw.random() < 0.3:
        leaving = draw.choice(list(wanted))
        gone.add(leaving)
        engine.core.abort_requests([leaving])
    if draw.random() < 0.5:
        engine.core.wake_up(["weights"])
    engine.core.wake_up()
    if level == 2:
        engine.core.collective_rpc("reload_weights")
