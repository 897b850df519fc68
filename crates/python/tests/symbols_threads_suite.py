"""That no thread waits for ever: threads that allocate, free, query, sleep, wake, open and close.

Some calls keep Python's own lock and some release it, as PyTorch does, and PyTorch's lock surrounds them.
`test_suites.py` runs this over the fake libcuda, and shows where a thread is stuck.
"""

import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any

import poorwill
import pytest
from c_calls import Live
from c_symbols import MIB, CachingAllocatorsLock, Crowd, Functions, Gpu
from poorwill import _native

NAMES = map("threads-{}".format, itertools.count())
STEPS = 400

MUTEX = pytest.mark.parametrize("has_mutex", [False, True], ids=["", "behind PyTorch's lock"])
GIL = pytest.mark.parametrize("keeps_gil", [False, True], ids=["", "with the interpreter's lock"])


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def arena(gpu: Gpu) -> Iterator[poorwill.Arena]:
    used_before = gpu.used_bytes()
    arena = poorwill.arena("cuda:0", next(NAMES), limit="512MiB")
    yield arena
    assert _native.torch_segments() == (0, 0)
    stats = arena.stats()
    assert (stats.live_bytes, stats.live_blocks) == (0, 0)
    arena.trim()
    assert gpu.used_bytes() == used_before
    arena.close()
    _native.torch_refusal()


def functions_of(arena: poorwill.Arena, tag: str, keeps_gil: bool, mutex: Any) -> Any:
    """Behind PyTorch's lock, if it is given."""
    made = Functions.of(arena, tag, keeps_gil=keeps_gil)
    return made if mutex is None else CachingAllocatorsLock(made, mutex)


class Accounting:
    """The segments of all threads together."""

    def __init__(self) -> None:
        self._live, self._lock = Live(), threading.Lock()

    def add(self, segment: int, size: int) -> None:
        with self._lock:
            self._live.add(segment, size)

    def remove(self, segment: int) -> int:
        with self._lock:
            return self._live.remove(segment)


def churn(
    functions: Any, accounting: Accounting, stream: int, seed: int, kept: int = 8, largest: int = 8
) -> None:
    """Gets segments and gives them back. When full it gives back, as PyTorch does."""
    rng, mine = random.Random(seed), list[int]()
    for _ in range(STEPS):
        if mine and (len(mine) > kept or rng.random() < 0.45):
            segment = mine.pop(rng.randrange(len(mine)))
            # The next owner must find it gone from the accounting.
            functions.free(segment, accounting.remove(segment), stream)
            continue
        size = rng.randint(1, largest) * 2 * MIB
        segment = functions.alloc(size, stream)
        if segment != 0:
            accounting.add(segment, size)
            mine.append(segment)
    for segment in mine:
        functions.free(segment, accounting.remove(segment), stream)


def ask(arena: poorwill.Arena) -> None:
    """All that is asked under the interpreter's lock."""
    assert arena.stats().live_bytes >= 0
    blocks = [block for segment in arena.snapshot() for block in segment["blocks"]]
    assert all(block["bytes"] > 0 for block in blocks)
    arena.state()
    _native.torch_segments()
    _native.torch_has_segment_at(1)
    _native.torch_moment()
    _native.torch_refusal()


def sleep_and_wake(arena: poorwill.Arena, tag: str) -> None:
    if tag in arena.state():
        arena.sleep(tags=tag)
        arena.wake(tag)


def open_and_close(gpu: Gpu, name: str) -> None:
    """Another arena, whose segments are given back before, while and after it is closed."""
    other = poorwill.arena("cuda:0", name, limit="64MiB")
    functions = Functions.of(other, "weights")
    segments = [functions.alloc(4 * MIB) for _ in range(3)]
    functions.free(segments[0], 4 * MIB)
    closer = threading.Thread(target=other.close)
    closer.start()
    functions.free(segments[1], 4 * MIB)
    closer.join()
    functions.free(segments[2], 4 * MIB)
    assert functions.alloc(4 * MIB) == 0


@GIL
@MUTEX
def test_no_thread_waits_for_ever(gpu: Gpu, arena: poorwill.Arena, keeps_gil: bool, has_mutex: bool) -> None:
    mutex, crowd, accounting = threading.RLock(), Crowd(), Accounting()
    names = map(f"{arena.name}-other-{{}}".format, range(20))

    def open_some() -> None:
        name = next(names, None)
        if name is not None:
            open_and_close(gpu, name)

    def ask_as_pytorch_does() -> None:
        # Its statistics take its lock, and so do tensors that end where ours are asked.
        with mutex:
            ask(arena)

    for number in range(4):
        functions = functions_of(arena, f"t{number % 2}", keeps_gil, mutex if has_mutex else None)
        stream = 0 if number == 0 else gpu.new_stream(0)
        crowd.works(churn, functions, accounting, stream, number)
    crowd.keeps_on(ask, arena)
    crowd.keeps_on(ask_as_pytorch_does)
    crowd.keeps_on(sleep_and_wake, arena, "t1")
    crowd.keeps_on(open_some)
    crowd.keeps_on(arena.trim)
    crowd.run()


@GIL
@MUTEX
def test_a_wait_for_the_device_at_the_limit_blocks_no_other_thread(
    gpu: Gpu, arena: poorwill.Arena, keeps_gil: bool, has_mutex: bool
) -> None:
    mutex, crowd, accounting = threading.RLock(), Crowd(), Accounting()
    stream, other = gpu.new_stream(0), gpu.new_stream(0)

    def functions(tag: str, keeps_gil: bool) -> Any:
        return functions_of(arena, tag, keeps_gil, mutex if has_mutex else None)

    def wait_at_the_limit() -> None:
        for_weights = functions("weights", keeps_gil)
        for _ in range(20):
            first = for_weights.alloc(400 * MIB, stream)
            assert first != 0, _native.torch_refusal()
            gpu.pause(stream, 5_000)
            for_weights.free(first, 400 * MIB, stream)
            # Another stream wants its memory before it is complete.
            second = for_weights.alloc(402 * MIB, other)
            assert second != 0, _native.torch_refusal()
            for_weights.free(second, 402 * MIB, other)

    def carve(rng: random.Random, stream: int) -> None:
        for_others = functions("others", False)
        segment = for_others.alloc(16 * MIB, stream)
        if segment != 0:
            holes = [(segment + rng.randrange(8) * 2 * MIB, 4 * MIB)]
            _native.torch_carve(_native.torch_moment(), [(segment, 16 * MIB, holes)])
            for_others.free(segment, 16 * MIB, stream)

    crowd.works(wait_at_the_limit)
    crowd.works(churn, functions("others", False), accounting, gpu.new_stream(0), 1, 2, 4)
    crowd.works(churn, functions("others", True), accounting, gpu.new_stream(0), 2, 2, 4)
    crowd.keeps_on(carve, random.Random(3), gpu.new_stream(0))
    crowd.keeps_on(ask, arena)
    crowd.run()


def test_a_segment_goes_back_once_however_many_give_it_back(gpu: Gpu, arena: poorwill.Arena) -> None:
    functions = Functions.of(arena, "weights")
    for _ in range(50):
        segment = functions.alloc(16 * MIB)
        moment, crowd = _native.torch_moment(), Crowd()
        for _ in range(4):
            crowd.works(functions.free, segment, 16 * MIB)
            hole = (segment + 4 * MIB, 8 * MIB)
            crowd.works(_native.torch_carve, moment, [(segment, 16 * MIB, [hole])])
        crowd.run()
        assert arena.stats().live_bytes == 0


def test_arenas_of_two_gpus_do_not_wait_for_each_other(gpu: Gpu, arena: poorwill.Arena) -> None:
    second = poorwill.arena("cuda:1", next(NAMES), limit="512MiB")
    crowd, accounting = Crowd(), Accounting()

    class OnSecond:
        def __init__(self, functions: Functions) -> None:
            self.functions = functions

        def alloc(self, size: int, stream: int = 0) -> int:
            return self.functions.alloc(size, stream, 1)

        def free(self, segment: int, size: int, stream: int = 0) -> None:
            self.functions.free(segment, size, stream, 1)

    crowd.works(churn, Functions.of(arena, "weights"), accounting, gpu.new_stream(0), 1)
    crowd.works(churn, OnSecond(Functions.of(second, "weights")), accounting, gpu.new_stream(1), 2)
    crowd.keeps_on(ask, arena)
    crowd.keeps_on(ask, second)
    crowd.run()
    second.close()
