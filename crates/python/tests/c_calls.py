"""Rows of calls as PyTorch's caching allocator makes them: read, made up, and made again.

A file of `calls/` has one call a line, as `bench/peers/record_calls.py` writes them. `a SIZE STREAM` gets a
segment, `r SIZE STREAM` was refused one, and `f INDEX` frees the segment of the call of that number.
"""

import bisect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fake_torch.allocator import DeviceAllocator
from fake_torch.machine import Paper
from fake_torch.settings import AllocatorSettings

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


class _Recorder(Paper):
    """Takes down what the model of PyTorch's caching allocator calls for."""

    def __init__(self) -> None:
        super().__init__()
        self.row: list[Call] = []
        self._indices: dict[int, int] = {}

    def allocate(self, size: int, device: int, stream: int) -> int:
        address = super().allocate(size, device, stream)
        self._indices[address] = len(self.row)
        self.row.append(Get(size, stream))
        return address

    def free(self, address: int, size: int, device: int, stream: int) -> None:
        super().free(address, size, device, stream)
        self.row.append(GiveBack(self._indices.pop(address)))


def made_up(seed: int, tensors: int = 400, of_streams: int = 1, conf: str = "") -> list[Call]:
    """The calls for so many tensors, of which a part is kept, with a cache that is emptied now and then."""
    rng, recorder = random.Random(seed), _Recorder()
    cache = DeviceAllocator(0, recorder, AllocatorSettings(conf))
    live: list[int] = []
    for _ in range(tensors):
        size = rng.choice(
            [rng.randint(1, MIB), rng.randint(1, 10 * MIB), rng.randint(10 * MIB, 96 * MIB), 64 * MIB]
        )
        live.append(cache.malloc(size, rng.randrange(of_streams)))
        while live and (len(live) > 40 or rng.random() < 0.45):
            cache.free(live.pop(rng.randrange(len(live))))
        if rng.random() < 0.1:
            cache.empty_cache()
    return recorder.row


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
