"""What all handlers share: the catalogue, the outbox, where jobs are, and the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.orm import Session

from surefoot import faultpoints
from surefoot.catalogue.database import Database
from surefoot_recovery.jobs import Jobs
from surefoot_recovery.outbox import Outbox


@dataclass(frozen=True)
class Desk:
    """The parts that a handler works with.

    Attributes:
        database: The catalogue.
        outbox: Sends what is decided.
        jobs: Where they are.
        clock: Now, UTC.
        detector_position: Id of the newest entry of `surefoot:events` that the detector was given.
        learn: Makes the lineage of a job known.
        merge_steps: An alarm that begins no further than this after another is part of the same incident.
    """

    database: Database
    outbox: Outbox
    jobs: Jobs
    clock: Callable[[], datetime]
    detector_position: Callable[[], str]
    learn: Callable[[str], None]
    merge_steps: int = 20

    @contextmanager
    def deciding(self, job: str) -> Iterator[Session]:
        """Give one transaction for all that a message leads to, and send it once that is committed.

        Raises:
            Unavailable: the database or the bus does not answer; deciding the same again finds what is done.
        """
        faultpoints.reach("recovery.read")
        self.learn(job)
        self.outbox.mark(job)
        self.jobs.look_now(job)
        with self.database.write() as session:
            yield session
        self.outbox.flush()
        faultpoints.reach("recovery.done")
