"""vLLM 0.33.0: an executor that sleeps as long as a tag does, an engine that resumes once none does."""

import logging
from concurrent.futures import Future
from typing import Any

from .clients import AsyncMPClient, DPLBAsyncMPClient, InprocClient, Office, SyncMPClient
from .executors import Ranks, later, run
from .scheduling import (
    EngineCoreOutputs,
    FinishReason,
    Loop,
    PauseState,
    Request,
    RequestError,
    RequestStatus,
)
from .scheduling import Scheduler as _Scheduler
from .worker import Worker

__all__ = ["AsyncMPClient", "DPLBAsyncMPClient", "InprocClient", "Office", "RequestStatus", "SyncMPClient"]

logger = logging.getLogger(__name__)


class Scheduler(_Scheduler):
    def has_request(self, request_id: str) -> bool:
        return any(request.request_id == request_id for request in (*self.waiting, *self.running))


class Executor:
    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self._init_executor()
        self.sleeping_tags: set[str] = set()

    def _init_executor(self) -> None:
        raise NotImplementedError

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, non_block: bool = False
    ) -> Any:
        raise NotImplementedError

    @property
    def is_sleeping(self) -> bool:
        return bool(self.sleeping_tags)

    def sleep(self, level: int = 1) -> None:
        if "weights" in self.sleeping_tags:
            logger.warning("Executor is already sleeping.")
            return
        self.collective_rpc("sleep", kwargs={"level": level})
        self.sleeping_tags |= {"weights", "kv_cache"}

    def wake_up(self, tags: list[str] | None = None) -> None:
        if not self.is_sleeping:
            logger.warning("Executor is not sleeping.")
            return
        for tag in tags or ():
            if tag not in self.sleeping_tags:
                logger.warning("Tag %s is not in sleeping tags %s", tag, self.sleeping_tags)
                return
        self.collective_rpc("wake_up", kwargs={"tags": tags})
        if tags:
            for tag in tags:
                self.sleeping_tags.remove(tag)
        else:
            self.sleeping_tags.clear()

    def discard(self, tags: tuple[str, ...]) -> None:
        missing = set(tags) - self.sleeping_tags
        if not missing:
            logger.warning("Tags %s are already sleeping.", tags)
            return
        try:
            self.collective_rpc("discard", args=(tuple(missing),))
        finally:
            self.sleeping_tags |= missing


class UniProcExecutor(Executor):
    def _init_executor(self) -> None:
        self.workers = [Worker(0)]

    def collective_rpc(
        self,
        method: Any,
        timeout: Any = None,
        args: Any = (),
        kwargs: Any = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        result = run(self.workers[0], method, args, kwargs)
        result = result if single_value else [result]
        return later(result) if non_block else result


class MultiprocExecutor(Executor):
    def _init_executor(self) -> None:
        self.ranks = Ranks(self.vllm_config.parallel_config.world_size)
        self.workers = self.ranks.workers

    def collective_rpc(
        self,
        method: Any,
        timeout: Any = None,
        args: Any = (),
        kwargs: Any = None,
        non_block: bool = False,
        unique_reply_rank: Any = None,
        kv_output_aggregator: Any = None,
        ec_output_aggregator: Any = None,
    ) -> Any:
        results = self.ranks.call(method, args, kwargs)
        result = results if unique_reply_rank is None else results[unique_reply_rank]
        return later(result) if non_block else result


class EngineCore:
    def __init__(
        self,
        vllm_config: Any,
        executor_class: Any,
        log_stats: Any,
        executor_fail_callback: Any = None,
        include_finished_set: Any = False,
    ) -> None:
        self.vllm_config = vllm_config
        self.model_executor = executor_class(vllm_config)
        self.collective_rpc("synchronize_device")
        self.scheduler = Scheduler()

    def add_request(self, request: Any, request_wave: int = 0) -> None:
        self.scheduler.add_request(request)
        if request.abort_immediately:
            self.scheduler.finish([request.request_id])
            self.freed = [*getattr(self, "freed", []), request.request_id]

    def step(self) -> dict[int, EngineCoreOutputs]:
        if not self.scheduler.has_requests():
            return {}
        ids = [request.request_id for request in self.scheduler.schedule()]
        results = self.model_executor.collective_rpc("execute_model", args=(ids,))
        outputs: dict[int, EngineCoreOutputs] = {}
        for request, output in self.scheduler.update(results[0]):
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)
        return outputs

    def _reset_caches(self, reset_running_requests: bool = True, reset_connector: bool = True) -> None:
        if not self.scheduler.reset():
            raise RuntimeError("Failed to reset the KV connector cache.")

    def _finish_pause(self, clear_cache: bool) -> None:
        self.model_executor.collective_rpc("synchronize_device")
        if clear_cache:
            self._reset_caches()

    def pause_scheduler(self, mode: str = "abort", clear_cache: bool = True) -> Any:
        if mode not in ("keep", "abort", "wait"):
            raise ValueError(f"Invalid pause mode: {mode}")
        if mode == "wait":
            raise ValueError("'wait' mode can't be used in inproc-engine mode")
        if mode == "abort":
            self.scheduler.finish(None)
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)
        self._finish_pause(clear_cache)
        return None

    def resume_scheduler(self) -> None:
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def is_scheduler_paused(self) -> bool:
        return self.scheduler.pause_state is not PauseState.UNPAUSED

    def sleep(self, level: int = 1, mode: str = "abort") -> Any:
        paused = self.pause_scheduler(mode=mode, clear_cache=level >= 1)
        if level < 1:
            return paused
        if paused is None:
            self.model_executor.sleep(level)
            return None
        future: Future[Any] = Future()

        def then(done: Future[Any]) -> None:
            try:
                done.result()
                future.set_result(self.model_executor.sleep(level))
            except Exception as error:
                future.set_exception(error)

        paused.add_done_callback(then)
        return future

    def wake_up(self, tags: list[str] | None = None) -> bool:
        if tags is not None and "scheduling" in tags:
            tags = [tag for tag in tags if tag != "scheduling"]
        if tags is None or tags:
            self.model_executor.wake_up(tags)
            if tags is None or "kv_cache" in tags:
                self._set_kv_connector_handshake_metadata()
        is_awake = not self.model_executor.is_sleeping
        if is_awake:
            self.resume_scheduler()
        return is_awake

    def _set_kv_connector_handshake_metadata(self) -> None:
        self.handshakes = getattr(self, "handshakes", 0) + 1

    def release_kv_cache_memory(self) -> None:
        if not (self.is_scheduler_paused() and not self.scheduler.has_requests()):
            raise RuntimeError("release_kv_cache_memory() requires a completed pause first")
        if self.model_executor.is_sleeping:
            raise RuntimeError("release_kv_cache_memory() requires all executor memory to be resident")
        self._reset_caches()
        self.model_executor.discard(("kv_cache",))

    def is_sleeping(self) -> bool:
        return self.is_scheduler_paused() or self.model_executor.is_sleeping

    def execute_dummy_batch(self) -> None:
        self.model_executor.collective_rpc("execute_dummy_batch")

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        return self.model_executor.collective_rpc(method, timeout, args, kwargs)

    def preprocess_add_request(self, request: Any) -> tuple[Any, int]:
        return request, 0


class EngineCoreProc(Loop, EngineCore):
    def __init__(self, vllm_config: Any, executor_class: Any, engine_index: int = 0) -> None:
        self.start(engine_index)
        self.reject_new_requests = False
        super().__init__(vllm_config, executor_class, False)

    def rejects(self, request: Request) -> bool:
        if not self.reject_new_requests:
            return False
        error = RequestError("engine_paused", "Generation is paused. Please retry.", True)
        ids = [request.request_id]
        self._send_finish_outputs_to_client(ids, request.client_index, FinishReason.ERROR, error)
        return True

    def pause_scheduler(self, mode: str = "abort", clear_cache: bool = True) -> Any:
        if mode not in ("keep", "abort", "wait"):
            raise ValueError(f"Invalid pause mode: {mode}")
        if mode == "abort":
            for request in self.scheduler.finish(None):
                self.finish_for_client([request.request_id], request.client_index, FinishReason.ABORT)
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)
        if self._pause_complete():
            self._finish_pause(clear_cache)
            return None
        future: Future[Any] = Future()

        def is_idle(engine: "EngineCoreProc") -> None:
            try:
                engine._finish_pause(clear_cache)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        self.idle_callbacks.append(is_idle)
        return future

    def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> Any:
        future = self.pause_scheduler(mode, clear_cache)
        self.reject_new_requests = mode != "keep"
        return future

    def resume_scheduler(self) -> None:
        self.reject_new_requests = False
        super().resume_scheduler()

    def _pause_complete(self) -> bool:
        return not self.has_work()

    def _send_finish_outputs_to_client(
        self,
        req_ids: list[str],
        client_index: int,
        finish_reason: FinishReason,
        error: RequestError | None = None,
    ) -> None:
        self.finish_for_client(req_ids, client_index, finish_reason, error)

    def _send_error_outputs_to_client(self, req_ids: list[str], client_index: int) -> None:
        self._send_finish_outputs_to_client(req_ids, client_index, FinishReason.ERROR)


class DPEngineCoreProc(EngineCoreProc):
    def __init__(self, vllm_config: Any, executor_class: Any, engine_index: int = 0) -> None:
        super().__init__(vllm_config, executor_class, engine_index)
        self.dp_group = object()
        self.pending_pause = False
        # How often this one came to where all wait for each other.
        self.waves_started = 0

    def _pause_complete(self) -> bool:
        self.pending_pause = True
        self.engines_running = True
        return False

    def run_step(self) -> None:
        if self.scheduler.has_requests():
            super().run_step()
        elif not self.model_executor.is_sleeping:
            self.execute_dummy_batch()
        if not self.scheduler.has_requests():
            # All others pause as well by then.
            self.pending_pause = self.engines_running = False

    def add_request(self, request: Any, request_wave: int = 0) -> None:
        super().add_request(request, request_wave)

    def resume_scheduler(self) -> None:
        if self.pending_pause:
            raise RuntimeError("resume_scheduler called while pause is still in flight.")
        if self.engines_running:
            return
        super().resume_scheduler()
        self.waves_started += 1


class AsyncLLM:
    def __init__(self, vllm_config: Any, engine_core: Any) -> None:
        self.vllm_config = vllm_config
        self.engine_core = engine_core
        self.dead_error: Exception | None = None
        self.sleep_states: list[tuple[int, int]] = []

    async def _outputs(self, request_id: str, request: Any) -> Any:
        await self.engine_core.add_request_async(request)
        outputs = self.engine_core.requests[request_id]
        while True:
            output = await outputs.get()
            if output.error is not None:
                raise RuntimeError(output.error.message)
            yield output
            if output.finish_reason is not None:
                return

    async def generate(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Any = None,
        trace_headers: Any = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: Any = None,
    ) -> Any:
        async for output in self._outputs(request_id, Request(request_id, steps=prompt)):
            yield output

    async def encode(
        self,
        prompt: Any,
        pooling_params: Any,
        request_id: str,
        lora_request: Any = None,
        trace_headers: Any = None,
        priority: int = 0,
        tokenization_kwargs: Any = None,
        reasoning_ended: bool | None = None,
    ) -> Any:
        async for output in self._outputs(request_id, Request(request_id, steps=prompt)):
            yield output

    async def resume_generation(self) -> None:
        await self.engine_core.resume_scheduler_async()

    async def check_health(self) -> None:
        if self.dead_error is not None:
            raise self.dead_error

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        await self.engine_core.sleep_async(level, mode)
        self.sleep_states.append((1, level))

    async def release_kv_cache_memory(self) -> None:
        await self.engine_core.release_kv_cache_memory_async()
        self.sleep_states.append((1, 0))

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        is_awake = bool(await self.engine_core.wake_up_async(tags))
        if is_awake:
            self.sleep_states.append((0, 0))
        return is_awake

    async def is_sleeping(self) -> bool:
        return bool(await self.engine_core.is_sleeping_async())

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return await self.engine_core.collective_rpc_async(method, timeout, args, kwargs)


class LLMEngine:
    def __init__(self, vllm_config: Any, engine_core: Any) -> None:
        self.vllm_config = vllm_config
        self.engine_core = engine_core
        self.sleep_states: list[tuple[int, int]] = []

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Any = None,
        trace_headers: Any = None,
        priority: int = 0,
        session_id: str | None = None,
        prompt_text: str | None = None,
        kv_hints: Any = None,
    ) -> str:
        self.engine_core.add_request(Request(request_id, steps=prompt))
        return request_id

    def step(self) -> Any:
        return self.engine_core.get_output().outputs

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.engine_core.sleep(level, mode)
        self.sleep_states.append((1, level))

    def release_kv_cache_memory(self) -> None:
        self.engine_core.release_kv_cache_memory()
        self.sleep_states.append((1, 0))

    def wake_up(self, tags: list[str] | None = None) -> bool:
        is_awake = bool(self.engine_core.wake_up(tags))
        if is_awake:
            self.sleep_states.append((0, 0))
        return is_awake

    def is_sleeping(self) -> bool:
        return bool(self.engine_core.is_sleeping())

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.engine_core.collective_rpc(method, timeout, args, kwargs)
