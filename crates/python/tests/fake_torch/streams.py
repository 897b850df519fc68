"""Streams, what is current, and graphs that capture what is done on a stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

from .blocks import PoolId
from .tensors import Device, index_of
from .world import Work, World


class Stream:
    """`torch.cuda.Stream`."""

    world: ClassVar[World]

    def __init__(self, device: Any = None, priority: int = 0, *, handle: int | None = None) -> None:
        ordinal = index_of(self.world, device)
        self.device = Device("cuda", ordinal)
        self.device_index = ordinal
        self.cuda_stream = self.world.machine.new_stream(ordinal) if handle is None else handle

    @property
    def stream_id(self) -> int:
        """PyTorch's own number of one of its streams; only a foreign stream has its handle as one."""
        return 0 if self.cuda_stream == 0 else ~self.cuda_stream

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[int, int]:
        return (self.device_index, self.cuda_stream)

    def synchronize(self) -> None:
        self.world.refuse_in_capture("cudaStreamSynchronize")
        self.world.machine.synchronize(self.device_index, self.cuda_stream)

    def record_event(self, event: Event | None = None) -> Event:
        recorded = event or Event()
        recorded.record(self)
        return recorded

    def wait_event(self, event: Event) -> None:
        """Waits on the host, as `wait_stream` does."""
        if event.stream is not None:
            self.wait_stream(event.stream)

    def wait_stream(self, stream: Stream) -> None:
        """Waits on the host, which is in order as well."""
        if self._identity not in self.world.captures:
            stream.synchronize()


class Event:
    """`torch.cuda.Event`."""

    world: ClassVar[World]

    def __init__(self) -> None:
        self._place: tuple[int, int] | None = None
        self.stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Behind what was done so far on a stream, the current one if None is given."""
        world = self.world
        device = world.device if stream is None else stream.device_index
        handle = world.stream(device) if stream is None else stream.cuda_stream
        self._place = (device, world.machine.record(device, handle))
        self.stream = stream

    def query(self) -> bool:
        """Whether it has come so far. An event that was recorded nowhere has."""
        if self._place is not None:
            self.world.refuse_in_capture("cudaEventQuery")
            # The machine forgets one that has passed.
            if self.world.machine.has_passed(*self._place):
                self._place = None
        return self._place is None


class Graph:
    """`torch.cuda.CUDAGraph`."""

    world: ClassVar[World]

    def __init__(self, keep_graph: bool = False) -> None:
        self._pool: PoolId | None = None
        self._place: tuple[int, int] | None = None
        self._work: list[Work] | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        world = self.world
        if self._pool is not None:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph. ")
        device = world.device
        place = (device, world.stream(device))
        if place[1] == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        pool_id = (world.number(), 0) if pool is None else (pool[0], pool[1])
        world.allocators[device].begin(pool_id, partial(self._claims, place))
        self._pool, self._place = pool_id, place
        world.machine.begin_capture(*place)
        self._work = world.captures[place] = []

    def _claims(self, place: tuple[int, int], stream: int) -> bool:
        return stream == place[1] and self.world.captures.get(place) is self._work

    def capture_end(self) -> None:
        if self._place is None or self._pool is None:
            raise RuntimeError("capture_end() is called without a capture_begin()")
        self.world.captures.pop(self._place)
        self.world.machine.end_capture(*self._place)
        self.world.allocators[self._place[0]].end(self._pool)

    def replay(self) -> None:
        if self._work is None or self._place is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        stream = self.world.stream(self._place[0])
        for work in self._work:
            work(stream)

    def reset(self) -> None:
        pool_id, place = self._pool, self._place
        self._pool = self._place = self._work = None
        if pool_id is not None and place is not None:
            self.world.allocators[place[0]].release(pool_id)

    def __del__(self) -> None:
        place = getattr(self, "_place", None)
        if place is not None:
            self.world.allocators[place[0]].mutex.when_given_back(self.reset)


class graph:
    """`torch.cuda.graph`: what is done inside is captured."""

    default_capture_stream: ClassVar[Any] = None
    runtime: ClassVar[Runtime]

    def __init__(
        self, cuda_graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> None:
        if stream is None:
            if type(self).default_capture_stream is None:
                type(self).default_capture_stream = self.runtime.stream_type()
            stream = type(self).default_capture_stream
        self.pool = pool
        self.cuda_graph = cuda_graph
        self.capture_stream = stream
        self._current = self.runtime.stream(stream)

    def __enter__(self) -> None:
        self.runtime.synchronize()
        self.runtime.empty_cache()
        self._current.__enter__()
        self.cuda_graph.capture_begin(self.pool)

    def __exit__(self, *raised: object) -> None:
        self.cuda_graph.capture_end()
        self._current.__exit__(None, None, None)


class Runtime:
    """What `torch.cuda` offers about devices and streams."""

    def __init__(self, world: World) -> None:
        self.world = world
        # Classes of this world's own, as PyTorch's are the process's.
        self.stream_type: type[Stream] = type("Stream", (Stream,), {"world": world})
        self.event_type: type[Event] = type("Event", (Event,), {"world": world})
        self.graph_type: type[Graph] = type("CUDAGraph", (Graph,), {"world": world})
        self.capture_type: type[graph] = type("graph", (graph,), {"runtime": self})

    def init(self) -> None:
        self.world.is_initialized = True

    def is_initialized(self) -> bool:
        return self.world.is_initialized

    def is_available(self) -> bool:
        return self.device_count() > 0

    def device_count(self) -> int:
        return len(self.world.allocators)

    def current_device(self) -> int:
        self.init()
        return self.world.device

    def set_device(self, device: Any) -> None:
        self.world.set_device(index_of(self.world, device))

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self.world.device
        self.set_device(device)
        try:
            yield
        finally:
            self.world.set_device(before)

    def synchronize(self, device: Any = None) -> None:
        self.world.refuse_in_capture("cudaDeviceSynchronize")
        self.world.machine.synchronize(index_of(self.world, device), None)

    def current_stream(self, device: Any = None) -> Stream:
        ordinal = index_of(self.world, device)
        return self.stream_type(ordinal, handle=self.world.stream(ordinal))

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        with self.device(stream.device_index):
            before = self.world.stream(stream.device_index)
            self.world.set_stream(stream.device_index, stream.cuda_stream)
            try:
                yield
            finally:
                self.world.set_stream(stream.device_index, before)

    def is_current_stream_capturing(self) -> bool:
        return self.world.is_capturing()

    def empty_cache(self) -> None:
        if self.world.is_initialized:
            for allocator in self.world.allocators:
                allocator.empty_cache()
