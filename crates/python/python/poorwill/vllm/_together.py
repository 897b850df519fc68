"""The ranks of one engine sleep and wake together, or not at all.

Each rank does what can fail, and waits for the others before it commits (`poorwill.Decision`). The last rank
that is ready commits for all. So one call of vLLM's executor is enough. Whichever process ends, no rank is
left half-way: it goes back when its time is up.

Ranks of several engines do it together where their frontend made the decision (`_engines`, `Group`).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from poorwill import Decision, PoorwillError
from poorwill._ranks import open_decision, remove, warn_apart

__all__ = ["METHODS", "Group", "Ranks", "open_decision", "remove", "warn_apart"]

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


class Ranks:
    """The ranks of an engine, as its core calls them."""

    def __init__(self, count: int, reached: Callable[[str], list[bool]]) -> None:
        """`reached` asks the ranks of this core which of them read a decision, by its path."""
        self.count = count
        self.group: Group | None = None
        """Other engines' ranks that take part in the next sleep or wake, which takes it."""
        self._reached = reached
        self._is_known = False

    @contextlib.contextmanager
    def deciding(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
        """What to call the workers by: a method and its arguments."""
        group = None
        if method in METHODS:
            group, self.group = self.group, None
        if group is not None:
            with self._undoing(group):
                yield _together(method, args, kwargs, group)
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
        reached = self._reached(str(decision.path))
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
