"""That prefetched layers' copies and uses are in order, over a model of streams, events and graphs.

The model knows only what happened before what. Whatever the timing, it detects a use before its copy, and a
copy before the last use of its slot. It also detects a graph that is not joined, or that waits for something
outside of it. It needs no PyTorch.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import cases
from poorwill.offload import ReplacedError, _prefetch
from poorwill.offload._prefetch import _Engine, _StreamCopies


class Race(AssertionError):
    """Two uses of a slot that are in no order."""


class Memory:
    """The slots: which layer is there, and all that was done with each."""

    def __init__(self, slots: int) -> None:
        self.content: list[int | None] = [None] * slots
        self.writes: list[set[int]] = [set() for _ in range(slots)]
        self.reads: list[set[int]] = [set() for _ in range(slots)]


class Capture:
    def __init__(self, slots: int) -> None:
        self.memory = Memory(slots)
        self.operations: set[int] = set()
        self.is_open = True


class Stream:
    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        self.seen: set[int] = set()
        self.capture: Capture | None = None
        # What it had seen before it was captured.
        self._outside: set[int] = set()

    def begin(self, capture: Capture) -> None:
        self.capture, self._outside, self.seen = capture, self.seen, set()

    def end(self) -> None:
        self.capture, self.seen = None, self._outside

    def wait_event(self, event: "Event") -> None:
        assert event.is_recorded
        if event.capture is not self.capture:
            assert self.capture is None, "a capture waits for what is outside of it"
            assert event.capture is not None
            assert event.capture.is_open, "what was only captured is waited for"
            self.begin(event.capture)
        self.seen |= event.seen

    def wait_stream(self, other: "Stream") -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        raise AssertionError("the CPU waits")

    def operation(self) -> tuple[Memory, int]:
        """The next operation, and the memory that it is on."""
        number = self._machine.count = self._machine.count + 1
        if self.capture is not None:
            self.capture.operations.add(number)
        return (self._machine.memory if self.capture is None else self.capture.memory), number

    def write(self, slot: int, content: int | None) -> None:
        memory, number = self.operation()
        if not memory.writes[slot] | memory.reads[slot] <= self.seen:
            raise Race(f"slot {slot} is written while it is in use")
        self.seen.add(number)
        memory.writes[slot].add(number)
        memory.content[slot] = content

    def read(self, slot: int, layer: int) -> None:
        memory, number = self.operation()
        if not memory.writes[slot] <= self.seen:
            raise Race(f"slot {slot} is read before it was written")
        assert memory.content[slot] == layer
        self.seen.add(number)
        memory.reads[slot].add(number)


class Event:
    def __init__(self) -> None:
        self.is_recorded = False

    def record(self, stream: Stream) -> None:
        self.seen, self.capture, self.is_recorded = set(stream.seen), stream.capture, True


class Machine:
    """What of PyTorch is used, and the slots."""

    def __init__(self, slots: int) -> None:
        self.count = 0
        self.memory = Memory(slots)
        self.streams: list[Stream] = []
        self.unkept: list[int] = []
        self.current = self.made()
        self.cuda = SimpleNamespace(
            Stream=lambda device: self.made(),
            Event=Event,
            current_stream=lambda device: self.current,
            stream=self.on,
            is_current_stream_capturing=lambda: self.current.capture is not None,
        )

    def is_grad_enabled(self) -> bool:
        return False

    # What copies read is kept until they were made, as `_Queued` does it.

    def forget_made(self) -> None:
        assert self.current.capture is None, "an event is asked about in a capture"

    def add(self, event: Event, host: int) -> None:
        assert event.capture is None, "what was only captured is never made"
        self.unkept.remove(host)

    def made(self) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self) -> Iterator[Capture]:
        """As PyTorch's, which synchronises first."""
        every = set().union(*(stream.seen for stream in self.streams))
        for stream in self.streams:
            stream.seen = set(every)
        capture = Capture(len(self.memory.content))
        with self.on(self.made()):
            self.current.begin(capture)
            yield capture
            assert capture.operations <= self.current.seen, "a graph is not joined"
        capture.is_open = False
        for stream in self.streams:
            if stream.capture is capture:
                stream.end()

    def replay(self, capture: Capture) -> None:
        for slot, content in enumerate(capture.memory.content):
            if capture.memory.writes[slot]:
                self.current.write(slot, content)


class Slot:
    """One slot, and any part of it."""

    def __init__(self, machine: Machine, number: int) -> None:
        self._machine, self._number = machine, number
        self.streams: list[Stream] = []

    def __getitem__(self, part: slice) -> "Slot":
        return self

    def copy_(self, layer: int, non_blocking: bool) -> None:
        assert non_blocking
        stream = self._machine.current
        # Its memory is not reused while the copy writes to it.
        assert stream in self.streams
        stream.write(self._number, layer)
        if stream.capture is None:
            self._machine.unkept.append(layer)

    def record_stream(self, stream: Stream) -> None:
        self.streams.append(stream)


def engine_on(machine: Machine, layers: int, slots: int, monkeypatch: pytest.MonkeyPatch) -> _Engine:
    monkeypatch.setattr(_prefetch, "import_torch", lambda: machine)
    monkeypatch.setattr(_prefetch, "_queued", machine)
    row: list[Any] = [
        SimpleNamespace(nbytes=1, is_pinned=True, host=number, strangers=list) for number in range(layers)
    ]
    places: list[Any] = [Slot(machine, number) for number in range(slots)]
    engine = _Engine(row, places, _StreamCopies(places, None))
    engine.fill()
    return engine


def forward(machine: Machine, engine: _Engine, layers: list[int]) -> None:
    for layer in layers:
        engine.before(layer)
        machine.current.read(layer % len(engine.slots), layer)
        engine.after(layer)
    assert machine.unkept == [], "nobody keeps what a copy reads"


@pytest.mark.parametrize("seed", cases(200, least=40))
def test_everything_is_in_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    layers = rng.randrange(1, 8)
    machine = Machine(slots := rng.randrange(1, layers + 1))
    engine = engine_on(machine, layers, slots, monkeypatch)
    every = list(range(layers))
    captures: list[Capture] = []
    others = [machine.made() for _ in range(2)]
    has_graphs = rng.random() < 0.7
    for _ in range(25):
        step = rng.random()
        if step < 0.35:
            forward(machine, engine, every)
        elif step < 0.5:
            # It raises, or begins in the middle, or leaves layers out.
            forward(machine, engine, sorted(rng.sample(every, rng.randrange(1, layers + 1))))
            engine.settle()
        elif step < 0.6:
            forward(machine, engine, [rng.choice(every) for _ in range(5)])
            engine.settle()
        elif step < 0.7:
            # Another stream, ordered after the one before.
            stream = rng.choice(others)
            stream.wait_stream(machine.current)
            with machine.on(stream):
                forward(machine, engine, every)
            if has_graphs:
                machine.current.wait_stream(stream)
        elif step < 0.8 and has_graphs:
            with machine.graph() as capture:
                begin = rng.randrange(layers)
                is_whole = rng.random() < 0.5
                forward(
                    machine, engine, every if is_whole else every[begin : rng.randrange(begin, layers) + 1]
                )
                if not is_whole:
                    engine.settle()
            captures.append(capture)
        elif captures:
            machine.replay(rng.choice(captures))


@pytest.mark.parametrize("seed", cases(50, least=10))
def test_a_copy_that_was_not_made_is_made_later(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    layers = rng.randrange(2, 8)
    machine = Machine(slots := rng.randrange(1, layers))
    engine = engine_on(machine, layers, slots, monkeypatch)
    start, failures = engine.copies.start, 0

    def failing(slot: int, layer: Any) -> None:
        if rng.random() < 0.1:
            raise OSError("no copy for this test")
        start(slot, layer)

    monkeypatch.setattr(engine.copies, "start", failing)
    for _ in range(30):
        for layer in range(layers):
            try:
                engine.before(layer)
            except OSError:
                failures += 1
                engine.after(layer)
                break
            # It asks whose bytes they are.
            machine.current.read(layer % slots, layer)
            try:
                engine.after(layer)
            except OSError:
                failures += 1
                break
    assert failures > 0


def test_a_layer_that_is_refused_in_a_capture_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(2)
    engine = engine_on(machine, 4, 2, monkeypatch)
    forward(machine, engine, [0, 1, 2, 3])
    with monkeypatch.context() as replaced:
        replaced.setattr(engine.layers[0], "strangers", lambda: ["0.weight"])
        with machine.graph() as capture:
            with pytest.raises(ReplacedError, match=r"0\.weight"):
                engine.before(0)
            # PyTorch calls it after a failure, too.
            engine.after(0)
    assert capture.operations == set()
    forward(machine, engine, [0, 1, 2, 3])


def test_the_model_finds_what_is_not_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every wait of the copies is needed: without any of them, something is found."""
    for name in ("wait_for", "after_release", "after_what_is_queued", "forget"):
        with monkeypatch.context() as without:
            without.setattr(_StreamCopies, name, lambda *_: None)
            found = 0
            for seed in range(300):
                try:
                    test_everything_is_in_order(seed, without)
                except (AssertionError, KeyError):
                    found += 1
        assert found > 0, name
