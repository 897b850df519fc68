"""Taking a server's engines off their GPUs, as a step beyond sleep: routes beside vLLM's `/sleep`.

No process can take itself off, so the server's process does it for its workers. All of them are one set.
"""

import asyncio
import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from poorwill import HibernateError, PoorwillError
from poorwill.vllm import _frontend
from poorwill.vllm._driver import put_back, take_off
from poorwill.vllm._engine import TAGS

__all__ = ["install_routes"]

_PATH = "/hibernate"

# The others are about the state of things, which a caller may change.
_FAILURES = ("no_such_process", "no_answer", "refused", "failed", "journal")

_log = logging.getLogger(__name__)


def install_routes(module: Any) -> None:
    """Adds our routes to vLLM's router of `/sleep`, so that they are served where that is."""
    fastapi, responses = map(importlib.import_module, ("fastapi", "fastapi.responses"))
    router = module.router
    if any(route.path == _PATH for route in router.routes):
        return

    def add(path: str, method: str, answer: Callable[[Any, Mapping[str, str]], Any]) -> None:
        async def route(raw_request: Any) -> Any:
            frontend = module.engine_client(raw_request)
            # It goes on if its caller disconnects, so that what it has begun has an end.
            answered = asyncio.ensure_future(answer(frontend, raw_request.query_params))
            return responses.JSONResponse(content=await asyncio.shield(answered))

        # FastAPI looks at it.
        route.__annotations__ = {"raw_request": fastapi.Request}
        router.add_api_route(path, route, methods=[method], name=f"poorwill{path.replace('/', '_')}")

    add(_PATH, "POST", _hibernate)
    add(f"{_PATH}/resume", "POST", _resume)
    add("/is_hibernating", "GET", _is_hibernating)


async def _hibernate(frontend: Any, given: Mapping[str, str]) -> dict[str, Any]:
    """Takes the engine off its GPUs. It must sleep, and stays asleep."""
    limits = _limits(given)
    watch = _watch_of(frontend)
    processes = watch.processes

    async def look(turn: Any = None) -> list[dict[str, Any]]:
        statuses = await _frontend.look_at_engines(frontend, watch, turn)
        if problem := _problem(statuses, processes.elsewhere):
            raise _frontend.http_error(HTTPStatus.CONFLICT, f"hibernate: {problem}")
        return statuses

    async with processes.changing:
        if await _is_done(frontend, watch):
            return _answer("hibernating", processes.pids, {})
        # Another server may wait for requests in its turn, or take off the engine, which then says nothing.
        async with watch.engines.turn(frontend.engine_core, meanwhile=look) as turn:
            # Meanwhile another server may have taken it off.
            if await _is_done(frontend, watch):
                return _answer("hibernating", processes.pids, {})
            processes.change = "the engine is being taken off its GPUs: ask again once that has ended"
            try:
                # The engine answers behind what is under way; nothing else passes from here on.
                limits["suspended_communicators"] = _suspended(await look(turn))
                report = await _changed(functools.partial(take_off, processes.pids, **limits))
            finally:
                processes.change = None
                await processes.look_async()
    _log.info("the engine hibernates: %s", report)
    return _answer("hibernating", processes.pids, report)


async def _is_done(frontend: Any, watch: Any) -> bool:
    """Whether all of the engine is off its GPUs. Raises if that is unknown, or a part of it is."""
    refusal = await _frontend.look_for_processes(frontend, watch)
    if refusal is not None and not await _stands(watch.processes, "checkpointed"):
        raise _frontend.http_error(HTTPStatus.CONFLICT, f"hibernate: {refusal}")
    return refusal is not None


async def _resume(frontend: Any, _: Mapping[str, str]) -> dict[str, Any]:
    """Puts the engine back on its GPUs, asleep."""
    watch = _watch_of(frontend)
    processes = watch.processes
    async with processes.changing:
        await _frontend.look_for_processes(frontend, watch)
        states = await processes.states()
        if states is None:
            raise _frontend.http_error(HTTPStatus.CONFLICT, f"resume: {processes.refusal}")
        away = [pid for pid, state in states.items() if state != "running"]
        if not away:
            return _answer("resumed", (), {})
        processes.change = "the engine is being put back on its GPUs: ask again once that has ended"
        try:
            report = await _changed(functools.partial(put_back, away))
        finally:
            processes.change = None
            await processes.look_async()
    _log.info("the engine is back on its GPUs: %s", report)
    return _answer("resumed", away, report)


async def _is_hibernating(frontend: Any, _: Mapping[str, str]) -> dict[str, Any]:
    watch = _watch_of(frontend)
    await _frontend.look_for_processes(frontend, watch)
    states = await watch.processes.states() or {}
    return {
        "is_hibernating": watch.processes.refusal is not None,
        "processes": [{"pid": pid, "state": states.get(pid)} for pid in watch.processes.pids],
    }


def _watch_of(frontend: Any) -> Any:
    watch = None if frontend is None else _frontend.watch_of(frontend)
    if watch is None:
        # As without the plugin.
        raise _frontend.http_error(HTTPStatus.NOT_FOUND, "Not Found")
    return watch


def _problem(statuses: list[dict[str, Any]], elsewhere: tuple[int, ...]) -> str | None:
    """Why engines cannot be taken off their GPUs."""
    ranks = [rank for status in statuses for rank in status["ranks"]]
    awake = [rank["rank"] for rank in ranks if not set(TAGS) <= set(rank["sleeping"])]
    if awake:
        return (
            f"the engine is awake on {_listed(awake)}: put it to sleep first, by POST /sleep?level=1, and "
            "all of it"
        )
    for rank in ranks:
        if rank["cannot_hibernate"] is not None:
            return f"{_listed([rank['rank']])}: {rank['cannot_hibernate']}"
        if rank["shared"]:
            names = ", ".join(str(shared["name"]) for shared in rank["shared"])
            return f"other processes map memory of {_listed([rank['rank']])} ({names}), which would be lost"
    if elsewhere:
        return (
            f"{_listed(elsewhere)} runs on another machine or in another container, and a process can only "
            "be taken off from beside it"
        )
    return None


def _suspended(statuses: list[dict[str, Any]]) -> int:
    """How many communicators every rank has suspended."""
    return min((len(rank["communicators"]) for status in statuses for rank in status["ranks"]), default=0)


async def _stands(processes: Any, state: str) -> bool:
    """Whether all processes are in this state."""
    states = await processes.states()
    return states is not None and [states.get(pid) for pid in processes.pids] == [state] * len(processes.pids)


async def _changed(call: Callable[[], Any]) -> Any:
    """The report of a call in a thread."""
    try:
        return await asyncio.to_thread(call)
    except HibernateError as error:
        failed = error.kind in _FAILURES
        status = HTTPStatus.INTERNAL_SERVER_ERROR if failed else HTTPStatus.CONFLICT
        raise _frontend.http_error(status, str(error)) from error
    except ValueError as error:
        raise _frontend.http_error(HTTPStatus.BAD_REQUEST, str(error)) from error
    except PoorwillError as error:
        raise _frontend.http_error(HTTPStatus.INTERNAL_SERVER_ERROR, str(error)) from error


def _limits(given: Mapping[str, str]) -> dict[str, Any]:
    """The library's, from a request's parameters. It reads sizes by itself."""
    limits: dict[str, Any] = {name: given[name] for name in ("wait_max", "host_bytes_max") if name in given}
    try:
        return {**limits, "wait_max": float(limits["wait_max"])} if "wait_max" in limits else limits
    except ValueError:
        said = f"hibernate: wait_max={limits['wait_max']!r} is no number of seconds"
        raise _frontend.http_error(HTTPStatus.BAD_REQUEST, said) from None


def _answer(status: str, pids: Any, report: dict[str, Any]) -> dict[str, Any]:
    return {"status": status, "pids": list(pids), **report}


def _listed(ranks: Any) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
