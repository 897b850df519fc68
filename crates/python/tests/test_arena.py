"""What arenas promise: on the host device, and over a stand-in for NVIDIA's library."""

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import poorwill
import pytest

MIB = 1 << 20

DEVICE = "host:256MiB"


@pytest.fixture
def arena() -> Iterator[poorwill.Arena]:
    opened = poorwill.arena(DEVICE, "tested", limit="64MiB")
    yield opened
    opened.close()


def filled(arena: poorwill.Arena, tag: str, size_bytes: int = 4 * MIB) -> Any:
    array = np.from_dlpack(arena.empty(size_bytes, tag=tag))
    array[:] = np.random.default_rng(size_bytes).integers(0, 256, size_bytes, dtype=np.uint8)
    return array


# Opening and closing.


def test_an_arena_has_a_device_a_name_and_a_limit(arena: poorwill.Arena) -> None:
    assert (arena.device, arena.name, arena.limit_bytes) == (DEVICE, "tested", 64 * MIB)
    assert repr(arena) == "<poorwill.Arena tested on host:256MiB: at most 64 MiB>"
    budget = arena.budget
    assert (budget.device, budget.budget_bytes, budget.unclaimed_bytes) == (DEVICE, 256 * MIB, 192 * MIB)
    assert [(claim.name, claim.bytes) for claim in budget.claims()] == [("pool", 64 * MIB)]
    with budget.claim("activations", "128MiB"):
        assert arena.budget.unclaimed_bytes == 64 * MIB


def test_asking_again_returns_the_same(arena: poorwill.Arena) -> None:
    for again in (
        poorwill.arena(DEVICE, "tested"),
        poorwill.arena("host", "tested"),
        poorwill.arena("host", "tested", limit=64 * MIB),
        poorwill.arena("host", "tested", limit={"host": "64m", "cuda:0": 0.5}),
        poorwill.arena("host", "tested", pageable=False),
    ):
        assert again == arena
        assert hash(again) == hash(arena)
    other = poorwill.arena("host", "other")
    assert other != arena
    assert other != "other"
    kept = filled(other, "weights")
    assert (other.stats().live_bytes, arena.stats().live_bytes) == (kept.nbytes, 0)
    other.close()


@pytest.mark.parametrize(
    ("device", "name", "options", "words"),
    [
        (
            DEVICE,
            "tested",
            {"limit": "32MiB"},
            "with a limit of 64 MiB, and a limit of 32 MiB is asked for",
        ),
        (DEVICE, "tested", {"limit": 0.25}, "and a limit of 0.25 is asked for"),
        ("host:1GiB", "tested", {}, "host:256MiB is open not as host:1GiB, for `tested`"),
        ("host:1GiB", "other", {}, "all arenas of a device share it"),
        ("host", "other", {"host_limit": "1GiB"}, "is open with another host_limit"),
        ("host", "tested", {"pageable": True}, "is open without pageable"),
    ],
)
def test_what_contradicts_how_it_is_open_is_refused(
    arena: poorwill.Arena, device: str, name: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(poorwill.PoorwillError) as raised:
        poorwill.arena(device, name, **options)
    assert type(raised.value) is poorwill.PoorwillError
    assert words in str(raised.value)
    assert "close" in str(raised.value)
    assert arena.limit_bytes == 64 * MIB


@pytest.mark.parametrize(
    ("limit", "limit_bytes"),
    [(None, 256), (64 * MIB, 64), ("64MiB", 64), (0.5, 128), ("25%", 64), (1.0, 256), ({"host": "1.0"}, 256)],
)
def test_limits_in_all_spellings(limit: Any, limit_bytes: int) -> None:
    arena = poorwill.arena(DEVICE, "limited", limit=limit)
    assert arena.limit_bytes == limit_bytes * MIB
    arena.close()


def test_a_limit_has_to_fit_beside_what_is_there(arena: poorwill.Arena) -> None:
    kept = filled(arena, "weights", 32 * MIB)
    # What is mapped counts, and what others may map does not.
    rest = poorwill.arena("host", "rest")
    assert rest.limit_bytes == 224 * MIB
    share = poorwill.arena("host", "share", limit=1.0)
    assert share.limit_bytes == 224 * MIB
    with pytest.raises(poorwill.BudgetError, match=r"cannot claim 225 MiB for .* `in_use` has 32 MiB"):
        poorwill.arena("host", "too-large", limit="225MiB")
    assert filled(rest, "weights", 220 * MIB).nbytes == 220 * MIB
    rest.close()
    share.close()
    del kept


@pytest.mark.parametrize(
    ("device", "options", "error", "words"),
    [
        ("host:1k", {}, poorwill.PoorwillError, "granule"),
        (DEVICE, {"limit": "1MiB"}, poorwill.BudgetError, "a limit of 1 MiB is below one granule of 2 MiB"),
        (DEVICE, {"limit": "1GiB"}, poorwill.BudgetError, "cannot claim 1 GiB for `pool`"),
        (DEVICE, {"limit": "lots"}, ValueError, "`lots` is no budget"),
        (DEVICE, {"limit": True}, TypeError, "not bool"),
        (DEVICE, {"host_limit": "lots"}, ValueError, "`lots` is not a size"),
        (DEVICE, {"name": ""}, ValueError, "cannot be the name of an arena"),
        (DEVICE, {"name": "a b"}, ValueError, "`a b` cannot be the name of an arena"),
        ("gpu", {}, ValueError, "names no device"),
        (1.5, {}, TypeError, "a device is an int"),
    ],
)
def test_what_cannot_be_opened_says_why(
    device: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as raised:
        poorwill.arena(device, **{"name": "refused", **options})
    assert type(raised.value) is error
    # Nothing is left of it.
    poorwill.arena("host:512MiB", "refused").close()


def test_closing_ends_all_that_names_it() -> None:
    arena, again = (poorwill.arena(DEVICE, "closing") for _ in range(2))
    preparation = arena.prepare_sleep()
    filled(arena, "weights")
    arena.close()
    again.close()
    uses: list[Callable[[], object]] = [
        lambda: arena.limit_bytes,
        lambda: arena.budget,
        lambda: again.empty(1),
        again.sleep,
        again.wake,
        again.prepare_sleep,
        lambda: again.discard("weights"),
        lambda: again.mark_restored("weights"),
        lambda: again.declare("mine", level1="drop"),
        again.state,
        again.stats,
        again.snapshot,
        again.trim,
    ]
    for use in uses:
        with pytest.raises(poorwill.ClosedError) as raised:
            use()
        assert str(raised.value) == (
            "the arena `closing` on host:256MiB has been closed, and what was in it is gone; open one again "
            'with poorwill.arena("host:256MiB", "closing")'
        )
    assert repr(again) == "<poorwill.Arena closing on host:256MiB: closed>"
    assert preparation.wait().end in ("finished", "overtaken")
    # The last arena of a device has let go of it, so it may have another size now.
    reopened = poorwill.arena("host:64MiB", "closing")
    assert reopened != arena
    assert reopened.state() == {}
    reopened.close()


def test_a_closed_arena_holds_no_memory_whoever_has_its_blocks() -> None:
    arena, watching = poorwill.arena(DEVICE, "held"), poorwill.arena(DEVICE, "watching")
    arrays = [filled(arena, tag) for tag in ("weights", "kv_cache", "mine")]
    assert poorwill.arena(DEVICE, "first").budget.process_used_bytes == 12 * MIB
    arena.close()
    assert poorwill.arena(DEVICE, "second").budget.process_used_bytes == 0
    arrays.clear()
    gc.collect()
    for name in ("first", "second", "watching"):
        poorwill.arena(DEVICE, name).close()
    assert watching.name == "watching"


# Sleeping and waking.


def test_tags_sleep_and_wake(arena: poorwill.Arena) -> None:
    arrays = {tag: filled(arena, tag) for tag in ("weights", "kv_cache", "runtime")}
    expected = {tag: array.copy() for tag, array in arrays.items()}
    assert arena.state() == dict.fromkeys(["weights", "kv_cache", "runtime"], "awake")
    asleep = arena.sleep(tags="weights")
    assert (asleep.level, asleep.tags, asleep.already_asleep_tags) == (1, ["weights"], [])
    assert (asleep.released_bytes, asleep.copied_bytes, asleep.discarded_bytes) == (4 * MIB, 4 * MIB, 0)
    assert asleep.release in ("confirmed", "ledger")
    assert arena.state()["weights"] == "asleep_backed_up"
    rest = arena.sleep()
    assert (sorted(rest.tags), rest.already_asleep_tags) == (["kv_cache", "runtime"], ["weights"])
    assert arena.state()["kv_cache"] == "asleep_dropped"
    woken = arena.wake(["weights", "kv_cache"], verify="all")
    assert sorted(woken.tags) == ["kv_cache", "weights"]
    assert (woken.copied_bytes, woken.verified_bytes, woken.zeroed_bytes) == (4 * MIB, 4 * MIB, 4 * MIB)
    arena.wake(("weights", "runtime"))
    assert (arrays["weights"] == expected["weights"]).all()
    assert (arrays["runtime"] == expected["runtime"]).all()
    assert not arrays["kv_cache"].any()


def test_level_two_leaves_weights_undefined_until_they_are_restored(arena: poorwill.Arena) -> None:
    weights = filled(arena, "weights")
    assert arena.sleep(2).discarded_bytes == 4 * MIB
    woken = arena.wake()
    assert woken.undefined_tags == ["weights"]
    assert arena.state() == {"weights": "undefined"}
    with pytest.raises(poorwill.TagError, match="write them again and call mark_restored"):
        arena.sleep()
    weights[:] = 3
    assert arena.mark_restored("weights") == ["weights"]
    assert arena.mark_restored(["weights"]) == []
    arena.sleep()
    arena.wake()
    assert (weights == 3).all()


def test_what_is_asked_in_vain_is_reported(arena: poorwill.Arena) -> None:
    kept = filled(arena, "weights")
    never = arena.wake()
    assert (never.tags, never.already_awake_tags, never.mapped_bytes) == ([], ["weights"], 0)
    awake = arena.wake("weights", timeout=0)
    assert (awake.tags, awake.already_awake_tags) == ([], ["weights"])
    assert arena.sleep(tags=[]).tags == []
    arena.sleep()
    assert arena.sleep().already_asleep_tags == ["weights"]
    arena.wake(timeout=1.5)
    assert kept.nbytes == 4 * MIB


def test_a_tag_that_is_not_there_is_named_with_those_that_are(arena: poorwill.Arena) -> None:
    kept = filled(arena, "mine")
    uses: list[Callable[[str], object]] = [
        lambda tag: arena.sleep(tags=tag),
        lambda tag: arena.wake(tag),
        lambda tag: arena.wake(["mine", tag]),
        lambda tag: arena.prepare_sleep(tags=tag),
        arena.discard,
        arena.mark_restored,
    ]
    for use in uses:
        with pytest.raises(poorwill.TagError, match=r"no tag `theirs` here; known are .*mine"):
            use("theirs")
    assert arena.state() == {"mine": "awake"}
    assert kept.nbytes == 4 * MIB


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda arena: arena.sleep(3),
            ValueError,
            "there is no level 3; 1 keeps weights",
        ),
        (lambda arena: arena.sleep("1"), TypeError, "str"),
        (lambda arena: arena.sleep(tags=7), TypeError, "tags are a str, or a sequence of them, not int"),
        (lambda arena: arena.sleep(tags=[b"x"]), TypeError, "a tag is a str, not bytes"),
        (lambda arena: arena.sleep(tags="a b"), ValueError, "`a b` cannot be a tag"),
        (lambda arena: arena.discard(None), TypeError, "not NoneType"),
        (
            lambda arena: arena.wake(verify="some"),
            ValueError,
            'it is "sample" or "all"',
        ),
        (lambda arena: arena.wake(timeout=-1), ValueError, "`-1` is no timeout"),
        (lambda arena: arena.wake(timeout=float("nan")), ValueError, "is no timeout"),
        (lambda arena: arena.wake(timeout="1s"), TypeError, "a timeout is a number of seconds, not str"),
        (
            lambda arena: arena.declare("mine"),
            ValueError,
            "say at least one of level1, level2",
        ),
        (
            lambda arena: arena.declare("mine", level1="keep"),
            ValueError,
            'it is "backup" or "drop"',
        ),
        (lambda arena: arena.declare("mine", dropped="ones"), ValueError, "`ones` is no value of dropped"),
        (
            lambda arena: arena.declare("mine", changes="few"),
            ValueError,
            '"immutable" or "volatile"',
        ),
    ],
)
def test_what_cannot_be_asked(
    arena: poorwill.Arena, call: Callable[[Any], object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as raised:
        call(arena)
    assert words in str(raised.value)


def test_tags_sleep_as_declared(arena: poorwill.Arena) -> None:
    arena.declare("scratch", level1="drop", level2="drop", dropped="zeros", changes="volatile")
    arena.declare("once", level2="drop")
    scratch, once = filled(arena, "scratch"), filled(arena, "once")
    expected = once.copy()
    assert arena.sleep().discarded_bytes == 4 * MIB
    arena.wake()
    assert not scratch.any()
    assert (once == expected).all()
    with pytest.raises(poorwill.TagError, match="declare a tag once, before its first allocation"):
        arena.declare("once", level1="drop")
    arena.declare("once", changes="immutable")
    slept = arena.sleep(tags="once")
    assert (slept.copied_bytes, slept.unchanged_bytes) == (0, 4 * MIB)
    arena.wake()
    assert arena.sleep(2).discarded_bytes == 8 * MIB


def test_a_broken_promise_is_an_error(arena: poorwill.Arena) -> None:
    array = filled(arena, "mine", 2 * MIB)
    arena.declare("mine", changes="immutable")
    arena.sleep()
    arena.wake()
    array[5] += 1
    with pytest.raises(poorwill.SleepError, match="`mine` was declared immutable") as raised:
        arena.sleep()
    assert raised.value.report is None
    assert arena.state() == {"mine": "awake"}
    assert arena.sleep().copied_bytes == 2 * MIB


def test_discarding_drops_whatever_the_policy(arena: poorwill.Arena) -> None:
    mine, kept = filled(arena, "mine"), filled(arena, "weights")
    report = arena.discard(["mine"])
    assert (report.level, report.tags, report.discarded_bytes) == (2, ["mine"], 4 * MIB)
    assert arena.state() == {"weights": "awake", "mine": "asleep_dropped"}
    with pytest.raises(poorwill.SleepError, match="wake it first"):
        arena.sleep()
    assert arena.wake().undefined_tags == ["mine"]
    assert mine.nbytes == kept.nbytes


def test_a_wake_that_does_not_fit_says_what_there_is(arena: poorwill.Arena) -> None:
    first = filled(arena, "weights", 48 * MIB)
    expected = first.copy()
    arena.sleep()
    second = arena.empty(32 * MIB, tag="mine")
    for timeout in (None, 0, 0.01):
        with pytest.raises(poorwill.OutOfMemoryError, match="is too low by 16 MiB") as raised:
            arena.wake(timeout=timeout)
        assert raised.value.limit_bytes == 64 * MIB
    assert arena.state() == {"weights": "asleep_backed_up", "mine": "awake"}
    second.free()
    arena.wake()
    assert (first == expected).all()


def test_memory_that_serves_nothing_is_given_back(arena: poorwill.Arena) -> None:
    kept, spare = arena.empty(4 * MIB), arena.empty(8 * MIB)
    spare.free()
    assert (arena.stats().mapped_bytes, arena.stats().cached_bytes) == (12 * MIB, 8 * MIB)
    assert (arena.trim(), arena.trim()) == (8 * MIB, 0)
    assert arena.stats().mapped_bytes == kept.nbytes


# Preparing.


def test_what_was_prepared_is_not_copied_again(arena: poorwill.Arena) -> None:
    array, cache = filled(arena, "weights", 8 * MIB), filled(arena, "kv_cache")
    preparation = arena.prepare_sleep()
    report = preparation.wait()
    assert (report.tags, report.end, report.copied_bytes) == (["weights"], "finished", 8 * MIB)
    assert (preparation.done_bytes, preparation.total_bytes, preparation.is_ended) == (8 * MIB, 8 * MIB, True)
    assert repr(preparation) == "<poorwill.Preparation: 8 MiB of 8 MiB, ended>"
    # Whoever asks again is told the same.
    assert preparation.wait(timeout=0).as_dict() == report.as_dict()
    preparation.cancel()
    array[:10] += 1
    slept = arena.sleep(tags="weights")
    assert (slept.copied_bytes, slept.unchanged_bytes) == (2 * MIB, 6 * MIB)
    del cache


def test_a_block_waits_for_its_preparation(arena: poorwill.Arena) -> None:
    kept = filled(arena, "weights", 16 * MIB)
    with arena.prepare_sleep() as preparation:
        assert preparation.total_bytes == kept.nbytes
    assert preparation.is_ended
    assert arena.sleep().copied_bytes == 0
    arena.wake()
    with pytest.raises(KeyError), arena.prepare_sleep() as preparation:
        raise KeyError
    assert preparation.wait().end in ("cancelled", "finished")


def test_a_sleep_overtakes_its_preparation(arena: poorwill.Arena) -> None:
    kept = filled(arena, "weights", 48 * MIB)
    preparation = arena.prepare_sleep()
    slept = arena.sleep()
    report = preparation.wait()
    assert report.end in ("overtaken", "finished")
    assert slept.copied_bytes + slept.unchanged_bytes == kept.nbytes


# Reports.


def as_plain(told: Any) -> Any:
    if isinstance(told, list):
        return [as_plain(each) for each in told]
    return getattr(told, "as_dict", lambda: told)()


def test_reports_have_the_fields_of_the_json(arena: poorwill.Arena) -> None:
    kept = [filled(arena, tag) for tag in ("weights", "kv_cache")]
    prepared = arena.prepare_sleep().wait()
    slept = arena.sleep()
    stats = arena.stats()
    woken = arena.wake()
    reports: list[Any] = [prepared, slept, slept.phases, woken, woken.phases, stats, *stats.tags]
    for report in reports:
        plain = report.as_dict()
        fields = [name for name in vars(type(report)) if not name.startswith("_") and name != "as_dict"]
        assert sorted(fields) == sorted(plain), report
        assert json.loads(json.dumps(plain)) == plain
        for name, value in plain.items():
            assert as_plain(getattr(report, name)) == value, name
        assert repr(report).startswith(f"<poorwill.{type(report).__name__} ")
    assert " of kv_cache, weights: 8 MiB released (" in repr(slept)
    assert "<poorwill.TagStats weights (asleep, backed up): 4 MiB live, 0 B mapped, 4 MiB backed up>" in map(
        repr, stats.tags
    )
    assert len(kept) == 2


def test_what_the_reports_say_is_what_the_design_says(arena: poorwill.Arena) -> None:
    design = (Path(__file__).parents[3] / "docs/design.md").read_text()
    kept = filled(arena, "weights")
    for name, report in [
        ("PrepareReport", arena.prepare_sleep().wait()),
        ("SleepReport", arena.sleep()),
        ("WakeReport", arena.wake()),
    ]:
        plain = as_plain(report)
        phases = plain.get("phases")
        fields = [
            f"phases{{{', '.join(phases)}}}" if field == "phases" and phases else field for field in plain
        ]
        assert f"`{name}`: `{', '.join(fields)}`" in design
    del kept


def test_a_snapshot_is_plain(arena: poorwill.Arena) -> None:
    block = arena.empty(4 * MIB, tag="runtime")
    [segment] = arena.snapshot()
    assert (segment["tag"], segment["mapped_bytes"]) == ("runtime", 4 * MIB)
    [live] = [block for block in segment["blocks"] if block["kind"] == "live"]
    assert (live["addr"], live["requested_bytes"]) == (block.address, 4 * MIB)


# Threads, processes, and the end.


def test_threads_share_an_arena_without_a_deadlock() -> None:
    # In a process of its own, which a watchdog ends with everybody's stack if it hangs.
    ran = run("""
import faulthandler, threading
import numpy
faulthandler.dump_traceback_later(90, exit=True)
arena = poorwill.arena("host:256MiB", limit="128MiB")
failures, barrier = [], threading.Barrier(12)
def turns(work):
    def run():
        barrier.wait()
        try:
            for turn in range(25):
                work(turn)
        except BaseException as error:
            failures.append(error)
    return threading.Thread(target=run)
def cycle(tag):
    block = arena.empty(2 << 20, tag=tag)
    array = numpy.from_dlpack(block)
    def work(turn):
        array[:] = turn
        if turn % 3 == 0:
            arena.prepare_sleep(tags=tag)
        arena.sleep(1 + turn % 2, tag)
        arena.wake(tag, verify="all", timeout=60)
        assert (array == turn).all()
    return work
def churn(turn):
    blocks = [arena.empty(size << 10, tag="churn") for size in range(1, 64)]
    arrays = [numpy.from_dlpack(block) for block in blocks[::2]]
    del blocks
    for array in arrays:
        array[:] = 1
def look(turn):
    arena.stats(), arena.state(), arena.snapshot(), repr(arena), arena.trim()
def reopen(turn):
    other = poorwill.arena("host", f"other-{turn % 2}")
    try:
        array = numpy.from_dlpack(other.empty(1 << 20))
        other.sleep(tags="weights")
        other.wake()
    except (poorwill.ClosedError, poorwill.TagError):
        pass
    other.close()
work = [cycle("a"), cycle("b"), cycle("c"), churn, churn, churn, look, look, look, reopen, reopen, reopen]
threads = [turns(each) for each in work]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(failures, sorted(arena.state().items()))
""")
    assert ran == "[] [('a', 'awake'), ('b', 'awake'), ('c', 'awake')]\n"


def test_others_run_while_a_thread_waits(arena: poorwill.Arena) -> None:
    kept = filled(arena, "weights", 48 * MIB)
    arena.sleep()
    other = arena.empty(32 * MIB, tag="mine")
    woken: list[poorwill.WakeReport] = []
    waiting = threading.Thread(target=lambda: woken.append(arena.wake(timeout=60)))
    waiting.start()
    # If the wake held Python's lock, nobody could free anything now.
    assert arena.stats().live_bytes == 80 * MIB
    other.free()
    waiting.join()
    assert woken[0].tags == ["weights"]
    assert kept.nbytes == 48 * MIB


def test_a_forked_child_opens_its_own() -> None:
    ran = run("""
import os, sys
arena, named = poorwill.arena("host:64MiB"), poorwill.arena("host:64MiB", "named")
block = arena.empty(1 << 20)
preparation = arena.prepare_sleep()
child = os.fork()
if child == 0:
    uses = [
        lambda: arena.limit_bytes, arena.sleep, arena.wake, arena.stats, arena.close, lambda: arena.budget,
        lambda: preparation.is_ended, preparation.wait, preparation.cancel,
    ]
    failed = 0
    for use in uses:
        try:
            use()
        except poorwill.PoorwillError as error:
            assert f"belongs to process {os.getppid()}" in str(error), error
            failed += 1
    assert failed == len(uses), failed
    assert arena.name == "default" and "another process" in repr(preparation)
    own = poorwill.arena("host:32MiB")
    assert own != arena and own == poorwill.arena("host:32MiB") and own.stats().live_bytes == 0
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
preparation.wait()
named.close()
print(arena.sleep().tags)
""")
    assert ran == "['weights']\n"


@pytest.mark.parametrize(
    "last", ["", "arena.close()", "arena.prepare_sleep()", "raise SystemExit", "del arena"]
)
def test_the_end_of_a_process_is_quiet(last: str) -> None:
    script = f"""
import threading
import numpy
arena = poorwill.arena("host:512MiB")
kept = numpy.from_dlpack(arena.empty(128 << 20))
kept[:] = 1
preparation = arena.prepare_sleep()
def forever():
    while True:
        try:
            arena.stats()
        except (poorwill.ClosedError, NameError):
            pass
threading.Thread(target=forever, daemon=True).start()
print("end")
{last}
"""
    assert run(script) == "end\n"


# The current device's arena, and GPUs: over the stand-in for NVIDIA's library.


@pytest.fixture
def fake(tmp_path: Path) -> dict[str, str]:
    """The environment in which the driver's library is the stand-in."""
    library = os.environ.get("POORWILL_FAKE_LIBCUDA")
    if library is None or not Path(library).is_file():
        pytest.skip("POORWILL_FAKE_LIBCUDA names no library; `cargo xtask python` builds one")
    (tmp_path / "libcuda.so.1").symlink_to(Path(library).resolve())
    return {"LD_LIBRARY_PATH": str(tmp_path), "POORWILL_FAKE_CUDA_DEVICES": "1GiB,1GiB"}


def test_the_functions_are_of_the_current_gpus_arena(fake: dict[str, str]) -> None:
    said = run(
        """
arena = poorwill.arena()
assert arena == poorwill.arena("cuda") == poorwill.arena(0) and arena != poorwill.arena(1)
block = arena.empty(4 << 20)
scratch = arena.empty(2 << 20, tag="kv_cache")
print(arena.device, poorwill.prepare_sleep().wait().copied_bytes >> 20)
slept = poorwill.sleep(tags="weights")
print(slept.tags, slept.copied_bytes, poorwill.state() == arena.state(), poorwill.stats().live_bytes >> 20)
print(poorwill.wake("weights", verify="all", timeout=1).tags)
print(poorwill.discard("weights").tags, poorwill.wake().undefined_tags, poorwill.mark_restored("weights"))
scratch.free()
print(poorwill.trim() >> 20)
""",
        **fake,
    ).splitlines()
    assert said == [
        "cuda:0 4",
        "['weights'] 0 True 6",
        "['weights']",
        "['weights'] ['weights'] ['weights']",
        "2",
    ]


def test_the_functions_open_nothing() -> None:
    said = run(
        """
uses = [poorwill.sleep, poorwill.wake, poorwill.state, poorwill.stats, poorwill.trim, poorwill.prepare_sleep,
        lambda: poorwill.discard("weights"), lambda: poorwill.mark_restored("weights")]
for use in uses:
    try:
        use()
    except poorwill.PoorwillError as error:
        print(error)
kept = poorwill.arena("host:64MiB", "mine")
try:
    poorwill.sleep()
except poorwill.PoorwillError as error:
    print(error)
""",
        CUDA_VISIBLE_DEVICES="",
    ).splitlines()
    without = (
        "nothing has been put into the arena of cuda:0, the current device, so there is nothing to do; "
        "allocate in poorwill.pool() first, or open it with poorwill.arena()"
    )
    assert said[:-1] == [without] * 8
    assert said[-1] == f'{without}; call the method of another: poorwill.arena("host", "mine")'


def test_arenas_of_a_gpu_share_one_context(fake: dict[str, str]) -> None:
    said = run(
        """
first = poorwill.arena("cuda:0", limit="256MiB")
second = poorwill.arena("cuda:0", "second", limit=0.25)
third = poorwill.arena("cuda:1", "third")
print(first.limit_bytes >> 20, second.limit_bytes >> 20, third.limit_bytes >> 20 > 900)
blocks = [arena.empty(64 << 20) for arena in (first, second, third)]
print([arena.sleep().released_bytes >> 20 for arena in (first, second, third)])
third.close()
first.wake()
print(first.state(), second.state())
""",
        **fake,
    ).splitlines()
    assert said == [
        "256 256 True",
        "[64, 64, 64]",
        "{'weights': 'awake'} {'weights': 'asleep_backed_up'}",
    ]


def test_a_gpu_that_is_not_there_is_named(fake: dict[str, str]) -> None:
    said = run(
        """
for device in (7, "cuda:7"):
    try:
        poorwill.arena(device)
    except poorwill.PoorwillError as error:
        print(type(error).__name__, error)
""",
        **fake,
    ).splitlines()
    assert len(said) == 2
    assert all(line.startswith("PoorwillError cannot use device cuda:7: there is no GPU 7") for line in said)


def test_a_failing_driver_is_told_by_what_it_failed(fake: dict[str, str]) -> None:
    # Each call of the driver fails in turn, of those that a sleep makes, and of those that a wake makes.
    said = run(
        """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
cuda.poorwillFakeDisarm.restype = ctypes.c_uint64
def arm(first, count):
    cuda.poorwillFakeArm(ctypes.c_uint64(first), ctypes.c_uint64(count))
arena = poorwill.arena(0, limit="64MiB")
block = arena.empty(4 << 20)
for act, back in ((arena.sleep, arena.wake), (arena.wake, arena.sleep)):
    arm(0, 0)
    act()
    calls = cuda.poorwillFakeDisarm()
    back()
    seen = set()
    for nth in range(calls):
        before = arena.state()
        arm(nth, 1)
        try:
            act()
        except poorwill.PoorwillError as error:
            report = getattr(error, "report", None)
            seen.add((type(error).__name__, report and report.release))
            assert report is not None or arena.state() == before, error
        cuda.poorwillFakeDisarm()
        if arena.state() != before:
            back()
    print(sorted(seen, key=str))
    act()
arena.close()
""",
        **fake,
    ).splitlines()
    assert said == ["[('SleepError', 'shortfall'), ('SleepError', None)]", "[('WakeError', None)]"]


def test_tensors_need_pytorch(monkeypatch: pytest.MonkeyPatch, arena: poorwill.Arena) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "poorwill.torch", raising=False)
    uses: list[Callable[[], object]] = [poorwill.pool, poorwill.graph_pool, arena.pool, arena.graph_pool]
    for use in uses:
        with pytest.raises(ImportError):
            use()


def run(script: str, **variables: str) -> str:
    """What a script prints in a process of its own, which must end well and say nothing else."""
    inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    ran = subprocess.run(
        [sys.executable, "-B", "-c", f"import poorwill\n{script}"],
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout
