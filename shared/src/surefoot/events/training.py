from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from surefoot.checkpoint.attempts import SkipWindow
from surefoot.events.base import Event


class JobState(StrEnum):
    """Where a job is. The last three are final; a launcher by itself only knows those."""

    PENDING = "PENDING"
    """Submitted; no worker has taken it."""
    STARTING = "STARTING"
    """A launcher is being started; no step is done."""
    RUNNING = "RUNNING"
    DEGRADED = "DEGRADED"
    """It trains, but with fewer ranks than asked for, or nobody can save."""
    RECOVERING = "RECOVERING"
    """Ranks are being restarted, or rolled back."""
    PAUSED = "PAUSED"
    """Saved and stopped on request, to go on later."""
    STOPPING = "STOPPING"
    """The last step is being saved."""
    SUCCEEDED = "SUCCEEDED"
    STOPPED = "STOPPED"
    """Saved and stopped on request."""
    FAILED = "FAILED"

    @property
    def is_final(self) -> bool:
        """Whether nothing follows without a person."""
        return self in (JobState.SUCCEEDED, JobState.STOPPED, JobState.FAILED)


class TimelineMark(BaseModel):
    """A named moment in the start of a rank (see `surefoot.timeline`)."""

    model_config = ConfigDict(frozen=True)

    name: str
    monotonic_seconds: float


class AttemptStarted(Event):
    """Rank 0 claimed the attempt; the state is loaded and the first step is next."""

    type: ClassVar[str] = "AttemptStarted"

    world_size: int
    from_attempt: int
    from_step: int
    source: str
    cause: str
    lr_factor: float = 1.0
    skip_windows: tuple[SkipWindow, ...] = ()
    total_steps: int | None = None
    timeline: tuple[TimelineMark, ...] = ()


class StepCompleted(Event):
    """All ranks finished one optimizer step (or agreed to skip its update)."""

    type: ClassVar[str] = "StepCompleted"
    lifecycle: ClassVar[bool] = False

    step: int
    position: int | None = None
    """Batch position: the step's index counting the batches that were skipped; what skip windows speak of."""
    updates: int
    epoch: int
    loss: float
    grad_norm: float | None = None
    learning_rate: float
    applied: bool
    """False: a gradient was not finite on some rank, so nobody updated."""
    nonfinite_ranks: tuple[int, ...] = ()
    num_samples: int
    num_tokens: int | None = None
    step_seconds: tuple[float, ...]
    """Per rank, in rank order."""
    dropped_events: int = 0


class RankFailed(Event):
    """A rank's process ended although the job was not done."""

    type: ClassVar[str] = "RankFailed"

    pid: int
    exit_code: int
    """Negative: the signal that ended it."""
    step: int | None = None
    error_type: str | None = None
    error_message: str | None = None
    traceback: str | None = None
    detected_seconds: float
    """CLOCK_MONOTONIC when the launcher saw it."""


class RankHung(Event):
    """A rank made no progress for longer than its phase may take; its stacks were saved and it is killed next."""

    type: ClassVar[str] = "RankHung"

    pid: int
    phase: str
    step: int
    seconds: float
    """Since its last progress."""
    limit_seconds: float
    stack_file: str | None = None
    stack_problem: str | None = None
    """Why there is no stack file."""


class RanksRestarted(Event):
    """The launcher started a new set of ranks."""

    type: ClassVar[str] = "RanksRestarted"

    restart: int
    world_size: int
    start_method: str
    start_method_reason: str | None = None
    pids: tuple[int, ...]
    timeline: tuple[TimelineMark, ...] = ()


class DataPrepared(Event):
    """A stage of data preparation ended (tokenizer, tokens)."""

    type: ClassVar[str] = "DataPrepared"

    stage: str
    detail: str
    seconds: float


class JobStateChanged(Event):
    """The worker service put the job into another state."""

    type: ClassVar[str] = "JobStateChanged"

    state: JobState
    reason: str


class JobFinished(Event):
    """The launcher is about to exit."""

    type: ClassVar[str] = "JobFinished"

    state: JobState
    reason: str
    restarts: int
