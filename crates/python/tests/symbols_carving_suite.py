"""What becomes of parts of segments that PyTorch never hands out again, over the fake libcuda.

`test_suites.py` runs it. Memory leaves by granules in segments that several tensors share, and by
mappings in those of one tensor.
"""

import itertools
import random
from collections.abc import Iterator

import poorwill
import pytest
from c_calls import Live
from c_symbols import GRANULE, MIB, Functions, Gpu
from helpers import cases
from poorwill import _native

NAMES = map("carving-{}".format, itertools.count())

CHUNK = 16 * GRANULE
SIZE = 20 * MIB

# Most that lives at a time in the rows that are made up.
MODEL_BYTES = 240 * MIB

Hole = tuple[int, int]


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def arena(gpu: Gpu) -> Iterator[poorwill.Arena]:
    used_before = gpu.used_bytes(), gpu.census()["mappings"]
    arena = poorwill.arena("cuda:0", next(NAMES), limit="1GiB")
    yield arena
    assert _native.torch_segments() == (0, 0)
    arena.trim()
    assert (gpu.used_bytes(), gpu.census()["mappings"]) == used_before
    arena.close()


@pytest.fixture
def functions(arena: poorwill.Arena) -> Functions:
    return Functions.of(arena, "weights")


def carve(segment: int, size: int, *holes: Hole, moment: int | None = None) -> int:
    """Holes are named from the segment's begin."""
    at = [(segment + start, bytes) for start, bytes in holes]
    return _native.torch_carve(_native.torch_moment() if moment is None else moment, [(segment, size, at)])


def live_blocks(arena: poorwill.Arena, segment: int) -> list[Hole]:
    """What is live of a segment, from its begin."""
    blocks = [block for segment in arena.snapshot() for block in segment["blocks"]]
    live = [(block["addr"] - segment, block["bytes"]) for block in blocks if block["kind"] == "live"]
    merged: list[Hole] = []
    for start, bytes in live:
        if merged and sum(merged[-1]) == start:
            start, bytes = merged[-1][0], merged.pop()[1] + bytes
        merged.append((start, bytes))
    return merged


@pytest.mark.parametrize(
    ("holes", "rest"),
    [
        pytest.param([], [(0, 20)], id="none"),
        pytest.param([(4, 0)], [(0, 20)], id="empty"),
        pytest.param([(4, 1)], [(0, 20)], id="less than a granule"),
        pytest.param([(5, 2)], [(0, 20)], id="a granule's size, over two of them"),
        pytest.param([(4, 4)], [(0, 4), (8, 12)], id="whole granules"),
        pytest.param([(3, 6)], [(0, 4), (8, 12)], id="partly outside of granules"),
        pytest.param([(0, 4)], [(0, 2), (4, 16)], id="at the first granule, which stays"),
        pytest.param([(0, 2)], [(0, 20)], id="the first granule"),
        pytest.param([(1, 19)], [(0, 2)], id="all but the begin"),
        pytest.param([(16, 4)], [(0, 16)], id="the end"),
        pytest.param([(16, 3.5)], [(0, 16), (18, 2)], id="all but the end"),
        pytest.param([(4, 2), (10, 4)], [(0, 4), (6, 4), (14, 6)], id="several"),
        pytest.param([(10, 4), (4, 2)], [(0, 4), (6, 4), (14, 6)], id="several, in another order"),
        pytest.param([(4, 2), (6, 2)], [(0, 4), (8, 12)], id="adjacent"),
        pytest.param([(4, 3), (7, 3)], [(0, 4), (6, 2), (10, 10)], id="adjacent within a granule"),
        pytest.param([(4, 4), (4, 4)], [(0, 4), (8, 12)], id="twice the same"),
        pytest.param([(4, 4), (6, 6)], [(0, 4), (12, 8)], id="overlapping"),
        pytest.param([(6, 2), (4, 6)], [(0, 4), (10, 10)], id="one in another"),
        pytest.param([(20, 4)], [(0, 20)], id="behind the end"),
        pytest.param([(-8, 8)], [(0, 20)], id="before the begin"),
        pytest.param([(-8, 12)], [(0, 2), (4, 16)], id="over the begin"),
        pytest.param([(18, 80)], [(0, 18)], id="over the end"),
    ],
)
def test_whole_granules_go_back_and_the_rest_stays(
    gpu: Gpu, arena: poorwill.Arena, functions: Functions, holes: list[tuple[float, float]], rest: list[Hole]
) -> None:
    segment = functions.alloc(SIZE)
    for granule in range(0, SIZE, GRANULE):
        gpu.fill(0, segment + granule, GRANULE, granule // GRANULE + 1, 0)
    gpu.synchronize(0, 0)
    used_before = gpu.used_bytes()
    expected = [(start * MIB, bytes * MIB) for start, bytes in rest]
    kept_bytes = sum(bytes for _, bytes in expected)
    at = [(int(start * MIB), int(bytes * MIB)) for start, bytes in holes]
    assert carve(segment, SIZE, *at) == SIZE - kept_bytes
    for _ in range(2):
        assert live_blocks(arena, segment) == expected
        assert _native.torch_segments() == (1, kept_bytes)
        assert arena.stats().live_bytes == kept_bytes
        # Again there is nothing left to carve.
        assert carve(segment, SIZE, *at) == 0
    assert arena.trim() == SIZE - kept_bytes
    assert gpu.used_bytes() == used_before - (SIZE - kept_bytes)
    for cycle in cases(3):
        for start, bytes in expected:
            for granule in range(start, start + bytes, GRANULE):
                assert gpu.holds(segment + granule, GRANULE, granule // GRANULE + 1), (cycle, granule)
        assert arena.sleep().released_bytes == kept_bytes
        arena.wake(verify="all")
    assert _native.torch_has_segment_at(segment)
    functions.free(segment, SIZE)
    assert arena.stats().live_bytes == 0


def test_holes_grow_as_pytorch_merges_them(arena: poorwill.Arena, functions: Functions) -> None:
    segment = functions.alloc(SIZE)
    # What was freed next to a hole is one with it in the next snapshot.
    assert carve(segment, SIZE, (6 * MIB, 3 * MIB), (14 * MIB, 2 * MIB)) == 4 * MIB
    assert carve(segment, SIZE, (6 * MIB, 6 * MIB)) == 4 * MIB
    assert carve(segment, SIZE, (3 * MIB, 9 * MIB)) == 2 * MIB
    assert live_blocks(arena, segment) == [(0, 4 * MIB), (12 * MIB, 2 * MIB), (16 * MIB, 4 * MIB)]
    # Two of them become one.
    assert carve(segment, SIZE, (3 * MIB, 15 * MIB)) == 4 * MIB
    assert live_blocks(arena, segment) == [(0, 4 * MIB), (18 * MIB, 2 * MIB)]
    functions.free(segment, SIZE)


def test_what_is_younger_than_the_moment_is_left_alone(arena: poorwill.Arena, functions: Functions) -> None:
    old = functions.alloc(SIZE)
    moment = _native.torch_moment()
    functions.free(old, SIZE)
    # PyTorch's snapshot was of the one, and this is another.
    young = functions.alloc(SIZE)
    assert young == old
    assert carve(young, SIZE, (0, SIZE), moment=moment) == 0
    assert arena.stats().live_bytes == SIZE
    assert carve(young, SIZE, (0, SIZE)) == SIZE - GRANULE
    functions.free(young, SIZE)


def test_what_is_no_segment_any_more_is_left_alone(arena: poorwill.Arena, functions: Functions) -> None:
    gone, kept = functions.alloc(SIZE), functions.alloc(SIZE)
    moment = _native.torch_moment()
    functions.free(gone, SIZE)
    everything = (1, (1 << 64) - 1)
    given = _native.torch_carve(
        moment,
        [
            (gone, SIZE, [(gone, SIZE)]),
            (kept, SIZE - 512, [(kept, SIZE)]),
            (kept + GRANULE, SIZE - GRANULE, [(kept + GRANULE, SIZE)]),
            (0, 0, [(0, 0), everything]),
            ((1 << 64) - 1, (1 << 64) - 1, [everything]),
        ],
    )
    assert given == 0
    assert arena.stats().live_bytes == SIZE
    # A hole that is longer than there are addresses is one to the end.
    assert carve(kept, SIZE, (SIZE - GRANULE, (1 << 64) - 1)) == GRANULE
    functions.free(kept, SIZE)


def test_a_segment_that_begins_within_a_granule(
    gpu: Gpu, arena: poorwill.Arena, functions: Functions
) -> None:
    # PyTorch without its cache asks for what it needs.
    for size in (SIZE, SIZE - 512, 6 * MIB + 512):
        before = functions.alloc(MIB + 512)
        segment = functions.alloc(size)
        within = segment % GRANULE
        gpu.fill(0, segment, size, 7, 0)
        carved = carve(segment, size, (0, size))
        first, last = -(-(segment + 1) // GRANULE) * GRANULE, (segment + size) // GRANULE * GRANULE
        assert carved == last - first, within
        assert arena.stats().live_bytes == MIB + 512 + size - carved
        for start, end in [(segment, first), (last, segment + size)]:
            assert gpu.holds(start, end - start, 7)
        functions.free(segment, size)
        functions.free(before, MIB + 512)


def test_carving_waits_for_the_stream(gpu: Gpu, arena: poorwill.Arena, functions: Functions) -> None:
    stream = gpu.new_stream(0)
    segment = functions.alloc(SIZE, stream)
    _native.torch_set_cached_max(arena, 0)
    used_before = gpu.used_bytes()
    with gpu.held(stream):
        gpu.fill(0, segment, SIZE, 5, stream)
        assert carve(segment, SIZE, (4 * MIB, 8 * MIB)) == 8 * MIB
        assert gpu.used_bytes() == used_before
        other = functions.alloc(8 * MIB)
        assert not segment <= other < segment + SIZE
    gpu.synchronize(0, None)
    assert gpu.holds(segment, 4 * MIB, 5, stream)
    assert gpu.holds(segment + 12 * MIB, 8 * MIB, 5, stream)
    functions.free(other, 8 * MIB)
    functions.free(segment, SIZE, stream)


def test_segments_are_carved_asleep(gpu: Gpu, arena: poorwill.Arena, functions: Functions) -> None:
    segment = functions.alloc(SIZE)
    gpu.fill(0, segment, SIZE, 9, 0)
    gpu.synchronize(0, 0)
    arena.sleep()
    used_before = gpu.used_bytes()
    assert carve(segment, SIZE, (4 * MIB, 8 * MIB)) == 8 * MIB
    assert gpu.used_bytes() == used_before
    assert arena.wake(verify="all").mapped_bytes == 12 * MIB
    assert gpu.holds(segment, 4 * MIB, 9)
    assert gpu.holds(segment + 12 * MIB, 8 * MIB, 9)
    arena.sleep()
    functions.free(segment, SIZE)
    arena.wake()
    assert arena.stats().live_bytes == 0


def test_segments_of_a_closed_arena_are_carved_for_nothing(gpu: Gpu) -> None:
    used_before = gpu.used_bytes()
    arena = poorwill.arena("cuda:0", next(NAMES), limit="64MiB")
    functions = Functions.of(arena, "weights")
    segment = functions.alloc(SIZE)
    arena.close()
    carve(segment, SIZE, (4 * MIB, 4 * MIB))
    assert gpu.used_bytes() == used_before
    functions.free(segment, SIZE)
    assert _native.torch_segments() == (0, 0)


def test_large_segments_go_back_whole_until_that_keeps_much(
    gpu: Gpu, arena: poorwill.Arena, functions: Functions
) -> None:
    size = 4 * CHUNK + 6 * MIB
    used_before = gpu.used_bytes()
    segments = []
    for least_bytes, most_bytes in [(0, 0), (CHUNK, 2 * CHUNK)]:
        segment = functions.alloc(size)
        segments.append(segment)
        assert carve(segment, size, (CHUNK // 2, 2 * CHUNK)) == 2 * CHUNK
        assert arena.stats().live_bytes == len(segments) * (size - 2 * CHUNK)
        assert least_bytes <= arena.trim() <= most_bytes
    # After a wake nothing is kept that does not live.
    arena.sleep()
    arena.wake()
    assert gpu.used_bytes() - used_before <= arena.stats().live_bytes + 2 * GRANULE
    for segment in segments:
        functions.free(segment, size)
    arena.trim()
    assert gpu.used_bytes() == used_before


class Model:
    """What is live of each segment, as plain ranges; each of its granules begins with the segment's bytes."""

    def __init__(self, gpu: Gpu, functions: dict[int, Functions], seed: int) -> None:
        self.gpu, self.functions = gpu, functions
        self.rng = random.Random(seed)
        self.live = Live()
        self.rest: dict[int, list[range]] = {}
        self.streams: dict[int, int] = {}
        self.bytes: dict[int, int] = {}

    @property
    def live_bytes(self) -> int:
        return sum(len(part) for parts in self.rest.values() for part in parts)

    def alloc(self) -> None:
        size = self.rng.choice([2, 20, 20, 2 * self.rng.randint(5, 30)]) * MIB
        stream = self.rng.choice(list(self.functions))
        segment = self.functions[stream].alloc(size, stream)
        assert segment != 0, _native.torch_refusal()
        assert segment not in self.rest
        mine = range(segment, segment + size)
        for parts in self.rest.values():
            assert all(part.stop <= mine.start or mine.stop <= part.start for part in parts)
        self.rest[segment], self.streams[segment] = [mine], stream
        self.live.sizes[segment] = size
        byte = self.rng.randrange(1, 256)
        for granule in range(0, size, GRANULE):
            self.gpu.fill(0, segment + granule, 512, byte, stream)
        self.gpu.synchronize(0, stream)
        self.bytes[segment] = byte

    def free(self) -> None:
        segment = self.rng.choice(list(self.rest))
        stream = self.streams.pop(segment)
        self.functions[stream].free(segment, self.live.sizes.pop(segment), stream)
        del self.rest[segment], self.bytes[segment]

    def carve(self) -> None:
        some = self.rng.sample(list(self.rest), min(len(self.rest), 3))
        named, expected = [], 0
        for segment in some:
            size, holes = self.live.sizes[segment], []
            for _ in range(self.rng.randint(1, 3)):
                start = self.rng.randrange(0, size, 512)
                bytes = self.rng.randrange(0, size - start + 1, 512)
                holes.append((segment + start, bytes))
                first = max(-(-(segment + start) // GRANULE), segment // GRANULE + 1) * GRANULE
                expected += self._cut(segment, range(first, (segment + start + bytes) // GRANULE * GRANULE))
            named.append((segment, size, holes))
        assert _native.torch_carve(_native.torch_moment(), named) == expected

    def _cut(self, segment: int, hole: range) -> int:
        left, cut = [], 0
        for part in self.rest[segment]:
            shared = range(max(part.start, hole.start), min(part.stop, hole.stop))
            if not shared:
                left.append(part)
                continue
            cut += len(shared)
            left += [
                rest for rest in (range(part.start, shared.start), range(shared.stop, part.stop)) if rest
            ]
        self.rest[segment] = left
        return cut

    def check_bytes(self) -> None:
        for segment, parts in self.rest.items():
            for part in parts:
                for at in (part.start, part.stop - GRANULE):
                    assert self.gpu.holds(at, 512, self.bytes[segment])


@pytest.mark.parametrize("seed", range(4))
def test_any_row_of_allocations_frees_and_carvings(gpu: Gpu, arena: poorwill.Arena, seed: int) -> None:
    streams = [0, gpu.new_stream(0), gpu.new_stream(0)]
    tags = ["weights", "mine", "weights"]
    functions = {
        stream: Functions.of(arena, tag, keeps_gil=seed % 2 == 0)
        for stream, tag in zip(streams, tags, strict=True)
    }
    model = Model(gpu, functions, seed)
    for step in cases(1500, least=150):
        turn = model.rng.random()
        if not model.rest or (turn < 0.4 and model.live_bytes < MODEL_BYTES):
            model.alloc()
        elif turn < 0.7 or model.live_bytes >= MODEL_BYTES:
            model.free()
        else:
            model.carve()
        stats = arena.stats()
        assert stats.live_bytes == model.live_bytes
        assert _native.torch_segments() == (len(model.rest), model.live_bytes)
        assert stats.mapped_bytes == gpu.used_bytes() <= arena.limit_bytes
        if step % 50 == 0:
            model.check_bytes()
        if step % 250 == 0:
            arena.sleep()
            assert gpu.used_bytes() == 0
            arena.wake()
            model.check_bytes()
    while model.rest:
        model.free()
    assert arena.stats().live_bytes == 0
