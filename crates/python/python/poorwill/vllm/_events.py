"""What has happened to an engine's memory, as plain values that travel between processes."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from poorwill._native import PrepareReport, SleepError, SleepReport, WakeReport

MOST = 1000
"""How many are kept for whoever takes them; older ones are lost first."""


class Event:
    """One operation, while it is done."""

    def __init__(self, operation: str) -> None:
        self.values: dict[str, Any] = {
            "operation": operation,
            "seconds": 0.0,
            "copied_bytes": 0,
            "skipped_bytes": 0,
            "released_bytes": 0,
            "release": None,
            "uncovered_bytes": None,
            "error": None,
            "phases": {},
        }

    def slept(self, report: SleepReport) -> None:
        """Takes the figures of a sleep."""
        self.values |= {
            "copied_bytes": report.copied_bytes,
            "skipped_bytes": report.unchanged_bytes,
            "released_bytes": report.released_bytes,
            "release": report.release,
            "uncovered_bytes": report.uncovered_bytes,
            "phases": report.phases.as_dict(),
        }

    def woken(self, report: WakeReport) -> None:
        """Takes the figures of a wake."""
        self.values |= {"copied_bytes": report.copied_bytes, "phases": report.phases.as_dict()}

    def prepared(self, report: PrepareReport) -> None:
        """Takes the figures of a preparation."""
        self.values |= {"copied_bytes": report.copied_bytes, "skipped_bytes": report.unchanged_bytes}


class Events:
    """What has happened and was not taken yet, oldest first."""

    def __init__(self) -> None:
        self._untaken: list[dict[str, Any]] = []
        self.uncovered_bytes: int | None = None
        """What this process held of its GPU when it slept last, beyond what sleeps and a bare context: CUDA
        graphs, workspaces, communicators. None before the first sleep; 0 too where the driver tells of no
        process."""

    @contextlib.contextmanager
    def of(self, operation: str) -> Iterator[Event]:
        """Times the block as one event. What it raises is the event's error."""
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
        """Keeps an event that was timed elsewhere."""
        if event.values["uncovered_bytes"] is not None:
            self.uncovered_bytes = event.values["uncovered_bytes"]
        self._untaken.append(event.values)
        del self._untaken[:-MOST]

    def take(self) -> list[dict[str, Any]]:
        """All that was not taken yet; it is then."""
        taken, self._untaken = self._untaken, []
        return taken
