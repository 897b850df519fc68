"""Events of an engine's memory, as plain values that can cross processes."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from poorwill._native import PrepareReport, SleepError, SleepReport, WakeReport

MOST = 1000
"""Most events kept until they are taken; the oldest are dropped first."""


class Event:
    """One operation, in progress."""

    def __init__(self, operation: str) -> None:
        self.values: dict[str, Any] = {
            "operation": operation,
            "seconds": 0.0,
            "copied_bytes": 0,
            "skipped_bytes": 0,
            "released_bytes": 0,
            "lent_bytes": 0,
            "lend_refused": None,
            "returned_bytes": 0,
            "kept_at_level2_bytes": 0,
            "release": None,
            "unaccounted_bytes": None,
            "error": None,
            "phases": {},
        }

    def slept(self, report: SleepReport) -> None:
        """Takes the figures of a sleep."""
        self.values |= {
            "copied_bytes": report.copied_bytes,
            "skipped_bytes": report.unchanged_bytes,
            "released_bytes": report.released_bytes,
            "lent_bytes": report.lent_bytes,
            "lend_refused": report.lend_refused,
            "kept_at_level2_bytes": report.kept_bytes,
            "release": report.release,
            "unaccounted_bytes": report.unaccounted_bytes,
            "phases": report.phases.as_dict(),
        }

    def woken(self, report: WakeReport) -> None:
        """Takes the figures of a wake."""
        self.values |= {
            "copied_bytes": report.copied_bytes,
            "returned_bytes": report.returned_bytes,
            "phases": report.phases.as_dict(),
        }

    def prepared(self, report: PrepareReport) -> None:
        """Takes the figures of a preparation."""
        self.values |= {"copied_bytes": report.copied_bytes, "skipped_bytes": report.unchanged_bytes}


class Events:
    """Events that were not taken yet, oldest first."""

    def __init__(self) -> None:
        self._untaken: list[dict[str, Any]] = []
        self.unaccounted_bytes: int | None = None
        """Device memory of this process beyond the arena and its context at the last sleep, in bytes.

        That is CUDA graphs, workspaces and communicators. None before the first sleep; 0 also where the
        driver knows no process.
        """

    @contextlib.contextmanager
    def of(self, operation: str) -> Iterator[Event]:
        """Times the block as one event. An exception becomes the event's error."""
        event = Event(operation)
        began = time.perf_counter()
        try:
            yield event
        except Exception as error:
            event.values["error"] = f"{type(error).__name__}: {error}"
            if isinstance(error, SleepError) and error.report is not None:
                event.slept(error.report)
            raise
        finally:
            event.values["seconds"] = time.perf_counter() - began
            self.add(event)

    def add(self, event: Event) -> None:
        """Adds an event that was timed elsewhere."""
        if event.values["unaccounted_bytes"] is not None:
            self.unaccounted_bytes = event.values["unaccounted_bytes"]
        self._untaken.append(event.values)
        del self._untaken[:-MOST]

    def take(self) -> list[dict[str, Any]]:
        """Takes all events since the last call."""
        taken, self._untaken = self._untaken, []
        return taken
