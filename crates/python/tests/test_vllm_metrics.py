"""What the engines' answers become in prometheus_client, of which a small fake is enough."""

import logging
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from poorwill.vllm import _metrics
from poorwill.vllm._events import Events

PAGE = Path(__file__).resolve().parents[3] / "docs/reference/vllm-metrics.md"


class Metric:
    """A collector that records its calls."""

    def __init__(self, name: str, documentation: str, labelnames: tuple[str, ...], **options: Any) -> None:
        self.name, self.labelnames, self.options = name, labelnames, options
        self.documentation = documentation
        self.type = ""
        self.reported: dict[tuple[str, ...], list[float]] = {}

    def labels(self, **labels: str) -> Any:
        assert set(labels) == set(self.labelnames)
        reported = self.reported.setdefault(tuple(labels[name] for name in self.labelnames), [])
        return SimpleNamespace(inc=reported.append, observe=reported.append, set=reported.append)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Metric]]:
    known: dict[str, Metric] = {}

    def metric(name: str, *args: Any, of_type: str, **options: Any) -> Metric:
        assert name not in known, "prometheus_client refuses a name that it has"
        known[name] = Metric(name, *args, **options)
        known[name].type = of_type
        return known[name]

    types = ("Histogram", "Counter", "Gauge")
    client = SimpleNamespace(**{name: partial(metric, of_type=name.lower()) for name in types})
    monkeypatch.setitem(sys.modules, "prometheus_client", client)
    _metrics._collectors.cache_clear()
    yield known
    _metrics._collectors.cache_clear()


def event(operation: str, **others: Any) -> dict[str, Any]:
    reported = {"seconds": 0.5, "copied_bytes": 7, "skipped_bytes": 3, "released_bytes": 9}
    reported |= {"lent_bytes": 0, "returned_bytes": 0}
    return {"operation": operation, **reported, "release": None, "error": None, **others}


def status(
    *events: dict[str, Any],
    engine: int = 0,
    rank: int = 0,
    host_bytes: int = 100,
    unaccounted_bytes: int | None = None,
) -> dict[str, Any]:
    figures = {"host_bytes": host_bytes, "unaccounted_bytes": unaccounted_bytes}
    ranks = [{"rank": rank, **figures, "events": list(events)}]
    return {"engine": engine, "not_ready": None, "ranks": ranks}


def test_each_figure_has_its_collector(registry: dict[str, Metric]) -> None:
    slept = event("sleep", release="confirmed", lent_bytes=6)
    _metrics.record([status(slept, event("wake", seconds=0.25, returned_bytes=5))])
    reported = {name: metric.reported for name, metric in registry.items()}
    sleep, wake = ("sleep", "0", "0"), ("wake", "0", "0")
    assert reported == {
        "poorwill_operation_seconds": {sleep: [0.5], wake: [0.25]},
        "poorwill_copied_bytes_total": {sleep: [7], wake: [7]},
        "poorwill_skipped_bytes_total": {sleep: [3], wake: [3]},
        "poorwill_lent_bytes_total": {sleep: [6], wake: [0]},
        "poorwill_returned_bytes_total": {sleep: [0], wake: [5]},
        "poorwill_shortfalls_total": {sleep: [0], wake: [0]},
        "poorwill_failures_total": {sleep: [0], wake: [0]},
        "poorwill_host_bytes": {("0", "0"): [100]},
        "poorwill_unaccounted_bytes": {},
    }


def test_the_reference_has_each_metric_with_its_type_and_labels(registry: dict[str, Metric]) -> None:
    _metrics.record([status()])
    rows = re.findall(r"^\| `(poorwill_\w+)` \| (\w+) \| ([^|]*) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    written = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert written == {name: (metric.type, metric.labelnames) for name, metric in registry.items()}


def test_the_reference_has_each_operation() -> None:
    package = Path(_metrics.__file__).parent
    sources = [path.read_text("utf-8") for path in package.glob("*.py")]
    named = {name for text in sources for name in re.findall(r"\b(?:events\.of|Event)\(\"(\w+)\"\)", text)}
    rows = re.findall(r"^\| `([a-z]+)` \|", PAGE.read_text("utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(rows)


def test_failures_and_shortfalls_count(registry: dict[str, Metric]) -> None:
    _metrics.record([status(event("sleep", release="shortfall", error="too little was given back"))])
    place = ("sleep", "0", "0")
    assert registry["poorwill_shortfalls_total"].reported == {place: [1]}
    assert registry["poorwill_failures_total"].reported == {place: [1]}
    assert registry["poorwill_operation_seconds"].reported == {}


def test_engines_and_ranks_are_kept_apart(registry: dict[str, Metric]) -> None:
    _metrics.record([status(engine=0, host_bytes=1), status(engine=1, rank=2, host_bytes=4)])
    assert registry["poorwill_host_bytes"].reported == {("0", "0"): [1], ("1", "2"): [4]}


def test_unaccounted_memory_is_a_gauge_from_the_first_sleep_on(registry: dict[str, Metric]) -> None:
    _metrics.record(
        [status(rank=1), status(rank=2, unaccounted_bytes=0), status(rank=2, unaccounted_bytes=5)]
    )
    gauge = registry["poorwill_unaccounted_bytes"]
    assert gauge.reported == {("0", "2"): [0, 5]}
    assert gauge.options == {"multiprocess_mode": "mostrecent"}


def test_unaccounted_memory_of_the_last_sleep_is_kept() -> None:
    events = Events()
    reported = {
        "copied_bytes": 0,
        "unchanged_bytes": 0,
        "released_bytes": 1,
        "lent_bytes": 0,
        "lend_refused": None,
        "release": "confirmed",
        "kept_bytes": 0,
    }
    phases = SimpleNamespace(as_dict=dict)
    seen = [events.unaccounted_bytes]
    for unaccounted_bytes in (7, 5):
        with events.of("sleep") as event:
            event.slept(
                cast(Any, SimpleNamespace(**reported, unaccounted_bytes=unaccounted_bytes, phases=phases))
            )
        with events.of("wake"):
            seen.append(events.unaccounted_bytes)
    assert [*seen, events.unaccounted_bytes] == [None, 7, 5, 5]
    assert [event["unaccounted_bytes"] for event in events.take()] == [7, None, 5, None]


def test_collectors_are_made_once_and_last(registry: dict[str, Metric]) -> None:
    _metrics.record([status()])
    assert registry["poorwill_host_bytes"].options == {"multiprocess_mode": "mostrecent"}
    _metrics.record([status()])
    assert registry["poorwill_host_bytes"].reported == {("0", "0"): [100, 100]}


def test_without_prometheus_client_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    _metrics._collectors.cache_clear()
    with caplog.at_level(logging.WARNING):
        _metrics.record([status()])
        _metrics.record([status()])
    _metrics._collectors.cache_clear()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["no metrics of poorwill"]
