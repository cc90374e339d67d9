"""What changes something: submit, and the verbs. One transaction each, with its operation and its audit entry.

A request is published after its operation is committed. Where that fails the client hears 503, and comes again with
the same Idempotency-Key: the operation is found and the request is sent again, with the same id, by which recovery
knows it. An operation that never reached recovery stays PENDING, and is FAILED once the job has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from surefoot.bus.streams import REQUESTS
from surefoot.catalogue.models import Job, Operation, Run
from surefoot.events import Request
from surefoot.spec import JobSpec
from surefoot_api import audit, operations, specs
from surefoot_api.parts import Parts
from surefoot_api.problems import ProblemError, not_found
from surefoot_api.reading import action_of
from surefoot_api.schemas import OperationView


@dataclass(frozen=True)
class Call:
    """A POST.

    Attributes:
        job: Name of the job it is about.
        kind: submit, or the verb.
        arguments: Of the verb, as JSON has them.
        actor: Who calls.
        path: For the audit.
        idempotency_key: The same call with the same key is carried out once.
    """

    job: str
    kind: str
    arguments: dict[str, Any]
    actor: str
    path: str
    idempotency_key: str | None

    def operation(self, generation: int) -> Operation:
        """Return the row of a new operation."""
        return Operation(
            id=uuid4().hex,
            job=self.job,
            kind=self.kind,
            arguments=self.arguments | {"generation": generation},
            actor=self.actor,
            idempotency_key=self.idempotency_key,
            created_at=datetime.now(UTC),
        )

    def replay(self, session: Session) -> Operation | None:
        """Return the operation that an earlier call with this key began, if any.

        Raises:
            ProblemError: that call was another one.
        """
        if self.idempotency_key is None:
            return None
        query = select(Operation).where(Operation.job == self.job, Operation.idempotency_key == self.idempotency_key)
        earlier = session.scalars(query).one_or_none()
        if earlier is None:
            return None
        arguments = {name: value for name, value in earlier.arguments.items() if name != "generation"}
        if (earlier.kind, arguments) != (self.kind, self.arguments):
            raise ProblemError(
                422, "idempotency_key_reused", f"Idempotency-Key: was used for another call ({earlier.kind})"
            )
        return earlier


def submit(parts: Parts, call: Call, spec: JobSpec, *, from_seed: bool) -> None:
    """Submit a job, or submit one that has ended again: it then goes on from what it saved.

    Raises:
        ProblemError: it is active.
        UsageError: this machine cannot start it; names the key.
        CatalogueUnavailable: nothing was done, or everything.
    """
    with parts.database.read() as session:
        if call.replay(session) is not None:
            return
        _require_ended(session.get(Job, call.job), session)
    if parts.settings.api_preflight:
        specs.check_startable(spec)  # looks at files, so outside of a transaction
    try:
        with parts.database.write() as session:
            if call.replay(session) is None:
                _submit(session, call, spec, from_seed)
    except IntegrityError:
        raise ProblemError(409, "job_active", f"job {call.job!r} was submitted at the same moment") from None


def _submit(session: Session, call: Call, spec: JobSpec, from_seed: bool) -> None:
    now = datetime.now(UTC)
    job = session.get(Job, call.job, with_for_update=True)
    _require_ended(job, session)
    if job is None:
        job = Job(name=call.job, generation=0, created_at=now)
        session.add(job)
    job.spec, job.from_seed, job.desired_state = specs.to_row(spec), from_seed, "RUNNING"
    job.generation += 1
    job.updated_at = now
    session.flush()
    operation = call.operation(job.generation)
    session.add_all([operation, audit.entry(call.actor, call.path, 201, call.job, operation.id)])


def _require_ended(job: Job | None, session: Session) -> None:
    if job is None:
        return
    state = operations.job_state(job, session.get(Run, job.name))
    if not state.is_final:
        raise ProblemError(409, "job_active", f"job {job.name!r} is {state}; stop it first, or give another name")


def carry_out(parts: Parts, call: Call, request: type[Request] | None) -> OperationView:
    """Do what a verb says, as far as that is the api's to do.

    Args:
        parts: To work with.
        call: What was asked for.
        request: What recovery is asked for; None: the verb is `stop`, which the worker reads off the job's row.

    Raises:
        ProblemError: there is no such job, or it is not active.
        Unavailable: the same call with the same Idempotency-Key makes it good.
    """
    with parts.database.write() as session:
        job = session.get(Job, call.job, with_for_update=True)
        if job is None:
            raise not_found("job", call.job)
        run = session.get(Run, call.job)
        operation = call.replay(session)
        if operation is None:
            _require_active(job, run, request)
            operation = call.operation(job.generation)
            session.add_all([operation, audit.entry(call.actor, call.path, 202, call.job, operation.id)])
            if request is None:
                job.desired_state, job.updated_at = "STOPPED", operation.created_at
        action = action_of(session, operation)
    if request is not None and action is None:
        arguments = {name: value for name, value in call.arguments.items() if value is not None}
        message = request(job=call.job, operation_id=operation.id, actor=operation.actor, **arguments)
        parts.publisher.publish(message, REQUESTS)
    return operations.view(operation, action, job, run)


def _require_active(job: Job, run: Run | None, request: type[Request] | None) -> None:
    state = operations.job_state(job, run)
    if state.is_final:
        raise ProblemError(409, "job_not_active", f"job {job.name!r} is {state}")
    if request is not None and job.desired_state != "RUNNING":
        raise ProblemError(409, "job_stopping", f"job {job.name!r} is to be {job.desired_state}")
