"""Attempts that this process has not seen begin and that the worker has not indexed yet: the stream tells of them."""

from __future__ import annotations

from surefoot.bus.base import Bus
from surefoot.bus.streams import EVENTS
from surefoot.catalogue.database import Database
from surefoot.catalogue.queries import attempt_records
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.lineage import on_lineage
from surefoot.errors import AttemptError
from surefoot.events import AttemptStarted
from surefoot_recovery.jobs import Jobs

CHUNK = 1000


def learn_lineage(job: str, jobs: Jobs, bus: Bus, database: Database) -> None:
    """Make sure that the lineage of a job is known, as far as it can be. Once per job and process, since later attempts
    are seen to begin; reads the whole stream only when the catalogue lacks something.

    Raises:
        Unavailable: the database or the bus does not answer.
    """
    view = jobs[job]
    if view.is_learned:
        return
    with database.read() as session:
        records = view.records() | attempt_records(session, job)
    newest = max([view.attempt, *records])
    try:
        on_lineage(CheckpointId(0, 0), newest, records)
    except AttemptError:
        for event in _attempts_on(bus):
            if event.attempt is not None:
                jobs[event.job].started.setdefault(event.attempt, event)
    view.is_learned = True


def _attempts_on(bus: Bus) -> list[AttemptStarted]:
    found: list[AttemptStarted] = []
    after = "0"
    while deliveries := bus.read(EVENTS, after, CHUNK, 0.0):
        found += [delivery.message for delivery in deliveries if isinstance(delivery.message, AttemptStarted)]
        after = deliveries[-1].id
    return found
