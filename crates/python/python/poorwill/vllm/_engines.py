"""The engines of one frontend sleep and wake together, or not at all, with all their ranks.

A data parallel server has several. Their ranks share one decision (`poorwill.Decision`), which the frontend
makes. Its path travels with the call. Frontends of one server take turns by a lock file: engines that began
two operations in different orders would wait for each other.

A frontend that commands one engine alone, as behind an external load balancer, is not concerned.
"""

import asyncio
import contextlib
import fcntl
import functools
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

from poorwill import Decision, PoorwillError
from poorwill.vllm._together import METHODS, open_decision, remove, warn_apart

__all__ = ["Engines", "Operation"]

_current: ContextVar["Operation | None"] = ContextVar("poorwill_operation", default=None)

_HOOK = "_poorwill_operates"

Ask = Callable[[str, Any], Awaitable[list[Any]]]
"""Asks each engine, by the name of a method and its argument."""


class Engines:
    """Those of one asynchronous client."""

    def __init__(self) -> None:
        self._firsts: dict[Any, int] = {}
        """The number of each engine's first rank, once all are known to reach each other."""
        self._ranks = 0
        self._lock_name = ""

    async def operation(self, client: Any, ask: Ask) -> "Operation | None":
        """The next sleep or wake of all engines. None where each acts by itself."""
        engines = list(getattr(client, "core_engines", ()))
        if len(engines) < 2:
            return None
        decision = await asyncio.to_thread(open_decision, "engine")
        if decision is None:
            return None
        if list(self._firsts) != engines and not await self._meet(engines, decision, ask):
            remove(decision)
            return None
        _hook(client)
        lock = await asyncio.to_thread(_locked, decision.path.parent / self._lock_name)
        return Operation(decision, self._firsts, self._ranks, lock)

    async def _meet(self, engines: list[Any], decision: Decision, ask: Ask) -> bool:
        """Asks for their ranks; whether all reach the decision."""
        self._firsts = {}
        answers = await ask("poorwill_reached", str(decision.path))
        reached = [answer["ranks"] for answer in answers]
        if not all(each and all(each) for each in reached):
            warn_apart("engine", [bool(each) and all(each) for each in reached], str(decision.path))
            return False
        first = 0
        for engine, each in zip(engines, reached, strict=True):
            self._firsts[engine] = first
            first += len(each)
        self._ranks = first
        self._lock_name = f"engines-{answers[0]['process']}.lock"
        return True


class Operation:
    """One sleep or wake of several engines.

    In its context the client's calls of `sleep` and `wake_up` are parts of it. Each ends once all have.
    """

    def __init__(self, decision: Decision, firsts: dict[Any, int], ranks: int, lock: IO[bytes]) -> None:
        self._lock = lock
        self._decision = decision
        self._firsts = firsts
        self._ranks = ranks
        self._answers: dict[Any, dict[str, Any]] = {}
        self._all_answered = asyncio.Event()

    def __enter__(self) -> "Operation":
        self._token = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)

    @property
    def done(self) -> list[Any]:
        """The engines that have done it; some have not if one failed behind the commit."""
        return [engine for engine, answer in self._answers.items() if answer["error"] is None]

    def end(self) -> None:
        """Its caller goes on. The decision stays until all engines have answered."""
        self._lock.close()
        if len(self._answers) == len(self._firsts):
            remove(self._decision)

    async def call(self, stock: Callable[..., Awaitable[Any]], method: str, args: Any, engine: Any) -> Any:
        """One engine's part. Raises an error of all engines that could not, once all have answered."""
        group = (str(self._decision.path), self._firsts[engine], self._ranks)
        try:
            answer = await stock("poorwill_in_group", method, list(args), *group, engine=engine)
        except Exception as error:
            with contextlib.suppress(PoorwillError):
                self._decision.decide("undo")
            answer = {"value": None, "error": str(error), "is_undone": False}
        self._answers[engine] = answer
        if len(self._answers) == len(self._firsts):
            self._all_answered.set()
        await self._all_answered.wait()
        self._raise(method)
        return answer["value"]

    def _raise(self, method: str) -> None:
        answers = [self._answers[engine] for engine in self._firsts]
        errors = {number: answer for number, answer in enumerate(answers) if answer["error"] is not None}
        # Those that are as they were for the sake of another have no reason of their own.
        own = {number: answer for number, answer in errors.items() if not answer["is_undone"]} or errors
        if own:
            words = "; ".join(f"engine {number}: {answer['error']}" for number, answer in own.items())
            raise PoorwillError(f"{method}: {len(own)} of {len(answers)} engines failed: {words}")


def _locked(path: Path) -> IO[bytes]:
    """A lock that is free again once the file is closed, also by the end of this process."""
    file = path.open("ab")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def _hook(client: Any) -> None:
    """Has the client's calls of its engines look for an operation."""
    stock = client._call_utility_async
    if hasattr(stock, _HOOK):
        return

    @functools.wraps(stock)
    async def call(method: str, *args: Any, engine: Any) -> Any:
        operation = _current.get()
        if operation is None or method not in METHODS:
            return await stock(method, *args, engine=engine)
        return await operation.call(stock, method, args, engine)

    setattr(call, _HOOK, True)
    client._call_utility_async = call
