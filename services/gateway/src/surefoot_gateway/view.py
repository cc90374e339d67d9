"""What the live page shows of one job. Fed by handlers.py, bounded in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import MutableMapping
from datetime import datetime
from typing import NamedTuple, TypeVar

from surefoot.events import IncidentState, JobState, StepCompleted
from surefoot_gateway.curve import Curve

K = TypeVar("K")
V = TypeVar("V")

MAX_POINTS = 2000
MAX_ATTEMPTS = 500
MAX_CHECKPOINTS = 300
MAX_INCIDENTS = 200
MAX_NOTES = 200
RATE_STEPS = 20
"""Rates are means over this many steps."""


class AttemptLine(NamedTuple):
    """One attempt."""

    attempt: int
    from_attempt: int
    from_step: int
    source: str
    cause: str
    lr_factor: float
    skip_windows: list[tuple[int, int]]
    world_size: int
    at: float


class CheckpointLine(NamedTuple):
    """One checkpoint; `state` is committed, stable, damaged or quarantined."""

    attempt: int
    step: int
    state: str
    num_bytes: int
    at: float


class IncidentLine(NamedTuple):
    """One incident, as it stands."""

    id: int
    attempt: int | None
    kind: str
    severity: str
    state: str
    onset_step: int | None
    action: str | None
    reason: str
    recovery_seconds: float | None
    steps_lost: int | None
    opened_at: float
    changed_at: float

    @property
    def is_open(self) -> bool:
        """Whether it is neither healed nor escalated."""
        return self.state not in (IncidentState.HEALED, IncidentState.ESCALATED)


class StorageProblem(NamedTuple):
    """What storage refuses, from the first failure until a write succeeds."""

    since: float
    operation: str
    reason: str
    num_failures: int


class SavingLine(NamedTuple):
    """What `save_every_seconds: auto` chose."""

    interval_seconds: float
    cost_seconds: float
    reason: str


class Note(NamedTuple):
    """Something worth reading; `tone` is info, good, warning or bad."""

    at: float
    attempt: int | None
    step: int | None
    tone: str
    text: str


class JobView:
    """One job.

    Attributes:
        revision: Grows with each message: what is shown can be kept as long as it is the same.
        state, reason: As the worker or the launcher said last; None: nobody has said anything.
        attempt, step, total_steps, world_size: Where it is; None: not known.
        last: The newest step.
        recent: The last few steps, for rates.
        storage_problem: Why nothing becomes durable; None: storage works.
        saving: How often `auto` saves; None: it does not, or has not said yet.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.revision = 0
        self.heard_at = 0.0
        self.state: JobState | None = None
        self.reason = ""
        self.attempt: int | None = None
        self.step = 0
        self.total_steps: int | None = None
        self.world_size: int | None = None
        self.last: StepCompleted | None = None
        self.recent: deque[StepCompleted] = deque(maxlen=RATE_STEPS)
        self.cleared_step: int | None = None
        self.curve = Curve(MAX_POINTS)
        self.attempts: dict[int, AttemptLine] = {}
        self.checkpoints: dict[tuple[int, int], CheckpointLine] = {}
        self.incidents: dict[int, IncidentLine] = {}
        self.storage_problem: StorageProblem | None = None
        self.saving: SavingLine | None = None
        self.notes: deque[Note] = deque(maxlen=MAX_NOTES)

    def begin_anew(self) -> None:
        """Forget steps, attempts and checkpoints: another job of the same name began, in an empty folder."""
        self.curve = Curve(MAX_POINTS)
        self.last, self.cleared_step, self.saving = None, None, None
        self.attempts.clear()
        self.checkpoints.clear()

    def note(
        self, at: datetime, text: str, tone: str = "info", attempt: int | None = None, step: int | None = None
    ) -> None:
        """Add a line to what happened."""
        self.notes.append(Note(at.timestamp(), attempt, step, tone, text))

    def put_attempt(self, line: AttemptLine) -> None:
        """Add an attempt."""
        _put(self.attempts, line.attempt, line, MAX_ATTEMPTS)

    def put_checkpoint(self, line: CheckpointLine) -> None:
        """Add a checkpoint, or change it."""
        _put(self.checkpoints, (line.attempt, line.step), line, MAX_CHECKPOINTS)

    def put_incident(self, line: IncidentLine) -> None:
        """Add an incident, or change it."""
        _put(self.incidents, line.id, line, MAX_INCIDENTS)

    @property
    def num_open_incidents(self) -> int:
        """Return how many incidents are neither healed nor escalated."""
        return sum(incident.is_open for incident in self.incidents.values())

    def kept_through(self) -> dict[int, int | None]:
        """Return for each attempt the last step of it that led to the present; None: all of it. 0: nothing.

        The lineage of DESIGN 3, walked back as far as the attempts are known.
        """
        kept: dict[int, int | None] = dict.fromkeys(self.attempts, 0)
        attempt, through = self.attempt, None
        while attempt in self.attempts:
            kept[attempt] = through
            line = self.attempts[attempt]
            through = line.from_step if through is None else min(through, line.from_step)
            attempt = line.from_attempt
        return kept


def _put(lines: MutableMapping[K, V], key: K, line: V, max_lines: int) -> None:
    lines[key] = line
    if len(lines) > max_lines:
        del lines[next(iter(lines))]
