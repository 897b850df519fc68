"""What PyTorch may rely on when it calls for segments: rows of calls, refusals, routes.

`test_suites.py` runs it over the fake libcuda. Each test opens arenas of its own.
"""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import poorwill
import pytest
from c_calls import Call, Live, made_up, peak_bytes, read, replay, streams
from c_symbols import GRANULE, MIB, Functions, Gpu
from helpers import STUCK_S, cases, together
from poorwill import _native

GIB = 1 << 30
NAMES = map("calls-{}".format, itertools.count())
# What the rounding of blocks may take beside what is live.
SLACK_BYTES = 4 * GRANULE

RECORDED = sorted((Path(__file__).parent / "calls").glob("*.txt"))


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture(autouse=True)
def nothing_left(gpu: Gpu) -> Iterator[None]:
    """A test leaves no segments behind, and nothing on a GPU."""
    before = _native.torch_segments(), gpu.used_bytes(0), gpu.used_bytes(1)
    yield
    assert (_native.torch_segments(), gpu.used_bytes(0), gpu.used_bytes(1)) == before


@pytest.fixture
def arena(nothing_left: None) -> Iterator[poorwill.Arena]:
    arena = poorwill.arena("cuda:0", next(NAMES), limit="1GiB")
    yield arena
    arena.close()


# Rows of calls.

ROWS = [
    *(pytest.param(lambda path=path: read(path), id=path.stem) for path in RECORDED),
    pytest.param(lambda: made_up(1), id="made up"),
    pytest.param(lambda: made_up(2, conf="max_split_size_mb:20"), id="made up, with a split limit"),
    pytest.param(lambda: made_up(3, of_streams=3), id="made up, on three streams"),
]


@pytest.mark.parametrize("keeps_gil", [False, True], ids=["", "with the interpreter's lock"])
@pytest.mark.parametrize("row", ROWS)
def test_what_is_mapped_follows_what_pytorch_has(
    gpu: Gpu, row: Callable[[], list[Call]], keeps_gil: bool
) -> None:
    calls = row()
    peak = peak_bytes(calls)
    # At the limit a segment that fits beside the live ones has to be found.
    limit_bytes = peak + peak // 100 + SLACK_BYTES
    used_before = gpu.used_bytes()
    arena = poorwill.arena("cuda:0", next(NAMES), limit=limit_bytes)
    functions = Functions.of(arena, "weights", keeps_gil=keeps_gil)
    handles = [0, *(gpu.new_stream(0) for _ in range(1, streams(calls)))]
    census_before = gpu.census()
    created_bytes = []

    def look(live: Live) -> None:
        stats = arena.stats()
        assert (stats.live_bytes, stats.live_blocks) == (live.bytes, len(live.sizes))
        assert _native.torch_segments() == (len(live.sizes), live.bytes)
        assert live.bytes <= stats.mapped_bytes <= limit_bytes

    for number in range(10):
        replay(calls, functions, handles, look if number < 2 else lambda live: None)
        stats = arena.stats()
        assert (stats.live_bytes, stats.peak_live_bytes, stats.deferred_release_bytes) == (0, peak, 0)
        assert gpu.used_bytes() - used_before == stats.mapped_bytes
        # Addresses come and go, as long as memory does not.
        assert stats.reserved_bytes <= 8 * peak
        assert _native.torch_segments() == (0, 0)
        created_bytes.append(stats.created_bytes)
    # What the first round has left serves the others, as far as it has their sizes.
    rounds = [after - before for before, after in itertools.pairwise(created_bytes)]
    assert max(rounds) <= created_bytes[0] // 2
    assert arena.trim() == stats.mapped_bytes
    stats = arena.stats()
    assert (stats.mapped_bytes, stats.reserved_bytes, stats.segments) == (0, 0, 0)
    assert gpu.used_bytes() == used_before
    assert gpu.census() == census_before
    assert _native.torch_refusal() is None
    arena.close()


def test_the_bytes_of_a_segment_are_its_own(gpu: Gpu, arena: poorwill.Arena) -> None:
    functions = Functions.of(arena, "weights")
    stream = gpu.new_stream(0)
    segments = [functions.alloc(size, stream) for size in (2 * MIB, 20 * MIB, 64 * MIB)]
    for number, segment in enumerate(segments):
        gpu.fill(0, segment, 2 * MIB, number + 1, stream)
    gpu.synchronize(0, stream)
    for cycle in range(3):
        arena.sleep()
        assert gpu.used_bytes() == 0
        arena.wake()
        for number, segment in enumerate(segments):
            assert gpu.holds(segment, 2 * MIB, number + 1, stream), cycle
    for segment, size in zip(segments, (2 * MIB, 20 * MIB, 64 * MIB), strict=True):
        functions.free(segment, size, stream)


def test_a_segment_stays_mapped_while_work_on_its_stream_may_touch_it(
    gpu: Gpu, arena: poorwill.Arena
) -> None:
    functions = Functions.of(arena, "weights")
    stream = gpu.new_stream(0)
    segment = functions.alloc(64 * MIB, stream)
    _native.torch_set_cached_max(arena, 0)
    with gpu.held(stream):
        gpu.fill(0, segment, 64 * MIB, 1, stream)
        functions.free(segment, 64 * MIB, stream)
        # Neither another stream nor another tag gets its memory meanwhile; the stream itself does.
        others = [
            (Functions.of(arena, "weights").alloc(64 * MIB), "weights"),
            (Functions.of(arena, "kv_cache").alloc(64 * MIB, stream), "kv_cache"),
        ]
        assert all(abs(other - segment) >= 64 * MIB for other, _ in others)
        assert arena.stats().mapped_bytes >= 3 * 64 * MIB
        assert functions.alloc(64 * MIB, stream) == segment
        functions.free(segment, 64 * MIB, stream)
    for other, tag in others:
        Functions.of(arena, tag).free(other, 64 * MIB)
    # What the fake was asked to do on memory that was gone by then would have broken it.
    gpu.synchronize(0, None)
    arena.trim()
    assert gpu.used_bytes() == 0


# Refusals.


@pytest.fixture
def functions(arena: poorwill.Arena) -> Functions:
    return Functions.of(arena, "weights")


@pytest.mark.parametrize(
    ("size", "device", "words"),
    [
        (2 * GIB, 0, "cannot allocate 2 GiB for `weights`: the limit of 1 GiB is too low by 1 GiB"),
        ((1 << 63) - 1, 0, "a block has at most 2 TiB (2199021158400 bytes)"),
        (2 * MIB, 1, "the pool of `weights` is on cuda:0, and was asked for memory of cuda:1"),
        (2 * MIB, -1, "the pool of `weights` is on cuda:0, and was asked for memory of cuda:-1"),
        (0, 0, "cannot allocate 0 bytes aligned to 512 for `weights`"),
        (-1, 0, "cannot allocate -1 bytes for `weights`"),
        (-(1 << 63), 0, "cannot allocate -9223372036854775808 bytes for `weights`"),
    ],
)
@pytest.mark.parametrize("keeps_gil", [False, True])
def test_what_is_refused_leaves_nothing(
    gpu: Gpu, arena: poorwill.Arena, size: int, device: int, words: str, keeps_gil: bool
) -> None:
    functions = Functions.of(arena, "weights", keeps_gil=keeps_gil)
    kept = functions.alloc(4 * MIB)
    before = arena.stats().as_dict(), gpu.census()
    assert functions.alloc(size, 0, device) == 0
    assert words in str(_native.torch_refusal())
    assert _native.torch_refusal() is None
    assert (arena.stats().as_dict(), gpu.census()) == before
    functions.free(kept, 4 * MIB)


def test_a_full_arena_is_reported_until_there_is_space(arena: poorwill.Arena, functions: Functions) -> None:
    first = functions.alloc(600 * MIB)
    for _ in range(3):
        assert functions.alloc(600 * MIB) == 0
        assert "cannot allocate 600 MiB for `weights`: the limit of 1 GiB is too low by 176 MiB" in str(
            _native.torch_refusal()
        )
    # PyTorch asks again when it has given back what it could: a refusal that was overcome is forgotten.
    assert functions.alloc(600 * MIB) == 0
    functions.free(first, 600 * MIB)
    second = functions.alloc(600 * MIB)
    assert second != 0
    assert _native.torch_refusal() is None
    functions.free(second, 600 * MIB)


def test_a_full_device_is_reported_until_there_is_space(gpu: Gpu) -> None:
    arena = poorwill.arena("cuda:1", next(NAMES), limit=0.99)
    functions = Functions.of(arena, "weights")
    free_bytes, _ = gpu.memory_bytes(1)
    taken = gpu.allocate(free_bytes - 16 * MIB, 1, 0)
    before = arena.stats().as_dict()
    assert functions.alloc(20 * MIB, 0, 1) == 0
    refusal = str(_native.torch_refusal())
    assert all(word in refusal for word in ("cannot allocate 20 MiB for `weights`", "16 MiB"))
    # What it took to find out counts, and is gone.
    counters = {"created_bytes": 0, "peak_mapped_bytes": 0}
    assert {**arena.stats().as_dict(), **counters} == {**before, **counters}
    assert gpu.memory_bytes(1)[0] == 16 * MIB
    gpu.free(taken, 0, 1, 0)
    segment = functions.alloc(20 * MIB, 0, 1)
    assert segment != 0
    functions.free(segment, 20 * MIB, 0, 1)
    arena.close()


def test_a_driver_that_fails_at_any_call_leaves_nothing(
    gpu: Gpu, arena: poorwill.Arena, functions: Functions
) -> None:
    # Some memory to move, so that there is something to fail at, too.
    kept = functions.alloc(20 * MIB)
    gpu.fill(0, kept, 20 * MIB, 3, 0)
    gpu.synchronize(0, 0)
    for size in (2 * MIB, 20 * MIB, 70 * MIB):
        refused, nth = 0, 0
        while True:
            arena.trim()
            gpu.arm(nth, 1)
            segment = functions.alloc(size)
            calls = gpu.disarm()
            refusal = _native.torch_refusal()
            assert (segment == 0) == (refusal is not None)
            if segment == 0:
                refused += 1
                assert str(refusal).startswith("cannot ")
                assert "999" in str(refusal)
            else:
                functions.free(segment, size)
            assert _native.torch_segments() == (1, 20 * MIB)
            assert (arena.stats().live_bytes, arena.stats().live_blocks) == (20 * MIB, 1)
            if nth >= calls:
                break
            nth += 1
        assert refused > 0
    assert gpu.holds(kept, 20 * MIB, 3)
    functions.free(kept, 20 * MIB)


def test_what_sleeps_takes_nothing_new(arena: poorwill.Arena, functions: Functions) -> None:
    kept = functions.alloc(2 * MIB)
    arena.sleep()
    other = Functions.of(arena, "kv_cache")
    assert functions.alloc(2 * MIB) == 0
    assert "`weights` is asleep" in str(_native.torch_refusal())
    segment = other.alloc(2 * MIB)
    assert segment != 0
    other.free(segment, 2 * MIB)
    arena.wake()
    segment = functions.alloc(2 * MIB)
    assert segment != 0
    functions.free(segment, 2 * MIB)
    arena.sleep()
    functions.free(kept, 2 * MIB)
    assert arena.stats().live_bytes == 0


def test_one_threads_luck_is_not_anothers(arena: poorwill.Arena, functions: Functions) -> None:
    assert functions.alloc(2 * GIB) == 0
    together(lambda: functions.free(functions.alloc(2 * MIB), 2 * MIB))
    assert "cannot allocate 2 GiB" in str(_native.torch_refusal())


def test_what_is_not_ours_is_left_alone(gpu: Gpu, arena: poorwill.Arena, functions: Functions) -> None:
    segment, size = functions.alloc(20 * MIB), 20 * MIB
    block = arena.empty(4 * MIB, tag="weights")
    before = arena.stats().as_dict(), gpu.census()
    for address, wrong in [
        (0, 0),
        (0, size),
        (1, 1),
        (segment, 0),
        (segment, -1),
        (segment, size - 1),
        (segment, size + 512),
        (segment + 512, size - 512),
        (block.address, 4 * MIB),
        ((1 << 64) - 1, (1 << 63) - 1),
    ]:
        functions.free(address, wrong)
        Functions.exported().free(address, wrong)
        assert (arena.stats().as_dict(), gpu.census()) == before
    functions.free(segment, size)
    functions.free(segment, size)
    assert arena.stats().live_bytes == block.nbytes
    block.free()
    # Twice, when it is another's: the address and the size are all that PyTorch says.
    again = functions.alloc(size)
    assert again == segment
    functions.free(segment, size)
    functions.free(again, size)
    assert arena.stats().live_bytes == 0


def test_a_closed_arena_gives_nothing_and_takes_everything_back(gpu: Gpu) -> None:
    used_before = gpu.used_bytes()
    for segments in (0, 1, 3):
        name = next(NAMES)
        arena = poorwill.arena("cuda:0", name, limit="256MiB")
        functions = Functions.of(arena, "weights")
        live = [functions.alloc(20 * MIB) for _ in range(segments)]
        arena.close()
        assert gpu.used_bytes() == used_before
        assert _native.torch_segments() == (segments, segments * 20 * MIB)
        for _ in range(2):
            assert functions.alloc(20 * MIB) == 0
            refusal = str(_native.torch_refusal())
            assert all(word in refusal for word in ("arena", "closed", "open"))
        reopened = poorwill.arena("cuda:0", name, limit="256MiB")
        fresh = Functions.of(reopened, "weights")
        assert fresh.address != functions.address
        assert functions.alloc(20 * MIB) == 0
        others = [fresh.alloc(20 * MIB) for _ in range(3)]
        assert 0 not in others
        # Where the old ones were nothing comes to lie, so that PyTorch means what it says.
        assert not set(live) & set(others)
        for segment in live * 2:
            functions.free(segment, 20 * MIB)
        assert reopened.stats().live_bytes == 60 * MIB
        for segment in others:
            fresh.free(segment, 20 * MIB)
        assert _native.torch_segments() == (0, 0)
        _native.torch_refusal()
        reopened.close()


def test_a_fork_gets_nothing_and_gives_nothing(gpu: Gpu, arena: poorwill.Arena) -> None:
    functions = [Functions.of(arena, "weights", keeps_gil=keeps_gil) for keeps_gil in (False, True)]
    _native.torch_make_default(arena, "weights")
    exported = Functions.exported()
    kept = functions[0].alloc(20 * MIB)
    before = arena.stats().as_dict()
    child = os.fork()
    if child == 0:
        failed = 1
        try:
            for each in [*functions, exported]:
                assert each.alloc(2 * MIB) == 0
                each.free(kept, 20 * MIB)
            assert "fork" in str(_native.torch_refusal())
            assert _native.torch_carve(1 << 60, [(kept, 20 * MIB, [(kept, 20 * MIB)])]) == 0
            assert not _native.torch_has_segment_at(kept)
            assert _native.torch_segments() == (0, 0)
            failed = 0
        finally:
            os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert arena.stats().as_dict() == before
    assert _native.torch_has_segment_at(kept)
    assert _native.torch_refusal() is None
    functions[0].free(kept, 20 * MIB)


def test_a_fork_under_way_does_not_hang(gpu: Gpu, arena: poorwill.Arena, functions: Functions) -> None:
    # Whatever lock the parent's threads hold then stays held in the child.
    is_done = threading.Event()

    def work(number: int) -> None:
        stream = gpu.new_stream(0)
        while not is_done.is_set():
            segment = functions.alloc((number + 1) * 2 * MIB, stream)
            functions.free(segment, (number + 1) * 2 * MIB, stream)
            functions.alloc(2 * GIB, stream)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in cases(100, least=20):
            child = os.fork()
            if child == 0:
                refused = functions.alloc(2 * MIB) == 0
                functions.free(2 * MIB, 2 * MIB)
                _native.torch_refusal()
                os._exit(0 if refused else 1)
            deadline = time.monotonic() + STUCK_S / 6
            while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(child, 9)
                    os.waitpid(child, 0)
                    pytest.fail("a forked child waits for a lock that nobody holds there")
                time.sleep(0.001)
            assert os.waitstatus_to_exitcode(ended[1]) == 0
    finally:
        is_done.set()
        for thread in threads:
            thread.join()
    _native.torch_refusal()


# Routes.


def test_a_pair_of_an_arena_and_a_tag_has_functions_of_its_own(arena: poorwill.Arena) -> None:
    other = poorwill.arena("cuda:0", next(NAMES), limit="64MiB")
    pairs = [(which, tag) for which in (arena, other) for tag in ("weights", "kv_cache", "mine")]
    addresses = [_native.torch_allocator(*pair) for pair in pairs]
    assert [_native.torch_allocator(*pair) for pair in pairs] == addresses
    assert len({alloc for alloc, _ in addresses}) == len(pairs)
    assert len({free for _, free in addresses}) == 1
    live = [(Functions.of(*pair), Functions.of(*pair).alloc(4 * MIB)) for pair in pairs]
    for which in (arena, other):
        tags = {tag.tag: tag.live_bytes for tag in which.stats().tags}
        assert tags == dict.fromkeys(["weights", "kv_cache", "mine"], 4 * MIB)
    for functions, segment in live:
        functions.free(segment, 4 * MIB)
    other.close()


def test_what_no_route_leads_to_is_an_error(arena: poorwill.Arena) -> None:
    host = poorwill.arena("host:64MiB", next(NAMES))
    for make in (_native.torch_allocator, _native.torch_make_default):
        with pytest.raises(poorwill.PoorwillError, match=r"host:64MiB is no GPU"):
            make(host, "weights")
        with pytest.raises(ValueError, match="cannot be a tag"):
            make(arena, "a b")
    host.close()
    closed = poorwill.arena("cuda:0", next(NAMES))
    closed.close()
    for make in (_native.torch_allocator, _native.torch_make_default):
        with pytest.raises(poorwill.ClosedError):
            make(closed, "weights")


def test_every_gpu_has_arenas_of_its_own(gpu: Gpu) -> None:
    arenas = [poorwill.arena(f"cuda:{n}", "per-gpu", limit="64MiB") for n in (0, 1)]
    streams = [[0, gpu.new_stream(n)] for n in (0, 1)]
    used_before = [gpu.used_bytes(n) for n in (0, 1)]
    all_functions = [Functions.of(arena, "weights") for arena in arenas]
    # Whatever context is current stays so.
    for current in (0, 1):
        with gpu._current(current):
            context = gpu.current_context()
            for n, functions in enumerate(all_functions):
                for stream in streams[n]:
                    segment = functions.alloc(20 * MIB, stream, n)
                    assert gpu.used_bytes(n) - used_before[n] >= 20 * MIB
                    gpu.fill(n, segment, 20 * MIB, 7, stream)
                    functions.free(segment, 20 * MIB, stream, n)
                    assert functions.alloc(20 * MIB, stream, 1 - n) == 0
                    # A stream of the other GPU, which PyTorch would never name.
                    if stream != 0:
                        assert functions.alloc(20 * MIB, streams[1 - n][1], n) == 0
                        assert "another context" in str(_native.torch_refusal())
                    assert gpu.current_context() == context
    for n, arena in enumerate(arenas):
        arena.close()
        assert gpu.used_bytes(n) == used_before[n]
    _native.torch_refusal()


def test_the_exported_symbols_serve_the_arena_that_was_named_last(gpu: Gpu) -> None:
    exported = [Functions.exported(keeps_gil=keeps_gil) for keeps_gil in (False, True)]
    names = [next(NAMES) for _ in range(3)]
    first, second = (poorwill.arena("cuda:0", name, limit="64MiB") for name in names[:2])
    third = poorwill.arena("cuda:1", names[2], limit="64MiB")
    for arena, tag, device in [(first, "a", 0), (third, "c", 1), (second, "b", 0), (first, "b", 0)]:
        _native.torch_make_default(arena, tag)
        for functions in exported:
            segment = functions.alloc(4 * MIB, 0, device)
            assert [(entry.tag, entry.live_bytes) for entry in arena.stats().tags if entry.live_bytes] == [
                (tag, 4 * MIB)
            ]
            functions.free(segment, 4 * MIB, 0, device)
    for device in (7, -1):
        assert exported[0].alloc(4 * MIB, 0, device) == 0
        assert f"poorwill_alloc has no arena on cuda:{device}" in str(_native.torch_refusal())
    first.close()
    assert exported[0].alloc(4 * MIB) == 0
    assert "closed" in str(_native.torch_refusal())
    second.close()
    third.close()
