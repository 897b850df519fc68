"""What sleeping and waking from Python promise, and what the reports say."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import poorwill
import pytest
from helpers import DEVICE, MIB, assert_restored, filled, run
from poorwill import _native

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


def test_unused_ranges_are_not_backed_up(arena: poorwill.Arena) -> None:
    weights = filled(arena, "weights")
    expected = weights.copy()
    middle = (weights.ctypes.data + 2 * MIB, 2 * MIB)
    asleep = arena.sleep(unused=[middle, (0, 100)])
    assert (asleep.copied_bytes, asleep.unused_bytes, asleep.released_bytes) == (2 * MIB, 2 * MIB, 4 * MIB)
    arena.wake(verify="all")
    used = len(weights.view("uint8")) - 2 * MIB
    assert (weights.view("uint8")[:used] == expected.view("uint8")[:used]).all()
    for wrong in (3, [3], [(1, 2, 3)], [("a", 1)], [(True, 1)]):
        with pytest.raises(TypeError, match="pairs of an address and a length"):
            arena.sleep(unused=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="it is negative"):
        arena.sleep(unused=[(-1, 5)])
    with pytest.raises(ValueError, match="passes the last address"):
        arena.sleep(unused=[(2**64 - 1, 5)])
    assert arena.state() == {"weights": "awake"}


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


def spoil(stored: bytes) -> None:
    """Changes the last of the bytes with which a page of host memory begins."""
    found = 0
    with Path("/proc/self/maps").open() as maps, Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        for line in maps.readlines():
            place, access, *_ = line.split()
            start, end = (int(part, 16) for part in place.split("-"))
            for addr in range(start, end, 4096) if access.startswith("rw") else ():
                memory.seek(addr)
                try:
                    is_found = memory.read(len(stored)) == stored
                except OSError:  # Mapped, with nothing behind it.
                    break
                if is_found:
                    memory.seek(addr + len(stored) - 1)
                    memory.write(bytes([stored[-1] ^ 1]))
                    found += 1
    assert found == 1, f"{found} copies"


def test_a_spoiled_backup_costs_no_more_than_its_bytes(arena: poorwill.Arena) -> None:
    weights, others = filled(arena, "weights"), filled(arena, "runtime")
    mark = bytes(range(7, 7 + 64))
    weights[:64] = list(mark)
    expected = weights.copy()
    arena.sleep()
    spoil(mark)
    with pytest.raises(poorwill.WakeError, match="accepting losses"):
        arena.wake(verify="all")
    assert set(arena.state().values()) == {"asleep_backed_up"}
    (lost,) = arena.wake(accept_losses=True).lost
    assert (lost.tag, lost.offset_bytes) == ("weights", 0)
    assert [as_plain(same) for same in arena.lost_ranges()] == [as_plain(lost)]
    assert (arena.state()["weights"], arena.state()["runtime"]) == ("undefined", "awake")
    assert (weights[lost.bytes :] == expected[lost.bytes :]).all()
    assert weights[63] != expected[63]
    assert others.any()
    with pytest.raises(poorwill.TagError, match="mark_restored"):
        arena.sleep()
    weights[: lost.bytes] = expected[: lost.bytes]
    assert arena.mark_restored("weights") == ["weights"]
    assert arena.lost_ranges() == []
    arena.sleep()
    assert arena.wake(verify="all").lost == []
    assert (weights == expected).all()


def test_what_is_asked_in_vain_is_reported(arena: poorwill.Arena) -> None:
    kept = filled(arena, "weights")
    never = arena.wake()
    assert (never.tags, never.already_awake_tags, never.mapped_bytes) == ([], ["weights"], 0)
    awake = arena.wake("weights", timeout=0)
    assert (awake.tags, awake.already_awake_tags) == ([], ["weights"])
    assert arena.sleep(tags=[]).tags == []
    arena.sleep()
    assert arena.sleep().already_asleep_tags == ["weights"]
    arena.wake(timeout=900.5)
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
        (lambda arena: arena.sleep(3), ValueError, "there is no level 3; 1 keeps weights"),
        (lambda arena: arena.sleep("1"), TypeError, "str"),
        (lambda arena: arena.sleep(tags=7), TypeError, "tags are a str, or a sequence of them, not int"),
        (lambda arena: arena.sleep(tags=[b"x"]), TypeError, "a tag is a str, not bytes"),
        (lambda arena: arena.sleep(tags="a b"), ValueError, "`a b` cannot be a tag"),
        (lambda arena: arena.discard(None), TypeError, "not NoneType"),
        (lambda arena: arena.wake(verify="some"), ValueError, 'it is "sample" or "all"'),
        (lambda arena: arena.wake(timeout=-1), ValueError, "`-1` is no timeout"),
        (lambda arena: arena.wake(timeout=float("nan")), ValueError, "is no timeout"),
        (lambda arena: arena.wake(timeout="1s"), TypeError, "a timeout is a number of seconds, not str"),
        (lambda arena: arena.declare("mine"), ValueError, "say at least one of level1, level2"),
        (lambda arena: arena.declare("mine", level1="keep"), ValueError, 'it is "backup" or "drop"'),
        (lambda arena: arena.declare("mine", dropped="ones"), ValueError, "`ones` is no value of dropped"),
        (lambda arena: arena.declare("mine", changes="few"), ValueError, '"immutable" or "volatile"'),
        (lambda arena: arena.declare("mine", backups="raw"), ValueError, 'it is "compact" or "viewable"'),
        (lambda arena: arena.read_backup(8, 4), ValueError, "does not lie in one live block"),
        (lambda arena: arena.view_backup(8, 4), ValueError, "does not lie in one live block"),
        (lambda arena: arena.view_backup(-1, 4), OverflowError, "negative"),
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


# Backups.


def backed_up(arena: poorwill.Arena) -> int:
    return arena.stats().backup_bytes


def test_backups_are_dropped_on_request(arena: poorwill.Arena) -> None:
    weights, runtime = filled(arena, "weights"), filled(arena, "runtime")
    expected = weights.copy()
    arena.sleep()
    arena.wake()
    assert backed_up(arena) == weights.nbytes + runtime.nbytes
    # What lies in one piece of host memory with another's comes back with that.
    first = arena.drop_backups("runtime")
    assert backed_up(arena) == weights.nbytes
    rest = arena.drop_backups()
    assert (first + rest, arena.drop_backups()) == (weights.nbytes + runtime.nbytes, 0)
    assert backed_up(arena) == 0
    assert arena.sleep().copied_bytes == weights.nbytes + runtime.nbytes
    with pytest.raises(poorwill.TagError, match=r"cannot drop backups: `weights` is asleep, .*wake it first"):
        arena.drop_backups(["weights"])
    # What sleeps has nothing else.
    assert arena.drop_backups() == 0
    with pytest.raises(poorwill.TagError, match="nobody"):
        arena.drop_backups("nobody")
    arena.wake(verify="all")
    assert (weights == expected).all()


def test_backups_go_with_a_wake_if_so_opened() -> None:
    for keep_backups, kept in ((False, 0), (True, 4 * MIB), (None, 4 * MIB)):
        arena = poorwill.arena("host:64MiB", "keeping", keep_backups=keep_backups)
        array = filled(arena, "weights")
        arena.sleep()
        arena.wake()
        assert (backed_up(arena), array.nbytes) == (kept, 4 * MIB)
        assert poorwill.arena("host:64MiB", "keeping") == arena
        other = not (kept > 0)
        with pytest.raises(
            poorwill.PoorwillError, match=f"keep_backups={not other}, and keep_backups={other}"
        ):
            poorwill.arena("host:64MiB", "keeping", keep_backups=other)
        arena.close()


def test_backups_are_codes_if_so_opened() -> None:
    arena = poorwill.arena("host:64MiB", "coded", compress="always")
    array = filled(arena, "weights")
    # Half of it stays noise.
    array[: 2 * MIB] = 7
    expected = array.copy()
    slept = arena.sleep()
    assert (slept.copied_bytes, 2 * MIB < slept.stored_bytes < 2.1 * MIB) == (4 * MIB, True)
    stats = arena.stats()
    assert stats.backup_raw_bytes == 4 * MIB > stats.backup_bytes
    woken = arena.wake(verify="all")
    assert (woken.copied_bytes, woken.read_bytes) == (4 * MIB, slept.stored_bytes)
    assert (array == expected).all()
    assert poorwill.arena("host:64MiB", "coded") == arena
    both = 'with compress="always", and compress="off" is requested'
    with pytest.raises(poorwill.PoorwillError, match=both):
        poorwill.arena("host:64MiB", "coded", compress="off")
    wrong: Any = "on"
    with pytest.raises(ValueError, match='`on` is no value of compress; it is "auto" or "off" or "always"'):
        poorwill.arena("host:64MiB", "other", compress=wrong)
    arena.close()


def test_links_of_other_gpus_are_named_or_all() -> None:
    # A device without others' links does the same without.
    arena = poorwill.arena("host:67MiB", "linked", links=True)
    array = filled(arena, "weights")
    expected = array.copy()
    arena.sleep()
    assert arena.wake().linked_bytes == 0
    assert (array == expected).all()
    assert poorwill.arena("host:67MiB", "linked") == arena
    for other in (False, [1]):
        with pytest.raises(poorwill.PoorwillError, match="with other links"):
            poorwill.arena("host:67MiB", "other", links=other)
    for wrong in ("keep", 1.5, [-1]):
        with pytest.raises(TypeError, match="links are True, False, or numbers of GPUs"):
            poorwill.arena("host:68MiB", "wrong", links=cast(Any, wrong))
    arena.close()


def test_backups_move_to_a_disk_and_come_back(tmp_path: Path) -> None:
    arena = poorwill.arena("host:66MiB", "spilled", disk=tmp_path, disk_limit="1GiB")
    array = filled(arena, "weights")
    expected = array.copy()
    arena.sleep()
    assert arena.spill() == 4 * MIB
    stats = arena.stats()
    assert (stats.backup_bytes, stats.backup_disk_bytes, stats.backup_raw_bytes) == (0, 4 * MIB, 4 * MIB)
    assert stats.disk is not None
    assert (stats.disk.used_bytes, stats.disk.limit_bytes) == (4 * MIB, 1 << 30)
    assert stats.disk.io == ("io_uring" if stats.disk.io_because is None else "threads")
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    assert arena.wake().disk_read_bytes == 4 * MIB
    assert (array == expected).all()
    with pytest.raises(poorwill.PoorwillError, match="with another disk"):
        poorwill.arena("host:66MiB", "other", disk="/tmp")
    arena.close()


def test_a_disk_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(poorwill.PoorwillError, match="nowhere"):
        poorwill.arena("host:65MiB", "nowhere", disk=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="disk_limit bounds a disk, and none is given"):
        poorwill.arena("host:65MiB", "limited", disk_limit="1GiB")
    arena = poorwill.arena("host:65MiB", "diskless")
    with pytest.raises(poorwill.PoorwillError, match="no disk"):
        arena.spill()
    assert arena.stats().disk is None
    arena.close()


# Holds.


def test_what_is_held_does_not_sleep(arena: poorwill.Arena) -> None:
    array, cache = filled(arena, "weights"), filled(arena, "kv_cache")
    expected = array.copy()
    with arena.hold("weights", "NIXL") as hold, arena.hold("weights", "UCX"):
        assert (hold.tag, hold.holder) == ("weights", "NIXL")
        assert arena.held() == {"weights": {"holders": ["NIXL", "UCX"], "reclaimable_bytes": 0}}
        refusals: list[Callable[[], object]] = [
            *(arena.sleep, lambda: arena.sleep(1, "weights"), lambda: arena.discard("weights")),
        ]
        for refused in refusals:
            with pytest.raises(
                poorwill.TagError, match="`weights` is held by NIXL, UCX; have it deregistered"
            ):
                refused()
        with pytest.raises(poorwill.TagError, match=r"cannot close the arena: .* held by NIXL, UCX"):
            arena.close()
        assert arena.sleep(1, "kv_cache").tags == ["kv_cache"]
        assert repr(hold) == "<poorwill.Hold of weights by NIXL>"
    hold.end()
    assert repr(hold) == "<poorwill.Hold of weights by NIXL, ended>"
    with pytest.raises(poorwill.PoorwillError, match=r"`weights` by NIXL is ended; call `Arena.hold`"), hold:
        pytest.fail("nothing is held")
    assert (arena.held(), cache.nbytes) == ({}, 4 * MIB)
    assert arena.sleep().tags == ["weights"]
    with pytest.raises(poorwill.TagError, match="asleep"):
        arena.hold("weights", "NIXL")
    arena.wake()
    assert (array == expected).all()


def test_a_hold_ends_with_the_block_whatever_happens(arena: poorwill.Arena) -> None:
    filled(arena, "weights")
    with pytest.raises(ZeroDivisionError), arena.hold("weights", "NIXL"):
        raise ZeroDivisionError
    assert arena.held() == {}
    arena.hold("weights", "NIXL")
    # No reference is left.
    assert arena.held() == {}
    for holder in ("", " "):
        with pytest.raises(ValueError, match="needs a name"):
            arena.hold("weights", holder)


def test_freed_memory_of_a_held_tag_stays(arena: poorwill.Arena) -> None:
    spare = arena.empty(8 * MIB)
    with arena.hold("weights", "NIXL"):
        spare.free()
        assert arena.trim() == 0
        assert arena.held()["weights"]["reclaimable_bytes"] == 8 * MIB
    assert arena.trim() == 8 * MIB


# Preparing.


def test_what_was_prepared_is_not_copied_again(arena: poorwill.Arena) -> None:
    array, cache = filled(arena, "weights", 8 * MIB), filled(arena, "kv_cache")
    preparation = arena.prepare_sleep()
    report = preparation.wait()
    assert (report.tags, report.end, report.copied_bytes) == (["weights"], "finished", 8 * MIB)
    assert (preparation.done_bytes, preparation.total_bytes, preparation.is_ended) == (8 * MIB, 8 * MIB, True)
    assert repr(preparation) == "<poorwill.Preparation: 8 MiB of 8 MiB, ended>"
    # A second call reports the same.
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


def as_plain(reported: Any) -> Any:
    if isinstance(reported, list):
        return [as_plain(each) for each in reported]
    return getattr(reported, "as_dict", lambda: reported)()


def test_reports_have_the_fields_of_the_json(arena: poorwill.Arena) -> None:
    kept = [filled(arena, tag) for tag in ("weights", "kv_cache")]
    prepared = arena.prepare_sleep().wait()
    slept = arena.sleep()
    stats = arena.stats()
    woken = arena.wake()
    reports: list[Any] = [prepared, slept, slept.phases, woken, woken.phases, stats, *stats.tags]
    for report in reports:
        plain = report.as_dict()
        fields = {name for name in vars(type(report)) if not name.startswith("_") and name != "as_dict"}
        assert fields == set(plain), report
        assert json.loads(json.dumps(plain)) == plain
        for name, value in plain.items():
            assert as_plain(getattr(report, name)) == value, name
        assert repr(report).startswith(f"<poorwill.{type(report).__name__} ")
        assert_restored(report)
    assert " of kv_cache, weights: 8 MiB released (" in repr(slept)
    assert "<poorwill.TagStats weights (asleep, backed up): 4 MiB live, 0 B mapped, 4 MiB backed up>" in map(
        repr, stats.tags
    )
    assert len(kept) == 2


def test_every_class_of_a_report_is_restored_by_pickle(tmp_path: Path) -> None:
    # A budget is no report: it has the claims of now.
    found = [
        each for each in vars(_native).values() if hasattr(each, "as_dict") and each is not _native.Budget
    ]
    assert len(found) > 10
    for report in found:
        assert "__reduce__" in vars(report), report
    with poorwill.arena(DEVICE, "pickled", limit="64MiB", keep_backups=False) as arena:
        kept = filled(arena, "weights")
        slept = arena.sleep()
    assert kept is not None
    (tmp_path / "report").write_bytes(pickle.dumps([slept, slept.phases]))
    script = """
import os, pickle
from pathlib import Path
slept, phases = pickle.loads(Path(os.environ["PICKLED"]).read_bytes())
print(slept, phases, slept.phases, slept.released_bytes, slept.tags, slept.release)
"""
    said = run(script, PICKLED=str(tmp_path / "report"))
    phases = slept.phases
    assert said == f"{slept} {phases} {phases} {slept.released_bytes} {slept.tags} {slept.release}\n"
    reduced: Any = slept.__reduce__()
    restore, (kind, (values, *rest)) = reduced
    del values["tags"]
    with pytest.raises(poorwill.PoorwillError, match="pickled without `tags`, by another version"):
        restore(kind, (values, *rest))


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


# Failures.


def test_a_failing_driver_is_reported_with_the_failed_operation(fake: dict[str, str]) -> None:
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
    # A stalled machine asks for events more often, so a number may skip a call: each has three turns.
    for nth in 3 * list(range(calls)):
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
