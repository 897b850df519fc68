"""What arenas promise: on the host device, and over a fake of NVIDIA's library."""

import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import poorwill
import pytest
from helpers import DEVICE, MIB, eventually, filled, run

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
        (DEVICE, "tested", {"limit": "32MiB"}, "with a limit of 64 MiB, and a limit of 32 MiB is requested"),
        (
            DEVICE,
            "tested",
            {"cache_limit": "3MiB"},
            "with cache_limit=None, and cache_limit=3 MiB is requested",
        ),
        (DEVICE, "tested", {"limit": 0.25}, "and a limit of 0.25 is requested"),
        ("host:1GiB", "tested", {}, "host:256MiB is open not as host:1GiB, for `tested`"),
        ("host:1GiB", "other", {}, "all arenas of a device share it"),
        ("host", "other", {"host_limit": "1GiB"}, "is open with another host_limit"),
        ("host", "tested", {"pageable": True}, "is open without pageable"),
        ("host", "other", {"peers": ()}, "is open with other peers"),
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
        (DEVICE, {"limit": True}, TypeError, "not bool"),
        (DEVICE, {"host_limit": "lots"}, ValueError, "`lots` is not a size"),
        (DEVICE, {"cache_limit": "few"}, ValueError, "`few` is not a size"),
        (DEVICE, {"name": "a b"}, ValueError, "`a b` cannot be the name of an arena"),
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


def test_a_cache_limit_bounds_what_freed_blocks_leave_mapped() -> None:
    with poorwill.arena(DEVICE, "bounded", cache_limit="8MiB") as arena:
        assert arena.cache_limit_bytes == 8 * MIB
        assert poorwill.arena(DEVICE, "bounded", cache_limit=8 * MIB) == arena
        kept = filled(arena, "weights")
        blocks = [filled(arena, "weights") for _ in range(8)]
        assert arena.stats().mapped_bytes >= 36 * MIB
        del blocks
        eventually(lambda: arena.stats().mapped_bytes <= 4 * MIB + 8 * MIB)
        del kept
    with poorwill.arena(DEVICE, "unbounded") as arena:
        assert arena.cache_limit_bytes is None
        filled(arena, "weights", 36 * MIB)
        assert arena.stats().cached_bytes >= 36 * MIB


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


def test_an_arena_closes_with_its_block() -> None:
    with poorwill.arena(DEVICE, "entered") as arena:
        kept = arena.empty(MIB)
    with pytest.raises(poorwill.ClosedError):
        arena.stats()
    with pytest.raises(poorwill.ClosedError), arena:
        arena.stats()
    assert kept is not None
    with pytest.raises(KeyError, match="ours"), poorwill.arena(DEVICE, "entered") as arena:
        raise KeyError("ours")
    with pytest.raises(poorwill.ClosedError):
        arena.stats()
    # What stops it from closing is not hidden, whatever the block raised.
    arena = poorwill.arena(DEVICE, "entered")
    block = arena.empty(MIB)
    hold = arena.hold("weights", "a test")
    with pytest.raises(poorwill.TagError, match="held") as refused, arena:
        raise KeyError("ours")
    assert isinstance(refused.value.__context__, KeyError)
    hold.end()
    del block
    arena.close()


def test_a_closed_arena_holds_no_memory_while_its_blocks_live() -> None:
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


# Threads, processes, and the end.


def test_threads_share_an_arena_without_a_deadlock() -> None:
    # In a process of its own, which a watchdog ends with everybody's stack if it hangs.
    ran = run("""
import faulthandler, threading
import numpy
faulthandler.dump_traceback_later(900, exit=True)
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
        arena.wake(tag, verify="all", timeout=900)
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


def test_others_run_while_a_thread_waits() -> None:
    waiting, giving = poorwill.arena(DEVICE, "waiting"), poorwill.arena(DEVICE, "giving")
    kept = filled(waiting, "weights", 160 * MIB)
    waiting.sleep()
    other = giving.empty(160 * MIB)
    woken: list[poorwill.WakeReport] = []
    thread = threading.Thread(target=lambda: woken.append(waiting.wake(timeout=900)))
    thread.start()
    # If the wake held Python's lock, no thread could give it what it waits for.
    other.free()
    giving.trim()
    thread.join()
    assert [report.tags for report in woken] == [["weights"]]
    assert kept.nbytes == 160 * MIB
    waiting.close()
    giving.close()


# The current device's arena, and GPUs: over the fake of NVIDIA's library.


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
print(poorwill.wake("weights", verify="all", timeout=900).tags)
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


def test_peers_are_the_devices(fake: dict[str, str]) -> None:
    said = run(
        """
def refused(device, name, peers):
    try:
        return poorwill.arena(device, name, peers=peers)
    except poorwill.PoorwillError as error:
        return error
print(refused("cuda:0", "first", [0, 2]))
alone = poorwill.arena("cuda:0", "first", peers=())
print(alone == refused("cuda:0", "first", None), alone == refused("cuda:0", "first", []))
print(refused("cuda:0", "second", [1]))
both = poorwill.arena("cuda:1", peers=[0])
print(both == refused("cuda:1", "default", (0,)), both.empty(2 << 20).nbytes >> 20)
""",
        **fake,
    ).splitlines()
    assert said[0].startswith("cannot use device cuda:0: ")
    assert "cuda:2 cannot be a peer of cuda:0: the driver shows this process 2 GPUs" in said[0]
    assert (said[1], said[3]) == ("True True", "True 2")
    assert "cuda:0 is open with other peers, for `first`" in said[2]


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
    assert said == ["256 256 True", "[64, 64, 64]", "{'weights': 'awake'} {'weights': 'asleep_backed_up'}"]


def test_without_a_known_total_a_limit_in_bytes_will_do(fake: dict[str, str]) -> None:
    said = run(
        """
for limit in (None, 0.5, "256MiB", "256MiB"):
    try:
        arena = poorwill.arena(0, f"of-{limit}", limit=limit)
        print(arena.limit_bytes >> 20, arena.budget.total_bytes, arena.empty(64 << 20).nbytes >> 20)
    except poorwill.BudgetError as error:
        print(str(error)[:39])
""",
        **fake,
        POORWILL_FAKE_CUDA_SIMULATE="0:total=0,0:info_total=0",
    ).splitlines()
    assert said == ["how much memory cuda:0 has is not known"] * 2 + ["256 None 64"] * 2


def test_tensors_need_pytorch(monkeypatch: pytest.MonkeyPatch, arena: poorwill.Arena) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("poorwill.torch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(poorwill, "torch", raising=False)
    uses: list[Callable[[], object]] = [poorwill.pool, poorwill.graph_pool, arena.pool, arena.graph_pool]
    for use in uses:
        with pytest.raises(ImportError):
            use()
