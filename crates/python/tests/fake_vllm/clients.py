"""vLLM's own frontends and clients of engines, from its sources. Where they wait for an engine in another
process, they turn its loop.
"""

import asyncio
import contextlib
import queue
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from . import engines
from .engines import HANGS_SECONDS, Request, Vllm
from .loader import Stub

__all__ = ["HANGS_SECONDS", "EngineProcesses", "HangError", "asynchronous", "in_process", "synchronous"]


class HangError(AssertionError):
    """The engine has nothing to do, and has not answered."""


class EngineProcesses:
    """The engines' processes, and the clients that they answer to."""

    def __init__(self, *cores: Any) -> None:
        self.cores = cores
        self.clients: dict[int, Any] = {}
        self._is_by_hand = False
        # A dead engine answers no call, and no other part fails its callers.
        self._has_died = False
        # Several wait for each other.
        self._threads = [ThreadPoolExecutor(1) for _ in cores] if len(cores) > 1 else []

    @property
    def is_by_hand(self) -> bool:
        """Whether loops turn only when a test says so. Once it is set, those of before have ended."""
        return self._is_by_hand

    @is_by_hand.setter
    def is_by_hand(self, is_by_hand: bool) -> None:
        self._is_by_hand = is_by_hand
        # A loop that has given its answers looks for more.
        ends = [thread.submit(lambda: None) for thread in self._threads if is_by_hand]
        if futures.wait(ends, HANGS_SECONDS).not_done:
            raise HangError("an engine's loop goes on")

    def die(self) -> None:
        self._has_died = True
        for client in self.clients.values():
            client.resources.engine_dead = True

    def send(self, vllm: Vllm, message: tuple[Any, ...]) -> None:
        engine, kind, payload = message
        number = int.from_bytes(engine, "little")
        core = self.cores[number]
        kind = vllm.core.EngineCoreRequestType(kind)
        core.input_queue.put_nowait((kind, (payload, 0) if isinstance(payload, Request) else payload))
        if self._threads and not (self.is_by_hand or self._has_died):
            self._threads[number].submit(self._turn_in_thread, core, asyncio.get_running_loop())
            return
        while not (self.is_by_hand or self._has_died) and self.turn():
            pass

    def turn(self) -> bool:
        did = [engines.turn(core) for core in self.cores]
        for core in self.cores:
            for client, outputs in self._outputs(core):
                client.receive(outputs)
        return any(did)

    def _turn_in_thread(self, core: Any, loop: asyncio.AbstractEventLoop) -> None:
        while engines.turn(core):
            for client, outputs in self._outputs(core):
                loop.call_soon_threadsafe(client.receive, outputs)

    def _outputs(self, core: Any) -> Iterator[tuple[Any, Any]]:
        while not core.output_queue.empty():
            index, outputs = core.output_queue.get_nowait()
            # There is no coordinator.
            if index >= 0:
                yield self.clients[index], outputs


def plain(value: Any) -> Any:
    """What can travel between processes, and nothing else."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"cannot be encoded: {value!r}")


def _client(
    vllm: Vllm, kind: str, processes: EngineProcesses, client_index: int = 0, client_count: int = 1
) -> Any:
    client = object.__new__(getattr(vllm.client, kind))

    def receive(outputs: Any) -> None:
        answer = outputs.utility_output
        if answer is None:
            client.outputs_queue.put_nowait(outputs)
            return
        if answer.result is not None:
            answer.result.result = plain(answer.result.result)
        vllm.client._process_utility_output(answer, client.utility_results)

    def send_multipart(message: tuple[Any, ...], copy: bool, track: bool = False) -> Any:
        processes.send(vllm, message)
        if isinstance(client.outputs_queue, asyncio.Queue):
            return asyncio.sleep(0)
        if client.utility_results and not (processes.is_by_hand or processes._has_died):
            raise HangError("the engine has not answered")
        return None

    processes.clients[client_index] = client
    client.vllm_config, client.resources = processes.cores[0].vllm_config, SimpleNamespace(engine_dead=False)
    client.core_engines = [index.to_bytes(2, "little") for index in range(len(processes.cores))]
    client.core_engine = client.core_engines[0]
    client.client_index, client.client_count = client_index, client_count
    client.utility_results = {}
    client.encoder = SimpleNamespace(encode=lambda message: (message,))
    client.input_socket = SimpleNamespace(send_multipart=send_multipart)
    client.pending_messages = []
    client.receive = receive
    client.engines_running, client.current_wave, client.is_dp = True, 0, False
    client._ensure_output_queue_task = client._ensure_stats_update_task = lambda: None
    client.get_core_engine_for_request = lambda request: client.core_engine
    client.free_pending_messages = lambda: None
    return client


class OutputProcessor:
    """Hands outputs to those who asked, as they are."""

    def __init__(self) -> None:
        self.queues: dict[str, Any] = {}

    def has_request(self, request_id: str) -> bool:
        return request_id in self.queues

    def has_unfinished_requests(self) -> bool:
        return bool(self.queues)

    def add_request(self, request: Request, _: Any, __: Any, index: int, outputs: Any = None) -> None:
        self.queues[request.request_id] = outputs

    def process_outputs(self, outputs: list[Any], *_: Any, **__: Any) -> Any:
        direct = []
        for output in outputs:
            finish = self.queues.pop if output.finish_reason is not None else self.queues.get
            waiting = finish(output.request_id, None)
            error = getattr(output, "error", None)
            output.outputs = [
                SimpleNamespace(
                    finish_reason=None if output.finish_reason is None else str(output.finish_reason)
                )
            ]
            if output.pooling_output is not None:
                output.outputs = SimpleNamespace(data=output.pooling_output)
            if waiting is None:
                direct.append(output)
            else:
                waiting.put(output if error is None else error.to_exception())
        return SimpleNamespace(request_outputs=direct, reqs_to_abort=[])

    def update_scheduler_stats(self, _: Any) -> None: ...

    def abort_requests(self, ids: list[str], internal: bool) -> list[str]:
        return list(ids)


class Collector:
    """What a request waits at."""

    def __init__(self, _: Any, request_id: str) -> None:
        self.request_id = request_id
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()
        self.put = self._outputs.put_nowait

    def get_nowait(self) -> Any:
        with contextlib.suppress(asyncio.QueueEmpty):
            return self._reported(self._outputs.get_nowait())
        return None

    async def get(self) -> Any:
        return self._reported(await self._outputs.get())

    def _reported(self, output: Any) -> Any:
        if isinstance(output, Exception):
            raise output
        return output

    def close(self) -> None: ...


def _frontend(of: Any, client: Any, config: Any, processes: EngineProcesses | None = None) -> Any:
    def process_inputs(request_id: str, prompt: int, *_: Any, **__: Any) -> Request:
        return Request(request_id, steps=prompt)

    async def process_inputs_async(*args: Any, **options: Any) -> Request:
        return process_inputs(*args, **options)

    frontend = object.__new__(of)
    frontend.vllm_config, frontend.engine_core, frontend.processes = config, client, processes
    frontend.model_config, frontend.scheduler_config = Stub("model"), config.scheduler_config
    frontend.renderer = Stub("renderer")
    frontend.output_processor, frontend.output_handler = OutputProcessor(), None
    frontend.input_processor = SimpleNamespace(
        process_inputs=process_inputs,
        process_inputs_async=process_inputs_async,
        assign_request_id=lambda request: None,
    )
    frontend._supported_tasks = ()
    frontend.log_stats = frontend.log_requests = frontend.should_execute_dummy_batch = False
    frontend.sleep_states = []
    frontend.shutdown = lambda **_: None
    frontend.logger_manager = SimpleNamespace(
        record_sleep_state=lambda *state: frontend.sleep_states.append(state), record=lambda **_: None
    )
    return frontend


def asynchronous(
    vllm: Vllm, processes: EngineProcesses, kind: str = "AsyncMPClient", index: int = 0, count: int = 1
) -> Any:
    """An AsyncLLM: one of so many in front of the same engines."""
    client = _client(vllm, kind, processes, index, count)
    client.outputs_queue = asyncio.Queue()
    vllm.async_llm.RequestOutputCollector = Collector
    vllm.async_llm.RequestOutput = vllm.async_llm.PoolingRequestOutput = vllm.core.EngineCoreOutput
    return _frontend(vllm.async_llm.AsyncLLM, client, client.vllm_config, processes)


def synchronous(vllm: Vllm, processes: EngineProcesses) -> Any:
    """An LLMEngine in front of an engine in another process."""
    client = _client(vllm, "SyncMPClient", processes)
    outputs: queue.Queue[Any] = queue.Queue()
    client.outputs_queue = SimpleNamespace(
        put_nowait=outputs.put_nowait, get=outputs.get_nowait, empty=outputs.empty
    )
    return _frontend(vllm.llm_engine.LLMEngine, client, client.vllm_config, processes)


def in_process(vllm: Vllm, core: Any) -> Any:
    """An LLMEngine with its engine."""
    client = object.__new__(vllm.client.InprocClient)
    client.engine_core = core
    return _frontend(vllm.llm_engine.LLMEngine, client, core.vllm_config)
