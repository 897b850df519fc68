"""Metrics of sleeping and waking, on vLLM's `/metrics`.

Names begin with `poorwill_`: when vLLM starts an engine, it removes metrics with "vllm" in their names.
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
    """One collector for each figure, in prometheus_client's own registry like vLLM's."""

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
            "Bytes that were not copied, since the host had them already.",
            _BY_OPERATION,
        )
        self.lent = prometheus.Counter(
            "poorwill_lent_bytes_total",
            "Bytes that sleeps lent instead of releasing them.",
            _BY_OPERATION,
        )
        self.returned = prometheus.Counter(
            "poorwill_returned_bytes_total",
            "Bytes that wakes found still there, and did not copy.",
            _BY_OPERATION,
        )
        self.shortfalls = prometheus.Counter(
            "poorwill_shortfalls_total",
            "Operations that released less memory than they should.",
            _BY_OPERATION,
        )
        self.failures = prometheus.Counter(
            "poorwill_failures_total", "Operations that failed.", _BY_OPERATION
        )
        self.host = prometheus.Gauge(
            "poorwill_host_bytes",
            "Host memory of one rank for backups.",
            _BY_RANK,
            multiprocess_mode="mostrecent",
        )
        self.unaccounted = prometheus.Gauge(
            "poorwill_unaccounted_bytes",
            "GPU memory that one rank held at its last sleep, beyond what sleeps and its context.",
            _BY_RANK,
            multiprocess_mode="mostrecent",
        )

    def add(self, status: Mapping[str, Any]) -> None:
        """Records an engine's status."""
        engine = str(status["engine"])
        for rank in status["ranks"]:
            labels = {"engine": engine, "rank": str(rank["rank"])}
            self.host.labels(**labels).set(rank["host_bytes"])
            if rank["unaccounted_bytes"] is not None:
                self.unaccounted.labels(**labels).set(rank["unaccounted_bytes"])
            for event in rank["events"]:
                self._add_event(event, {"operation": event["operation"], **labels})

    def _add_event(self, event: Mapping[str, Any], labels: dict[str, str]) -> None:
        self.copied.labels(**labels).inc(event["copied_bytes"])
        self.skipped.labels(**labels).inc(event["skipped_bytes"])
        self.lent.labels(**labels).inc(event["lent_bytes"])
        self.returned.labels(**labels).inc(event["returned_bytes"])
        # A 0 as well, so that a rate is known from the first operation on.
        self.shortfalls.labels(**labels).inc(event["release"] == "shortfall")
        failed = event["error"] is not None
        self.failures.labels(**labels).inc(failed)
        if not failed:
            self.seconds.labels(**labels).observe(event["seconds"])


@functools.cache
def _collectors() -> _Collectors | None:
    # Not earlier: vLLM first sets the folder for several processes, which is read once.
    try:
        return _Collectors(importlib.import_module("prometheus_client"))
    except ImportError as error:
        _log.warning("no metrics of poorwill: %s", error)
        return None


def record(statuses: Iterable[Mapping[str, Any]]) -> None:
    """Records what engines answered to `poorwill_status`."""
    collectors = _collectors()
    if collectors is not None:
        for status in statuses:
            collectors.add(status)
