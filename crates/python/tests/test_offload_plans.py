"""What offloading modules decides, over random models without memory."""

import random
from typing import Any

import pytest
from helpers import cases
from poorwill.offload._plans import (
    ALIGNMENT_BYTES,
    Ring,
    Selection,
    SlotLayout,
    choose_ahead,
    fitting,
    grouped,
    next_of,
)

GIB = 1 << 30
SEEDS = cases(100, least=20)


# Names


def test_names_match_by_whole_segments() -> None:
    selection = Selection.of(["experts.w2_weight", "norm"])
    for name in ("experts.w2_weight", "mlp.experts.w2_weight", "experts.w2_weight.data", "a.norm.weight"):
        assert selection.has(name)
    for name in (
        "mlp.experts.w2_weight_scale",
        "my_experts.w2_weight",
        "experts.0.w2_weight",
        "norms.weight",
    ):
        assert not selection.has(name)
    assert Selection.of(()).has("anything")
    assert selection.unmatched(["experts.w2_weight"]) == ("norm",)
    assert Selection.of(()).unmatched([]) == ()


@pytest.mark.parametrize("wrong", ["weight", (3,), ("",), ("a.",), (".a",), ("a..b",)])
def test_what_is_no_row_of_names_is_refused(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        Selection.of(wrong)


@pytest.mark.parametrize("seed", SEEDS)
def test_matching_is_a_run_of_segments(seed: int) -> None:
    rng = random.Random(seed)
    name, pattern = (
        [rng.choice(["a", "b", "ab", "a_b"]) for _ in range(rng.randrange(1, most))] for most in (6, 4)
    )
    runs = [name[begin : begin + len(pattern)] for begin in range(len(name))]
    assert Selection.of([".".join(pattern)]).has(".".join(name)) == (pattern in runs)


@pytest.mark.parametrize("seed", SEEDS)
def test_groups_keep_the_order_and_lose_nothing(seed: int) -> None:
    rng = random.Random(seed)
    items = [(number, rng.randrange(5)) for number in range(rng.randrange(12))]
    groups = grouped(items, lambda item: item[1])
    assert sorted(item for group in groups for item in group) == items
    assert all(group == sorted(group) and len({key for _, key in group}) == 1 for group in groups)
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    assert len(groups) == len({key for _, key in items})


# The budget


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_taken_fits_and_what_is_left_did_not(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randrange(1, 50) for _ in range(rng.randrange(10))]
    capacity = rng.randrange(150)
    taken = fitting(sizes, capacity)
    assert len(taken) == len(sizes)
    assert sum(size for size, is_taken in zip(sizes, taken, strict=True) if is_taken) <= capacity
    for index, is_taken in enumerate(taken):
        before = sum(size for size, was in zip(sizes[:index], taken[:index], strict=True) if was)
        assert is_taken == (before + sizes[index] <= capacity)
    # In two calls it is the same as in one.
    cut = rng.randrange(len(sizes) + 1)
    used = sum(size for size, was in zip(sizes[:cut], taken[:cut], strict=True) if was)
    assert fitting(sizes[:cut], capacity) + fitting(sizes[cut:], capacity - used) == taken
    assert all(fitting(sizes, None))


# Slots


@pytest.mark.parametrize("seed", SEEDS)
def test_parts_of_a_slot_are_aligned_and_apart(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([1, 255, 256, 257, rng.randrange(1, 5000)]) for _ in range(rng.randrange(8))]
    layout = SlotLayout.of(sizes)
    end = 0
    for offset, size in zip(layout.offsets, sizes, strict=True):
        assert offset % ALIGNMENT_BYTES == 0
        assert end <= offset < end + ALIGNMENT_BYTES
        end = offset + size
    assert layout.nbytes == end


class Slots:
    """Slots with content: a copy that is started is made before the next step."""

    def __init__(self, layers: int, slots: int) -> None:
        self.ring = Ring(layers, slots)
        self.content: list[int | None] = [None] * slots
        self.at_once = 0
        self.copies = 0

    def copy(self, layer: int) -> None:
        self.content[layer % self.ring.slots] = layer
        self.copies += 1

    def run(self, layer: int, is_linear: bool = False) -> int | None:
        copies = self.ring.enter(layer, is_linear)
        assert copies[:1] in ([], [layer])
        # No two into one slot, and none onto the layer that is to be used.
        assert len({copied % self.ring.slots for copied in copies}) == len(copies)
        for copied in copies:
            self.copy(copied)
        self.at_once += len(copies)
        assert self.content[layer % self.ring.slots] == layer
        coming = self.ring.leave(layer, is_linear)
        if coming is not None:
            assert coming % self.ring.slots == layer % self.ring.slots
            self.copy(coming)
        return coming


@pytest.mark.parametrize("seed", SEEDS)
def test_in_order_nothing_is_waited_for(seed: int) -> None:
    rng = random.Random(seed)
    layers = rng.randrange(1, 12)
    slots = Slots(layers, rng.randrange(1, layers + 1))
    for layer in slots.ring.fill():
        slots.copy(layer)
    for _ in range(4):
        before = slots.copies
        for layer in range(layers):
            slots.run(layer)
        assert slots.at_once == 0
        # Each layer once, but those that have a slot for themselves.
        alone = sum(next_of(layer, layers, slots.ring.slots) == layer for layer in range(layers))
        assert slots.copies - before == layers - alone
        assert slots.ring.held() == tuple(range(slots.ring.slots))


@pytest.mark.parametrize("seed", SEEDS)
def test_in_any_order_a_layer_is_there_when_it_is_used(seed: int) -> None:
    rng = random.Random(seed)
    layers = rng.randrange(1, 10)
    slots = Slots(layers, rng.randrange(1, layers + 1))
    for _ in range(60):
        step = rng.random()
        if step < 0.2:
            slots.ring.forget()
            # As after a graph, whatever it has left.
            slots.content = [rng.randrange(layers) for _ in slots.content]
        elif step < 0.4:
            # Entered, and never left.
            for copied in slots.ring.enter(layer := rng.randrange(layers)):
                slots.copy(copied)
            assert slots.content[layer % slots.ring.slots] == layer
        else:
            slots.run(rng.randrange(layers), is_linear=step > 0.9)
    # A forward later everything is as it should be.
    for layer in range(layers):
        slots.run(layer)
    before = slots.at_once
    for layer in range(layers):
        slots.run(layer)
    assert slots.at_once == before


@pytest.mark.parametrize("seed", SEEDS)
def test_a_linear_forward_trusts_nothing_and_leaves_nothing_open(seed: int) -> None:
    rng = random.Random(seed)
    layers = rng.randrange(1, 12)
    slots = Slots(layers, rng.randrange(1, layers + 1))
    for _ in range(3):
        slots.content = [rng.randrange(layers) for _ in slots.content]
        before = slots.copies
        started: set[int] = set()
        used: set[int] = set()
        for layer in range(layers):
            coming = slots.run(layer, is_linear=True)
            used.add(layer)
            started |= {coming} if coming is not None else set()
        # What was copied ahead was used in the same forward, and each layer was copied once.
        assert started <= used
        assert slots.copies - before == layers


def test_rings_have_as_many_slots_as_they_need() -> None:
    for layers, slots in ((3, 0), (3, 4), (0, 0)):
        with pytest.raises(ValueError, match="slots"):
            Ring(layers, slots)


# How far ahead


def test_one_layer_ahead_is_enough_for_even_layers() -> None:
    assert choose_ahead(50.0, GIB, 1.0) == 1
    # The link is the limit, and more slots do not widen it.
    assert choose_ahead(1.0, GIB, 0.001) == 1
    assert choose_ahead(10.0, [GIB] * 6, 0.2) == 1


def test_a_large_layer_is_copied_while_several_small_ones_work() -> None:
    sizes = [GIB] * 11 + [4 * GIB]
    chosen = choose_ahead(1.0, sizes, 1.5)
    assert chosen > 1
    # In the end the copies are hidden behind the work.
    assert choose_ahead(100.0, sizes, 1.5) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_chosen_depends_on_ratios_only(seed: int) -> None:
    rng = random.Random(seed)
    layers = rng.randrange(1, 9)
    sizes = [rng.randrange(1, 64) << 20 for _ in range(layers)]
    times = [rng.uniform(0.001, 0.01) for _ in range(layers)]
    link = rng.uniform(1.0, 60.0)
    chosen = choose_ahead(link, sizes, times)
    assert min(1, layers - 1) <= chosen <= max(1, layers - 2) or layers <= 2
    assert choose_ahead(link * 2, sizes, [time / 2 for time in times]) == chosen
    assert choose_ahead(link * 2, [size * 2 for size in sizes], times) == chosen


@pytest.mark.parametrize(
    ("link", "sizes", "times"),
    [
        (0.0, 1, 1.0),
        (-1.0, 1, 1.0),
        (1.0, [1, 2], [1.0] * 3),
        (1.0, [], 1.0),
        (1.0, [0], 1.0),
        (1.0, 1, -1.0),
    ],
)
def test_figures_that_cannot_be_are_refused(link: float, sizes: Any, times: Any) -> None:
    with pytest.raises(ValueError, match=r"figures|layers"):
        choose_ahead(link, sizes, times)
