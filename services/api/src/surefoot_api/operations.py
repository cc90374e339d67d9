"""How jobs and operations fare, read off what others wrote. Pure."""

from __future__ import annotations

from typing import NamedTuple

from surefoot.catalogue.models import Action, ActionState, Job, Operation, Run
from surefoot.events import JobState
from surefoot_api.schemas import OperationState, OperationView

SUBMIT, STOP = "submit", "stop"
_ACTION_STATES: dict[str, OperationState] = {
    ActionState.PENDING: OperationState.RUNNING,
    ActionState.SENT: OperationState.RUNNING,
    ActionState.APPLIED: OperationState.SUCCEEDED,
    ActionState.REFUSED: OperationState.FAILED,
    ActionState.EXPIRED: OperationState.FAILED,
}


def job_state(job: Job, run: Run | None) -> JobState:
    """Return the state of a job; PENDING until a worker answers its newest generation."""
    return JobState(run.state) if run is not None and run.generation >= job.generation else JobState.PENDING


class _Fate(NamedTuple):
    state: OperationState
    detail: str


def view(operation: Operation, action: Action | None, job: Job, run: Run | None) -> OperationView:
    """Return an operation as clients see it.

    Args:
        operation: Its row.
        action: What recovery made of it, if anything yet.
        job: Its job.
        run: How that job fares; None: no worker has ever taken it.
    """
    by_desired_state = operation.kind in (SUBMIT, STOP)
    fate = _by_run(operation, job, run) if by_desired_state else _by_action(operation, action, job, run)
    return OperationView(
        id=operation.id,
        job=operation.job,
        kind=operation.kind,
        arguments=operation.arguments,
        actor=operation.actor,
        created_at=operation.created_at,
        state=fate.state,
        detail=fate.detail,
        action_id=None if action is None else action.id,
        new_attempt=None if action is None else action.new_attempt,
    )


def _by_run(operation: Operation, job: Job, run: Run | None) -> _Fate:
    """A stop is done when the run of its generation ended, however; a submission when a worker has taken it."""
    if operation.arguments["generation"] < job.generation:
        return _Fate(OperationState.SUCCEEDED, "the job has ended and was submitted again")
    state = job_state(job, run)
    detail = f"the job is {state}" + (f": {run.reason}" if run is not None and run.reason else "")
    if state is JobState.PENDING and not (operation.kind == SUBMIT and job.desired_state == "STOPPED"):
        return _Fate(OperationState.PENDING, "no worker has taken it up yet")
    if state.is_final or operation.kind == SUBMIT:
        return _Fate(OperationState.SUCCEEDED, detail)
    return _Fate(OperationState.RUNNING, detail)


def _by_action(operation: Operation, action: Action | None, job: Job, run: Run | None) -> _Fate:
    if action is not None:
        return _Fate(_ACTION_STATES[action.state], action.problem or action.reason)
    if operation.arguments["generation"] < job.generation or job_state(job, run).is_final:
        return _Fate(OperationState.FAILED, "the job ended before recovery took it up")
    return _Fate(OperationState.PENDING, "recovery has not taken it up yet")
