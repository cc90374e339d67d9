"""What several services ask the catalogue."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from surefoot.catalogue.models import Attempt, Checkpoint, CheckpointState
from surefoot.checkpoint.attempts import AttemptRecord, SkipWindow, Source, StartsFrom
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.lineage import newest_on_lineage

_SAME_IN_BOTH = (
    *("lr_factor", "lr_hold_steps", "lr_rewarm_steps", "lr_from_step"),
    *("command", "cause", "world_size", "host", "started_at"),
)


def attempt_records(session: Session, job: str) -> dict[int, AttemptRecord]:
    """Return the attempt records of a job by number, ascending, as the functions of `checkpoint.lineage` take them.

    The worker indexes them from the files a moment after they are written, so the newest can be missing.
    """
    rows = session.scalars(select(Attempt).where(Attempt.job == job).order_by(Attempt.attempt))
    return {row.attempt: _record(row) for row in rows}


def newest_attempt(session: Session, job: str) -> Attempt | None:
    """Return the newest attempt of a job that is in the catalogue; None before the first."""
    return session.scalars(
        select(Attempt).where(Attempt.job == job).order_by(Attempt.attempt.desc()).limit(1)
    ).one_or_none()


def stable_checkpoint(session: Session, job: str, attempt: int, at_most_step: int) -> Checkpoint | None:
    """Return the newest STABLE checkpoint on the lineage of `attempt` that is not after `at_most_step`.

    Args:
        session: To read with.
        job: Name of the job.
        attempt: On whose lineage; its record must be in the catalogue.
        at_most_step: Highest step allowed.

    Raises:
        AttemptError: a record that the answer depends on is missing.
    """
    rows = session.scalars(
        select(Checkpoint).where(
            Checkpoint.job == job,
            Checkpoint.stable,
            Checkpoint.state == CheckpointState.COMMITTED,
            Checkpoint.step <= at_most_step,
        )
    )
    by_id = {CheckpointId(row.attempt, row.step): row for row in rows}
    newest = newest_on_lineage(by_id, attempt, attempt_records(session, job))
    return None if newest is None else by_id[newest]


def attempt_row(job: str, record: AttemptRecord) -> Attempt:
    """Return the row that indexes an attempt record; `attempt_records` reads it back as it was."""
    return Attempt(
        job=job,
        attempt=record.attempt,
        from_attempt=record.starts_from.attempt,
        from_step=record.starts_from.step,
        source=record.starts_from.source.value,
        skip_windows=[[window.start, window.stop] for window in record.skip_windows],
        **{name: getattr(record, name) for name in _SAME_IN_BOTH},
    )


def _record(row: Attempt) -> AttemptRecord:
    return AttemptRecord(
        attempt=row.attempt,
        starts_from=StartsFrom(attempt=row.from_attempt, step=row.from_step, source=Source(row.source)),
        skip_windows=tuple(SkipWindow(start=start, stop=stop) for start, stop in row.skip_windows),
        **{name: getattr(row, name) for name in _SAME_IN_BOTH},
    )
