"""All jobs, by name. The thread that reads the stream writes, the web server's thread reads; both hold the lock."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from surefoot_gateway.registry import JobMetrics, Metrics
from surefoot_gateway.view import JobView


@dataclass(frozen=True)
class Job:
    """One job: its series and what is shown of it."""

    metrics: JobMetrics
    view: JobView


class Board:
    """All jobs that are kept.

    Args:
        max_jobs: The job that was silent for longest goes when there are more.

    Attributes:
        lock: Held by whoever reads or changes anything here.
        metrics: All series.
        jobs: By name, the one heard of last at the end.
        caught_up: Whether the whole stream was read once.
        bus_problem: Why the bus does not answer, None when it does.
    """

    def __init__(self, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        self.lock = threading.Lock()
        self.metrics = Metrics()
        self.jobs: dict[str, Job] = {}
        self.caught_up = False
        self.bus_problem: str | None = "the stream of events was not read yet"

    def job(self, name: str) -> Job:
        """Return a job; its series begin when it is new."""
        job = self.jobs.pop(name, None)
        if job is None:
            job = Job(self.metrics.of_job(name), JobView(name))
        self.jobs[name] = job
        if len(self.jobs) > self._max_jobs:
            self.jobs.pop(next(iter(self.jobs))).metrics.forget()
        return job

    def render_metrics(self, accept: str) -> tuple[bytes, str]:
        """Return the exposition and its content type. Takes the lock."""
        with self.lock:
            self.metrics.show("surefoot_gateway_bus_up", self.bus_problem is None)
            self.metrics.show("surefoot_gateway_caught_up", self.caught_up)
            self.metrics.show("surefoot_gateway_jobs", len(self.jobs))
            return self.metrics.render(accept, with_jobs=self.caught_up)
