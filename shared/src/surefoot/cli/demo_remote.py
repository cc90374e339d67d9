"""The demo's job as the API tells of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from surefoot.cli.client import ApiClient
from surefoot.events import JobState

JOB_LIMIT_SECONDS = 1800.0
POLL_SECONDS = 0.5
SETTLE_SECONDS = 20.0


class RemoteJob:
    """Asks the API how the job fares, twice a second at most.

    Args:
        api: Where it runs.
        job: Its name.
    """

    def __init__(self, api: ApiClient, job: str) -> None:
        self._api = api
        self._job = job
        self._asked = 0.0
        self._deadline = time.monotonic() + JOB_LIMIT_SECONDS
        self._last: dict[str, Any] = {"state": JobState.PENDING, "reason": ""}

    def outcome(self) -> dict[str, Any]:
        """Return the job as it is now."""
        self._asked = time.monotonic()
        self._last = self._api.get("jobs", self._job)
        return self._last

    def end_reason(self) -> str | None:
        """Return how the job has ended; None while it has not."""
        now = time.monotonic()
        if now > self._deadline:
            return f"it did not end within {JOB_LIMIT_SECONDS:.0f} s"
        job = self._last if now - self._asked < POLL_SECONDS else self.outcome()
        return f"{job['state']}: {job['reason']}" if JobState(job["state"]).is_final else None

    def incidents(self) -> list[dict[str, Any]]:
        """Return the incidents of the job with their actions, oldest first."""
        rows = (self._api.get("incidents", row["id"]) for row in self._rows())
        return sorted(rows, key=lambda row: int(row["id"]))

    def _rows(self) -> list[dict[str, Any]]:
        return self._api.list("incidents", "jobs", self._job, "incidents")

    def follow(self, say: Callable[[str], None]) -> None:
        """Say what becomes of incidents until the job has ended and nothing of them is in the air."""
        told: dict[int, str] = {}
        settle_until = None
        while True:
            ended = self.end_reason()
            for row in self._rows():
                if told.get(row["id"]) != row["state"]:
                    told[row["id"]] = row["state"]
                    say(f"incident {row['id']} ({row['kind']}): {row['state']}: {row['cause']}")
            if ended is not None:
                settle_until = settle_until or time.monotonic() + SETTLE_SECONDS
                if set(told.values()) <= {"HEALED", "ESCALATED"} or time.monotonic() > settle_until:
                    return
            time.sleep(POLL_SECONDS)
