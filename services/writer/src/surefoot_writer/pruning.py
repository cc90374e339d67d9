"""Removal of what the writer took out of use: files first, then events and rows. Not of Celery."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from surefoot.bus.publisher import Publisher
from surefoot.catalogue.database import Database
from surefoot.catalogue.models import CheckpointState, Job
from surefoot.checkpoint.catalog import list_committed
from surefoot.checkpoint.prune import prune
from surefoot.faultpoints import reach
from surefoot.spec import parse_spec
from surefoot_writer.index import CheckpointIndex
from surefoot_writer.jobs import store_of
from surefoot_writer.retaining import known_from

log = structlog.get_logger(__name__)


@dataclass
class Pruning:
    """Removes checkpoints. One thread.

    Attributes:
        database: Where jobs and checkpoints are.
        publisher: Sends the events.
    """

    database: Database
    publisher: Publisher

    def prune(self, job: str) -> None:
        """Remove a job's DELETING checkpoints that are still unwanted; the others are COMMITTED again.

        Args:
            job: Name of the job.

        Raises:
            Unavailable: bus or database do not answer; the next call finishes.
            AttemptError: attempt records are missing or damaged; nothing is removed.
            OSError: storage fails; the next call finishes.
            UsageError: the job's spec cannot be understood.
        """
        index = CheckpointIndex(self.database)
        with self.database.read() as session:
            row = session.get(Job, job)
        if row is None:
            return
        spec = parse_spec(row.spec)
        store, rows = store_of(spec), index.rows(job)
        deleting = [id_ for id_, row in rows.items() if row.state == CheckpointState.DELETING]
        gone = prune(
            store,
            spec.checkpoint.retention,
            job=job,
            emit=self.publisher.publish,
            protected=index.named_by_commands(job),
            only=deleting,
            refine=known_from(rows),
        )
        reach("writer.pruned")
        for (attempt, step), reason in gone:
            log.info("removed", job_id=job, attempt=attempt, step=step, reason=reason)
        there = set(list_committed(store))
        for id_ in deleting:
            if id_ in there:
                index.note_kept(job, id_)
            else:
                index.note_gone(job, id_)
