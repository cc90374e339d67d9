"""The worker's tables: `runs` with its leases, and `attempts`. Every function is one transaction's worth of work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import or_, select, update
from sqlalchemy.orm import Session

from surefoot.catalogue.models import Attempt, Job, Run
from surefoot.catalogue.queries import attempt_row
from surefoot.checkpoint.attempts import AttemptRecord
from surefoot.events import JobState
from surefoot_worker.service.run_state import RunState

_FINAL = tuple(state.value for state in JobState if state.is_final)


class Wanted(NamedTuple):
    """What is wanted of a job, and who has it.

    Attributes:
        job: Its name.
        desired_state: RUNNING, PAUSED or STOPPED.
        generation: Of the job.
        run_generation: Of the run; None when there is none yet.
        state: Of the run.
        worker: Who holds the lease.
        lease_version: Of the lease.
    """

    job: str
    desired_state: str
    generation: int
    run_generation: int | None
    state: JobState | None
    worker: str | None
    lease_version: int

    @property
    def is_new(self) -> bool:
        """Whether it was submitted and nobody has taken it up."""
        return self.run_generation is None or self.run_generation < self.generation


def unfinished(session: Session) -> Sequence[Wanted]:
    """Return the jobs that are not at their end, the one that has waited longest first."""
    rows = session.execute(
        select(Job.name, Job.desired_state, Job.generation, Run.generation, Run.state, Run.worker, Run.lease_version)
        .outerjoin(Run, Run.job == Job.name)
        .where(or_(Run.job.is_(None), Run.generation < Job.generation, Run.state.not_in(_FINAL)))
        .order_by(Job.updated_at, Job.name)
    )
    return [
        Wanted(name, desired, generation, of_run, None if state is None else JobState(state), worker, version or 0)
        for name, desired, generation, of_run, state, worker, version in rows
    ]


class Taken(NamedTuple):
    """A job that this worker has taken; the spec is as it was submitted."""

    spec: dict[str, Any]
    from_seed: bool
    run: RunState


def take(session: Session, wanted: Wanted, worker: str) -> Taken | None:
    """Take the lease of a job; None when somebody else was faster or the job is gone.

    Args:
        session: One that writes.
        wanted: As it was read; nothing of it may have changed.
        worker: Identity of this worker.
    """
    job = session.get(Job, wanted.job, with_for_update=True)
    run = session.get(Run, wanted.job, with_for_update=True)
    if job is None or job.generation != wanted.generation:
        return None
    if run is None and wanted.run_generation is None:
        run = Run(job=job.name, generation=job.generation, state=JobState.PENDING, lease_version=0, updated_at=_now())
        session.add(run)
    elif run is None or (run.worker, run.lease_version) != (wanted.worker, wanted.lease_version):
        return None
    if run.generation < job.generation:
        _renew(run, job.generation)
    run.worker, run.lease_version, run.updated_at = worker, run.lease_version + 1, _now()
    return Taken(job.spec, job.from_seed, _in_memory(run))


def save(session: Session, run: RunState, worker: str, *, keep: bool) -> bool:
    """Write a run and renew its lease; False when this worker does not hold it any more.

    Args:
        session: One that writes.
        run: What to write.
        worker: Identity of this worker.
        keep: Keep the lease; else anybody may take the job.
    """
    values = {name: getattr(run, name) for name in _SAVED}
    changed = session.execute(
        update(Run)
        .where(Run.job == run.job, Run.worker == worker, Run.generation == run.generation)
        .values(**values, worker=worker if keep else None, lease_version=Run.lease_version + 1, updated_at=_now())
    )
    return bool(getattr(changed, "rowcount", 0))


def index_attempts(session: Session, job: str, records: Mapping[int, AttemptRecord], known: AbstractSet[int]) -> None:
    """Add the attempts that are not in the table, as far as `known` does not hold them."""
    present = set(session.scalars(select(Attempt.attempt).where(Attempt.job == job)))
    for number, record in records.items():
        if number not in known | present:
            session.merge(attempt_row(job, record))


_SAVED = ("state", "reason", "exit_code", "attempt", "step", "total_steps", "world_size", "started_at", "finished_at")


def _renew(run: Run, generation: int) -> None:
    run.generation, run.state, run.reason = generation, JobState.PENDING, "submitted again"
    run.exit_code = run.started_at = run.finished_at = None


def _in_memory(run: Run) -> RunState:
    return RunState(
        job=run.job,
        generation=run.generation,
        state=JobState(run.state),
        reason=run.reason or "submitted",
        exit_code=run.exit_code,
        attempt=run.attempt,
        step=run.step,
        total_steps=run.total_steps,
        world_size=run.world_size,
        started_at=run.started_at,
        finished_at=run.finished_at,
    )


def _now() -> datetime:
    return datetime.now(UTC)
