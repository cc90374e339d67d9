"""The composition root of the writer."""

from __future__ import annotations

import threading

import structlog

from surefoot.bus.consumer import Consumer
from surefoot.bus.publisher import Publisher
from surefoot.bus.redis_bus import RedisBus
from surefoot.bus.streams import EVENTS
from surefoot.catalogue.database import Database
from surefoot.runtime import Runtime, Turn, run_service
from surefoot.settings import load_settings
from surefoot_writer.chores import Chores
from surefoot_writer.cleared import ClearedSteps
from surefoot_writer.drains import Drains
from surefoot_writer.handlers import Handlers
from surefoot_writer.index import CheckpointIndex
from surefoot_writer.jobs import KnownJobs
from surefoot_writer.orders import Orders
from surefoot_writer.promotion import Promoter
from surefoot_writer.retaining import Retainer
from surefoot_writer.settings import WriterSettings
from surefoot_writer.tasks import send_prune, send_verify

NAME = "writer"
JOIN_SECONDS = 5.0

log = structlog.get_logger(__name__)


def main() -> int:
    """Run the writer until it is told to stop; returns the exit code."""
    settings = load_settings(WriterSettings)
    return run_service(NAME, settings, lambda runtime: build(runtime, settings))


def build(runtime: Runtime, settings: WriterSettings) -> Turn:
    """Make and connect the parts.

    Raises:
        Unavailable: the database is away or not upgraded.
    """
    database = Database(settings.database_url)
    runtime.on_exit.callback(database.close)
    database.check_schema()
    bus = RedisBus(settings.redis_url)
    runtime.on_exit.callback(bus.close)
    jobs, index = KnownJobs(database), CheckpointIndex(database)
    cleared = ClearedSteps(settings.cleared_dir)
    drains = Drains(settings.writer_drainless_seconds)
    verifications = Orders(send_verify, settings.writer_resend_seconds)
    publisher = Publisher(bus, NAME)
    promoter = Promoter(publisher.publish, index.note_stable, index.end_verify, index.note_nonfinite)
    chores = Chores(
        jobs=jobs,
        index=index,
        cleared=cleared,
        promoter=promoter,
        retainer=Retainer(index, Orders(send_prune, settings.writer_resend_seconds)),
        drains=drains,
        verifications=verifications,
        rescan_seconds=settings.writer_rescan_seconds,
    )
    handlers = Handlers(jobs=jobs, index=index, cleared=cleared, verifications=verifications, chores=chores)
    consumer = Consumer(bus.group(EVENTS, NAME, NAME), handlers.by_type())
    thread = threading.Thread(target=chores.run, args=(runtime.stopping,), name="chores", daemon=True)
    runtime.on_exit.callback(_end, thread, chores, drains, jobs, settings.writer_stop_seconds)
    thread.start()

    def turn() -> None:
        consumer.turn()
        chores.check()

    return turn


def _end(thread: threading.Thread, chores: Chores, drains: Drains, jobs: KnownJobs, timeout_seconds: float) -> None:
    """Let the drains finish what they have: whoever stops the writer may be about to stop this machine."""
    chores.wake()
    thread.join(JOIN_SECONDS)
    for path in drains.wait_until_idle(jobs.specs().values(), timeout_seconds):
        log.error("snapshots are not durable yet; their drain goes on without us", staging=str(path))
