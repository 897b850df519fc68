"""The engines of one frontend sleep and wake together, or not at all, with all their ranks.

A data parallel server has several. First all of them pause, which takes as long as their requests do. Then
their ranks share one decision (`poorwill.Decision`), which the frontend makes. Its path travels with the
call. After a failure all of them go back at once, since some can only do so together.

Frontends of one server take turns. Engines that began two operations in different orders would wait for each
other. One that is being taken off its GPU must not be woken. Where engines pause each by itself, that is
no part of the turn, and a wake or a resumption ends it. Those that meet in each step also pause together, in
their turn.

An engine that one frontend alone commands, as behind an external load balancer, is not concerned.
"""

import asyncio
import contextlib
import errno
import functools
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

from poorwill import Decision, PoorwillError
from poorwill.vllm._liveness import outlive_async
from poorwill.vllm._together import METHODS, open_decision, remove, warn, warn_apart

__all__ = ["Engines", "Operation", "Turn"]

_T = TypeVar("_T")

_current: ContextVar["Operation | None"] = ContextVar("poorwill_operation", default=None)

_HOOK = "_poorwill_operates"

# How often a frontend that waits for its turn looks again.
_TURN_POLL_SECONDS = 0.01

_PAUSES_APART = (
    "this vLLM has engines of a model with experts pause each by itself",
    "vLLM 0.21 and later have them pause together",
)


class Engines:
    """Those of one asynchronous client."""

    def __init__(self) -> None:
        self.firsts: dict[Any, int] = {}
        """The number of each engine's first rank, once all are known to reach each other."""
        self.ranks = 0
        self._first: dict[str, Any] | None = None
        self._under_way: set[asyncio.Task[Any]] = set()

    @staticmethod
    def are_shared(client: Any) -> bool:
        """Whether there are several, or several frontends that command them."""
        return len(getattr(client, "core_engines", ())) > 1 or getattr(client, "client_count", 1) != 1

    async def first(self, client: Any) -> dict[str, Any]:
        """What the first engine says of itself, as far as it stays so."""
        if self._first is None:
            asked = client._call_utility_async(
                "poorwill_part", "describe", [None], engine=client.core_engines[0]
            )
            self._first = await outlive_async(client, asked)
        first: dict[str, Any] = self._first
        return first

    @contextlib.asynccontextmanager
    async def turn(
        self, client: Any, meanwhile: Callable[[], Coroutine[Any, Any, object]] | None = None
    ) -> AsyncIterator["Turn"]:
        """While it lasts, no other frontend has them sleep, wake, resume or hibernate.

        If it has to be waited for, `meanwhile` is called, whose error ends the wait.
        """
        turn = Turn()
        if self.are_shared(client):
            begin = None if meanwhile is None else functools.partial(self._begin, meanwhile)
            await turn.take((await self.first(client))["process"], begin)
        try:
            yield turn
        finally:
            turn.end()

    async def carry_out(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Awaits work that goes on without its caller, so that what it has begun has an end."""
        task = asyncio.ensure_future(work)
        self._keep(task)
        return await asyncio.shield(task)

    def _begin(self, work: Callable[[], Coroutine[Any, Any, object]]) -> asyncio.Task[object]:
        """Begins work whose error concerns only a caller that is still there."""
        task = asyncio.ensure_future(work())
        self._keep(task)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)


class Turn:
    """One at a time on this machine, for each process named. The end of its holder's process ends it."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    @property
    def is_held(self) -> bool:
        return self._socket is not None

    async def take(self, process: str, begin: Callable[[], asyncio.Task[object]] | None = None) -> None:
        """Waits for it. `begin` begins what may end the wait by an error."""
        turn = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        begun = None
        try:
            while not _is_taken(turn, process):
                if begun is None and begin is not None:
                    begun = begin()
                elif begun is not None and begun.done():
                    begun.result()
                await asyncio.sleep(_TURN_POLL_SECONDS)
        except BaseException:
            turn.close()
            raise
        self._socket = turn

    def end(self) -> None:
        """Does nothing where it was not taken."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _is_taken(turn: socket.socket, process: str) -> bool:
    try:
        _bind(turn, f"\0poorwill engines {process}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise PoorwillError(f"waiting for other servers of engine process {process}: {error}") from error
    return True


def _bind(turn: socket.socket, name: str) -> None:
    # In the abstract namespace, which has no files that stay.
    turn.bind(name)


class Operation:
    """One sleep or wake of engines that are shared.

    In its context the client's calls of `sleep` and `wake_up` begin it, and each ends once all of it has. Its
    turn ends with the context.
    """

    def __init__(
        self,
        engines: Engines,
        client: Any,
        refuse_away: Callable[[], Awaitable[None]],
        method: str,
        args: tuple[Any, ...],
    ) -> None:
        """`refuse_away` raises if the engines are off their GPUs."""
        self._engines = engines
        self._client = client
        self._refuse_away = refuse_away
        self._method = method
        self._args = args
        self._name = None if method != "sleep" else uuid.uuid4().hex
        """By which it is taken back."""
        self._asked: list[Any] = []
        self.turn = Turn()
        self._task: asyncio.Task[dict[Any, Any]] | None = None

    async def __aenter__(self) -> "Operation":
        _hook(self._client)
        self._token = _current.set(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        _current.reset(self._token)
        if self._task is not None:
            # It has not ended if an engine died.
            self._task.cancel()
            await asyncio.wait({self._task})
        self.turn.end()

    async def answer(self, engine: Any) -> Any:
        """The value of one engine. Raises an error of all that could not."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._carry_out())
        values = await self._task
        # None for one that has come meanwhile.
        return values.get(engine)

    async def _carry_out(self) -> dict[Any, Any]:
        first = await self._engines.first(self._client)
        meets = first["meets"]
        if meets or self._method != "sleep":
            await self._take_turn(first)
        self._asked = list(self._client.core_engines)
        if self._method != "sleep":
            return await self._decide(self._args)
        level, mode = self._args
        before = await self._ask("describe", level)
        self._raise({engine: answer["refusal"] for engine, answer in before.items()})
        # If one sleeps, all have paused, and a step of the others would wait for it.
        is_paused = meets and any(answer["is_asleep"] for answer in before.values())
        try:
            paused = await self._ask("pause", self._name, level, None if is_paused else mode)
            if level == 0:
                return paused
            if not meets:
                await self._take_turn(first)
            return await self._decide((level,))
        except Exception as error:
            states = await self._ask("take_back", self._name, len(self._asked), are_errors_answers=True)
            said = self._said({engine: state for engine, state in states.items() if state is not None})
            if not said or type(error) is not PoorwillError:
                raise
            raise PoorwillError(f"{error}; {said}") from error

    async def _take_turn(self, first: dict[str, Any]) -> None:
        await self.turn.take(first["process"])
        # Meanwhile another frontend may have taken them off.
        await self._refuse_away()

    async def _decide(self, args: tuple[Any, ...]) -> dict[Any, Any]:
        """The values of all engines, whose ranks have done it. If one could not, none has."""
        if self._asked != list(self._client.core_engines):
            raise PoorwillError(f"{self._method}: engines came or went meanwhile; call it again")
        decision = await self._decision()
        parts = (self._part(engine, args, decision) for engine in self._asked)
        answers = self._checked(await asyncio.gather(*parts, return_exceptions=True))
        if decision is not None and all(
            not isinstance(answer, Exception) and answer["is_read"] for answer in answers.values()
        ):
            await _in_thread(remove, decision)
        errors, own = {}, {}
        for engine, answer in answers.items():
            if isinstance(answer, Exception):
                errors[engine] = own[engine] = str(answer)
            elif answer["error"] is not None:
                errors[engine] = answer["error"]
                if not answer["is_undone"]:
                    own[engine] = answer["error"]
        # Those that are as they were for the sake of another have no reason of their own.
        self._raise(own or errors)
        return {engine: answer["value"] for engine, answer in answers.items()}

    async def _part(self, engine: Any, args: tuple[Any, ...], decision: Decision | None) -> Any:
        group = None
        if decision is not None:
            group = [str(decision.path), self._engines.firsts[engine], self._engines.ranks]
        part = [self._name, list(args), len(self._asked), group]
        try:
            return await self._client._call_utility_async("poorwill_part", "act", part, engine=engine)
        except BaseException:
            # What has not answered reads the verdict when it goes on.
            with contextlib.suppress(PoorwillError):
                if decision is not None:
                    await _in_thread(decision.decide, "undo")
            raise

    async def _decision(self) -> Decision | None:
        """None where each engine acts by itself."""
        if len(self._asked) < 2:
            return None
        opening = asyncio.ensure_future(asyncio.to_thread(open_decision, "engine"))
        reach_it = False
        try:
            decision = await _ended(opening)
            reach_it = decision is not None and (
                list(self._engines.firsts) == self._asked or await self._meet(decision)
            )
        finally:
            # Also if this was cancelled while it was opened.
            if not reach_it and (unused := opening.result()) is not None:
                await _in_thread(remove, unused)
        return decision if reach_it else None

    async def _meet(self, decision: Decision) -> bool:
        """Asks the engines for their ranks; whether all reach the decision."""
        reached = list((await self._ask("reached", str(decision.path))).values())
        if not all(reached):
            warn("engine", *_PAUSES_APART)
            return False
        if not all(all(each) for each in reached):
            warn_apart("engine", [all(each) for each in reached], str(decision.path))
            return False
        firsts, self._engines.ranks = {}, 0
        for engine, each in zip(self._asked, reached, strict=True):
            firsts[engine] = self._engines.ranks
            self._engines.ranks += len(each)
        self._engines.firsts = firsts
        return True

    async def _ask(self, act: str, *args: Any, are_errors_answers: bool = False) -> dict[Any, Any]:
        """Each engine's answer, once all have answered. Raises an error of all that failed."""
        ask = self._client._call_utility_async
        asked = (ask("poorwill_part", act, list(args), engine=engine) for engine in self._asked)
        answers = self._checked(await asyncio.gather(*asked, return_exceptions=True))
        errors = {engine: str(answer) for engine, answer in answers.items() if isinstance(answer, Exception)}
        if not are_errors_answers:
            self._raise(errors)
        return {**answers, **errors}

    def _checked(self, answers: list[Any]) -> dict[Any, Any]:
        """Raises where an engine has died, which is vLLM's own error. One that failed said so in words."""
        for answer in answers:
            if isinstance(answer, BaseException) and type(answer) is not Exception:
                raise answer
        return dict(zip(self._asked, answers, strict=True))

    def _raise(self, errors: Mapping[Any, str | None]) -> None:
        failed = {engine: words for engine, words in errors.items() if words is not None}
        if not failed:
            return
        said = self._said(failed)
        if len(self._asked) > 1:
            said = f"{self._method}: {len(failed)} of {len(self._asked)} engines failed: {said}"
        raise PoorwillError(said)

    def _said(self, words: dict[Any, str]) -> str:
        """What engines say, once if all say the same."""
        if len(words) == len(self._asked) and len(set(words.values())) == 1:
            return next(iter(words.values()))
        return "; ".join(f"engine {self._asked.index(engine)}: {each}" for engine, each in words.items())


async def _in_thread(call: Callable[..., _T], *args: Any) -> _T:
    """The result of a call that reads or writes files."""
    return await _ended(asyncio.ensure_future(asyncio.to_thread(call, *args)))


async def _ended(task: asyncio.Task[_T]) -> _T:
    """Its result. If the caller is cancelled, it has an end first."""
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            # There may be several, by the end of an engine and of the operation.
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()


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
        return await operation.answer(engine)

    setattr(call, _HOOK, True)
    client._call_utility_async = call
