"""A whole stack of a test's own: real services, real processes, a job submitted over REST."""

from __future__ import annotations

import json
import os
import signal
import statistics
from typing import Any

from helpers.jobs import Job
from helpers.waiting import wait_until
from surefoot.bus.redis_bus import RedisBus
from surefoot.bus.streams import EVENTS
from surefoot.cli.client import ApiClient
from surefoot.cli.demo_stack import DemoStack
from surefoot.embedded.stack_file import ServiceState, Stack, read_stack
from surefoot.events import JobState, Message, StepCompleted


class TestStack(DemoStack):
    """`surefoot up --foreground` with what tests ask of it."""

    __test__ = False

    def __enter__(self) -> TestStack:
        super().__enter__()
        urls = self.wait_until_ready().urls
        self.api = ApiClient(urls["api"], self.stack.token)
        self.urls = urls
        return self

    def down(self) -> None:
        if self.exit_code is None and hasattr(self, "api"):
            self.api.__exit__(None, None, None)
        super().down()

    @property
    def stack(self) -> Stack:
        found = read_stack(self.home)
        assert found is not None
        return found

    @property
    def redis_url(self) -> str:
        """With the password, which is the api's token."""
        return self.urls["redis"].replace("redis://", f"redis://:{self.stack.token}@")

    def submit(self, job: Job) -> None:
        spec = json.loads(job.write_spec().read_text())
        self.api.post("jobs", body={"spec": spec})

    def row(self, job: Job) -> dict[str, Any]:
        return self.api.get("jobs", job.name)

    def wait_for_end(self, job: Job, timeout_seconds: float) -> dict[str, Any]:
        return self.wait_until_final(job.name, timeout_seconds)

    def wait_until_final(self, job: str, timeout_seconds: float) -> dict[str, Any]:
        def final_row() -> dict[str, Any] | None:
            row = self.api.get("jobs", job)
            return row if JobState(row["state"]).is_final else None

        row = wait_until(final_row, timeout_seconds, "the job ends", 0.2)
        assert row is not None
        return row

    def incidents(self, job: Job) -> list[dict[str, Any]]:
        rows = self.api.list("incidents", "jobs", job.name, "incidents")
        return sorted((self.api.get("incidents", row["id"]) for row in rows), key=lambda row: row["id"])

    def kill(self, service: str) -> None:
        """SIGKILL it, and wait until another process has taken its place and is ready."""
        before = self.stack.services[service]
        os.kill(before.pid, signal.SIGKILL)
        wait_until(
            lambda: self.stack.services[service].restarts > before.restarts
            and self.stack.services[service].state is ServiceState.READY,
            40,
            f"{service} is back",
        )

    def messages(self, job: Job) -> list[Message]:
        """Everything on the event stream about a job, repeats left out."""
        bus, after = RedisBus(self.redis_url), "0"
        found: dict[str, Message] = {}
        while batch := bus.read(EVENTS, after, 1000, 0.0):
            after = batch[-1].id
            found |= {d.message.event_id: d.message for d in batch if d.message and d.message.job == job.name}
        bus.close()
        return list(found.values())


def last_step(job: Job) -> int:
    return max((event.step for event in job.events(StepCompleted)), default=0)


def step_seconds(job: Job, since: float, until: float) -> float:
    """Median seconds of the steps that ended between two moments (CLOCK_MONOTONIC)."""
    steps = [e for e in job.events(StepCompleted) if since <= e.monotonic_seconds < until]
    return statistics.median(max(event.step_seconds) for event in steps)
