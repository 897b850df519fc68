"""What is moved, its offset, and the order of copies: decisions only, without PyTorch.

Nothing here touches memory. Results depend only on the arguments, so a model's layout does not depend on
timing.
"""

import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

ALIGNMENT_BYTES = 256
"""Alignment of a weight in a slot, the least of PyTorch's own allocator."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Selection:
    """Selected names: those that contain one of the patterns as a run of whole segments.

    `experts.w2_weight` is in `mlp.experts.w2_weight`, and not in `mlp.experts.w2_weight_scale`. No patterns
    select every name.
    """

    patterns: tuple[str, ...]

    @classmethod
    def of(cls, parameters: Iterable[str]) -> "Selection":
        """Raises TypeError unless it is a sequence of names, and ValueError for an empty segment."""
        if isinstance(parameters, str):
            raise TypeError(f"parameters are several names: ({parameters!r},) and not {parameters!r}")
        patterns = tuple(parameters)
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise TypeError(f"parameters are names, not {type(pattern).__name__}")
            if not all(pattern.split(".")):
                raise ValueError(f"{pattern!r} has an empty segment: a name is like 'experts.w2_weight'")
        return cls(patterns)

    def matching(self, name: str) -> tuple[str, ...]:
        """The patterns that match this name."""
        return tuple(pattern for pattern in self.patterns if f".{pattern}." in f".{name}.")

    def has(self, name: str) -> bool:
        return not self.patterns or bool(self.matching(name))

    def unmatched(self, names: Iterable[str]) -> tuple[str, ...]:
        """The patterns that match none of the names."""
        matched = {pattern for name in names for pattern in self.matching(name)}
        return tuple(pattern for pattern in self.patterns if pattern not in matched)


def grouped(items: Iterable[_T], key_of: Callable[[_T], Hashable]) -> list[list[_T]]:
    """The items by key; keys and items keep their order."""
    groups: dict[Hashable, list[_T]] = {}
    for item in items:
        groups.setdefault(key_of(item), []).append(item)
    return list(groups.values())


def fitting(sizes: Sequence[int], capacity: int | None) -> list[bool]:
    """Which sizes are taken, in order: each that fits into the capacity left by those before it.

    One that does not fit is left, and later smaller ones may still be taken. None is unlimited.
    """
    taken = []
    for size in sizes:
        is_taken = capacity is None or size <= capacity
        if capacity is not None and is_taken:
            capacity -= size
        taken.append(is_taken)
    return taken


@dataclass(frozen=True)
class SlotLayout:
    """Offsets of a layer's parts, the same in its slot and in its host memory."""

    offsets: tuple[int, ...]
    nbytes: int
    """Bytes to the end of the last part."""

    @classmethod
    def of(cls, sizes: Iterable[int]) -> "SlotLayout":
        offsets, end = [], 0
        for size in sizes:
            begin = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            offsets.append(begin)
            end = begin + size
        return cls(tuple(offsets), end)


def next_of(layer: int, layers: int, slots: int) -> int:
    """The layer that follows `layer` in its slot: the next of the slot's layers, or the first after the
    last.
    """
    after = layer + slots
    return after if after < layers else layer % slots


class Ring:
    """Which layer is in which slot, or being copied there. Layer i belongs to slot i % slots.

    `enter` and `leave` surround each layer's work and return the copies to start; the ring assumes that they
    are started. If layers run in order, over and over, each is in its slot when it is entered. Otherwise it
    may be missing, and is then copied at once. The ring never assumes a layer that is not there.

    With `is_linear`, as during a graph capture, nothing of an earlier forward is used. The first layer, or
    one out of order, starts anew, and the end does not copy the first layers again.
    """

    def __init__(self, layers: int, slots: int) -> None:
        if not 1 <= slots <= layers:
            raise ValueError(f"{slots} slots for {layers} layers: it is 1 to as many as there are layers")
        self.layers = layers
        self.slots = slots
        self._holds: list[int | None] = [None] * slots
        self._last: int | None = None

    def held(self) -> tuple[int | None, ...]:
        """The layer in each slot."""
        return tuple(self._holds)

    def forget(self) -> None:
        """Marks the contents of all slots as unknown."""
        self._holds = [None] * self.slots
        self._last = None

    def interrupt(self) -> None:
        """The next layer does not follow the last one."""
        self._last = None

    def fill(self) -> list[int]:
        """The copies that fill the slots with the first layers."""
        self._holds = list(range(self.slots))
        self._last = None
        return list(range(self.slots))

    def enter(self, layer: int, is_linear: bool = False) -> list[int]:
        """The copies to start before `layer` may be used.

        None if it is in its slot or being copied. Otherwise it, first, with those that follow where it
        starts a row anew.
        """
        slot = layer % self.slots
        follows = self._last is not None and layer == self._last + 1
        self._last = layer
        if is_linear and not follows:
            self._holds = [None] * self.slots
            copies = list(range(layer, min(layer + self.slots, self.layers)))
        elif self._holds[slot] == layer:
            return []
        else:
            copies = [layer]
        for copied in copies:
            self._holds[copied % self.slots] = copied
        return copies

    def leave(self, layer: int, is_linear: bool = False) -> int | None:
        """The copy to start once the work of `layer` is queued.

        None if its slot holds what comes next, or another layer took it meanwhile.
        """
        slot = layer % self.slots
        coming = next_of(layer, self.layers, self.slots)
        if self._holds[slot] != layer or coming == layer or (is_linear and coming < layer):
            return None
        self._holds[slot] = coming
        return coming


_FORWARDS = 8
_EVEN_LAYERS = 8
_CLOSE = 1.01


def choose_ahead(
    link_gib_per_s: float, layer_bytes: int | Sequence[int], compute_s: float | Sequence[float]
) -> int:
    """How many layers to copy ahead, at least.

    That is the fewest with which repeated forward passes take at most 1 % longer than the slower of copying
    and computing alone. No number of slots does better while every layer is copied once a forward. If none
    gets there, as with one large layer among small ones, it is the fewest within 1 % of the best.

    `layer_bytes` and `compute_s` are one figure for all layers, or one for each. In the model a layer's copy
    waits for the previous layer of its slot and for earlier copies on the link, and for nothing else.

    Raises ValueError for figures that are not positive, or sequences of different lengths.
    """
    sizes = [layer_bytes] if not isinstance(layer_bytes, Sequence) else list(layer_bytes)
    times = [compute_s] if not isinstance(compute_s, Sequence) else list(compute_s)
    lengths = {len(row) for row in (sizes, times) if len(row) != 1} or {1}
    is_even = not isinstance(layer_bytes, Sequence) and not isinstance(compute_s, Sequence)
    layers = _EVEN_LAYERS if is_even else max(lengths)
    if len(lengths) > 1 or layers == 0:
        raise ValueError(f"{len(sizes)} sizes and {len(times)} times: they are of the same layers")
    if not link_gib_per_s > 0 or any(size <= 0 for size in sizes) or any(not time >= 0 for time in times):
        raise ValueError("the link and the layers have positive figures, and a time is 0 or more")
    copy_s = [operator.index(size) / (link_gib_per_s * (1 << 30)) for size in sizes * (layers // len(sizes))]
    work_s = [float(time) for time in times * (layers // len(times))]
    # With a slot for every layer nothing would be copied any more.
    candidates = range(1, layers - 1)
    found = {ahead: _forward_s(copy_s, work_s, ahead + 1) for ahead in candidates}
    if not found:
        return layers - 1
    bound = min(found.values()) if min(found.values()) > max(sum(copy_s), sum(work_s)) * _CLOSE else None
    most = (bound or max(sum(copy_s), sum(work_s))) * _CLOSE
    return next(ahead for ahead in candidates if found[ahead] <= most)


def _forward_s(copy_s: Sequence[float], work_s: Sequence[float], slots: int) -> float:
    """Duration of a forward after several others."""
    layers = len(copy_s)
    ring = Ring(layers, slots)
    link_s = 0.0
    ready_s = [0.0] * layers
    ends: list[float] = []
    now_s = 0.0

    def copy(layer: int, free_s: float) -> None:
        nonlocal link_s
        link_s = max(link_s, free_s) + copy_s[layer]
        ready_s[layer] = link_s

    for layer in ring.fill():
        copy(layer, 0.0)
    for _ in range(_FORWARDS):
        for layer in range(layers):
            ring.enter(layer)
            now_s = max(now_s, ready_s[layer]) + work_s[layer]
            coming = ring.leave(layer)
            if coming is not None:
                copy(coming, now_s)
        ends.append(now_s)
    half = _FORWARDS // 2
    return (ends[-1] - ends[half - 1]) / (_FORWARDS - half)
