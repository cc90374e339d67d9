"""What goes over the wire: bodies of requests, and what the rows of the catalogue look like to clients."""

from __future__ import annotations

import math
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from surefoot.events import JobState


def _spell_nonfinite(value: Any) -> Any:
    """Write NaN and infinity as events do, "NaN" and "Infinity": JSON has no numbers for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _spell_nonfinite(item) for key, item in value.items()}
    return [_spell_nonfinite(item) for item in value] if isinstance(value, list) else value


Evidence = Annotated[dict[str, Any], BeforeValidator(_spell_nonfinite)]
Step = Annotated[int, Field(ge=1, lt=2**63)]
Factor = Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Submission(_Body):
    """A job to run."""

    spec: dict[str, Any]
    """What `surefoot run` takes as a file; paths absolute. Without storage and run_dir: those of the stack."""
    from_seed: bool = False
    """Start over at step 0, although the job may have progress."""


class NoArguments(_Body):
    """An empty object, or no body."""


class RollBackArguments(_Body):
    """Where to go back to: to the newest STABLE checkpoint when no step is named."""

    to_step: Step | None = None
    to_attempt: Step | None = None
    """Needed only where several checkpoints of `to_step` are on the lineage."""
    lr_factor: Factor | None = None
    """Multiplies the schedule's learning rate from then on; null: as it is."""

    @model_validator(mode="after")
    def _attempt_needs_step(self) -> RollBackArguments:
        if self.to_attempt is not None and self.to_step is None:
            raise ValueError("to_attempt needs to_step")
        return self


class SetLearningRateArguments(_Body):
    """Another factor on the schedule's learning rate, at once and as a new attempt."""

    lr_factor: Factor
    lr_hold_steps: int | None = Field(default=None, ge=0, lt=2**31)
    """Steps with that factor; null: for ever."""
    lr_rewarm_steps: int = Field(default=0, ge=0, lt=2**31)
    """Steps over which it then returns linearly to 1."""

    @model_validator(mode="after")
    def _rewarm_needs_an_end(self) -> SetLearningRateArguments:
        if self.lr_rewarm_steps and self.lr_hold_steps is None:
            raise ValueError("lr_rewarm_steps needs lr_hold_steps: without it the factor holds for ever")
        return self


class _Row(BaseModel):
    model_config = ConfigDict(from_attributes=True, use_attribute_docstrings=True)


class JobView(_Row):
    """A job and how it fares."""

    name: str
    state: JobState
    desired_state: str
    """What its owner wants: RUNNING, PAUSED or STOPPED."""
    reason: str
    generation: int
    """Grows when the job is submitted again after it had ended."""
    attempt: int | None
    step: int | None
    total_steps: int | None
    world_size: int | None
    exit_code: int | None
    worker: str | None
    created_at: datetime
    updated_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


class JobDetail(JobView):
    """A job with its spec."""

    spec: dict[str, Any]


class AttemptView(_Row):
    """One stretch of training under one control state."""

    attempt: int
    from_attempt: int
    from_step: int
    source: str
    cause: str
    lr_factor: float
    skip_windows: list[Any]
    world_size: int
    host: str
    started_at: datetime


class CheckpointView(_Row):
    """A committed checkpoint."""

    attempt: int
    step: int
    state: str
    """COMMITTED, QUARANTINED (found damaged) or DELETING (retention keeps it no longer)."""
    stable: bool
    """Probation is over and its tensors are finite: what roll-backs go to."""
    pinned: bool
    """Somebody wants to keep it."""
    loss: float | None
    """Mean training loss of the last steps before it; null: not known."""
    on_lineage: bool | None = None
    """Whether it led to the present; false: abandoned; null: not known yet."""
    num_bytes: int
    world_size: int
    path: str
    committed_at: datetime
    promoted_at: datetime | None
    verified_at: datetime | None
    verify_problem: str | None
    nonfinite_tensor: str | None
    """A tensor with NaN or Inf in it, for which it is never promoted."""


class ActionView(_Row):
    """Something that recovery did or ordered, and why."""

    id: int
    attempt: int
    kind: str
    incident_id: int | None
    operation_id: str | None
    rung: str | None
    reason: str
    state: str
    problem: str
    new_attempt: int | None
    seconds: float | None
    created_at: datetime
    closed_at: datetime | None


class IncidentView(_Row):
    """One trouble, from seen to healed."""

    id: int
    job: str
    attempt: int
    kind: str
    severity: str
    state: str
    onset_step: int
    detected_step: int | None
    cause: str
    evidence: Evidence
    outcome: str
    resumed_attempt: int | None
    recovery_seconds: float | None
    steps_lost: int | None
    opened_at: datetime
    resumed_at: datetime | None
    closed_at: datetime | None


class IncidentDetail(IncidentView):
    """An incident with what was done about it."""

    actions: list[ActionView]


class OperationState(StrEnum):
    """How an operation fares."""

    PENDING = "PENDING"
    """Nobody has taken it up."""
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


class OperationView(_Row):
    """A verb that somebody called."""

    id: str
    job: str
    kind: str
    arguments: dict[str, Any]
    actor: str
    state: OperationState
    detail: str
    action_id: int | None
    new_attempt: int | None
    """The attempt that it began, if it began one."""
    created_at: datetime


class JobPage(_Row):
    """One page of jobs, by when they were first submitted, newest first."""

    jobs: list[JobView]
    next_page_token: str | None


class AttemptPage(_Row):
    """One page of attempts, newest first."""

    attempts: list[AttemptView]
    next_page_token: str | None


class CheckpointPage(_Row):
    """One page of checkpoints, newest first."""

    checkpoints: list[CheckpointView]
    next_page_token: str | None


class IncidentPage(_Row):
    """One page of incidents, newest first."""

    incidents: list[IncidentView]
    next_page_token: str | None


class OperationPage(_Row):
    """One page of operations, newest first."""

    operations: list[OperationView]
    next_page_token: str | None
