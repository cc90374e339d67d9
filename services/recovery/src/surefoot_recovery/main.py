"""The recovery service: where its parts are built and connected."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial

from sqlalchemy import select

from surefoot.bus.consumer import Consumer
from surefoot.bus.publisher import Publisher
from surefoot.bus.redis_bus import RedisBus
from surefoot.bus.streams import EVENTS, REQUESTS
from surefoot.catalogue.database import Database
from surefoot.catalogue.models import Action, Incident
from surefoot.runtime import Runtime, Turn, run_service
from surefoot.settings import load_settings
from surefoot_recovery.desk import Desk
from surefoot_recovery.handlers import event_handlers, request_handlers
from surefoot_recovery.history import learn_lineage
from surefoot_recovery.jobs import Jobs
from surefoot_recovery.lookups import UNANSWERED
from surefoot_recovery.outbox import Outbox
from surefoot_recovery.settings import RecoverySettings

NAME = "recovery"
"""Also of its consumer groups, and of the one consumer in each."""

DETECTOR = "detector"
"""Whose silence means something only while it keeps up."""

IDLE_SECONDS = 0.2
"""A request waits no longer than this for events to be read."""


def main() -> int:
    """Run the service until SIGTERM; return the exit code."""
    settings = load_settings(RecoverySettings)
    return run_service(NAME, settings, lambda runtime: build(runtime, settings))


def build(runtime: Runtime, settings: RecoverySettings) -> Turn:
    """Connect the parts and return a turn of the loop.

    Raises:
        Unavailable: the database does not answer or is of another version.
    """
    database = Database(settings.database_url)
    runtime.on_exit.callback(database.close)
    database.check_schema()
    jobs = jobs_with_open_ends(database)
    bus = RedisBus(settings.redis_url)
    runtime.on_exit.callback(bus.close)
    outbox = Outbox(database, Publisher(bus, NAME), utc_now)
    detector = bus.group(EVENTS, DETECTOR, DETECTOR)
    learn = partial(learn_lineage, jobs=jobs, bus=bus, database=database)
    desk = Desk(database, outbox, jobs, utc_now, detector.last_delivered_id, learn, settings.recovery_merge_steps)
    events = Consumer(bus.group(EVENTS, NAME, NAME), event_handlers(desk))
    requests = Consumer(bus.group(REQUESTS, NAME, NAME), request_handlers(desk))

    def turn() -> None:
        outbox.flush()
        events.turn(IDLE_SECONDS)
        requests.turn(0.0)

    return turn


def jobs_with_open_ends(database: Database) -> Jobs:
    """Return the jobs whose incidents or actions the process before left open, to be looked at with their next step."""
    jobs = Jobs()
    with database.read() as session:
        incidents = select(Incident.job).where(Incident.closed_at.is_(None))
        for name in session.scalars(incidents.union(select(Action.job).where(Action.state.in_(UNANSWERED)))):
            jobs.look_now(name)
    return jobs


def utc_now() -> datetime:
    """Return the time of day, UTC."""
    return datetime.now(UTC)
