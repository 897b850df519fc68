"""The processes that hold an engine's GPUs, and whether they are off them.

The driver keeps the state of each process, also of one that a rotation or the command `poorwill hibernate`
took off. A frontend asks for it before it passes on what would wait for the GPU.
"""

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from poorwill import HibernateError
from poorwill.vllm._driver import open_driver, process_state

__all__ = ["Processes", "here", "this_process"]

# How long a frontend waits for the driver's answer, which is no more than a look.
_STATE_TIMEOUT_SECONDS = 10.0

# A checkpoint or restore of a whole GPU takes less.
_SILENT_MAX_SECONDS = 60.0

# Looks without an answer that lie further apart are no one silence: the driver may have answered in between.
_SAME_SILENCE_SECONDS = 120.0

_NO_ANSWER = "no_answer"
_AWAY = ("locked", "checkpointing", "checkpointed", "restoring")

_log = logging.getLogger(__name__)


@functools.cache
def here() -> str:
    """Where a pid means the same process: one start of one machine, and one namespace."""
    parts = []
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def this_process() -> dict[str, Any]:
    """What a rank reports of its process."""
    return {"pid": os.getpid(), "pid_namespace": here()}


class Processes:
    """A frontend's knowledge of its engines' processes."""

    def __init__(self) -> None:
        self.pids: tuple[int, ...] = ()
        """Those of the ranks here; none before a rank has reported."""
        self.elsewhere: tuple[int, ...] = ()
        """Ranks on other machines or in other containers."""
        self.change: str | None = None
        """What this frontend does to them."""
        self.changing = asyncio.Lock()
        self.refusal: str | None = None
        """Why nothing may be passed on, at the last look."""
        self.is_lost = False
        """Whether one had no GPU any more at the last look, or has not answered for too long."""
        self._silent: tuple[float, float] | None = None
        """When the driver first did not answer, and when it last did not."""
        self._opening: asyncio.Future[None] | None = None
        self._asked: asyncio.Future[dict[int, str]] | None = None
        self._soon: asyncio.Future[str | None] | None = None

    def take(self, ranks: Iterable[dict[str, Any]]) -> None:
        """Takes the ranks' reports."""
        ranks = list(ranks)
        self.pids = tuple(sorted({rank["pid"] for rank in ranks if rank["pid_namespace"] == here()}))
        self.elsewhere = tuple(number for number, rank in enumerate(ranks) if rank["pid_namespace"] != here())

    def look(self) -> str | None:
        """Asks the driver why nothing may be passed on; None if all may."""
        self._know(_states(self.pids))
        return self.refusal

    async def look_async(self) -> str | None:
        """The same beside the loop."""
        states = None if self.change is not None else await self.states()
        self._know(dict.fromkeys(self.pids, _NO_ANSWER) if states is None else states)
        return self.refusal

    def _know(self, states: dict[int, str]) -> None:
        # Since the driver was asked, a change may have begun.
        self.refusal = self.change or _refusal(states)
        found = states.values() if self.change is None else ()
        self._silent = self._silence(time.monotonic()) if _NO_ANSWER in found else None
        began, last = self._silent or (0.0, 0.0)
        self.is_lost = "failed" in found or last - began > _SILENT_MAX_SECONDS

    def _silence(self, now: float) -> tuple[float, float]:
        began, last = self._silent or (now, now)
        return (began if now - last <= _SAME_SILENCE_SECONDS else now, now)

    def open_soon(self) -> None:
        """Loads the driver beside the loop, which takes seconds on machines with many GPUs.

        Does nothing without a running event loop.
        """
        if self._opening is None:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop()
                self._opening = asyncio.ensure_future(asyncio.to_thread(open_driver))

    def look_soon(self) -> None:
        """The same, not awaited. Does nothing without a running event loop."""
        with contextlib.suppress(RuntimeError):
            loop = asyncio.get_running_loop()
            if self._soon is None or self._soon.done():
                self._soon = loop.create_task(self.look_async())

    async def states(self) -> dict[int, str] | None:
        """The driver's states by pid, without processes that cannot be asked; None if it does not answer.

        One such query runs at a time.
        """
        if not self.pids:
            return {}
        self.open_soon()
        if self._opening is not None:
            # It does not wait for any process.
            await asyncio.wait({self._opening}, timeout=_STATE_TIMEOUT_SECONDS)
        if self._asked is None or self._asked.done():
            self._asked = asyncio.ensure_future(asyncio.to_thread(_states, self.pids))
        asked = self._asked
        await asyncio.wait({asked}, timeout=_STATE_TIMEOUT_SECONDS)
        return asked.result() if asked.done() else None


def _states(pids: Sequence[int]) -> dict[int, str]:
    states = {}
    for pid in pids:
        # What runs here is on its GPU.
        if pid == os.getpid():
            continue
        try:
            states[pid] = process_state(pid)
        except HibernateError as error:
            if error.kind == _NO_ANSWER:
                states[pid] = _NO_ANSWER
            # A driver that cannot tell has taken nothing off.
            _log.debug("%s", error)
    return states


def _refusal(states: dict[int, str]) -> str | None:
    lost = [pid for pid, state in states.items() if state == "failed"]
    if lost:
        return f"{_named(lost)} lost the GPU: restart the engine"
    silent = [pid for pid, state in states.items() if state == _NO_ANSWER]
    if silent:
        return _unanswered(silent)
    away = [pid for pid, state in states.items() if state in _AWAY]
    if not away:
        return None
    found = " and ".join(sorted({states[pid] for pid in away}))
    return f"the engine hibernates: {_named(away)} {'is' if len(away) == 1 else 'are'} {found}; {_how(away)}"


def _how(pids: Sequence[int]) -> str:
    numbers = " ".join(f"--pid {pid}" for pid in pids)
    return (
        f"call POST /hibernate/resume, or run `poorwill hibernate --resume {numbers}`; a rotation resumes "
        "what it has hibernated by itself"
    )


def _unanswered(pids: Sequence[int]) -> str:
    return (
        f"the driver does not say whether {_named(pids)} may use the GPU: it is probably being taken off or "
        "put back; ask again"
    )


def _named(pids: Sequence[int]) -> str:
    numbers = ", ".join(map(str, pids))
    return f"process {numbers}" if len(pids) == 1 else f"processes {numbers}"
