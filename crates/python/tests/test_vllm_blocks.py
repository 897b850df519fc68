"""Where blocks lie in the views that vLLM's layouts give, against all of their elements, one by one."""

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, permutations, product
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import cases
from poorwill.vllm import _generations
from poorwill.vllm._blocks import places, runs_of

OLD, NEW = _generations.of("0.20.2"), _generations.of("0.33.0")
BASE = 1 << 20


class View:
    """A tensor, as far as its bytes have places."""

    def __init__(self, shape: Sequence[int], strides: Sequence[int], offset: int = 0, size: int = 2) -> None:
        """Strides are in elements, the offset in bytes."""
        self.shape, self._strides, self._at, self._size = tuple(shape), tuple(strides), BASE + offset, size

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def data_ptr(self) -> int:
        return self._at

    def element_size(self) -> int:
        return self._size

    def bytes_of(self, dimension: int, numbers: Iterable[int]) -> set[int]:
        """All of those with these indices in one dimension."""
        ranges = [range(extent) for extent in self.shape]
        found: set[int] = set()
        for number in numbers:
            ranges[dimension] = range(number, number + 1)
            for at in product(*ranges):
                start = self._at + self._size * sum(i * s for i, s in zip(at, self._strides, strict=True))
                found.update(range(start, start + self._size))
        return found


def ordered(shape: Sequence[int], order: Sequence[int]) -> View:
    """A dense view whose dimensions lie in memory in this order, the outermost first."""
    strides, step = [0] * len(shape), 1
    for dimension in reversed(order):
        strides[dimension] = step
        step *= shape[dimension]
    return View(shape, strides)


def layer(cache: Any, dimension: int = 0) -> Any:
    backend = SimpleNamespace(get_kv_cache_block_dim=lambda *_: dimension)
    return SimpleNamespace(kv_cache=cache, get_attn_backend=lambda: backend)


def config(blocks: int, step: int = 0, *names: str) -> Any:
    tensor = SimpleNamespace(shared_by=[*names], layers=[*names], block_stride=step)
    return SimpleNamespace(num_blocks=blocks, kv_cache_tensors=[tensor])


def covered(ranges: Sequence[tuple[int, int]]) -> set[int]:
    ends = [start + nbytes for start, nbytes in ranges]
    assert all(end < start for end, (start, _) in zip(ends, ranges[1:], strict=False)), "not merged"
    return {at for start, nbytes in ranges for at in range(start, start + nbytes)}


def drawn(draw: random.Random, blocks: int) -> list[int]:
    return draw.sample(range(blocks), draw.randint(1, blocks))


def in_pieces(numbers: Iterable[int], pieces: int) -> Iterator[int]:
    for number in numbers:
        yield from range(number * pieces, (number + 1) * pieces)


# Up to 0.28: a backend's shape in any order, blocks in one or several pieces.


@pytest.mark.parametrize("case", cases(100, 20))
def test_any_order_of_dimensions(case: int) -> None:
    draw = random.Random(case)
    blocks, pieces, dimension = draw.randint(2, 6), draw.choice([1, 1, 2, 4]), draw.randint(0, 1)
    shape = [2, draw.randint(1, 3), draw.randint(1, 3), draw.randint(2, 3)]
    shape.insert(dimension, blocks * pieces)
    *outer, inner = range(len(shape))
    view = ordered(shape, (*draw.choice(list(permutations(outer))), inner))
    numbers = drawn(draw, blocks)
    found = places(OLD, config(blocks, 0, "a"), {"a": layer(view, dimension)}, runs_of(numbers))
    assert found is not None
    assert covered(found) == view.bytes_of(dimension, in_pieces(numbers, pieces))


def test_a_hybrid_models_attention_has_its_values_behind_its_keys() -> None:
    """As 0.20 turns the strides of `(2, blocks, ...)` round, so that pages are those of state."""
    view = View((2, 5, 3, 4), (12, 24, 4, 1))
    state = [View((5, 7), (24, 1)), View((5, 3), (24, 1), offset=14)]
    layers = {"attention": layer(view, 1), "mamba": layer(state)}
    found = places(OLD, config(5, 0, "attention", "mamba"), layers, [(1, 2), (4, 1)])
    assert found is not None
    needed = view.bytes_of(1, [1, 2, 4]).union(*(each.bytes_of(0, [1, 2, 4]) for each in state))
    assert needed <= covered(found)
    # What follows in the next block is no state of its own, and at most a page more.
    assert len(covered(found)) <= len(needed) + 2 * 24 * 2


@pytest.mark.parametrize("case", cases(100, 20))
def test_granules_are_those_that_blocks_touch(case: int) -> None:
    """Layers whose blocks have all sizes, at all distances, in front of or amid a granule, in any order."""
    draw = random.Random(case)
    blocks, granule = draw.randint(2, 30), draw.choice([16, 32, 128])
    step, widths = draw.choice([8, 10]), [1, 7]
    starts = [number * 2048 + draw.choice([0, 0, 6]) for number in range(6)]
    views = [View((blocks, draw.choice(widths)), (step, 1), offset=start) for start in starts]
    layers = {str(number): layer(view) for number, view in enumerate(views)}
    runs = runs_of(drawn(draw, blocks))
    described = config(blocks, step * 2, *layers)
    exact = places(NEW, described, layers, runs)
    draw.shuffle(runs)
    found = places(NEW, described, layers, runs, granule)
    assert exact is not None
    assert found is not None
    assert {byte // granule for byte in covered(exact)} == {byte // granule for byte in covered(found)}
    assert all(start % granule == nbytes % granule == 0 for start, nbytes in found)
    assert all(sum(one) < other[0] for one, other in pairwise(found))


def test_padding_belongs_to_its_block() -> None:
    found = places(OLD, config(4, 0, "a"), {"a": layer(View((4, 3, 2), (16, 2, 1)))}, [(2, 1)])
    assert found == [(BASE + 2 * 32, 32)]


# From 0.29 on: layers, blocks, heads, tokens and content in six orders, in one allocation.

LAYOUTS = [
    (0, 1, 2, 3, 4),
    (0, 1, 3, 2, 4),
    (0, 2, 1, 3, 4),
    (1, 0, 2, 3, 4),
    (1, 0, 3, 2, 4),
    (1, 2, 0, 3, 4),
]


@pytest.mark.parametrize("case", cases(100, 20))
@pytest.mark.parametrize("order", LAYOUTS)
def test_any_layout(order: tuple[int, ...], case: int) -> None:
    draw = random.Random(case)
    blocks, count = draw.randint(2, 6), draw.randint(1, 3)
    whole = ordered([count, blocks, draw.randint(1, 3), 2, 3], order)
    strides = whole.stride()
    views = [View(whole.shape[1:], strides[1:], offset=number * strides[0] * 2) for number in range(count)]
    layers = {str(number): layer(view) for number, view in enumerate(views)}
    numbers = drawn(draw, blocks)
    found = places(NEW, config(blocks, strides[1] * 2, *layers), layers, runs_of(numbers))
    assert found is not None
    assert covered(found) == set().union(*(view.bytes_of(0, numbers) for view in views))


@pytest.mark.parametrize("apart", [0, 5])
def test_blocks_in_pieces_with_others_bytes_between(apart: int) -> None:
    """A view that counts pieces over what lies between blocks, whose last block ends it."""
    pieces, rows, blocks = 3, 4, 5
    step = pieces + apart
    view = View(((blocks - 1) * step + pieces, 1, rows, 2), (rows * 2, rows * 2, 2, 1))
    found = places(NEW, config(blocks, step * rows * 4, "a"), {"a": layer(view)}, [(1, 1), (3, 2)])
    assert found is not None
    taken = [number * step + piece for number in (1, 3, 4) for piece in range(pieces)]
    assert covered(found) == view.bytes_of(0, taken)


# What is not known.

UNKNOWN: dict[str, tuple[Any, Any, Any]] = {
    "no layer": (OLD, config(4, 0, "a"), {}),
    "no cache": (OLD, config(4, 0, "a"), {"a": SimpleNamespace()}),
    "an empty list": (OLD, config(4, 0, "a"), {"a": layer([])}),
    "too few blocks": (OLD, config(4, 0, "a"), {"a": layer(ordered((3, 2), (0, 1)))}),
    "blocks and a half": (OLD, config(4, 0, "a"), {"a": layer(ordered((6, 2), (0, 1)))}),
    "the same memory twice": (OLD, config(4, 0, "a"), {"a": layer(View((4, 3, 2), (2, 2, 1)))}),
    "blocks that overlap": (OLD, config(4, 0, "a"), {"a": layer(View((4, 3), (2, 1)))}),
    "a broken step": (NEW, config(4, 9, "a"), {"a": layer(ordered((4, 2), (0, 1)))}),
    "more pieces than a step": (NEW, config(4, 4, "a"), {"a": layer(ordered((9, 2), (0, 1)))}),
    "no such shape": (OLD, config(4, 0, "a"), {"a": layer(ordered((4, 2), (0, 1)), 7)}),
    "one of two": (OLD, config(4, 0, "a", "b"), {"a": layer(ordered((4, 2), (0, 1)))}),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_not_guessed(name: str) -> None:
    vllm, described, layers = UNKNOWN[name]
    assert places(vllm, described, layers, [(1, 1)]) is None


def test_runs_are_in_order() -> None:
    assert runs_of([5, 3, 4, 9, 3]) == [(3, 3), (9, 1)]
    assert runs_of([]) == []
