"""What ranks need to sleep and wake together, whichever engine they are of: settings, and their decisions.

A warning says once where they cannot, and then each acts by itself.
"""

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from poorwill._environment import folder, seconds
from poorwill._native import Decision, PoorwillError

RANKS_TIMEOUT = "POORWILL_RANKS_TIMEOUT"
RANKS_FOLDER = "POORWILL_RANKS_FOLDER"
TIMEOUT_S = 300.0
"""How long a rank that is ready waits for the others, where nothing else is said."""

_SHARE = f"name a folder that all of them share in {RANKS_FOLDER}, and they sleep together or not at all"

logger = logging.getLogger("poorwill.ranks")

_was_warned: set[str] = set()


class Together(TypedDict):
    """What a sleep or wake is given that several ranks carry out, or none."""

    decision: Decision
    undo_after: float


def timeout_s() -> float:
    """How long a rank that is ready waits for the others. Raises ValueError for a bad value."""
    return seconds(os.environ, RANKS_TIMEOUT, TIMEOUT_S)


def shared_folder() -> str | None:
    """The folder that all ranks share, if one is named. Raises ValueError for a bad value."""
    return folder(os.environ, RANKS_FOLDER)


def open_decision(what: str) -> Decision | None:
    """A new decision for ranks or engines. None where there is no folder for it, after a warning."""
    try:
        return Decision.create(shared_folder())
    except (PoorwillError, ValueError) as error:
        warn(what, str(error), _SHARE)
        return None


def remove(decision: Decision) -> None:
    """Removes a decision that all have read."""
    with contextlib.suppress(PoorwillError):
        # What stays is removed by a later one.
        decision.remove()


def warn_apart(what: str, reached: Sequence[bool], path: str) -> None:
    """Warns once that not all reach a decision."""
    apart = ", ".join(str(number) for number, is_reached in enumerate(reached) if not is_reached)
    warn(what, f"{what} {apart} does not reach {Path(path).parent}", _SHARE)


def warn(what: str, reason: str, remedy: str) -> None:
    """Warns once that ranks or engines act each by itself."""
    if what not in _was_warned:
        _was_warned.add(what)
        logger.warning("one %s may sleep while another cannot: %s; %s", what, reason, remedy)


def reaches(path: str) -> bool:
    """Whether this process reads a decision with this path."""
    return joined(path, 0, 1) is not None


def joined(path: str, rank: int, ranks: int) -> Decision | None:
    """The decision with this path, for one of its ranks. None where this rank does not reach it."""
    try:
        return Decision.join(path, rank, ranks)
    except PoorwillError:
        return None
