"""Requests, what is answered to them, and the scheduler that has them."""

import queue
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class PauseState(Enum):
    """Who may run: everybody, those that run already, nobody."""

    UNPAUSED = 0
    PAUSED_NEW = 1
    PAUSED_ALL = 2


class FinishReason(Enum):
    """How a request ended."""

    STOP = "stop"
    ABORT = "abort"
    ERROR = "error"


class RequestStatus(Enum):
    """Where a request is."""

    FINISHED_ABORTED = 1


@dataclass
class Request:
    """A request, with the steps that it takes."""

    request_id: str
    client_index: int = 0
    steps: int = 1
    kv_transfer_params: dict[str, Any] | None = None
    abort_immediately: bool = False


@dataclass
class RequestError:
    """Why a request failed."""

    code: str
    message: str
    retryable: bool = False


@dataclass
class EngineCoreOutput:
    """What one request gets."""

    request_id: str
    text: str = ""
    finish_reason: FinishReason | None = None
    error: RequestError | None = None


@dataclass
class UtilityOutput:
    """What a call gets."""

    call_id: int
    result: Any = None
    failure_message: str | None = None


@dataclass
class EngineCoreOutputs:
    """A message to a client."""

    outputs: list[EngineCoreOutput] = field(default_factory=list)
    utility_output: UtilityOutput | None = None


class Scheduler:
    """First come, first served, all at once."""

    def __init__(self) -> None:
        self.pause_state = PauseState.UNPAUSED
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.resets = 0

    def add_request(self, request: Request) -> None:
        self.waiting.append(request)

    def set_pause_state(self, pause_state: PauseState) -> None:
        self.pause_state = pause_state

    def has_requests(self) -> bool:
        if self.pause_state is PauseState.PAUSED_ALL:
            return False
        return bool(self.running) or (self.pause_state is PauseState.UNPAUSED and bool(self.waiting))

    def finish(self, ids: list[str] | None) -> list[Request]:
        gone = [r for r in (*self.waiting, *self.running) if ids is None or r.request_id in ids]
        self.waiting = [request for request in self.waiting if request not in gone]
        self.running = [request for request in self.running if request not in gone]
        return gone

    def schedule(self) -> list[Request]:
        if self.pause_state is PauseState.UNPAUSED:
            self.running, self.waiting = [*self.running, *self.waiting], []
        return self.running

    def update(self, texts: dict[str, str]) -> list[tuple[Request, EngineCoreOutput]]:
        outputs = []
        for request in self.running:
            request.steps -= 1
            reason = None if request.steps else FinishReason.STOP
            outputs.append((request, EngineCoreOutput(request.request_id, texts[request.request_id], reason)))
        self.running = [request for request in self.running if request.steps]
        return outputs

    def reset(self) -> bool:
        self.resets += 1
        return True


class Loop:
    """What an engine in a process of its own has besides: queues, and a loop around the steps."""

    # Of the engine that this is part of.
    scheduler: Any
    step: Any
    add_request: Any
    vllm_config: Any

    def start(self, engine_index: int) -> None:
        """Before the engine is made."""
        self.engine_index = engine_index
        self.input_queue: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.output_queue: queue.Queue[tuple[int, EngineCoreOutputs]] = queue.Queue()
        self.idle_callbacks: list[Any] = []
        self.engines_running = False

    def has_work(self) -> bool:
        return self.engines_running or self.scheduler.has_requests()

    def turn(self) -> bool:
        """Once around; whether there was anything to do. What is raised in here ends the process."""
        did = False
        while not self.has_work():
            while self.idle_callbacks:
                did = True
                self.idle_callbacks.pop()(self)
            if self.input_queue.empty():
                break
            did = True
            self._handle(*self.input_queue.get_nowait())
        while not self.input_queue.empty():
            did = True
            self._handle(*self.input_queue.get_nowait())
        if self.has_work():
            did = True
            self.run_step()
        return did

    def run_step(self) -> None:
        for client, output in self.step().items():
            self.output_queue.put_nowait((client, output))

    def _handle(self, kind: str, message: Any) -> None:
        if kind == "add":
            if not self.rejects(message):
                self.add_request(message, 0)
            return
        client, call_id, method, args = message
        self._invoke(
            lambda: getattr(self, method)(*args),
            UtilityOutput(call_id),
            method,
            lambda output: self.output_queue.put_nowait((client, EngineCoreOutputs(utility_output=output))),
        )

    def rejects(self, request: Request) -> bool:
        return False

    def _invoke(self, get_result: Any, output: UtilityOutput, name: str, put: Any) -> None:
        try:
            result = get_result()
            if hasattr(result, "add_done_callback"):
                result.add_done_callback(lambda done: self._invoke(done.result, output, name, put))
                return
            output.result = plain(result)
        except Exception as error:
            output.failure_message = f"Call to {name} method failed: {error}"
        put(output)

    def finish_for_client(
        self, ids: list[str], client: int, reason: FinishReason, error: RequestError | None = None
    ) -> None:
        outputs = [EngineCoreOutput(request_id, "", reason, error) for request_id in ids]
        self.output_queue.put_nowait((client, EngineCoreOutputs(outputs)))


def plain(value: Any) -> Any:
    """What can travel between processes, and nothing else."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"cannot be encoded: {value!r}")
