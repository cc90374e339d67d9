"""Where each job is, as its events tell. In memory only: what must survive a restart is in the catalogue."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from surefoot.checkpoint.attempts import AttemptRecord, Source, StartsFrom
from surefoot.events import AttemptStarted

MAX_STARTED = 100
"""Attempts whose beginnings are kept per job: only those that the worker has not indexed yet matter."""


@dataclass
class JobView:
    """One job.

    Attributes:
        attempt: Newest attempt that an event spoke of, 0 before the first.
        step: Last completed step, None before the first.
        is_over: Its launcher has ended, and no attempt began since.
        started: The newest attempts' beginnings, by number.
        is_learned: Its lineage is known: earlier attempts were looked up, later ones are seen to begin.
        overdue: An incident has not healed within its rung's wait_steps.
        overdue_since: Since when that is known with the detector having seen all that this service has seen.
        look_at_step: Nothing about its incidents can be due before this step; None: it has none, and no action.
    """

    attempt: int = 0
    step: int | None = None
    is_over: bool = False
    started: dict[int, AttemptStarted] = field(default_factory=dict)
    is_learned: bool = False
    overdue: bool = False
    overdue_since: datetime | None = None
    look_at_step: float | None = None

    def start(self, event: AttemptStarted) -> None:
        """Note that an attempt began."""
        if event.attempt is None:
            return
        self.attempt = max(self.attempt, event.attempt)
        self.started[event.attempt] = event
        self.is_over = False
        while len(self.started) > MAX_STARTED:
            del self.started[min(self.started)]

    def records(self) -> dict[int, AttemptRecord]:
        """Return the attempt records that the events amount to; the learning rate's duration is not among it."""
        return {number: _record(number, event) for number, event in self.started.items()}


class Jobs(dict[str, JobView]):
    """All jobs by name; asking for one makes it known."""

    def __missing__(self, name: str) -> JobView:
        """Return the view of a job that was not known."""
        view = self[name] = JobView()
        return view

    def look_now(self, name: str) -> None:
        """Look at the job's incidents with its next step."""
        self[name].look_at_step = 0


def _record(number: int, event: AttemptStarted) -> AttemptRecord:
    starts_from = StartsFrom(attempt=event.from_attempt, step=event.from_step, source=Source(event.source))
    return AttemptRecord(
        attempt=number,
        starts_from=starts_from,
        lr_factor=event.lr_factor,
        lr_hold_steps=None,
        lr_rewarm_steps=0,
        lr_from_step=0,
        command=0,
        skip_windows=event.skip_windows,
        cause=event.cause,
        world_size=event.world_size,
        host="",
        started_at=event.ts,
    )
