"""One try of a verification: read every byte of a committed checkpoint, write down what was found. Not of Celery."""

from __future__ import annotations

import time
from dataclasses import dataclass
from uuid import NAMESPACE_URL, uuid5

import structlog

from surefoot.bus.publisher import Publisher
from surefoot.catalogue.database import Database
from surefoot.catalogue.models import Checkpoint, Job
from surefoot.checkpoint.catalog import verify
from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.errors import CheckpointError, DamagedCheckpoint
from surefoot.events import CheckpointVerified
from surefoot.faultpoints import reach
from surefoot.spec import parse_spec
from surefoot_writer.index import MAX_VERIFY_TRIES, CheckpointIndex
from surefoot_writer.jobs import store_of

log = structlog.get_logger(__name__)


class ReadFailed(Exception):
    """Storage could not be read, and there is a try left."""


@dataclass
class Verifier:
    """Verifies checkpoints. One thread.

    Attributes:
        database: Where jobs and checkpoints are.
        publisher: Sends the result.
    """

    database: Database
    publisher: Publisher

    def verify(self, job: str, checkpoint: CheckpointId, *, is_repeated: bool) -> None:
        """Verify a checkpoint unless that was done, record the result and send it.

        Args:
            job: Name of the job.
            checkpoint: Which one.
            is_repeated: This order was taken up before: a result that is recorded already may not have been sent.

        Raises:
            ReadFailed: an I/O error, and there is a try left.
            Unavailable: bus or database do not answer.
            UsageError: the job's spec cannot be understood.
        """
        index = CheckpointIndex(self.database)
        if not index.begin_verify(job, checkpoint):
            if is_repeated:
                self._send_recorded(job, checkpoint)
            return
        reach("verify.begun")
        with self.database.read() as session:
            spec = parse_spec(session.get_one(Job, job).spec)
            num_tries = session.get_one(Checkpoint, (job, *checkpoint)).verify_tries
        started = time.monotonic()
        problem: str | None = None
        try:
            verify(store_of(spec), checkpoint)
        except (DamagedCheckpoint, CheckpointError) as error:
            problem = str(error)
        except OSError as error:
            if num_tries < MAX_VERIFY_TRIES:
                raise ReadFailed(f"{error}") from error
            index.end_verify(job, checkpoint, f"could not be read in {num_tries} tries: {error}", is_final=False)
            log.error("a checkpoint cannot be read", job_id=job, error=str(error), **checkpoint._asdict())
            return
        reach("verify.read")
        if not index.end_verify(job, checkpoint, problem):
            return  # what is removed while it is read looks damaged
        reach("verify.recorded")
        self._send(job, checkpoint, problem, time.monotonic() - started)

    def _send_recorded(self, job: str, checkpoint: CheckpointId) -> None:
        with self.database.read() as session:
            row = session.get(Checkpoint, (job, *checkpoint))
        if row is not None and row.verified_at is not None:
            self._send(job, checkpoint, row.verify_problem, 0.0)

    def _send(self, job: str, checkpoint: CheckpointId, problem: str | None, seconds: float) -> None:
        attempt, step = checkpoint
        # A result may be told twice; it then has the same id.
        told = uuid5(NAMESPACE_URL, f"surefoot:verified:{job}:{folder_name(checkpoint)}:{problem}").hex
        self.publisher.publish(
            CheckpointVerified(event_id=told, job=job, attempt=attempt, step=step, problem=problem, seconds=seconds)
        )
        if problem is None:
            log.info("verified", job_id=job, attempt=attempt, step=step, seconds=round(seconds, 3))
        else:
            log.error("a committed checkpoint is damaged", job_id=job, attempt=attempt, step=step, error=problem)
