"""Hooks on vLLM's AsyncLLM and LLMEngine: an engine without its memory answers with an error, at once.

It neither lets a request wait for a wake that may never come, nor answers with gibberish. A request that
comes during a sleep or a wake waits for its end.

The hooks act only with poorwill's worker. After each operation they ask for the engine's state, for the next
request and for the metrics. While the engine of a single server is ready, a request costs one look at an
attribute. Of several servers each looks at its outputs, too, for the core's refusals.
"""

import asyncio
import contextlib
import functools
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from poorwill import PoorwillError
from poorwill.vllm import _generations, _keep, _metrics
from poorwill.vllm._engine import (
    RESTORING,
    SCHEDULING,
    NotReadyError,
    check_level,
    check_tags,
    replace,
    sleeps,
)
from poorwill.vllm._engines import Engines, Operation, Turn
from poorwill.vllm._keep import KeepUnsupportedError
from poorwill.vllm._liveness import outlive, outlive_async
from poorwill.vllm._platform import is_active
from poorwill.vllm._processes import Processes

__all__ = [
    *("install_async", "install_offline", "install_sync"),
    *("http_error", "look_at_engines", "look_for_processes", "watch_of"),
]

_WATCH = "_poorwill"

# How long a health check waits for a busy engine before it answers from the last known state.
_HEALTH_TIMEOUT_SECONDS = 1.0

_log = logging.getLogger(__name__)


def http_error(status: HTTPStatus, sentence: str, of: Any = NotReadyError) -> PoorwillError:
    """The error of a class that a server answers with this status; without a server, a plain one."""
    # Imported wherever requests arrive by HTTP.
    fastapi = sys.modules.get("fastapi")
    error: PoorwillError = (
        of(sentence) if fastapi is None else _http_error_type(fastapi.HTTPException, of)(status, sentence)
    )
    return error


def unavailable(sentence: str) -> PoorwillError:
    """The same with HTTP 503."""
    return http_error(HTTPStatus.SERVICE_UNAVAILABLE, sentence)


@functools.cache
def _http_error_type(http_exception: Any, of: Any) -> Any:
    class UnavailableError(of, http_exception):  # type: ignore[misc]
        """An exception that vLLM's FastAPI handlers turn into an answer."""

        def __init__(self, status: HTTPStatus, sentence: str) -> None:
            http_exception.__init__(self, status_code=status.value, detail=sentence)

        def __str__(self) -> str:
            # In a stream only this reaches the client.
            return str(self.detail)

    return UnavailableError


class _Watch:
    """A frontend's knowledge of its engine."""

    def __init__(self) -> None:
        self.not_ready: str | None = None
        self.refusal: str | None = None
        """Why the engine would refuse a request, by the last look: it is not ready, or something sleeps."""
        self.is_stale = False
        self.is_clear = True
        """Whether requests may pass without another look, unless the engine sleeps."""
        self.is_asleep = False
        """Whether anything slept at the last look."""
        self.is_paused = False
        """Whether its scheduler was paused then."""
        self.changes: set[asyncio.Future[None]] = set()
        """Sleeps and wakes that have not ended."""
        self.cannot_keep: list[str | None] | None = None
        """Why no sleep can keep requests, of each engine. That stays as it is, once it is known."""
        self.processes = Processes()
        self.engines = Engines()
        self._look: asyncio.Future[None] | None = None

    @property
    def may_hibernate(self) -> bool:
        """Whether the engine may be off its GPUs by now. An awake one is not taken off them."""
        return self.is_asleep or self.processes.refusal is not None

    def invalidate(self) -> None:
        """An operation ended in an unknown state."""
        self.is_stale = True
        self.is_clear = False

    def know(self, not_ready: str | None) -> None:
        """Takes an engine's last answer."""
        self.not_ready = not_ready
        self.is_stale = False
        self.is_clear = not_ready is None

    def take(self, statuses: list[dict[str, Any]]) -> None:
        """Takes the last status of all engines of a frontend, with their events."""
        self.know(next((status["not_ready"] for status in statuses if status["not_ready"] is not None), None))
        self.refusal = next((status["refusal"] for status in statuses if status["refusal"] is not None), None)
        self.is_paused = any(status["is_paused"] for status in statuses)
        ranks = [rank for status in statuses for rank in status["ranks"]]
        self.is_asleep = any(rank["sleeping"] for rank in ranks)
        if self.is_asleep:
            self.processes.take(ranks)
            # Not by the wake, whose caller would wait for it.
            self.processes.open_soon()
        try:
            _metrics.record(statuses)
        except Exception:
            _log.exception("metrics of poorwill could not be recorded")

    def look_beside(self, frontend: Any) -> "asyncio.Future[None]":
        """Queries the engine in a task that callers may await. One such query runs at a time."""
        if self._look is None or self._look.done():
            self._look = asyncio.ensure_future(_look_beside_async(frontend, self))
        return self._look

    def look_soon(self, frontend: Any) -> None:
        """The same, not awaited. Does nothing without a running event loop."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        self.look_beside(frontend)

    def wake_result(self, is_awake: bool | None) -> bool | None:
        """The result of a wake, which vLLM reports to the client as its state.

        An engine that is not ready counts as asleep.
        """
        return is_awake if is_awake is None else is_awake and self.not_ready is None

    def refuse(self) -> None:
        """Raises NotReadyError where the engine would refuse a request."""
        if self.refusal is not None:
            raise unavailable(self.refusal)

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Has requests wait until the sleep or wake in the context has ended."""
        change = asyncio.get_running_loop().create_future()
        self.changes.add(change)
        try:
            yield
        finally:
            self.changes.discard(change)
            change.set_result(None)

    async def settled(self) -> None:
        """Waits until no sleep or wake is in progress."""
        while self.changes:
            await asyncio.wait(self.changes)


def watch_of(frontend: Any) -> _Watch | None:
    """What a frontend knows; None if its engine is not poorwill's."""
    watch: _Watch | None = vars(frontend).get(_WATCH)
    if watch is None and is_active(frontend.vllm_config):
        watch = _Watch()
        setattr(frontend, _WATCH, watch)
    return watch


def _refuse_keeping(causes: Sequence[str | None]) -> None:
    """Raises KeepUnsupportedError, by HTTP 501, where an engine has a cause."""
    for cause in causes:
        if cause is not None:
            sentence = KeepUnsupportedError.sentence(cause)
            raise http_error(HTTPStatus.NOT_IMPLEMENTED, sentence, KeepUnsupportedError)


def _original(error: Exception) -> Exception:
    """The error of an engine in another process, which arrives as a bare exception with its message."""
    return PoorwillError(str(error)) if type(error) is Exception else error


def _not_asked(error: Exception) -> None:
    _log.warning("the engine did not say what state it is in (%s); the next request asks again", error)


def _are_only_held(statuses: list[dict[str, Any]]) -> bool:
    """Whether every engine has all it needs and every scheduler is held for missing weights.

    If one has resumed, another frontend is about to resume all.
    """
    return all(status["is_held"] and status["not_ready"] is None for status in statuses)


def _is_watched(watch: _Watch, method: Any) -> bool:
    """Whether a call of the workers may change the engine's memory."""
    return not watch.is_clear or watch.is_asleep or (isinstance(method, str) and method in RESTORING)


# With asyncio


async def _ask_async(
    frontend: Any, utility: str, *args: Any, engines: Sequence[Any] | None = None
) -> list[Any]:
    """Each engine's answer, or each of these; vLLM's own method returns only the first one's."""
    client = frontend.engine_core

    async def answers() -> list[Any]:
        asked = client.core_engines if engines is None else engines
        return list(
            await asyncio.gather(*(client._call_utility_async(utility, *args, engine=each) for each in asked))
        )

    answered: list[Any] = await outlive_async(client, answers())
    return answered


async def look_at_engines(frontend: Any, watch: _Watch, turn: Turn | None = None) -> list[dict[str, Any]]:
    """Takes the status of all engines, which they report behind what they were asked before.

    `turn` is that of the caller. Without one it is waited for if all engines can go on.
    """
    statuses = await _ask_async(frontend, "poorwill_status")
    watch.take(statuses)
    if not _are_only_held(statuses):
        return statuses
    # Weights were written on a path that bypasses the engines' cores.
    try:
        if watch.engines.are_shared(frontend.engine_core) and not (turn is not None and turn.is_held):
            return await watch.engines.carry_out(_go_on_in_turn(frontend, watch))
        await _ask_async(frontend, "poorwill_go_on")
    except BaseException:
        watch.invalidate()
        raise
    return statuses


async def _go_on_in_turn(frontend: Any, watch: _Watch) -> list[dict[str, Any]]:
    """Has all engines go on, unless another frontend has changed them before this one's turn."""
    async with watch.engines.turn(frontend.engine_core):
        refusal = await look_for_processes(frontend, watch)
        if refusal is not None:
            raise unavailable(refusal)
        statuses = await _ask_async(frontend, "poorwill_status")
        watch.take(statuses)
        if _are_only_held(statuses):
            await _ask_async(frontend, "poorwill_go_on")
        return statuses


async def look_for_processes(frontend: Any, watch: _Watch) -> str | None:
    """Why nothing may be passed on to the engines: their processes are off their GPUs."""
    processes = watch.processes
    if not processes.pids:
        try:
            asked = _ask_async(frontend, "poorwill_processes")
            answers = await asyncio.wait_for(asked, _HEALTH_TIMEOUT_SECONDS)
        except Exception as error:
            # It is busy, or it is dead, which the call itself finds out.
            _log.debug("the engine did not say which processes it has (%s)", error)
            return processes.change
        processes.take(rank for ranks in answers for rank in ranks)
    return await processes.look_async()


async def _refuse_hibernating_async(frontend: Any, watch: _Watch) -> None:
    """Raises while the engine hibernates: it would answer once it is back, and its caller wait for that."""
    refusal = await look_for_processes(frontend, watch)
    if refusal is not None:
        raise http_error(HTTPStatus.CONFLICT, refusal)


async def _look_async(frontend: Any, watch: _Watch, turn: Turn | None = None) -> None:
    if watch.processes.refusal is not None:
        # It would answer once it is back.
        watch.invalidate()
        return
    try:
        await look_at_engines(frontend, watch, turn)
    except Exception as error:
        watch.invalidate()
        _not_asked(error)


async def _look_beside_async(frontend: Any, watch: _Watch) -> None:
    if watch.may_hibernate:
        await watch.processes.look_async()
    await _look_async(frontend, watch)


async def _operate_async(
    frontend: Any, watch: _Watch, operation: Awaitable[Any], turn: Turn | None = None
) -> Any:
    try:
        result = await outlive_async(frontend.engine_core, operation)
    except Exception as error:
        await _look_async(frontend, watch, turn)
        raise _original(error) from error
    except BaseException:
        # The client disconnected; the engine continues.
        watch.invalidate()
        raise
    await _look_async(frontend, watch, turn)
    return result


async def _change_async(
    frontend: Any, watch: _Watch, change: Callable[[], Awaitable[Any]], method: str, *args: Any
) -> Any:
    """A sleep or a wake that all engines carry out, or none, also if its caller goes."""
    client = frontend.engine_core
    if not watch.engines.are_shared(client):
        with watch.changing():
            return await _operate_async(frontend, watch, change())
    refuse = functools.partial(_refuse_hibernating_async, frontend, watch)

    async def carry_out() -> Any:
        with watch.changing():
            async with Operation(watch.engines, client, refuse, method, args) as operation:
                return await _operate_async(frontend, watch, change(), operation.turn)

    return await _carry_out(watch, carry_out())


async def _carry_out(watch: _Watch, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of work that all engines do or none, also if its caller goes."""
    try:
        return await watch.engines.carry_out(work)
    except asyncio.CancelledError:
        watch.invalidate()
        raise


async def _in_turn(frontend: Any, watch: _Watch, operation: Callable[[Turn | None], Awaitable[Any]]) -> Any:
    """The result of an operation. If engines are shared it has its turn, and goes on without its caller."""
    if not watch.engines.are_shared(frontend.engine_core):
        return await operation(None)

    async def carry_out() -> Any:
        async with watch.engines.turn(frontend.engine_core) as turn:
            # Meanwhile another server may have taken them off.
            await _refuse_hibernating_async(frontend, watch)
            return await operation(turn)

    return await _carry_out(watch, carry_out())


def _is_alone(frontend: Any) -> bool:
    """Whether all operations on the engine pass through this frontend."""
    return getattr(frontend.engine_core, "client_count", None) == 1


async def _check_health(frontend: Any, watch: _Watch) -> None:
    processes = watch.processes
    # One that never slept is at home.
    known = bool(processes.pids) or _is_alone(frontend)
    refusal = await (processes.look_async() if known else look_for_processes(frontend, watch))
    if refusal is not None:
        if processes.is_lost:
            raise unavailable(refusal)
        # As far as is known, it comes back without a restart.
        return
    if not watch.is_clear or not _is_alone(frontend):
        asked = _ask_async(frontend, "poorwill_not_ready")
        try:
            sentences = await asyncio.wait_for(asked, _HEALTH_TIMEOUT_SECONDS)
        except asyncio.TimeoutError:
            _log.info("the engine is busy: its health is what was known last")
        else:
            not_ready = next((sentence for sentence in sentences if sentence is not None), None)
            if not_ready is not None:
                watch.know(not_ready)
    if not watch.is_clear:
        # The weights may have been written meanwhile.
        await asyncio.wait({watch.look_beside(frontend)}, timeout=_HEALTH_TIMEOUT_SECONDS)
    if watch.not_ready is not None:
        raise unavailable(watch.not_ready)


async def _requested(
    frontend: Any, watch: _Watch, request: Callable[[], AsyncIterator[Any]]
) -> AsyncIterator[Any]:
    """The outputs of a request, if the engine is ready by now."""
    await watch.settled()
    if watch.may_hibernate:
        refusal = await watch.processes.look_async()
        if refusal is not None:
            raise unavailable(refusal)
    if not watch.is_clear or watch.is_asleep:
        # Another one may have woken it.
        await look_at_engines(frontend, watch)
        watch.refuse()
    async with aclosing(request()) as outputs:  # type: ignore[type-var]
        async for output in outputs:
            if _may_be_refused(output):
                # By the core, since another server has put the engine to sleep.
                await look_at_engines(frontend, watch)
                watch.refuse()
                if not isinstance(output.outputs, list):
                    raise unavailable(
                        "the engine slept when the request came, and is awake by now: ask again"
                    )
            yield output


def _may_be_refused(output: Any) -> bool:
    """Whether the engine's core may have refused the request, which before 0.33 it does without a reason."""
    outputs = output.outputs
    if isinstance(outputs, list):
        return any(each.finish_reason == "error" for each in outputs)
    return not outputs.data.numel() and getattr(output, "error", None) is None


def _requesting(stock: Any) -> Callable[..., Any]:
    def request(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = vars(self).get(_WATCH) if _is_alone(self) else watch_of(self)
        is_ready = watch is None or (watch.is_clear and not watch.may_hibernate and not watch.changes)
        if watch is None or (is_ready and _is_alone(self)):
            return stock(self, *args, **kwargs)
        if watch.processes.refusal is not None and _is_alone(self):
            # At once, as below. If the engine is back by now, the next request finds out.
            watch.processes.look_soon()
            raise unavailable(watch.processes.refusal)
        if watch.refusal is not None and not watch.is_stale and not watch.changes and _is_alone(self):
            # At once, so that a client of a stream gets the status and not an error within the stream.
            # If another path has woken it, or written the weights, the next request finds out.
            watch.look_soon(self)
            watch.refuse()
        return _requested(self, watch, functools.partial(stock, self, *args, **kwargs))

    return request


def install_async(module: Any, vllm: _generations.Generation | None = None) -> None:
    """Installs the hooks on the AsyncLLM of `vllm.v1.engine.async_llm`."""
    frontend = module.AsyncLLM
    for name in ("generate", "encode"):
        replace(frontend, name, _requesting)
    for name, make in {
        "sleep": _sleep_async,
        "wake_up": _wake_up_async,
        "resume_generation": _resume_async,
        "collective_rpc": _collective_rpc_async,
        "check_health": _check_health_async,
    }.items():
        replace(frontend, name, make)
    if (vllm or _generations.chosen()).releases_cache:
        replace(frontend, "release_kv_cache_memory", _operation_async)


def _sleep_async(stock: Any) -> Callable[..., Any]:
    async def sleep(self: Any, level: int = 1, mode: str = "abort", keep_tags: Sequence[str] = ()) -> Any:
        watch = watch_of(self)
        if watch is None:
            _keep.refuse_tags(keep_tags)
            return await stock(self, level, mode)
        check_level(level)
        tags = _keep.asked(keep_tags)
        wanted = _keep.Wanted.of(level, _keep.checked(mode), tags)
        await _refuse_hibernating_async(self, watch)
        if wanted is not None:
            several = len(self.engine_core.core_engines) > 1
            if watch.cannot_keep is None and not several:
                watch.cannot_keep = await _ask_async(self, "poorwill_cannot_keep")
            _refuse_keeping([_keep.SEVERAL] if several else watch.cannot_keep or ())
        mode = _keep.encoded(mode, tags)
        change = functools.partial(stock, self, level, mode)
        return await _change_async(self, watch, change, "sleep", level, mode)

    return sleep


def _wake_up_async(stock: Any) -> Callable[..., Any]:
    async def wake_up(self: Any, tags: list[str] | None = None) -> Any:
        watch = watch_of(self)
        if watch is None:
            return await stock(self, tags)
        check_tags(tags)
        await _refuse_hibernating_async(self, watch)
        change = functools.partial(stock, self, tags)
        return watch.wake_result(await _change_async(self, watch, change, "wake_up", tags))

    return wake_up


def _operation_async(stock: Any) -> Callable[..., Any]:
    async def operation(self: Any) -> Any:
        watch = watch_of(self)
        if watch is None:
            return await stock(self)
        await _refuse_hibernating_async(self, watch)
        return await _in_turn(self, watch, lambda turn: _operate_async(self, watch, stock(self), turn))

    return operation


def _resume_async(stock: Any) -> Callable[..., Any]:
    async def resume_generation(self: Any) -> Any:
        watch = watch_of(self)
        if watch is None:
            return await stock(self)
        await _refuse_hibernating_async(self, watch)

        async def resume(turn: Turn | None) -> Any:
            if not (watch.is_clear and _is_alone(self)):
                # Data parallel engines meet in it, so one that refuses would block the others.
                await look_at_engines(self, watch, turn)
                if watch.not_ready is not None:
                    raise NotReadyError(f"resume: {watch.not_ready}")
            return await _operate_async(self, watch, stock(self), turn)

        return await _in_turn(self, watch, resume)

    return resume_generation


def _collective_rpc_async(stock: Any) -> Callable[..., Any]:
    async def collective_rpc(
        self: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        watch = watch_of(self)
        # This frontend does not know what another one has learnt.
        if watch is None or not (_is_watched(watch, method) or not _is_alone(self)):
            return await stock(self, method, timeout, args, kwargs)
        await _refuse_hibernating_async(self, watch)
        return await _operate_async(self, watch, stock(self, method, timeout, args, kwargs))

    return collective_rpc


def _check_health_async(stock: Any) -> Callable[..., Any]:
    async def check_health(self: Any) -> None:
        await stock(self)
        watch = watch_of(self)
        if watch is not None:
            await _check_health(self, watch)

    return check_health


# Without


def _ask(frontend: Any, utility: str) -> Any:
    client = frontend.engine_core
    in_process = getattr(client, "engine_core", None)
    if in_process is not None:
        return getattr(in_process, utility)()
    return outlive(client, functools.partial(client.call_utility, utility))


def _take(frontend: Any, watch: _Watch) -> None:
    statuses = [_ask(frontend, "poorwill_status")]
    if _are_only_held(statuses):
        _ask(frontend, "poorwill_go_on")
    watch.take(statuses)


def _refuse_hibernating(watch: _Watch) -> None:
    refusal = watch.processes.look()
    if refusal is not None:
        raise http_error(HTTPStatus.CONFLICT, refusal)


def _look(frontend: Any, watch: _Watch) -> None:
    try:
        _take(frontend, watch)
    except Exception as error:
        watch.invalidate()
        _not_asked(error)


def _operate(frontend: Any, watch: _Watch, operation: Callable[[], Any]) -> Any:
    _refuse_hibernating(watch)
    try:
        result = outlive(frontend.engine_core, operation)
    except Exception as error:
        _look(frontend, watch)
        original = _original(error)
        if original is error:
            raise
        raise original from error
    except BaseException:
        watch.invalidate()
        raise
    _look(frontend, watch)
    return result


def install_sync(module: Any, vllm: _generations.Generation | None = None) -> None:
    """Installs the hooks on the LLMEngine of `vllm.v1.engine.llm_engine`."""
    frontend = module.LLMEngine
    for name, make in {
        "sleep": _sleep,
        "wake_up": _wake_up,
        "collective_rpc": _collective_rpc,
        "add_request": _add_request,
        "step": _step,
    }.items():
        replace(frontend, name, make)
    if (vllm or _generations.chosen()).releases_cache:
        replace(frontend, "release_kv_cache_memory", _operation)


def install_offline(module: Any) -> None:
    """Installs the hook on the LLM of `vllm.entrypoints.llm`."""
    replace(module.LLM, "sleep", _sleep_offline)


def _sleep_offline(stock: Any) -> Callable[..., Any]:
    def sleep(self: Any, level: int = 1, mode: str = "abort", keep_tags: Sequence[str] = ()) -> Any:
        with _keep.asking(keep_tags):
            return stock(self, level, mode)

    return sleep


def _sleep(stock: Any) -> Callable[..., Any]:
    def sleep(self: Any, level: int = 1, mode: str = "abort", keep_tags: Sequence[str] = ()) -> Any:
        watch = watch_of(self)
        if watch is None:
            _keep.refuse_tags(keep_tags)
            return stock(self, level, mode)
        check_level(level)
        tags = _keep.asked(keep_tags)
        wanted = _keep.Wanted.of(level, _keep.checked(mode), tags)
        _refuse_hibernating(watch)
        if wanted is not None:
            if watch.cannot_keep is None:
                watch.cannot_keep = [_ask(self, "poorwill_cannot_keep")]
            _refuse_keeping(watch.cannot_keep)
        return _operate(self, watch, functools.partial(stock, self, level, _keep.encoded(mode, tags)))

    return sleep


def _wake_up(stock: Any) -> Callable[..., Any]:
    def wake_up(self: Any, tags: list[str] | None = None) -> Any:
        watch = watch_of(self)
        if watch is None:
            return stock(self, tags)
        check_tags(tags)
        return watch.wake_result(_operate(self, watch, functools.partial(stock, self, tags)))

    return wake_up


def _operation(stock: Any) -> Callable[..., Any]:
    def operation(self: Any) -> Any:
        watch = watch_of(self)
        return stock(self) if watch is None else _operate(self, watch, functools.partial(stock, self))

    return operation


def _collective_rpc(stock: Any) -> Callable[..., Any]:
    def collective_rpc(
        self: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        watch = watch_of(self)
        call = functools.partial(stock, self, method, timeout, args, kwargs)
        return call() if watch is None or not _is_watched(watch, method) else _operate(self, watch, call)

    return collective_rpc


def _add_request(stock: Any) -> Callable[..., Any]:
    def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = vars(self).get(_WATCH)
        if watch is not None and watch.is_asleep:
            _refuse_hibernating(watch)
        if watch is not None and (watch.is_asleep or not watch.is_clear):
            _take(self, watch)
            watch.refuse()
        return stock(self, *args, **kwargs)

    return add_request


def _step(stock: Any) -> Callable[..., Any]:
    def step(self: Any) -> Any:
        watch = vars(self).get(_WATCH)
        if watch is None or not watch.is_paused or not self.output_processor.has_unfinished_requests():
            return stock(self)
        return _step_paused(self, watch, functools.partial(stock, self))

    return step


def _step_paused(frontend: Any, watch: _Watch, step: Callable[[], Any]) -> Any:
    """What has come for requests. Raises where they wait for a wake that only the caller could ask for."""
    outputs = getattr(frontend.engine_core, "outputs_queue", None)
    if outputs is None or not outputs.empty():
        came = step()
        if came or outputs is not None:
            return came
    _refuse_hibernating(watch)
    _take(frontend, watch)
    if not watch.is_paused:
        return step()
    watch.refuse()
    raise NotReadyError(f"{sleeps([SCHEDULING])}; the requests wait for that")
