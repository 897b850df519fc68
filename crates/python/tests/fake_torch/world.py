"""What all parts of the fake share: the machine, the allocators, and what is current in each thread."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from .allocator import DeviceAllocator
from .blocks import PoolId
from .driver import Driver, Segments
from .errors import InternalAssert
from .settings import AllocatorSettings

Work = Callable[[int], None]
"""Something to do on a stream."""


class _Threads(threading.local):
    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, int] = {}


class World:
    """One process with PyTorch in it."""

    def __init__(
        self,
        machine: Driver,
        conf: str | None = None,
        *,
        first_wins: bool = False,
        empties_default: bool = False,
    ) -> None:
        self.machine = machine
        self.settings = AllocatorSettings(conf)
        self.allocators = [
            DeviceAllocator(
                device,
                machine,
                self.settings,
                first_wins=first_wins,
                empties_default=self.is_capturing if empties_default else None,
            )
            for device in range(machine.devices())
        ]
        self.is_initialized = False
        self.captures: dict[tuple[int, int], list[Work]] = {}
        """The streams that are being captured, and what is to be done in a replay."""
        self.terminations: list[str] = []
        """What would have ended the process: PyTorch's checks that fail in destructors."""
        self._threads = _Threads()
        self._numbers = itertools.count(1)

    @property
    def device(self) -> int:
        return self._threads.device

    def set_device(self, device: int) -> None:
        if not 0 <= device < len(self.allocators):
            raise RuntimeError("CUDA error: invalid device ordinal")
        self._threads.device = device

    def stream(self, device: int) -> int:
        """The current stream's handle; 0 is the default one."""
        return self._threads.streams.get(device, 0)

    def set_stream(self, device: int, stream: int) -> None:
        self._threads.streams[device] = stream

    def number(self) -> int:
        return next(self._numbers)

    def do(self, device: int, work: Work) -> None:
        """Work for the current stream, which gets it at once unless it belongs to a graph."""
        stream = self.stream(device)
        capture = self.captures.get((device, stream))
        if capture is None:
            work(stream)
        else:
            capture.append(work)

    def is_capturing(self) -> bool:
        """Whether this thread's current stream is being captured."""
        return (self.device, self.stream(self.device)) in self.captures

    def refuse_in_capture(self, what: str) -> None:
        if self.captures:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")

    def interrupt(self, action: Callable[[], None]) -> None:
        """Does what Python does between two instructions: not within PyTorch's allocator."""
        held = [allocator.mutex for allocator in self.allocators if allocator.mutex.is_mine()]
        if held:
            held[0].when_given_back(action)
        else:
            action()

    def begin_for_thread(self, device: int, pool_id: PoolId) -> None:
        thread = threading.get_ident()
        self.allocators[device].begin(pool_id, lambda stream: threading.get_ident() == thread)

    def custom(self, segments: object) -> Segments | None:
        """A user's allocator, or none."""
        if segments is not None and not hasattr(segments, "allocate"):
            raise TypeError("allocator has to be a _cuda_CUDAAllocator")
        return segments  # type: ignore[return-value]

    def destroy_pool(self, device: int, pool_id: PoolId) -> None:
        """What PyTorch's destructor of a pool does. Where that fails, it ends the process."""
        allocator = self.allocators[device]
        try:
            allocator.release(pool_id)
            allocator.empty_cache(pool_id)
        except InternalAssert as error:
            self.terminations.append(f"the end of MemPool {pool_id}: {error}")
            raise
