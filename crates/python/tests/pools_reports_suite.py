"""Patterns of use that public reports name, on pools: over the fakes, and on a GPU. `test_suites.py` runs it.

Each test names its report: of PyTorch's `MemPool`, and of others that put memory to sleep.
"""

import gc
import itertools
import threading
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import poorwill
import poorwill.torch
import pytest

torch: Any = import_module("torch")
pytestmark = pytest.mark.gpu

MIB = 1 << 20
NAMES = map("report-{}".format, itertools.count())


@pytest.fixture
def arena() -> Iterator[poorwill.Arena]:
    arena = poorwill.arena("cuda:0", next(NAMES), limit="4GiB")
    yield arena
    gc.collect()
    torch.cuda.synchronize()
    arena.close()


def empty(mib: int) -> Any:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def same(tensor: Any, byte: int) -> bool:
    return bool(
        torch.equal(tensor, torch.empty(tensor.numel(), dtype=torch.uint8, device="cuda").fill_(byte))
    )


def live_mib(arena: poorwill.Arena, tag: str) -> int:
    return sum(entry.live_bytes for entry in arena.stats().tags if entry.tag == tag) // MIB


def test_a_scope_that_no_one_names_ends_before_its_tensors(arena: poorwill.Arena) -> None:
    """pytorch#167745."""
    outside = empty(3).fill_(1)
    with arena.pool("weights"):
        inside = empty(3).fill_(7)
    with arena.pool("a"), arena.pool("b"):
        pass
    del outside
    gc.collect()
    arena.sleep()
    arena.wake()
    assert same(inside, 7)


def test_an_inner_scope_has_its_own_tensors_and_no_others(arena: poorwill.Arena) -> None:
    """pytorch#161193."""
    with arena.pool("a"):
        first = empty(24).fill_(1)
        with arena.pool("b"):
            inner = empty(30).fill_(2)
        last = empty(26).fill_(3)
    assert live_mib(arena, "a") >= 50
    assert 30 <= live_mib(arena, "b") < 40
    arena.sleep(1, "b")
    assert same(first, 1)
    assert same(last, 3)
    arena.wake()
    assert same(inner, 2)


def test_another_thread_stays_outside_of_a_scope(arena: poorwill.Arena) -> None:
    """pytorch#152861."""
    is_inside, is_made, made = threading.Event(), threading.Event(), []

    def beside() -> None:
        is_inside.wait(60)
        made.append(empty(40).fill_(9))
        is_made.set()

    thread = threading.Thread(target=beside)
    thread.start()
    with arena.pool("weights"):
        inside = empty(22).fill_(4)
        is_inside.set()
        assert is_made.wait(60)
    thread.join()
    assert live_mib(arena, "weights") < 30
    arena.sleep()
    assert same(made[0], 9)
    arena.wake()
    assert same(inside, 4)


def test_a_view_outlives_its_scope_and_an_emptied_cache(arena: poorwill.Arena) -> None:
    """pytorch#146431, #171962."""
    with arena.pool("weights"):
        whole = empty(25).fill_(5)
    torch.cuda.empty_cache()
    part = whole[: 5 * MIB]
    del whole
    gc.collect()
    torch.cuda.empty_cache()
    arena.sleep()
    arena.wake()
    assert same(part, 5)


def test_what_one_tag_has_freed_serves_no_other(arena: poorwill.Arena) -> None:
    """torch_memory_saver#85."""
    with arena.pool("kv_cache"):
        cache = [empty(40).fill_(1) for _ in range(4)]
        empty(120).fill_(2)
    torch.cuda.synchronize()
    with arena.pool("draft"):
        draft = [empty(24).fill_(number) for number in range(10, 16)]
    arena.sleep(1, "kv_cache")
    assert all(same(tensor, number) for number, tensor in enumerate(draft, 10))
    arena.wake()
    assert len(cache) == 4


def test_tensors_may_die_in_their_sleep(arena: poorwill.Arena) -> None:
    """vllm#36751."""
    with arena.pool("weights"):
        tensors = [empty(22).fill_(number) for number in range(6)]
    arena.sleep()
    del tensors[::2]
    gc.collect()
    torch.cuda.empty_cache()
    arena.wake()
    for _ in range(3):
        assert [same(tensor, number) for tensor, number in zip(tensors, (1, 3, 5), strict=True)] == [True] * 3
        arena.sleep()
        arena.wake()


def test_a_pool_that_was_full_has_space_again(arena: poorwill.Arena) -> None:
    """pytorch#159674."""
    with arena.pool("weights"):
        for mib in (3000, 3500, 3900, 2000, 3950):
            empty(mib)
            torch.cuda.synchronize()
        with pytest.raises(torch.OutOfMemoryError):
            empty(5000)
        last = empty(3900).fill_(3)
    assert live_mib(arena, "weights") >= 3900
    assert same(last[: 4 * MIB], 3)


def test_a_buffer_that_grows_leaves_little_behind(arena: poorwill.Arena) -> None:
    """A workspace of vLLM's, while it profiles."""
    with arena.pool("workspace"):
        for mib in range(100, 2000, 150):
            grown, beside = empty(mib), empty(1)
            torch.cuda.synchronize()
    assert beside.numel() == MIB
    assert arena.stats().mapped_bytes <= grown.numel() + 40 * MIB


def test_a_generator_that_is_closed_ends_its_scope(arena: poorwill.Arena) -> None:
    def within() -> Iterator[Any]:
        with arena.pool("weights"):
            yield empty(22).fill_(1)

    steps = within()
    inside = next(steps)
    steps.close()  # type: ignore[attr-defined]
    outside = empty(22)
    assert live_mib(arena, "weights") < 40
    assert outside.numel() == inside.numel()
    assert same(inside, 1)


def test_scopes_left_in_another_order_say_so_and_end(arena: poorwill.Arena) -> None:
    outer, inner = arena.pool("a"), arena.pool("b")
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(poorwill.PoorwillError):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    assert empty(22).numel() == 22 * MIB
    assert (live_mib(arena, "a"), live_mib(arena, "b")) == (0, 0)
