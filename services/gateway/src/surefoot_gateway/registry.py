"""The metrics of the table as series: those of a job begin when it is first seen and end when it is forgotten."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

from surefoot_gateway.table import METRICS, Metric

Series = Counter | Gauge | Histogram


class Metrics:
    """All series. Not thread-safe; see Board for the lock.

    The gateway's own are in one registry and those of jobs in another, so that these can be held back.
    """

    def __init__(self) -> None:
        # `_created` would double the number of series for a date that a rebuild from the stream gets wrong.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._own, self._jobs = CollectorRegistry(auto_describe=True), CollectorRegistry(auto_describe=True)
        self._by_name: dict[str, tuple[Metric, Series]] = {}
        for metric in METRICS:
            series = _make(metric, self._jobs if metric.source else self._own)
            self._by_name[metric.name] = (metric, series)
            if not metric.source:
                _begin(metric, series, ())

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter of the gateway itself."""
        child = self._own_series(name, labels)
        assert isinstance(child, Counter), name
        child.inc(amount)

    def show(self, name: str, value: float) -> None:
        """Set a gauge of the gateway itself."""
        child = self._own_series(name, {})
        assert isinstance(child, Gauge), name
        child.set(value)

    def _own_series(self, name: str, labels: dict[str, str]) -> Series:
        metric, series = self._by_name[name]
        return _labelled(series, [_known(metric, label, labels[label]) for label in metric.labels])

    def of_job(self, job: str) -> JobMetrics:
        """Begin all series of a job."""
        return JobMetrics(job, self._by_name)

    def render(self, accept: str, with_jobs: bool) -> tuple[bytes, str]:
        """Return the exposition and its content type.

        Args:
            accept: The scraper's Accept header: text or OpenMetrics.
            with_jobs: Whether the series of jobs are in it.
        """
        encode, content_type = choose_encoder(accept)
        registries = [self._own, self._jobs] if with_jobs else [self._own]
        return encode(_Union(registries)), content_type


class JobMetrics:
    """The series of one job."""

    def __init__(self, job: str, by_name: dict[str, tuple[Metric, Series]]) -> None:
        self._job = job
        self._by_name = by_name
        self._children: dict[tuple[str, ...], Series] = {}
        for metric, series in by_name.values():
            if metric.source and (metric.kind != "gauge" or metric.initial is not None):
                for _, *values in _begin(metric, series, (job,)):
                    self._child(metric, series, values)

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter; an unknown label value counts as `other`."""
        child = self._get(name, labels)
        assert isinstance(child, Counter), name
        child.inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        child = self._get(name, labels)
        assert isinstance(child, Gauge), name
        child.set(value)

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Add a value to a histogram."""
        child = self._get(name, labels)
        assert isinstance(child, Histogram), name
        child.observe(seconds)

    def drop(self, name: str, **labels: str) -> None:
        """End one series, a rank's that is gone, say."""
        if self._children.pop((name, *labels.values()), None) is not None:
            self._by_name[name][1].remove(self._job, *labels.values())

    def forget(self) -> None:
        """End all series of the job."""
        for name, *values in self._children:
            self._by_name[name][1].remove(self._job, *values)
        self._children.clear()

    def _get(self, name: str, labels: dict[str, str]) -> Series:
        # Most are there under what they are asked by; an unknown value or another order of labels is not.
        child = self._children.get((name, *labels.values()))
        if child is not None:
            return child
        metric, series = self._by_name[name]
        values = [_known(metric, label, labels[label]) for label in metric.labels]
        return self._children.get((name, *values)) or self._child(metric, series, values)

    def _child(self, metric: Metric, series: Series, values: Iterable[str]) -> Series:
        child = _labelled(series, (self._job, *values))
        self._children[(metric.name, *values)] = child
        return child


class _Union:
    """Several registries as one collector."""

    def __init__(self, registries: Iterable[CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterable[prometheus_client.Metric]:
        return itertools.chain.from_iterable(registry.collect() for registry in self._registries)


def _make(metric: Metric, registry: CollectorRegistry) -> Series:
    if metric.kind == "histogram":
        return Histogram(metric.name, metric.help, metric.label_names, registry=registry, buckets=metric.buckets)
    cls = Counter if metric.kind == "counter" else Gauge
    return cls(metric.name, metric.help, metric.label_names, registry=registry)


def _begin(metric: Metric, series: Series, before: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Make the series of all label values; return the values."""
    combinations = [(*before, *values) for values in itertools.product(*metric.labels.values())]
    for values in combinations:
        child = _labelled(series, values)
        if isinstance(child, Gauge):
            child.set(metric.initial or 0)
    return combinations


def _labelled(series: Series, values: Iterable[str]) -> Series:
    values = tuple(values)
    return series.labels(*values) if values else series


def _known(metric: Metric, label: str, value: str) -> str:
    allowed = metric.labels[label]
    return value if not allowed or value in allowed else "other"
