"""The table `checkpoints`: an index of what is on storage. All that the writer writes to it is here."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum

import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

from surefoot.catalogue.database import Database
from surefoot.catalogue.models import Checkpoint, Job
from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.spec import JobSpec
from surefoot_writer.survey import Facts, Survey

MAX_VERIFY_TRIES = 3

log = structlog.get_logger(__name__)


class CheckpointState(StrEnum):
    """Column `state`: COMMITTED -> QUARANTINED, and back when it is written again."""

    COMMITTED = "COMMITTED"
    QUARANTINED = "QUARANTINED"


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
            if row is not None and row.state == CheckpointState.COMMITTED:
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

    def end_verify(self, job: str, checkpoint: CheckpointId, problem: str | None, *, is_final: bool = True) -> None:
        """Write down how a verification ended.

        Args:
            job: Name of the job.
            checkpoint: Which one.
            problem: What is wrong; None: every byte is good.
            is_final: False: it could not be read, which says nothing about the checkpoint.
        """
        with self._database.write() as session:
            row = session.get(Checkpoint, (job, *checkpoint), with_for_update=True)
            if row is not None:
                row.verify_problem = problem
                row.verified_at = datetime.now(UTC) if is_final else None
                row.stable = row.stable and not (is_final and problem is not None)

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
                elif checkpoint not in found.stable_by_committed:
                    log.warning("a checkpoint is gone from storage", job_id=spec.job, name=folder_name(checkpoint))
                    session.delete(row)
                elif row.state != CheckpointState.COMMITTED:
                    session.delete(row)
                elif row.stable and not found.stable_by_committed[checkpoint]:
                    row.stable, row.promoted_at = False, None
            session.flush()
            for checkpoint, facts in new.items():
                if session.get(Checkpoint, (spec.job, *checkpoint)) is None:
                    session.add(_new_row(spec, checkpoint, facts))


def without_row(rows: Mapping[CheckpointId, Checkpoint], found: Survey) -> list[CheckpointId]:
    """Return the committed checkpoints that the index does not know as such."""
    return [id_ for id_ in found.stable_by_committed if id_ not in rows or rows[id_].state != CheckpointState.COMMITTED]


def _differs(rows: Mapping[CheckpointId, Checkpoint], found: Survey) -> bool:
    if without_row(rows, found):
        return True
    return any(
        (id_ not in found.stable_by_committed and (id_ not in found.quarantined or row.state != "QUARANTINED"))
        or (row.stable and not found.stable_by_committed.get(id_, False))
        for id_, row in rows.items()
    )


def _rows(session: Session, job: str) -> dict[CheckpointId, Checkpoint]:
    rows = session.scalars(select(Checkpoint).where(Checkpoint.job == job))
    return {CheckpointId(row.attempt, row.step): row for row in rows}


def _new_row(spec: JobSpec, checkpoint: CheckpointId, facts: Facts) -> Checkpoint:
    return Checkpoint(
        job=spec.job,
        attempt=checkpoint.attempt,
        step=checkpoint.step,
        state=CheckpointState.COMMITTED.value,
        num_bytes=facts.num_bytes,
        world_size=facts.world_size,
        path=str(spec.storage / spec.job / folder_name(checkpoint)),
        committed_at=facts.committed_at,
    )


def _quarantine(row: Checkpoint, reason: str) -> None:
    row.state = CheckpointState.QUARANTINED.value
    row.stable = False
    row.verify_problem = row.verify_problem or reason
