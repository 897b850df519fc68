"""A machine of which nothing is asked but segments."""

import itertools

from .driver import Driver


class Paper(Driver):
    """A machine without memory, streams or a driver. It counts what is mapped, and the peak of it."""

    _bases = itertools.count(1 << 44, 1 << 42)

    def __init__(self, total_bytes: int = 1 << 40, devices: int = 1) -> None:
        self.total_bytes = total_bytes
        self.mapped_bytes = [0] * devices
        self.peak_bytes = [0] * devices
        self.calls: list[tuple[str, int]] = []
        self._sizes: dict[int, int] = {}
        self._next_address = next(self._bases)

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
