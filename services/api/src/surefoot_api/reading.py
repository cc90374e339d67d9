"""What the catalogue holds, as clients see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from surefoot.catalogue.models import Action, Attempt, Checkpoint, CheckpointState, Incident, Job, Operation, Run
from surefoot.catalogue.queries import attempt_records
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.lineage import candidates
from surefoot.errors import AttemptError
from surefoot_api import operations
from surefoot_api.pages import PageRequest, page
from surefoot_api.problems import ProblemError, not_found
from surefoot_api.schemas import (
    ActionView,
    AttemptPage,
    AttemptView,
    CheckpointPage,
    CheckpointView,
    IncidentDetail,
    IncidentPage,
    IncidentView,
    JobDetail,
    JobPage,
    JobView,
    OperationPage,
    OperationView,
)


def require_job(session: Session, name: str) -> Job:
    """Return a job's row.

    Raises:
        ProblemError: there is none.
    """
    job = session.get(Job, name)
    if job is None:
        raise not_found("job", name)
    return job


def job_detail(session: Session, name: str) -> JobDetail:
    """Return one job with its spec."""
    job = require_job(session, name)
    return JobDetail(**_job_fields(job, session.get(Run, name)), spec=job.spec)


def jobs(session: Session, request: PageRequest) -> JobPage:
    """Return a page of jobs."""
    rows, token = page(session, select(Job), [Job.created_at, Job.name], request)
    names = [row.name for row in rows]
    runs = {run.job: run for run in session.scalars(select(Run).where(Run.job.in_(names)))}
    return JobPage(jobs=[JobView(**_job_fields(row, runs.get(row.name))) for row in rows], next_page_token=token)


def _job_fields(job: Job, run: Run | None) -> dict[str, Any]:
    of_run = ("reason", "attempt", "step", "total_steps", "world_size", "exit_code", "worker", "started_at")
    # A run of an earlier generation says nothing about this one.
    current = run if run is not None and run.generation >= job.generation else None
    fields: dict[str, Any] = {name: getattr(current, name, None) for name in (*of_run, "finished_at")}
    fields |= {name: getattr(job, name) for name in ("name", "desired_state", "generation", "created_at")}
    fields["reason"] = fields["reason"] or ""
    fields["updated_at"] = job.updated_at if current is None else max(job.updated_at, current.updated_at)
    return fields | {"state": operations.job_state(job, run)}


def attempts(session: Session, name: str, request: PageRequest) -> AttemptPage:
    """Return a page of a job's attempts, newest first."""
    require_job(session, name)
    rows, token = page(session, select(Attempt).where(Attempt.job == name), [Attempt.attempt], request)
    return AttemptPage(attempts=[AttemptView.model_validate(row) for row in rows], next_page_token=token)


def checkpoints(session: Session, name: str, request: PageRequest) -> CheckpointPage:
    """Return a page of a job's checkpoints, newest first."""
    require_job(session, name)
    query = select(Checkpoint).where(Checkpoint.job == name)
    rows, token = page(session, query, [Checkpoint.attempt, Checkpoint.step], request)
    current = _on_lineage(session, name, rows)
    views = [
        CheckpointView.model_validate(row).model_copy(
            update={"on_lineage": None if current is None else CheckpointId(row.attempt, row.step) in current}
        )
        for row in rows
    ]
    return CheckpointPage(checkpoints=views, next_page_token=token)


def _on_lineage(session: Session, name: str, rows: Sequence[Checkpoint]) -> set[CheckpointId] | None:
    """Return those of the checkpoints that led to the present; None while a record is not in the catalogue yet."""
    records = attempt_records(session, name)
    try:
        return set(candidates([CheckpointId(row.attempt, row.step) for row in rows], max(records, default=0), records))
    except AttemptError:
        return None


def checkpoint_of_step(session: Session, name: str, step: int) -> CheckpointId:
    """Return the newest checkpoint of a step that is on the lineage.

    Raises:
        ProblemError: there is none.
    """
    require_job(session, name)
    is_usable = Checkpoint.state == CheckpointState.COMMITTED
    query = select(Checkpoint).where(Checkpoint.job == name, Checkpoint.step == step, is_usable)
    current = _on_lineage(session, name, list(session.scalars(query)))
    if not current:
        raise ProblemError(
            409, "no_such_checkpoint", f"job {name!r} has no committed checkpoint of step {step} on its lineage"
        )
    return max(current)


def incidents(session: Session, name: str, request: PageRequest) -> IncidentPage:
    """Return a page of a job's incidents, newest first."""
    require_job(session, name)
    rows, token = page(session, select(Incident).where(Incident.job == name), [Incident.id], request)
    return IncidentPage(incidents=[IncidentView.model_validate(row) for row in rows], next_page_token=token)


def incident(session: Session, incident_id: int) -> IncidentDetail:
    """Return one incident with what was done about it, oldest action first."""
    row = session.get(Incident, incident_id)
    if row is None:
        raise not_found("incident", incident_id)
    actions = session.scalars(select(Action).where(Action.incident_id == incident_id).order_by(Action.id))
    fields = IncidentView.model_validate(row).model_dump()
    return IncidentDetail(**fields, actions=[ActionView.model_validate(action) for action in actions])


def action_of(session: Session, operation: Operation) -> Action | None:
    """Return what recovery made of an operation, if anything yet."""
    return session.scalars(select(Action).where(Action.operation_id == operation.id)).one_or_none()


def operation(session: Session, operation_id: str) -> OperationView:
    """Return one operation."""
    row = session.get(Operation, operation_id)
    if row is None:
        raise not_found("operation", operation_id)
    return operations.view(row, action_of(session, row), require_job(session, row.job), session.get(Run, row.job))


def operations_of(session: Session, name: str, request: PageRequest) -> OperationPage:
    """Return a page of a job's operations, newest first."""
    job, run = require_job(session, name), session.get(Run, name)
    query = select(Operation).where(Operation.job == name)
    rows, token = page(session, query, [Operation.created_at, Operation.id], request)
    ids = [row.id for row in rows]
    actions = {row.operation_id: row for row in session.scalars(select(Action).where(Action.operation_id.in_(ids)))}
    views = [operations.view(row, actions.get(row.id), job, run) for row in rows]
    return OperationPage(operations=views, next_page_token=token)
