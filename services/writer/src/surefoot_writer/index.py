"""The table `checkpoints`: an index of what is on storage. All that the writer writes to it is here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime

import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

from surefoot.catalogue.database import Database
from surefoot.catalogue.models import Action, ActionState, Checkpoint, CheckpointState, Job
from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.spec import JobSpec
from surefoot_writer.survey import Facts, Survey

MAX_VERIFY_TRIES = 3

log = structlog.get_logger(__name__)


class CheckpointIndex:
    """Rows of checkpoints. Any thread. Every method may raise CatalogueUnavailable.

    Args:
        database: Where the table is.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def rows(self, job: str) -> dict[CheckpointId, Checkpoint]:
        """Return the rows of a job, to read."""
        with self._database.read() as session:
            return _rows(session, job)

    def note_committed(self, spec: JobSpec, checkpoint: CheckpointId, facts: Facts) -> bool:
        """Make the row of a checkpoint that was just committed; return False when it is there already."""
        with self._database.write() as session:
            row = session.get(Checkpoint, (spec.job, *checkpoint))
            if row is not None and row.state != CheckpointState.QUARANTINED:
                return False
            if row is not None:  # quarantined, and written again from the snapshot in memory
                session.delete(row)
                session.flush()
            if session.get(Job, spec.job) is None:
                return False
            session.add(_new_row(spec, checkpoint, facts))
            return True

    def note_quarantined(self, job: str, checkpoint: CheckpointId, reason: str) -> None:
        """Say that a checkpoint was moved to quarantine."""
        with self._database.write() as session:
            row = session.get(Checkpoint, (job, *checkpoint), with_for_update=True)
            if row is not None:
                _quarantine(row, reason)

    def note_stable(self, job: str, checkpoint: CheckpointId, promoted_at: datetime) -> None:
        """Say that a checkpoint was promoted."""
        with self._database.write() as session:
            row = session.get(Checkpoint, (job, *checkpoint), with_for_update=True)
            if row is not None and row.state == CheckpointState.COMMITTED:
                row.stable, row.promoted_at = True, promoted_at

    def note_nonfinite(self, job: str, checkpoint: CheckpointId, tensor: str) -> None:
        """Say that a checkpoint will never be promoted."""
        with self._database.write() as session:
            row = session.get(Checkpoint, (job, *checkpoint), with_for_update=True)
            if row is not None:
                row.nonfinite_tensor = tensor

    def note_deleting(self, job: str, checkpoints: Collection[CheckpointId]) -> list[CheckpointId]:
        """Take checkpoints out of use before their files go; return those for which that was done.

        One that a command names stays. Whoever writes such a command sees the state first, or is seen here: SQLite has
        one writer at a time, and on PostgreSQL both lock the row.
        """
        with self._database.write() as session:
            taken = []
            for checkpoint in sorted(checkpoints):
                row = session.get(Checkpoint, (job, *checkpoint), with_for_update=True)
                if row is not None and row.state == CheckpointState.COMMITTED:
                    taken.append((checkpoint, row))
            named = _named_by_commands(session, job)  # after the locks
            deleting = [(checkpoint, row) for checkpoint, row in taken if checkpoint not in named]
            for _, row in deleting:
                row.state = CheckpointState.DELETING
            return [checkpoint for checkpoint, _ in deleting]

    def note_kept(self, job: str, checkpoint: CheckpointId) -> None:
        """Say that a checkpoint stays after all."""
        with self._database.write() as session:
            row = session.get(Checkpoint, (job, *checkpoint), with_for_update=True)
            if row is not None and row.state == CheckpointState.DELETING:
                row.state = CheckpointState.COMMITTED

    def note_gone(self, job: str, checkpoint: CheckpointId) -> None:
        """Drop the row of a checkpoint that retention removed."""
        with self._database.write() as session:
            row = session.get(Checkpoint, (job, *checkpoint), with_for_update=True)
            if row is not None and row.state != CheckpointState.QUARANTINED:
                session.delete(row)

    def named_by_commands(self, job: str) -> set[CheckpointId]:
        """Return the checkpoints that a command which was not answered yet sends the job back to."""
        with self._database.read() as session:
            return _named_by_commands(session, job)

    def begin_verify(self, job: str, checkpoint: CheckpointId) -> bool:
        """Count a try of a verification, before it is made; False: there is nothing (more) to do."""
        with self._database.write() as session:
            row = session.get(Checkpoint, (job, *checkpoint), with_for_update=True)
            if row is None or row.state != CheckpointState.COMMITTED or row.verified_at is not None:
                return False
            if row.verify_tries >= MAX_VERIFY_TRIES:
                row.verify_problem = row.verify_problem or f"given up: {row.verify_tries} tries were cut short"
                return False
            row.verify_tries += 1
            return True

    def end_verify(self, job: str, checkpoint: CheckpointId, problem: str | None, *, is_final: bool = True) -> bool:
        """Write down how a verification ended; return False when the checkpoint was taken out of use meanwhile.

        Args:
            job: Name of the job.
            checkpoint: Which one.
            problem: What is wrong; None: every byte is good.
            is_final: False: it could not be read, which says nothing about the checkpoint.
        """
        with self._database.write() as session:
            row = session.get(Checkpoint, (job, *checkpoint), with_for_update=True)
            if row is None or row.state != CheckpointState.COMMITTED:
                return False
            row.verify_problem = problem
            row.verified_at = datetime.now(UTC) if is_final else None
            row.stable = row.stable and not (is_final and problem is not None)
            return True

    def reconcile(self, spec: JobSpec, found: Survey, new: Mapping[CheckpointId, Facts]) -> None:
        """Make the rows what the folders say.

        Args:
            spec: Of the job.
            found: What lies on storage.
            new: The facts of those committed checkpoints that have no row of one.
        """
        with self._database.read() as session:
            if not _differs(_rows(session, spec.job), found):
                return
        with self._database.write() as session:
            rows = _rows(session, spec.job)
            for checkpoint, row in rows.items():
                if checkpoint in found.quarantined:
                    _quarantine(row, "found in quarantine")
                elif checkpoint not in found.committed:
                    if row.state != CheckpointState.DELETING:
                        log.warning("a checkpoint is gone from storage", job_id=spec.job, name=folder_name(checkpoint))
                    session.delete(row)
                elif row.state == CheckpointState.QUARANTINED:
                    session.delete(row)
                else:
                    row.pinned = found.committed[checkpoint].pinned
                    if row.stable and not found.committed[checkpoint].stable:
                        row.stable, row.promoted_at = False, None
            session.flush()
            for checkpoint, facts in new.items():
                if session.get(Checkpoint, (spec.job, *checkpoint)) is None:
                    row = _new_row(spec, checkpoint, facts)
                    row.pinned = found.committed[checkpoint].pinned
                    session.add(row)


def without_row(rows: Mapping[CheckpointId, Checkpoint], found: Survey) -> list[CheckpointId]:
    """Return the committed checkpoints that the index does not know as such."""
    return [id_ for id_ in found.committed if id_ not in rows or rows[id_].state == CheckpointState.QUARANTINED]


def _differs(rows: Mapping[CheckpointId, Checkpoint], found: Survey) -> bool:
    if without_row(rows, found):
        return True
    return any(_row_differs(row, id_, found) for id_, row in rows.items())


def _row_differs(row: Checkpoint, checkpoint: CheckpointId, found: Survey) -> bool:
    marks = found.committed.get(checkpoint)
    if marks is None:
        return checkpoint not in found.quarantined or row.state != CheckpointState.QUARANTINED
    return row.pinned != marks.pinned or (row.stable and not marks.stable)


def _named_by_commands(session: Session, job: str) -> set[CheckpointId]:
    unanswered = Action.state.in_((ActionState.PENDING, ActionState.SENT))
    commands = session.scalars(select(Action.command).where(Action.job == job, unanswered))
    return {CheckpointId(c["to_attempt"], c["to_step"]) for c in commands if c is not None and "to_step" in c}


def _rows(session: Session, job: str) -> dict[CheckpointId, Checkpoint]:
    rows = session.scalars(select(Checkpoint).where(Checkpoint.job == job))
    return {CheckpointId(row.attempt, row.step): row for row in rows}


def _new_row(spec: JobSpec, checkpoint: CheckpointId, facts: Facts) -> Checkpoint:
    return Checkpoint(
        job=spec.job,
        attempt=checkpoint.attempt,
        step=checkpoint.step,
        state=CheckpointState.COMMITTED,
        num_bytes=facts.num_bytes,
        world_size=facts.world_size,
        path=str(spec.storage / spec.job / folder_name(checkpoint)),
        committed_at=facts.committed_at,
        loss=facts.loss,
    )


def _quarantine(row: Checkpoint, reason: str) -> None:
    row.state = CheckpointState.QUARANTINED
    row.stable = False
    row.verify_problem = row.verify_problem or reason
