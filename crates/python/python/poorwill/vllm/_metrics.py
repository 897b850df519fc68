"""What sleeping and waking costs, on vLLM's `/metrics`.

Names begin with `poorwill_`: when it starts an engine, vLLM takes what has "vllm" in its name out of the
registry.
"""

import functools
import importlib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["record"]

_log = logging.getLogger(__name__)

_BY_OPERATION = ("operation", "engine", "rank")
_BY_RANK = ("engine", "rank")

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)


class _Collectors:
    """One collector for each figure, in prometheus_client's own registry as vLLM's are."""

    def __init__(self, prometheus: Any) -> None:
        self.seconds = prometheus.Histogram(
            "poorwill_operation_seconds",
            "Time of one rank's sleeps, wakes, discards, backups and loads that succeeded.",
            _BY_OPERATION,
            buckets=_SECONDS,
        )
        self.copied = prometheus.Counter(
            "poorwill_copied_bytes_total", "Bytes copied between a GPU and its host.", _BY_OPERATION
        )
        self.skipped = prometheus.Counter(
            "poorwill_skipped_bytes_total",
            "Bytes that did not have to be copied, since the host had them already.",
            _BY_OPERATION,
        )
        self.shortfalls = prometheus.Counter(
            "poorwill_shortfalls_total",
            "Operations that gave back less memory than they should.",
            _BY_OPERATION,
        )
        self.failures = prometheus.Counter(
            "poorwill_failures_total", "Operations that failed.", _BY_OPERATION
        )
        self.host = prometheus.Gauge(
            "poorwill_host_bytes",
            "Host memory that one rank holds for what sleeps or is prepared to.",
            _BY_RANK,
            multiprocess_mode="mostrecent",
        )
        self.uncovered = prometheus.Gauge(
            "poorwill_uncovered_bytes",
            "GPU memory that one rank held when it slept last, beyond what sleeps and its bare context.",
            _BY_RANK,
            multiprocess_mode="mostrecent",
        )

    def add(self, status: Mapping[str, Any]) -> None:
        """Takes over what an engine says of its ranks."""
        engine = str(status["engine"])
        for rank in status["ranks"]:
            place = {"engine": engine, "rank": str(rank["rank"])}
            self.host.labels(**place).set(rank["host_bytes"])
            if rank["uncovered_bytes"] is not None:
                self.uncovered.labels(**place).set(rank["uncovered_bytes"])
            for event in rank["events"]:
                self._add_event(event, {"operation": event["operation"], **place})

    def _add_event(self, event: Mapping[str, Any], labels: dict[str, str]) -> None:
        self.copied.labels(**labels).inc(event["copied_bytes"])
        self.skipped.labels(**labels).inc(event["skipped_bytes"])
        # Also a 0, so that a rate can be told from the first operation on.
        self.shortfalls.labels(**labels).inc(event["release"] == "shortfall")
        failed = event["error"] is not None
        self.failures.labels(**labels).inc(failed)
        if not failed:
            self.seconds.labels(**labels).observe(event["seconds"])


@functools.cache
def _collectors() -> _Collectors | None:
    # As late as this: vLLM names the folder for several processes first, and it is read only once.
    try:
        return _Collectors(importlib.import_module("prometheus_client"))
    except ImportError as error:
        _log.warning("no metrics of poorwill: %s", error)
        return None


def record(statuses: Iterable[Mapping[str, Any]]) -> None:
    """Takes over what engines answered to `poorwill_status`."""
    collectors = _collectors()
    if collectors is not None:
        for status in statuses:
            collectors.add(status)
