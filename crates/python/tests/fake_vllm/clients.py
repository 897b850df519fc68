"""The clients of engines; alike in both versions. They turn the engine's loop instead of waiting for it."""

import asyncio
import itertools
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from .scheduling import EngineCoreOutputs, Request, UtilityOutput

_call_ids = itertools.count(1)

HANGS_SECONDS = 5.0


class HangError(AssertionError):
    """The engine has nothing to do, and has not answered."""


class EngineDeadError(Exception):
    """vLLM's, of `vllm.v1.engine.exceptions`."""


class MPClient:
    """A client of engines in processes of their own, which may die."""

    def __init__(self, office: "Office", client_index: int) -> None:
        self.office = office
        self.utility_results: dict[int, Any] = {}
        office.clients[client_index] = self

    def ensure_alive(self) -> None:
        if self.office.has_died:
            raise EngineDeadError


class InprocClient:
    """An engine in this process, without a loop."""

    def __init__(self, core: Any) -> None:
        self.engine_core = core

    def get_output(self) -> EngineCoreOutputs:
        outputs: dict[int, EngineCoreOutputs] = self.engine_core.step()
        return outputs.get(0) or EngineCoreOutputs()

    def add_request(self, request: Request) -> None:
        added, wave = self.engine_core.preprocess_add_request(request)
        self.engine_core.add_request(added, wave)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        if mode == "wait":
            raise ValueError("'wait' pause mode is not supported in inproc-engine mode")
        result = self.engine_core.sleep(level, mode)
        assert result is None

    def release_kv_cache_memory(self) -> None:
        self.engine_core.release_kv_cache_memory()

    def wake_up(self, tags: list[str] | None = None) -> Any:
        return self.engine_core.wake_up(tags)

    def is_sleeping(self) -> bool:
        return bool(self.engine_core.is_sleeping())

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        result: list[Any] = self.engine_core.collective_rpc(method, timeout, args, kwargs)
        return result


class Office:
    """The engines' processes and the clients that they answer to."""

    def __init__(self, *cores: Any) -> None:
        self.cores = cores
        self.clients: dict[int, Any] = {}
        # Whether loops turn only when a test says so.
        self.is_by_hand = False
        # An engine that has died answers nobody, and nobody fails who waits.
        self.has_died = False

    def turn(self) -> bool:
        did = [core.turn() for core in self.cores]
        for core in self.cores:
            while not core.output_queue.empty():
                client, outputs = core.output_queue.get_nowait()
                self.clients[client].receive(outputs)
        return any(did)

    def settle(self) -> None:
        """Until nobody has anything to do."""
        while not (self.is_by_hand or self.has_died) and self.turn():
            pass


def answer_with(output: UtilityOutput, waiting: dict[int, Any]) -> None:
    """Hands an answer to the future that waits for it."""
    future = waiting.pop(output.call_id)
    if future.cancelled():
        return
    if output.failure_message is not None:
        future.set_exception(Exception(output.failure_message))
    else:
        future.set_result(output.result)


class SyncMPClient(MPClient):
    """The only client of an engine elsewhere."""

    def __init__(self, office: Office) -> None:
        super().__init__(office, 0)
        self.outputs: list[EngineCoreOutputs] = []

    def receive(self, outputs: EngineCoreOutputs) -> None:
        if outputs.utility_output is None:
            self.outputs.append(outputs)
        else:
            answer_with(outputs.utility_output, self.utility_results)

    def get_output(self) -> EngineCoreOutputs:
        if not self.outputs:
            raise HangError("no request has been answered")
        return self.outputs.pop(0)

    def add_request(self, request: Request) -> None:
        self.office.cores[0].input_queue.put_nowait(("add", request))
        self.office.settle()

    def call_utility(self, method: str, *args: Any) -> Any:
        self.ensure_alive()
        call_id = next(_call_ids)
        future = self.utility_results[call_id] = Future[Any]()
        self.office.cores[0].input_queue.put_nowait(("utility", (0, call_id, method, args)))
        self.office.settle()
        try:
            # The engine has had its turns: only its death can be waited for.
            return future.result(HANGS_SECONDS)
        except FutureTimeout:
            raise HangError(f"{method} has not been answered") from None

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.call_utility("sleep", level, mode)

    def release_kv_cache_memory(self) -> None:
        self.call_utility("release_kv_cache_memory")

    def wake_up(self, tags: list[str] | None = None) -> Any:
        return self.call_utility("wake_up", tags)

    def is_sleeping(self) -> bool:
        return bool(self.call_utility("is_sleeping"))

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        result: list[Any] = self.call_utility("collective_rpc", method, timeout, args, kwargs)
        return result


class AsyncMPClient(MPClient):
    """One of `client_count` clients of an engine elsewhere."""

    def __init__(self, office: Office, client_count: int = 1, client_index: int = 0) -> None:
        super().__init__(office, client_index)
        self.client_count = client_count
        self.client_index = client_index
        self.core_engines = [index.to_bytes(2, "little") for index in range(len(office.cores))]
        self.core_engine = self.core_engines[0]
        self.requests: dict[str, asyncio.Queue[Any]] = {}

    def receive(self, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            self.requests[output.request_id].put_nowait(output)
        if outputs.utility_output is not None:
            answer_with(outputs.utility_output, self.utility_results)

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        return await self._call_utility_async(method, *args, engine=self.core_engine)

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        call_id = next(_call_ids)
        future = self.utility_results[call_id] = asyncio.get_running_loop().create_future()
        self.ensure_alive()
        core = self.office.cores[self.core_engines.index(engine)]
        core.input_queue.put_nowait(("utility", (self.client_index, call_id, method, args)))
        self.office.settle()
        return await future

    async def add_request_async(self, request: Request) -> None:
        request.client_index = self.client_index
        self.requests[request.request_id] = asyncio.Queue()
        self.office.cores[0].input_queue.put_nowait(("add", request))
        self.office.settle()

    async def pause_scheduler_async(self, mode: str = "abort", clear_cache: bool = True) -> None:
        await self.call_utility_async("pause_scheduler", mode, clear_cache)

    async def resume_scheduler_async(self) -> None:
        await self.call_utility_async("resume_scheduler")

    async def sleep_async(self, level: int = 1, mode: str = "abort") -> None:
        await self.call_utility_async("sleep", level, mode)

    async def release_kv_cache_memory_async(self) -> None:
        await self.call_utility_async("release_kv_cache_memory")

    async def wake_up_async(self, tags: list[str] | None = None) -> Any:
        return await self.call_utility_async("wake_up", tags)

    async def is_sleeping_async(self) -> bool:
        return bool(await self.call_utility_async("is_sleeping"))

    async def collective_rpc_async(
        self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        return await self.call_utility_async("collective_rpc", method, timeout, args, kwargs)


class DPLBAsyncMPClient(AsyncMPClient):
    """A client of several engines, which tells what the first one answers."""

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        calls = (self._call_utility_async(method, *args, engine=engine) for engine in self.core_engines)
        return (await asyncio.gather(*calls))[0]
