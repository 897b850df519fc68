"""The ranks of one engine sleep and wake together, or not at all.

Each rank does what can fail, and waits for the others before it commits (`poorwill.Decision`). The last rank
that is ready commits for all. So one call of vLLM's executor is enough. Whichever process ends, no rank is
left half-way: it goes back when its time is up.

Ranks of several engines do it together where their frontend made the decision (`_engines`, `Part`).
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from poorwill import Decision, PoorwillError, UndoneError
from poorwill._ranks import open_decision, remove, warn, warn_apart
from poorwill.vllm import _keep
from poorwill.vllm._processes import here

__all__ = ["METHODS", "RESUMED", "Part", "Ranks", "open_decision", "remove", "warn", "warn_apart"]

RESUMED = "sleep: given up, because the engine was resumed while its requests were finishing"

METHODS = frozenset({"sleep", "wake_up"})
"""Methods of the worker that all ranks carry out, or none."""


@dataclass(frozen=True)
class Group:
    """The ranks of one engine among those of several, in one sleep or wake."""

    path: str
    """That of the decision."""
    first: int
    """The number of this engine's first rank."""
    ranks: int
    """How many there are in all engines."""

    def undo(self) -> None:
        """Proposes to undo, since this engine cannot take part."""
        with contextlib.suppress(PoorwillError):
            Decision.join(self.path, self.first, self.ranks).decide("undo")

    def note_staged(self, count: int) -> None:
        """None of this engine's ranks has anything to do, so none can fail."""
        for rank in range(self.first, self.first + count):
            Decision.join(self.path, rank, self.ranks).note_staged()


class Part:
    """What an engine does in a sleep or wake of several engines, or of one that several frontends command.

    `sleep` is the name of one sleep, which its frontend has chosen.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._before: dict[str, Any] = {}
        """How it was before each sleep that may have to be taken back."""
        self._wanted: dict[str, _keep.Wanted | None] = {}
        """What each of them is to keep."""

    def describe(self, level: int | None) -> dict[str, Any]:
        """What a frontend has to know, and why this engine would refuse a sleep at this level."""
        refusal = None
        try:
            if level is not None:
                self._engine.has_to_sleep(level)
        except (PoorwillError, ValueError) as error:
            refusal = str(error)
        return {
            "process": f"{here()} {os.getpid()}",
            "meets": not self._engine.goes_on(),
            "is_asleep": bool(self._engine.asleep),
            "refusal": refusal,
        }

    def reached(self, path: str) -> list[bool]:
        """Which ranks read a decision, by its path. Empty if they cannot wait for those of other engines."""
        if not (self._engine.goes_on() or self._engine.vllm.pauses_together):
            # A step of another engine would wait for one that waits here.
            return []
        return [bool(is_reached) for is_reached in self._engine.ranks.reached(path)]

    def pause(self, sleep: str, level: int, mode: str | None) -> Any:
        """Pauses and drains as for a sleep, which may take long; not where `mode` is None."""
        engine = self._engine
        mode, tags = _keep.decoded(mode)
        wanted = _keep.Wanted.of(level, mode, tags)
        if not engine.has_to_sleep(level):
            return None
        engine.keep_with(wanted)
        before = engine.state(level)
        for other in self._before.values():
            if other.level == 0:
                # A pause of the user's own.
                continue
            # It has paused for that one.
            before.is_paused = before.is_paused and other.is_paused
        self._before[sleep], self._wanted[sleep] = before, wanted
        if mode is None:
            return None
        with engine.keeper.pausing():
            return engine.core.pause_scheduler(mode, level > 0)

    def act(
        self, sleep: str | None, args: Sequence[Any], engines: int, group: Sequence[Any] | None
    ) -> dict[str, Any]:
        """Wakes, or sleeps once it has paused. An error is an answer, too."""
        engine, ranks = self._engine, self._engine.ranks
        joined = None if group is None else Group(*group)
        ranks.group, ranks.is_late, engine.is_grouped = joined, False, engines > 1
        value, error, cause = None, None, None
        try:
            if sleep is None:
                value = engine.core.wake_up(*args)
            else:
                self._sleep(sleep, *args)
        except Exception as failure:
            error, cause = str(failure) or type(failure).__name__, failure.__cause__ or failure
        is_unasked, ranks.group, engine.is_grouped = ranks.group is not None, None, False
        if joined is not None and error is not None:
            joined.undo()
        elif joined is not None and is_unasked:
            joined.note_staged(ranks.count)
        is_undone = isinstance(cause, UndoneError)
        return {"value": value, "error": error, "is_undone": is_undone, "is_read": not ranks.is_late}

    def _sleep(self, sleep: str, level: int) -> None:
        engine, before, wanted = self._engine, self._before.get(sleep), self._wanted.get(sleep)
        self.forget()
        if engine.has_to_sleep(level):
            if before is None:
                # Another pause has ended it since.
                raise PoorwillError(RESUMED)
            engine.before = self._before[sleep] = before
            # Another frontend may have paused it since, for a sleep of its own.
            engine.keeper.set(wanted)
            engine.executor.sleep(level)
            engine.is_down(level)

    def take_back(self, sleep: str, engines: int) -> str | None:
        """After a sleep that some engine could not do: is as before. Returns the state, if that is new."""
        before = self._before.pop(sleep, None)
        return None if before is None else self._engine.restored(before, is_grouped=engines > 1)

    def forget(self) -> None:
        """No sleep is taken back behind a wake or a resumption."""
        self._before.clear()
        self._wanted.clear()


class Ranks:
    """The ranks of an engine, as its core calls them."""

    def __init__(self, count: int, reached: Callable[[str], list[bool]]) -> None:
        """`reached` asks the ranks of this core which of them read a decision, by its path."""
        self.count = count
        self.group: Group | None = None
        """Other engines' ranks that take part in the next sleep or wake, which takes it."""
        self.is_late = False
        """Whether some rank of theirs here has not answered, and may still look for the verdict."""
        self.reached = reached
        self._is_known = False

    @contextlib.contextmanager
    def deciding(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
        """What to call the workers by: a method and its arguments."""
        group = None
        if method in METHODS:
            group, self.group = self.group, None
        if group is not None:
            self.is_late = True
            with self._undoing(group):
                yield _together(method, args, kwargs, group)
            self.is_late = False
            return
        decision = self._decision() if method in METHODS and self.count > 1 else None
        if decision is None:
            yield method, args, kwargs
            return
        group = Group(str(decision.path), 0, self.count)
        with self._undoing(group):
            yield _together(method, args, kwargs, group)
        remove(decision)

    @staticmethod
    @contextlib.contextmanager
    def _undoing(group: Group) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # Some rank has not answered, and reads the verdict when it goes on.
            group.undo()
            raise

    def _decision(self) -> Decision | None:
        """None where each rank acts by itself."""
        decision = open_decision("rank")
        if decision is None or self._is_known:
            return decision
        reached = self.reached(str(decision.path))
        # With an external launcher each rank has a core of its own.
        self.count = len(reached)
        self._is_known = all(reached)
        if self._is_known and self.count > 1:
            return decision
        remove(decision)
        if not self._is_known:
            warn_apart("rank", reached, str(decision.path))
        return None


def _together(method: str, args: Sequence[Any], kwargs: dict[str, Any], group: Group) -> Any:
    return "poorwill_together", (method, args, kwargs, group.path, group.first, group.ranks), {}
