"""What lies below the allocator: segments for the default pool, events, streams, and what is free.

`Paper` only counts: its addresses have no memory, its streams no work. The fake driver is another one.
"""

import itertools
from typing import Protocol


class Segments(Protocol):
    """Where segments come from: the machine, or an allocator that somebody plugged in."""

    def allocate(self, size: int, device: int, stream: int) -> int:
        """The address of a segment; 0 where there is none."""

    def free(self, address: int, size: int, device: int, stream: int) -> None: ...


class Paper:
    """A machine without memory. It counts what is mapped, and the peak of it."""

    _bases = itertools.count(1 << 44, 1 << 42)

    def __init__(self, total_bytes: int = 1 << 40, devices: int = 1) -> None:
        self.total_bytes = total_bytes
        self.mapped_bytes = [0] * devices
        self.peak_bytes = [0] * devices
        self.calls: list[tuple[str, int]] = []
        self._sizes: dict[int, int] = {}
        self._next_address = next(self._bases)
        self._handles = itertools.count(1)

    def devices(self) -> int:
        return len(self.mapped_bytes)

    def memory_bytes(self, device: int) -> tuple[int, int]:
        return self.total_bytes - self.mapped_bytes[device], self.total_bytes

    def allocate(self, size: int, device: int, stream: int) -> int:
        if self.mapped_bytes[device] + size > self.total_bytes:
            self.calls.append(("refuse", size))
            return 0
        address = self._next_address
        self._next_address += size
        self._sizes[address] = size
        self.mapped_bytes[device] += size
        self.peak_bytes[device] = max(self.peak_bytes[device], self.mapped_bytes[device])
        self.calls.append(("alloc", size))
        return address

    def free(self, address: int, size: int, device: int, stream: int) -> None:
        assert self._sizes.pop(address) == size
        self.mapped_bytes[device] -= size
        self.calls.append(("free", size))

    def new_stream(self, device: int) -> int:
        return next(self._handles) << 8

    def synchronize(self, device: int, stream: int | None) -> None:
        pass

    def record(self, device: int, stream: int) -> int:
        return next(self._handles)

    def has_passed(self, device: int, event: int) -> bool:
        return True

    def begin_capture(self, device: int, stream: int) -> None:
        pass

    def end_capture(self, device: int, stream: int) -> None:
        pass

    def fill(self, device: int, address: int, size: int, byte: int, stream: int) -> None:
        raise NotImplementedError("paper has no bytes")

    def read(self, device: int, address: int, size: int, stream: int) -> bytes:
        raise NotImplementedError("paper has no bytes")

    def write(self, device: int, address: int, content: bytes, stream: int) -> None:
        raise NotImplementedError("paper has no bytes")

    def queue(self, device: int, address: int, source: int, size: int, stream: int) -> None:
        raise NotImplementedError("paper has no bytes")

    def lock(self, address: int, size: int) -> None:
        pass

    def unlock(self, address: int) -> None:
        pass

    def is_locked(self, address: int) -> bool:
        return False
