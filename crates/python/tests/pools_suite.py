"""What pools promise of PyTorch's tensors: on a GPU, and over fakes of PyTorch and the driver.

`test_suites.py` runs it. Each test opens an arena of its own, so that none finds what another has left.
"""

import copy
import functools
import gc
import itertools
import os
import pickle
import random
import threading
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import poorwill
import poorwill.torch
import pytest
from helpers import cases, eventually, together
from poorwill import _native

torch: Any = import_module("torch")

# Which way scopes look here; without it, as they do by themselves.
WATCH = os.environ.get("POORWILL_TEST_WATCH", "operations")
poorwill.torch.Pool = functools.partial(poorwill.torch.Pool, watch=WATCH)  # type: ignore

MIB = 1 << 20
GIB = 1 << 30
NAMES = map("test-{}".format, itertools.count())


@pytest.fixture
def arena() -> Iterator[poorwill.Arena]:
    arena = poorwill.arena("cuda:0", next(NAMES), limit="4GiB")
    yield arena
    gc.collect()
    # A capture leaves cuBLAS's workspace for its stream in its pool.
    if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    arena.close()


def filled(nbytes: int, seed: int) -> Any:
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda").fill_(seed % 251 + 1)


def same(tensor: Any, seed: int) -> bool:
    return bool(torch.equal(tensor, filled(tensor.numel(), seed)))


def is_zero(tensor: Any) -> bool:
    return bool(torch.equal(tensor, torch.zeros(tensor.numel(), dtype=torch.uint8, device="cuda")))


def free_bytes() -> int:
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def mapped_bytes(arena: poorwill.Arena) -> int:
    return arena.stats().mapped_bytes


def test_tensors_sleep_and_wake_where_they_were(arena: poorwill.Arena) -> None:
    with arena.pool("weights"):
        tensors = [filled(size, seed) for seed, size in enumerate([24 * MIB, 3 * MIB, 5000, 40 * MIB])]
    addresses = [tensor.data_ptr() for tensor in tensors]
    for cycle in range(3):
        slept = arena.sleep()
        assert slept.release in ("confirmed", "ledger")
        assert slept.released_bytes >= sum(tensor.numel() for tensor in tensors)
        assert mapped_bytes(arena) == 0
        woken = arena.wake()
        assert woken.copied_bytes > 0
        assert [tensor.data_ptr() for tensor in tensors] == addresses, cycle
        assert all(same(tensor, seed) for seed, tensor in enumerate(tensors)), cycle


def test_what_a_scope_has_freed_is_not_kept(arena: poorwill.Arena) -> None:
    with arena.pool("weights"):
        kept = []
        for number in range(8):
            transient = torch.empty((100 + 60 * number) * MIB, dtype=torch.uint8, device="cuda")
            kept.append(filled(30 * MIB, number))
            # Until then work that is queued keeps what is freed.
            torch.cuda.synchronize()
            del transient
        kept.append(filled(3 * MIB, 8))
    live = sum(tensor.numel() for tensor in kept)
    assert live <= mapped_bytes(arena) <= live + 20 * MIB
    assert arena.stats().peak_mapped_bytes <= arena.stats().peak_live_bytes + 64 * MIB
    assert all(same(tensor, number) for number, tensor in enumerate(kept))


def churn(arena: poorwill.Arena, rng: random.Random, most_bytes: int) -> int:
    """Takes and frees blocks of a load. Returns what was mapped at most beside what lived, after it took one,
    and waits each time until that is no more than `most_bytes`.
    """
    live: list[Any] = []
    # What was freed since the last check, if only requests are checked.
    unseen_bytes, moment = 0, _native.torch_moment()
    peak_bytes = 0

    def unused_bytes() -> int:
        return mapped_bytes(arena) - int(sum(tensor.numel() for tensor in live)) - unseen_bytes

    for _ in range(120):
        mib = rng.choice([2 ** rng.uniform(-10, 4), rng.uniform(16, 300)])
        live.append(torch.empty(int(mib * MIB), dtype=torch.uint8, device="cuda"))
        if WATCH == "operations" or _native.torch_moment() != moment:
            unseen_bytes, moment = 0, _native.torch_moment()
        # The arena releases in the background, once queued work is complete.
        torch.cuda.synchronize()
        eventually(lambda: unused_bytes() <= most_bytes)
        peak_bytes = max(peak_bytes, unused_bytes())
        while live and (sum(tensor.numel() for tensor in live) > GIB or rng.random() < 0.4):
            unseen_bytes += live.pop(rng.randrange(len(live))).numel()
    return peak_bytes


@pytest.mark.parametrize("limit_mib", [128, 200, 700])
def test_a_cache_limit_bounds_what_stays_mapped(limit_mib: int) -> None:
    unbounded = []
    for seed in cases(10):
        limit_bytes = limit_mib * MIB
        # Chunks that are partly live stay.
        for limit, most_bytes in [(None, 8 * GIB), (limit_bytes, limit_bytes + 32 * MIB)]:
            with poorwill.arena("cuda:0", next(NAMES), limit="8GiB", cache_limit=limit) as arena:
                with arena.pool("weights"):
                    torch.cuda.current_blas_handle()
                    peak_bytes = churn(arena, random.Random(seed), most_bytes)
                torch.cuda.synchronize()
            if limit is None:
                unbounded.append(peak_bytes)
    assert max(unbounded) > limit_mib * MIB + 32 * MIB, "the bound says nothing"


@pytest.mark.parametrize("limit", [0, "127MiB"])
def test_a_cache_limit_that_no_pool_can_keep_is_refused(limit: int | str) -> None:
    with poorwill.arena("cuda:0", next(NAMES), limit="1GiB", cache_limit=limit) as arena:
        with pytest.raises(ValueError, match="keep up to 134217728: give 128MiB or more, or none"):
            arena.pool("weights")


def test_three_quarters_then_seven_eighths(arena: poorwill.Arena) -> None:
    with arena.pool("weights"):
        for _ in range(3):
            first = torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")
            del first
            second = torch.empty(7 * GIB // 2, dtype=torch.uint8, device="cuda")
            del second


def test_what_fits_beside_live_bytes_fits(arena: poorwill.Arena) -> None:
    with arena.pool("weights"):
        live = [torch.empty(100 * MIB, dtype=torch.uint8, device="cuda") for _ in range(38)]
        # Holes everywhere, none of them large.
        del live[::2]
        large = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    assert large.numel() + sum(tensor.numel() for tensor in live) <= mapped_bytes(arena) <= 4 * GIB


def test_a_refusal_says_why_and_leaves_nothing_behind(arena: poorwill.Arena) -> None:
    with arena.pool("weights"):
        kept = filled(32 * MIB, 1)
        with pytest.raises(torch.OutOfMemoryError) as refused:
            torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
        # Where no operation is checked, only leaving the scope reports it.
        if WATCH == "operations":
            notes = " ".join(getattr(refused.value, "__notes__", map(str, refused.value.args)))
            assert "poorwill: cannot allocate 4 GiB for `weights`" in notes
        more = filled(32 * MIB, 2)
    assert same(kept, 1)
    assert same(more, 2)


def test_the_default_pool_finds_what_the_arena_does_not_use(arena: poorwill.Arena) -> None:
    with arena.pool("weights"):
        # What it keeps, it keeps from now on.
        torch.cuda.current_blas_handle()
    torch.cuda.empty_cache()
    before = free_bytes()
    with arena.pool("weights"):
        tensors = [filled(32 * MIB, 0)]
        tensors += [torch.empty(500 * MIB, dtype=torch.uint8, device="cuda") for _ in range(6)]
    del tensors[1:]
    torch.cuda.empty_cache()
    arena.trim()
    assert before - free_bytes() <= 50 * MIB
    other = torch.empty(int(before - 200 * MIB), dtype=torch.uint8, device="cuda")
    del other
    torch.cuda.empty_cache()
    assert same(tensors[0], 0)


def test_scopes_nest_and_are_entered_again(arena: poorwill.Arena) -> None:
    outer, inner = arena.pool("weights"), arena.pool("kv_cache")
    with outer:
        first = filled(12 * MIB, 1)
        with inner:
            cache = filled(12 * MIB, 2)
            with outer:
                second = filled(12 * MIB, 3)
            more_cache = filled(12 * MIB, 4)
        third = filled(12 * MIB, 5)
    with outer:
        fourth = filled(12 * MIB, 6)
    outside = filled(12 * MIB, 7)
    tags = {tag.tag: tag.live_bytes for tag in arena.stats().tags}
    assert tags["weights"] == 4 * 12 * MIB
    assert tags["kv_cache"] == 2 * 12 * MIB
    arena.sleep()
    assert same(outside, 7)
    arena.wake()
    assert all(same(tensor, seed) for tensor, seed in [(first, 1), (second, 3), (third, 5), (fourth, 6)])
    assert is_zero(cache)
    assert is_zero(more_cache)


def test_an_exception_leaves_the_scope(arena: poorwill.Arena) -> None:
    def fail() -> None:
        with arena.pool("weights"):
            torch.empty(MIB, dtype=torch.uint8, device="cuda")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    live = arena.stats().live_bytes
    torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    assert arena.stats().live_bytes == live


def test_scopes_work_in_inference_mode(arena: poorwill.Arena) -> None:
    with torch.inference_mode(), arena.pool("weights"):
        tensor = filled(32 * MIB, 1)
        copy = tensor.clone()
    arena.sleep()
    arena.wake()
    assert same(tensor, 1)
    assert same(copy, 1)


def test_threads_load_different_tags_at_once(arena: poorwill.Arena) -> None:
    kept: dict[str, list[Any]] = {}
    is_done = threading.Event()

    def load(tag: str, seed: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), arena.pool(tag):
            tensors = []
            for number in cases(40, least=5):
                transient = torch.empty((20 + number) * MIB, dtype=torch.uint8, device="cuda")
                tensors.append(filled(10 * MIB + 512 * number, seed + number))
                del transient
            stream.synchronize()
        kept[tag] = tensors

    def load_all() -> None:
        try:
            together(*(functools.partial(load, f"t{n}", 1000 * n) for n in range(3)))
        finally:
            is_done.set()

    def watch() -> None:
        while not is_done.is_set():
            arena.stats()

    together(load_all, watch)
    arena.sleep()
    arena.wake()
    for n in range(3):
        assert all(same(tensor, 1000 * n + number) for number, tensor in enumerate(kept[f"t{n}"]))


@pytest.mark.real_torch
def test_work_on_other_streams_is_waited_for(arena: poorwill.Arena) -> None:
    side = torch.cuda.Stream()
    source = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    results = []
    with arena.pool("weights"):
        for number in range(30):
            work = torch.full((64 * MIB,), number, dtype=torch.uint8, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(2_000_000)
                results.append((work.to(torch.int32) - number).abs().sum() + source[:1].sum() - 1)
            work.record_stream(side)
            del work
            torch.full((70 * MIB,), 255, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    assert [int(result) for result in results] == [0] * 30


def test_a_graph_replays_after_ten_cycles(arena: poorwill.Arena) -> None:
    pool = arena.graph_pool()
    with arena.pool("weights"):
        weight = filled(8 * MIB, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        hidden = weight.clone()
        y = hidden.clone()
    graph.replay()
    assert same(y, 1)
    assert {tag.tag for tag in arena.stats().tags if tag.live_bytes} == {"weights", "cudagraph"}
    for cycle in range(10):
        arena.sleep()
        arena.wake()
        assert same(y, cycle + 1)
        weight.fill_(cycle + 3)
        graph.replay()
        assert same(y, cycle + 2)
    assert copy.copy(pool) is pool
    with pytest.raises(TypeError, match="make one there"):
        pickle.dumps(pool)
    del hidden, y, graph, pool
    gc.collect()
    arena.trim()
    assert {tag.tag for tag in arena.stats().tags if tag.live_bytes} == {"weights"}


@pytest.mark.real_torch
def test_a_graph_of_products_replays_the_same(arena: poorwill.Arena) -> None:
    with arena.pool("weights"):
        weight = torch.randn(1024, 1024, device="cuda")
    x = torch.randn(64, 1024, device="cuda")
    (x @ weight).sum().item()
    graph, pool = torch.cuda.CUDAGraph(), arena.graph_pool()
    with torch.cuda.graph(graph, pool=pool):
        y = ((x @ weight).relu() @ weight).softmax(-1)
    graph.replay()
    expected = y.clone()
    for _ in range(10):
        arena.sleep()
        arena.wake()
        graph.replay()
        assert torch.equal(y, expected)


def test_a_graph_captured_in_a_scope_keeps_its_own_memory(arena: poorwill.Arena) -> None:
    x = filled(4 * MIB, 5)
    graph = torch.cuda.CUDAGraph()
    with arena.pool("weights"):
        before = filled(8 * MIB, 1)
        with torch.cuda.graph(graph):
            y = x.clone().clone()
        after = filled(8 * MIB, 2)
    with arena.pool("weights"):
        filled(64 * MIB, 7)
    graph.replay()
    assert same(y, 5)
    assert same(before, 1)
    assert same(after, 2)


def test_sleeping_under_a_capture_is_refused_and_the_capture_survives(arena: poorwill.Arena) -> None:
    with arena.pool("weights"):
        weight = filled(8 * MIB, 1)
    graph, pool = torch.cuda.CUDAGraph(), arena.graph_pool()
    with torch.cuda.graph(graph, pool=pool):
        y = weight.clone()
        with pytest.raises(poorwill.PoorwillError, match="captur"):
            arena.sleep()
        with arena.pool("weights"):
            z = y.clone()
        arena.stats()
    graph.replay()
    assert same(z, 1)
    arena.sleep()
    arena.wake()
    weight.fill_(3)
    graph.replay()
    assert same(z, 2)


def test_a_closed_arena_that_ends_under_a_capture_does_not_break_it(arena: poorwill.Arena) -> None:
    other = poorwill.arena("cuda:0", next(NAMES), limit="64MiB")
    with other.pool("weights"):
        last = filled(4 * MIB, 1)
    other.close()
    with arena.pool("weights"):
        kept = filled(4 * MIB, 2)
    graph, inputs = torch.cuda.CUDAGraph(), filled(MIB, 3)
    del last
    # It empties the cache first.
    with torch.cuda.graph(graph, pool=arena.graph_pool()):
        output = inputs.clone()
        with pytest.raises(poorwill.PoorwillError, match="captur"):
            arena.sleep()
    graph.replay()
    torch.cuda.synchronize()
    assert same(output, 3)
    assert same(kept, 2)


def test_memory_freed_under_a_capture_is_caught_up_with(arena: poorwill.Arena) -> None:
    with arena.pool("weights"):
        gone = filled(256 * MIB, 1)
        kept = filled(32 * MIB, 2)
    graph = torch.cuda.CUDAGraph()
    x = filled(MIB, 3)
    with torch.cuda.graph(graph):
        y = x.clone()
        del gone
        torch.cuda.empty_cache()
        y = y.clone()
    graph.replay()
    assert same(y, 3)
    arena.trim()
    assert mapped_bytes(arena) <= 34 * MIB
    assert same(kept, 2)


@pytest.mark.real_torch
def test_what_cublas_keeps_is_not_put_to_sleep(arena: poorwill.Arena) -> None:
    torch._C._cuda_clearCublasWorkspaces()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        with arena.pool("weights"):
            x = torch.randn(512, 512, device="cuda")
            y = x @ x
        # The workspace is larger.
        assert arena.stats().live_bytes < 8 * MIB
        arena.sleep()
        other = torch.randn(512, 512, device="cuda")
        (other @ other).sum().item()
        arena.wake()
        assert torch.equal(x @ x, y)


def test_what_is_asleep_takes_nothing_new(arena: poorwill.Arena) -> None:
    with arena.pool("weights"):
        tensor = filled(MIB, 1)
    arena.sleep()
    with pytest.raises(poorwill.PoorwillError, match="wake it"), arena.pool("weights"):
        pass
    arena.wake()
    assert same(tensor, 1)


def test_a_closed_arena_says_so() -> None:
    arena = poorwill.arena("cuda:0", next(NAMES), limit="1GiB")
    pool = arena.pool("weights")
    with pool:
        tensor = filled(MIB, 1)
    torch.cuda.synchronize()
    arena.close()
    with pytest.raises(poorwill.ClosedError), pool:
        pass
    del tensor
    gc.collect()
    torch.cuda.empty_cache()


def test_devices_and_tags_that_are_none() -> None:
    with pytest.raises(poorwill.PoorwillError):
        poorwill.arena("cuda:99")
    with pytest.raises(ValueError, match="cannot be a tag"):
        poorwill.pool(tag="no tag")
    host = poorwill.arena("host:64MiB", next(NAMES))
    with pytest.raises(poorwill.PoorwillError, match="GPU"):
        host.pool("weights")
    host.close()


def test_the_symbols_serve_an_allocator_made_by_hand(arena: poorwill.Arena) -> None:
    path = poorwill.torch.library(arena, "by_hand")
    allocator = torch.cuda.memory.CUDAPluggableAllocator(path, "poorwill_alloc", "poorwill_free")
    pool = torch.cuda.MemPool(allocator.allocator())
    with torch.cuda.use_mem_pool(pool):
        tensor = filled(32 * MIB, 1)
    arena.sleep()
    arena.wake()
    assert same(tensor, 1)
    del tensor
    del pool
    torch.cuda.empty_cache()
    assert arena.stats().live_bytes == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_two_gpus_have_scopes_of_their_own() -> None:
    arenas = [poorwill.arena(f"cuda:{ordinal}", next(NAMES), limit="1GiB") for ordinal in (0, 1)]
    cached = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda:1")
    del cached
    reserved = torch.cuda.memory_reserved(1)

    def on(ordinal: int, seed: int) -> Any:
        return torch.empty(32 * MIB, dtype=torch.uint8, device=f"cuda:{ordinal}").fill_(seed)

    with arenas[0].pool("weights"):
        here = on(0, 1)
        gone = on(0, 2)
        del gone
        elsewhere = on(1, 3)
        with arenas[1].pool("weights"):
            there = on(1, 4)
            again = on(0, 5)
    # What is emptied on one GPU is left alone on the other.
    assert torch.cuda.memory_reserved(1) >= reserved
    live = [arena.stats().live_bytes for arena in arenas]
    assert live == [64 * MIB, 32 * MIB]
    for arena in arenas:
        assert arena.sleep().released_bytes >= 32 * MIB
    for arena in arenas:
        arena.wake()
    for tensor, seed in [(here, 1), (elsewhere, 3), (there, 4), (again, 5)]:
        assert torch.equal(tensor, torch.empty_like(tensor).fill_(seed))
    with pytest.raises(poorwill.PoorwillError, match="entered last"):
        arenas[0].pool("weights").__exit__(None, None, None)
    del here, elsewhere, there, again, tensor
    gc.collect()
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    for arena in arenas:
        arena.close()


@pytest.mark.parametrize("split", [None, 20, 64])
def test_any_split_limit_will_do(arena: poorwill.Arena, split: int | None) -> None:
    from poorwill.torch import allocator_settings

    with allocator_settings(max_split_size_mb=split), arena.pool("weights"):
        kept = []
        for number in cases(20, least=5):
            raw = torch.empty((40 + 17 * number % 50) * MIB, dtype=torch.uint8, device="cuda")
            transient = torch.empty((150 + 37 * number % 200) * MIB, dtype=torch.uint8, device="cuda")
            kept.append(filled(22 * MIB - number * 3000, number))
            del transient
            kept.append(filled(2 * MIB + number * 100_000, number))
            del raw
    # A tensor takes whole granules, unless it shares them with others of its generation.
    granules = sum(-(-tensor.numel() // (2 * MIB)) for tensor in kept)
    assert mapped_bytes(arena) <= granules * 2 * MIB
    assert all(same(tensor, index // 2) for index, tensor in enumerate(kept))
