"""A rank of SGLang in a process of its own, over the fakes: carries out orders, and says how it is then.

Ranks meet over a pipe, as over a group of gloo's: one that has ended is an error for the other.
"""

import contextlib
import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import fake_sglang
import fake_torch

MIB = 1 << 20
WEIGHT, CACHED = 3, 7

MIXINS = () if fake_sglang.IS_MANAGED else (fake_sglang.SchedulerUpdateWeightsMixin,)
"""What the scheduler is, too, where it releases and resumes itself."""


class Order(NamedTuple):
    """A request, and what becomes of it in this rank."""

    call: str
    tags: tuple[str, ...] = ()
    fault: str = ""
    settings: tuple[tuple[str, str], ...] = ()


class State(NamedTuple):
    """How a request ended in a rank, and how the rank is afterwards."""

    error: str | None
    """What it answers."""
    raised: str | None
    """What ends the scheduler."""
    released: set[str]
    """Tags whose memory is released."""
    offload_tags: set[str]
    """Tags that SGLang takes for released."""
    is_equal: bool | None
    """Whether all weights have their bytes; None without memory."""
    cached: int | None
    """What the cache is filled with."""
    is_registered: bool
    """Whether a disaggregated server's transfers may use the cache."""
    warnings: list[str]


class Pair:
    """A group of two ranks."""

    count = 2

    def __init__(self, link: Any, rank: int) -> None:
        self.rank, self._link = rank, link

    def meet(self, value: Any) -> list[Any]:
        """What each rank gives here."""
        self._link.send_bytes(pickle.dumps(value))
        other = pickle.loads(self._link.recv_bytes())
        return [value, other] if self.rank == 0 else [other, value]


class Buffer:
    """The model's only buffer: its first weight."""

    def __init__(self, weight: Any) -> None:
        self._weight = weight
        self.fault = ""

    def clone(self) -> Any:
        if self.fault == "step":
            raise MemoryError("no memory for the buffers")
        if self.fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return self._weight.clone()

    def copy_(self, other: Any) -> None:
        if self.fault == "step":
            self._weight.fill_(0)
            raise MemoryError("no memory for the buffers")
        self._weight.copy_(other)


class Scheduler(*MIXINS):  # type: ignore[misc]
    """A scheduler: a rank of two, or a stage of two."""

    def __init__(self, link: Any, passed: Any, rank: int, *, is_pipeline: bool) -> None:
        self.torch: Any = import_module("torch")
        adapters: Any = import_module(fake_sglang.ADAPTER)
        self.saver = adapters.TorchMemorySaverAdapter.create(enable=True)
        with self.saver.region("weights", enable_cpu_backup=True):
            self.weights = [self._filled(WEIGHT + number) for number in range(2)]
        with self.saver.region("kv_cache"):
            self.cache = self._filled(CACHED)
        self.buffer = Buffer(self.weights[0])
        group = Pair(link, rank)
        if is_pipeline:
            self.world_group = SimpleNamespace(cpu_group=group)
            for known in (fake_sglang.PIPELINE, fake_sglang.PARALLEL):
                vars(known).update(pp_size=2, pp_rank=rank)
        self.disagg_prefill_bootstrap_queue = fake_sglang.Queue()
        fake_sglang.equipped(self, self._answered)
        parts = (self.saver, self.buffer, self.torch.cuda.synchronize, None if is_pipeline else group)
        self.weight_updater: Any = self
        if fake_sglang.IS_MANAGED:
            self.weight_updater = fake_sglang.Manager(*parts, self)
        else:
            self.begin(*parts)
        self.answers: list[Any] = []
        self._passed = passed

    def _filled(self, value: int) -> Any:
        return self.torch.empty(MIB, dtype=self.torch.uint8, device="cuda").fill_(value)

    # As SGLang's

    def _request_dispatcher(self, request: Any) -> Any:
        call = "release" if isinstance(request, fake_sglang.Release) else "resume"
        return getattr(self.weight_updater, f"{call}_memory_occupation")(request)

    def _answered(self, output: Any, request: Any) -> None:
        self.answers.append(output)

    def _pp_send_pyobj_to_next_stage(self, data: Any, async_send: bool = False) -> None:
        self._passed.send_bytes(pickle.dumps(data))

    def turn(self, request: Any) -> Any:
        """One of its loop: receives, carries out, passes on. Returns the answer to the request."""
        pipeline = fake_sglang.PIPELINE
        self.answers.clear()
        received = [request] if pipeline.pp_rank == 0 else pickle.loads(self._passed.recv_bytes())
        for each in received:
            if (output := self._request_dispatcher(each)) is not None:
                self._answered(output, each)
        if pipeline.pp_rank < pipeline.pp_size - 1:
            self._pp_send_pyobj_to_next_stage(received, async_send=True)
        [answer] = self.answers
        return answer

    # By orders

    def do(self, order: Order) -> State:
        """Carries a request out, with its fault."""
        kind = fake_sglang.Release if order.call == "release" else fake_sglang.Resume
        error = raised = None
        with _warnings() as warnings, self._faulty(order.fault):
            try:
                error = self.turn(kind(*order.tags, rid="poorwill")).rid
            except Exception as ends:
                raised = f"{type(ends).__name__}: {ends}"
        return self._state(error, raised, warnings)

    def _state(self, error: str | None, raised: str | None, warnings: list[str]) -> State:
        [arena] = self._pools()._arenas.values()
        states = arena.state()
        released = {name.removesuffix(".none") for name, state in states.items() if "asleep" in state}
        is_equal = cached = None
        if "weights" not in released:
            expected = [bytes([WEIGHT + number]) * MIB for number in range(2)]
            is_equal = [weight.cpu().numpy_bytes() for weight in self.weights] == expected
        if "kv_cache" not in released:
            [cached] = set(self.cache.cpu().numpy_bytes())
        manager = self.weight_updater
        return State(
            error,
            raised,
            released,
            set(manager.offload_tags),
            is_equal,
            cached,
            self.disagg_prefill_bootstrap_queue.kv_manager.is_registered,
            warnings,
        )

    def fill_cache(self) -> None:
        """As a request does."""
        self.cache.fill_(CACHED)

    def _taken(self) -> Iterator[Any]:
        """All memory that is left on the GPU."""
        with contextlib.suppress(self.torch.OutOfMemoryError):
            while True:
                yield self._filled(0)

    def _meanwhile(self, release: Any, call: Any) -> Any:
        """Has memory released after a call has begun that lacks it."""

        def released() -> None:
            # Without a wait the call has failed by then.
            time.sleep(0.1)
            release()
            self.torch.cuda.empty_cache()

        def begin(*args: Any) -> Any:
            thread = threading.Thread(target=released)
            thread.start()
            try:
                return call(*args)
            finally:
                thread.join()

        return begin

    def _pools(self) -> Any:
        return import_module("poorwill.compat.torch_memory_saver").torch_memory_saver._used()

    @contextlib.contextmanager
    def _faulty(self, fault: str) -> Iterator[None]:
        [arena] = self._pools()._arenas.values()
        ranks: Any = import_module("poorwill._ranks")
        joined = ranks.joined
        hold, taken = None, list[Any]()
        is_idle = self.weight_updater.is_fully_idle
        self.buffer.fault = self.disagg_prefill_bootstrap_queue.kv_manager.fault = fault
        if fault == "busy":
            self.weight_updater.is_fully_idle = lambda **_: False
        elif fault == "hold":
            hold = arena.hold("weights", "a network card")
        elif fault == "full":
            taken = list(self._taken())
        elif fault == "soon":
            taken = list(self._taken())
            vars(self.saver)["resume_all"] = self._meanwhile(taken.clear, self.saver.resume_all)
        elif fault == "late":
            call = "resume_all" if self.weight_updater.offload_tags else "pause_all"
            vars(self.saver)[call] = _late(getattr(self.saver, call))
        elif fault == "apart":
            ranks.joined = lambda *_: None
        try:
            yield
        finally:
            self.buffer.fault = self.disagg_prefill_bootstrap_queue.kv_manager.fault = ""
            self.weight_updater.is_fully_idle = is_idle
            ranks.joined = joined
            for call in ("pause_all", "resume_all"):
                vars(self.saver).pop(call, None)
            if hold is not None:
                hold.end()
            taken.clear()
            self.torch.cuda.empty_cache()


def _late(call: Any) -> Any:
    def fail(*args: Any) -> Any:
        call(*args)
        raise OSError("a report could not be written")

    return fail


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("poorwill")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def main(orders: Any, link: Any, passed: Any, rank: int, is_pipeline: bool) -> None:
    """Carries out orders until there is none."""
    fake_torch.install(fake_torch.Driver())
    fake_sglang.install()
    import_module("torch").__dict__["distributed"] = fake_sglang.Distributed
    fake_sglang.load_plugins()
    scheduler = Scheduler(link, passed, rank, is_pipeline=is_pipeline)
    while (order := orders.recv()) is not None:
        before = dict(os.environ)
        os.environ.update(order.settings)
        state = scheduler.do(order)
        os.environ.clear()
        os.environ.update(before)
        orders.send(state)
        if state.cached is not None:
            scheduler.fill_cache()
