"""What the ranks of an engine need to sleep and wake together, whichever engine it is."""

import os
from collections.abc import Mapping
from typing import TypedDict

from poorwill._native import Decision, PoorwillError

RANKS_TIMEOUT = "POORWILL_RANKS_TIMEOUT"
RANKS_FOLDER = "POORWILL_RANKS_FOLDER"
TIMEOUT_S = 300.0
"""How long a rank that is ready waits for the others, where nothing else is said."""


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


def joined(path: str, rank: int, ranks: int) -> Decision | None:
    """The decision with this path, for one of its ranks. None where this rank does not reach it."""
    try:
        return Decision.join(path, rank, ranks)
    except PoorwillError:
        return None


def folder(environ: Mapping[str, str], name: str) -> str | None:
    """A variable with a folder."""
    text = environ.get(name, "").strip()
    if text and not os.path.isdir(text):
        raise ValueError(f"{name}={text!r} is no folder here")
    return text or None


def seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    """A variable with a number of seconds."""
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    # Refuses NaN, too.
    if not 0 <= number <= 3600:
        raise ValueError(f"{name}={text!r} is no number of seconds from 0 to 3600")
    return number
