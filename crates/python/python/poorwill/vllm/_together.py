"""The ranks of one engine sleep and wake together, or not at all.

Each rank does what can fail, and waits for the others before it commits (`poorwill.Decision`). The last rank
that is ready commits for all. So one call of vLLM's executor is enough. Whichever process ends, no rank is
left half-way: it goes back when its time is up.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from poorwill import Decision, PoorwillError
from poorwill.vllm import _environment

__all__ = ["METHODS", "Ranks"]

METHODS = frozenset({"sleep", "wake_up"})
"""Methods of the worker that all ranks carry out, or none."""

_log = logging.getLogger(__name__)


class Ranks:
    """The ranks of an engine, as its core calls them."""

    def __init__(self, count: int, reached: Callable[[str], list[bool]]) -> None:
        """`reached` asks the ranks of this core which of them read a decision, by its path."""
        self._count = count
        self._reached = reached
        self._is_known = False
        self._has_warned = False

    @contextlib.contextmanager
    def deciding(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
        """What to call the workers by: a method and its arguments."""
        decision = self._decision() if method in METHODS and self._count > 1 else None
        if decision is None:
            yield method, args, kwargs
            return
        try:
            yield "poorwill_together", (method, args, kwargs, str(decision.path), self._count), {}
        except BaseException:
            # Some rank has not answered, and reads the verdict when it goes on.
            with contextlib.suppress(PoorwillError):
                decision.decide("undo")
            raise
        _remove(decision)

    def _decision(self) -> Decision | None:
        """None where each rank acts by itself."""
        try:
            folder = _environment.read().ranks_folder
            decision = Decision.create(folder)
        except (PoorwillError, ValueError) as error:
            self._warn(str(error))
            return None
        if self._is_known:
            return decision
        reached = self._reached(str(decision.path))
        # With an external launcher each rank has a core of its own.
        self._count = len(reached)
        self._is_known = all(reached)
        if self._is_known and self._count > 1:
            return decision
        _remove(decision)
        if not self._is_known:
            apart = ", ".join(str(rank) for rank, is_reached in enumerate(reached) if not is_reached)
            self._warn(f"rank {apart} does not reach {decision.path}")
        return None

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "one rank may sleep while another cannot: %s; name a folder that all of them share in %s, "
                "and they sleep together or not at all",
                reason,
                _environment.RANKS_FOLDER,
            )


def _remove(decision: Decision) -> None:
    with contextlib.suppress(PoorwillError):
        # What stays is removed by a later one.
        decision.remove()
