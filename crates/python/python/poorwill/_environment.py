"""Variables that several parts read, and how variables are read. A bad value is a ValueError in words."""

import os
from collections.abc import Mapping

SLEEP_MODE = "POORWILL_SLEEP_MODE"
"""Whether engines sleep with Poorwill."""
WAKE_TIMEOUT = "POORWILL_WAKE_TIMEOUT"
"""How long a wake waits for memory that another process is about to release."""
WAKE_TIMEOUT_S = 2.0
LEND = "POORWILL_LEND"
"""Whether memory that sleeps is lent instead of released."""
BROKER = "POORWILL_BROKER"
"""The socket of the broker at which it is."""
PEER_COPIES = "POORWILL_PEER_COPIES"
"""Whether copies of what sleeps are kept in the idle memory of other GPUs."""


def wants_sleep_mode(environ: Mapping[str, str] | None = None) -> bool:
    """Whether an engine is to sleep with Poorwill. Being installed is not enough."""
    return switch(os.environ if environ is None else environ, SLEEP_MODE, False)


def wake_timeout_s(environ: Mapping[str, str] | None = None) -> float:
    """How long a wake waits for memory; 0 for not at all."""
    return seconds(os.environ if environ is None else environ, WAKE_TIMEOUT, WAKE_TIMEOUT_S)


def lending(environ: Mapping[str, str] | None = None) -> bool | str | None:
    """What `poorwill.arena` is given as `lend`."""
    given = os.environ if environ is None else environ
    return (path(given, BROKER) or True) if switch(given, LEND, False) else None


def peer_copies(environ: Mapping[str, str] | None = None) -> bool:
    """What `poorwill.arena` is given as `peer_copies`."""
    given = os.environ if environ is None else environ
    check_peer_copies(given)
    return switch(given, PEER_COPIES, False)


def check_peer_copies(environ: Mapping[str, str]) -> None:
    """Raises ValueError for copies without a broker."""
    if switch(environ, PEER_COPIES, False) and not switch(environ, LEND, False):
        raise ValueError(f"{PEER_COPIES}={environ[PEER_COPIES]!r} needs {LEND}=1: a broker gives copies up")


def switch(environ: Mapping[str, str], name: str, default: bool) -> bool:
    """A variable that is on or off."""
    chosen = choice(environ, name)
    return default if chosen is None else chosen


def choice(environ: Mapping[str, str], name: str) -> bool | None:
    """A variable that is on or off, or not set."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    if text not in ("0", "1"):
        raise ValueError(f"{name}={text!r} is neither 0 nor 1")
    return text == "1"


def path(environ: Mapping[str, str], name: str) -> str | None:
    """A variable with a path, which need not be there."""
    return environ.get(name, "").strip() or None


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
