"""vLLM's own engines in one process: its cores and executors from its sources, over workers and a scheduler
that are not.

They are put together without their `__init__`, which begins with a model: here is what that would have set.
"""

import pickle
import queue
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Barrier
from types import SimpleNamespace
from typing import Any, TypeVar

from poorwill.vllm import _generations

from .loader import Loader, Stub
from .worker import Worker

REAL = (
    *(f"vllm.v1.engine{name}" for name in ("", ".core", ".core_client", ".exceptions")),
    *("vllm.v1.engine.async_llm", "vllm.v1.engine.llm_engine"),
    *(f"vllm.v1.executor.{name}_executor" for name in ("uniproc", "multiproc")),
    *("vllm.v1.executor.abstract", "vllm.v1.core.sched.interface", "vllm.v1.serial_utils"),
    *("vllm.v1.request", "vllm.exceptions", "vllm.outputs"),
)
# Only what hangs runs into it.
HANGS_SECONDS = 300.0
PARAMS = SimpleNamespace(n=1, output_kind=None)


@dataclass
class Request:
    """A request, with the steps that it takes."""

    request_id: str
    client_index: int = 0
    steps: int = 1
    kv_transfer_params: dict[str, Any] | None = None
    abort_immediately: bool = False
    ec_transfer_params: None = None
    pooling_params: None = None
    data_parallel_rank: int = 0
    resumable: bool = False
    params: Any = field(default_factory=lambda: PARAMS)


@dataclass
class Batch:
    """What the ranks compute in one step."""

    ids: list[str]

    @property
    def total_num_scheduled_tokens(self) -> int:
        return len(self.ids)


class Scheduler:
    """First come, first served, all at once."""

    connector = None

    def __init__(self, vllm: "Vllm") -> None:
        self.vllm = vllm
        self.pause_state = vllm.core.PauseState.UNPAUSED
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.finished: list[str] = []
        # Without blocks.
        pool = SimpleNamespace(blocks=[], evict_blocks=lambda _: None)
        coordinator = SimpleNamespace(single_type_managers=())
        self.kv_cache_manager = SimpleNamespace(block_pool=pool, coordinator=coordinator)

    def add_request(self, request: Request) -> None:
        self.waiting.append(request)

    def has_request(self, request_id: str) -> bool:
        return any(request.request_id == request_id for request in (*self.waiting, *self.running))

    def set_pause_state(self, pause_state: Any) -> None:
        self.pause_state = pause_state

    def has_requests(self) -> bool:
        states = self.vllm.core.PauseState
        if self.pause_state is states.PAUSED_ALL:
            return False
        return bool(self.running) or (self.pause_state is states.UNPAUSED and bool(self.waiting))

    has_unfinished_requests = has_requests

    def finish_requests(self, ids: list[str] | None, _: Any) -> list[Any]:
        gone = [r for r in (*self.waiting, *self.running) if ids is None or r.request_id in ids]
        self.waiting = [request for request in self.waiting if request not in gone]
        self.running = [request for request in self.running if request not in gone]
        self.finished += [request.request_id for request in gone]
        return [(r.request_id, r.client_index) for r in gone] if self.vllm.minor <= 25 else list(gone)

    def schedule(self, *_: Any) -> Batch:
        if self.pause_state is self.vllm.core.PauseState.UNPAUSED:
            self.running, self.waiting = [*self.running, *self.waiting], []
        return Batch([request.request_id for request in self.running])

    def update_from_output(self, _: Batch, texts: dict[str, str]) -> dict[int, Any]:
        outputs: dict[int, Any] = {}
        for request in self.running:
            request.steps -= 1
            reason = None if request.steps else self.vllm.core.FinishReason.STOP
            output = self.vllm.core.EngineCoreOutput(
                request.request_id, [texts[request.request_id]], finish_reason=reason
            )
            outputs.setdefault(request.client_index, self.vllm.core.EngineCoreOutputs()).outputs.append(
                output
            )
        self.running = [request for request in self.running if request.steps]
        return outputs

    def get_grammar_bitmask(self, _: Batch) -> None: ...

    def make_stats(self) -> None: ...

    def reset_prefix_cache(self, *_: bool) -> bool:
        return True

    def reset_encoder_cache(self) -> None: ...

    def get_kv_connector(self) -> Any:
        return self.connector

    get_ec_connector = make_stats


class Ranks:
    """The worker processes of vLLM's multi-process executor, and the queue that it calls them by. What it has
    put there is done at once, and the answers wait.
    """

    def __init__(self, vllm: "Vllm", count: int) -> None:
        self.workers = [vllm.make_worker(rank) for rank in range(count)]
        self.answers = [Answers() for _ in self.workers]
        self.loops = []
        for worker, answers in zip(self.workers, self.answers, strict=True):
            self.loops.append(loop := object.__new__(vllm.multiproc.WorkerProc))
            loop.worker, loop.rank, loop.worker_response_mq = worker, worker.rank, answers
            loop.rpc_broadcast_mq, loop.use_async_scheduling = Calls(), False

    def enqueue(self, message: Any) -> None:
        # They have their own memory, and wait for each other in some calls.
        for loop in self.loops:
            loop.rpc_broadcast_mq.message = pickle.dumps(message)
        with ThreadPoolExecutor(len(self.loops)) as threads:
            for done in [threads.submit(self._turn, loop) for loop in self.loops]:
                done.result()

    @staticmethod
    def _turn(loop: Any) -> None:
        with suppress(EOFError):
            loop.worker_busy_loop()


class Calls:
    """The queue that one rank reads its calls from."""

    def __init__(self) -> None:
        self.message: bytes | None = None

    def dequeue(self, indefinite: bool) -> Any:
        if self.message is None:
            raise EOFError
        message, self.message = self.message, None
        return pickle.loads(message)


class Answers:
    """The queue of one rank's answers."""

    def __init__(self) -> None:
        self.kept: deque[tuple[Any, bytes]] = deque()

    def enqueue(self, answer: tuple[Any, Any]) -> None:
        status, result = answer
        self.kept.append((status, pickle.dumps(result)))

    def dequeue(self, timeout: float | None) -> tuple[Any, Any]:
        status, result = self.kept.popleft()
        return status, pickle.loads(result)


class Meeting:
    """A group of data parallel engines in threads: what they ask together waits until all have asked.

    Without one, all others are taken to be as far as the one that asks.
    """

    def __init__(self, cores: Sequence[Any]) -> None:
        self._kinds = {kind: _Round(len(cores)) for kind in ("resume", "step")}
        for core in cores:
            core.dp_group = self

    def ask(self, kind: str, *mine: bool) -> list[tuple[bool, ...]]:
        """What all have brought."""
        return self._kinds[kind].ask(mine)


class _Round:
    def __init__(self, count: int) -> None:
        self._brought: list[tuple[bool, ...]] = []
        self._all: list[tuple[bool, ...]] = []
        self._barrier = Barrier(count, self._collect, HANGS_SECONDS)

    def _collect(self) -> None:
        self._all, self._brought = self._brought, []

    def ask(self, mine: tuple[bool, ...]) -> list[tuple[bool, ...]]:
        self._brought.append(mine)
        self._barrier.wait()
        return self._all


class DataParallel:
    """What data parallel ranks ask together; how often this one has is counted."""

    def __init__(self) -> None:
        self.met = 0

    def has_unfinished_dp(self, group: object, has_unfinished: bool) -> bool:
        self.met += 1
        if isinstance(group, Meeting):
            return any(brought for (brought,) in group.ask("resume", has_unfinished))
        return has_unfinished

    @staticmethod
    def sync_dp_state(group: object, has_unfinished: bool, pending_pause: bool) -> tuple[bool, bool]:
        """The same from 0.21 on, which agree on a pause as well."""
        if not isinstance(group, Meeting):
            return has_unfinished, pending_pause
        all_brought = group.ask("step", has_unfinished, pending_pause)
        return any(brought for brought, _ in all_brought), all(pauses for _, pauses in all_brought)


class Vllm:
    """A version, with modules without hooks."""

    def __init__(self, version: str, also: Sequence[str] = ()) -> None:
        """`also` are modules that are run as well, as far as the version has them."""
        self.loader = Loader(version, REAL, {"poorwill", *(["numpy"] if also else [])})
        self.loader.real |= {name for name in also if self.loader.has(name)}
        self.loader.give("cloudpickle", dumps=pickle.dumps, loads=pickle.loads)
        self.loader.give(
            "vllm.envs", VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=None, VLLM_V1_OUTPUT_PROC_CHUNK_SIZE=128
        )
        self.loader.give("typing_extensions", TypeVar=lambda name, **_: TypeVar(name))
        self.loader.give(
            "vllm.renderers.inputs.preprocess", extract_prompt_components=lambda *_: (None, None, None)
        )
        self.make_worker: Callable[[int], Any] = Worker
        """A rank's of the engines to come."""
        self.minor = int(version.split(".")[1])
        self.generation = _generations.of(version)
        self.core = self.loader.module("vllm.v1.engine.core")
        self.client = self.loader.module("vllm.v1.engine.core_client")
        self.async_llm = self.loader.module("vllm.v1.engine.async_llm")
        self.llm_engine = self.loader.module("vllm.v1.engine.llm_engine")
        self.multiproc = self.loader.module("vllm.v1.executor.multiproc_executor")
        self.uniproc = self.loader.module("vllm.v1.executor.uniproc_executor")
        self.core.ParallelConfig = self.data_parallel = DataParallel()

    def engine(self, kind: str = "EngineCoreProc", count: int = 3, index: int = 0, config: Any = None) -> Any:
        """A core by the name of its class: over so many workers in processes, or over one in its own."""
        config = make_config(1 if kind == "EngineCore" else count) if config is None else config
        core = object.__new__(getattr(self.core, kind))
        core.vllm_config = config
        core.model_executor = (self._multiproc if kind != "EngineCore" else self._uniproc)(config)
        core.scheduler = Scheduler(self)
        core.batch_queue = core.mm_receiver_cache = None
        core.log_stats = core.use_spec_decode = core.check_for_draft_tokens = core.async_scheduling = False
        core.aborts_queue = queue.Queue()
        core.step_fn = core.step
        core._idle_state_callbacks = []
        core._weight_version = "default"
        core.preprocess_add_request = lambda request: (request, 0)
        if kind != "EngineCore":
            core.engine_index, core.engines_running, core.reject_new_requests = index, False, False
            core.input_queue, core.output_queue = queue.Queue(), queue.Queue()
            core.process_input_queue_block = core.publish_dp_lb_stats = False
            core.shutdown_state = self.core.EngineShutdownState.RUNNING
        if kind == "DPEngineCoreProc":
            core.dp_group, core.dp_rank, core.has_coordinator = object(), index, True
            core.current_wave = core.step_counter = 0
            core.dp_sync_interval, core.prefill_schedule_interval = 1, 1
            core.pending_pause = core.ignore_start_dp_wave = False
            core.eep_scaling_state = None
        return core

    def _uniproc(self, config: Any) -> Any:
        vllm = self

        class Executor(self.uniproc.UniProcExecutor):  # type: ignore[misc, name-defined]
            def _init_executor(self) -> None:
                self.driver_worker = vllm.make_worker(0)
                self.workers = [self.driver_worker]

        return Executor(config)

    def _multiproc(self, config: Any) -> Any:
        vllm = self

        class Executor(self.multiproc.MultiprocExecutor):  # type: ignore[misc, name-defined]
            def _init_executor(self) -> None:
                self.rpc_broadcast_mq = Ranks(vllm, config.parallel_config.world_size)
                self.response_mqs = self.rpc_broadcast_mq.answers
                self.workers = self.rpc_broadcast_mq.workers
                self.futures_queue: deque[Any] = deque()
                self.output_rank, self.is_failed = 0, False

        return Executor(config)


WORKER = "poorwill.vllm.worker.Worker"


def make_config(count: int = 1, worker_cls: str = WORKER) -> Any:
    """A configuration, of which only this is asked."""
    config: Any = Stub("config")
    config.parallel_config = Stub("parallel_config")
    config.parallel_config.worker_cls, config.parallel_config.world_size = worker_cls, count
    config.parallel_config.sync_dp_state = DataParallel.sync_dp_state
    config.scheduler_config = SimpleNamespace(max_num_queued_reqs=None, max_num_queued_tokens=None)
    return config


def is_busy(core: Any) -> bool:
    return bool(core._idle_state_callbacks) or not core.input_queue.empty() or core.has_work()


def turn(core: Any) -> bool:
    """Once around vLLM's loop; whether there was anything to do. What is raised in here ends the process."""
    if not is_busy(core):
        return False
    turns = iter((True, False))
    core._handle_shutdown = lambda: next(turns)
    with suppress(SystemExit):
        core.run_busy_loop()
    return True


def turn_until_idle(core: Any) -> list[Any]:
    """The outputs of requests that come of it."""
    while turn(core):
        pass
    reported: list[Any] = []
    while not core.output_queue.empty():
        reported += core.output_queue.get_nowait()[1].outputs
    return reported
