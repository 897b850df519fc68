"""Rows of calls as PyTorch's caching allocator makes them: read, made up, and made again.

A file of `calls/` holds one call a line, as `bench/peers/record_calls.py` writes them: `a SIZE STREAM` gets a
segment, `r SIZE STREAM` was refused one, and `f INDEX` gives the segment of the call of that number back.
"""

import bisect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

MIB = 1 << 20


@dataclass(frozen=True)
class Get:
    """A segment is asked for, on a stream by its number."""

    size: int
    stream: int
    is_refused: bool = False


@dataclass(frozen=True)
class GiveBack:
    """The segment that the call of this number has got goes back."""

    index: int


Call = Get | GiveBack


def read(path: Path) -> list[Call]:
    calls: list[Call] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        match line.partition("#")[0].split():
            case []:
                pass
            case ["a" | "r" as kind, size, stream]:
                calls.append(Get(int(size), int(stream), is_refused=kind == "r"))
            case ["f", index]:
                calls.append(GiveBack(int(index)))
            case _:
                raise ValueError(f"{path}:{number}: `{line}` is no call")
    return calls


def streams(calls: Sequence[Call]) -> int:
    """How many streams there are."""
    return 1 + max(call.stream for call in calls if isinstance(call, Get))


def peak_bytes(calls: Sequence[Call]) -> int:
    """Most bytes that PyTorch has at a time."""
    sizes: dict[int, int] = {}
    live = peak = 0
    for index, call in enumerate(calls):
        if isinstance(call, GiveBack):
            live -= sizes.pop(call.index)
        elif not call.is_refused:
            sizes[index] = call.size
            live += call.size
            peak = max(peak, live)
    return peak


@dataclass
class _Segment:
    index: int
    size: int
    stream: int
    is_small: bool
    free: list[tuple[int, int]]


@dataclass
class _Cache:
    """What the caching allocator decides: where in its segments a tensor lies, and when it asks for another.

    Up to 1 MiB a tensor shares a segment of 2 MiB, below 10 MiB one of 20 MiB, and a larger one gets its own,
    of whole 2 MiB. What is free is cut, within the limit for that, and goes back when the cache is emptied.
    """

    max_split: int
    calls: list[Call] = field(default_factory=list)
    segments: list[_Segment] = field(default_factory=list)

    def tensor(self, size: int, stream: int) -> tuple[_Segment, int, int]:
        size = -(-size // 512) * 512
        is_small = size <= MIB
        fitting = [
            (bytes, segment.index, at, segment)
            for segment in self.segments
            if segment.stream == stream and segment.is_small == is_small
            for at, bytes in segment.free
            if self._fits(size, bytes)
        ]
        if not fitting:
            whole = 2 * MIB if is_small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            segment = _Segment(len(self.calls), whole, stream, is_small, [(0, whole)])
            self.calls.append(Get(whole, stream))
            self.segments.append(segment)
            fitting = [(whole, segment.index, 0, segment)]
        bytes, _, at, segment = min(fitting, key=lambda found: found[:3])
        segment.free.remove((at, bytes))
        rest = bytes - size
        if rest >= 512 if is_small else rest > MIB and size < self.max_split:
            segment.free.append((at + size, rest))
        else:
            size = bytes
        return segment, at, size

    def _fits(self, size: int, free: int) -> bool:
        if size < self.max_split:
            return size <= free < self.max_split
        return size <= free < size + 20 * MIB

    def drop(self, tensor: tuple[_Segment, int, int]) -> None:
        segment, at, size = tensor
        merged: list[tuple[int, int]] = []
        for start, bytes in sorted([*segment.free, (at, size)]):
            if merged and sum(merged[-1]) == start:
                start, bytes = merged[-1][0], merged.pop()[1] + bytes
            merged.append((start, bytes))
        segment.free = merged

    def empty(self) -> None:
        for segment in [segment for segment in self.segments if segment.free == [(0, segment.size)]]:
            self.segments.remove(segment)
            self.calls.append(GiveBack(segment.index))


def made_up(seed: int, tensors: int = 400, of_streams: int = 1, max_split: int = 1 << 60) -> list[Call]:
    """The calls for so many tensors, of which a part is kept, with a cache that is emptied now and then."""
    rng, cache = random.Random(seed), _Cache(max_split)
    live: list[tuple[_Segment, int, int]] = []
    for _ in range(tensors):
        size = rng.choice(
            [rng.randint(1, MIB), rng.randint(1, 10 * MIB), rng.randint(10 * MIB, 96 * MIB), 64 * MIB]
        )
        live.append(cache.tensor(size, rng.randrange(of_streams)))
        while live and (len(live) > 40 or rng.random() < 0.45):
            cache.drop(live.pop(rng.randrange(len(live))))
        if rng.random() < 0.1:
            cache.empty()
    return cache.calls


class Gives(Protocol):
    """What segments come from."""

    def alloc(self, size: int, stream: int = 0) -> int: ...
    def free(self, segment: int, size: int, stream: int = 0) -> None: ...


@dataclass
class Live:
    """The segments that are out, which never share a byte."""

    sizes: dict[int, int] = field(default_factory=dict)
    bytes: int = 0
    peak_bytes: int = 0
    _starts: list[int] = field(default_factory=list)

    def add(self, segment: int, size: int) -> None:
        assert segment % 512 == 0, hex(segment)
        at = bisect.bisect(self._starts, segment)
        if at > 0:
            below = self._starts[at - 1]
            assert below + self.sizes[below] <= segment, "it begins in another segment"
        if at < len(self._starts):
            assert segment + size <= self._starts[at], "it reaches into another segment"
        self._starts.insert(at, segment)
        self.sizes[segment] = size
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def remove(self, segment: int) -> int:
        size = self.sizes.pop(segment)
        del self._starts[bisect.bisect_left(self._starts, segment)]
        self.bytes -= size
        return size


def replay(
    calls: Sequence[Call],
    functions: Gives,
    handles: Sequence[int],
    look: Callable[[Live], None] = lambda live: None,
) -> Live:
    """Makes the calls again, but for those that were refused, and then gives back what is left.

    `handles` are the streams by their numbers. After every call `look` sees what is out.
    """
    live = Live()
    segments: dict[int, tuple[int, int]] = {}
    for index, call in enumerate(calls):
        if isinstance(call, GiveBack):
            segment, stream = segments.pop(call.index)
            functions.free(segment, live.remove(segment), stream)
        elif not call.is_refused:
            stream = handles[call.stream]
            segment = functions.alloc(call.size, stream)
            assert segment != 0, f"call {index} was refused: {call}, beside {live.bytes} bytes"
            live.add(segment, call.size)
            segments[index] = segment, stream
        look(live)
    for segment, stream in segments.values():
        functions.free(segment, live.remove(segment), stream)
        look(live)
    return live
