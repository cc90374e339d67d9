"""The Celery app of the writer: slow storage chores, done by a process of its own.

    python -m celery -q -A surefoot_writer.tasks worker --pool solo --without-gossip --without-mingle

Messages are JSON, are acknowledged after the task, and come again when the worker dies; there is no result backend:
results are rows.
"""

from __future__ import annotations

import functools
import logging
import time
from typing import Any

import structlog
from celery import Celery
from celery.signals import setup_logging
from kombu.exceptions import OperationalError

from surefoot.bus.publisher import Publisher
from surefoot.bus.redis_bus import RedisBus
from surefoot.catalogue.database import Database
from surefoot.checkpoint.ids import CheckpointId
from surefoot.errors import AttemptError, BusUnavailable, Unavailable
from surefoot.telemetry import logging as logs
from surefoot_writer.pruning import Pruning
from surefoot_writer.settings import WriterSettings
from surefoot_writer.verifying import ReadFailed, Verifier

VERIFY = "surefoot.verify"
PRUNE = "surefoot.prune"
QUEUE = "chores"
KEY_PREFIX = "surefoot:celery:"
"""Of all keys that Celery keeps on the server."""
VISIBILITY_SECONDS = 24 * 3600
"""A task that was taken and not acknowledged for so long is given to another worker: longer than any runs."""
ANSWER_SECONDS = 4.0
UNAVAILABLE_RETRY_SECONDS = 5.0

log = structlog.get_logger(__name__)


def _configuration() -> dict[str, Any]:
    return {
        "broker_url": WriterSettings().redis_url,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "broker_transport_options": {
            "visibility_timeout": VISIBILITY_SECONDS,
            "global_keyprefix": KEY_PREFIX,
            "socket_connect_timeout": ANSWER_SECONDS,
            "socket_timeout": ANSWER_SECONDS,
        },
        "task_default_queue": QUEUE,
        "task_publish_retry": False,
        "task_serializer": "json",
        "result_serializer": "json",
        "accept_content": ["json"],
        "task_ignore_result": True,
        "task_acks_late": True,
        "worker_prefetch_multiplier": 1,
        "worker_enable_remote_control": False,
        "worker_send_task_events": False,
        "worker_hijack_root_logger": False,
        "timezone": "UTC",
    }


app = Celery("surefoot_writer", set_as_current=False)
# A callable: settings are read when something is sent or a worker starts, not when this is imported.
app.add_defaults(_configuration)


class _SayOnce(logging.Filter):
    """Lets Celery's "Cannot connect", which comes with every try, through once a minute."""

    EVERY_SECONDS = 60.0

    def __init__(self) -> None:
        super().__init__()
        self._next_seconds = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Decide about one record."""
        if "Cannot connect" not in str(record.msg) and "Connection to broker lost" not in str(record.msg):
            return True
        is_due = time.monotonic() >= self._next_seconds
        if is_due:
            self._next_seconds = time.monotonic() + self.EVERY_SECONDS
        return is_due


@setup_logging.connect  # type: ignore[untyped-decorator]
def _configure_logging(**_: object) -> None:
    logs.configure("writer", WriterSettings().log_level)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_SayOnce())


@functools.cache
def _outside() -> tuple[Database, Publisher]:
    settings = WriterSettings()
    return Database(settings.database_url), Publisher(RedisBus(settings.redis_url), "writer")


@app.task(name=VERIFY, bind=True, max_retries=None)  # type: ignore[untyped-decorator]
def verify(self: Any, job: str, attempt: int, step: int) -> None:
    """Verify a committed checkpoint; at most 3 tries, counted in its row. Damage is a result and not a failure."""
    num_before = self.request.retries
    is_repeated = num_before > 0 or bool((self.request.delivery_info or {}).get("redelivered"))
    try:
        Verifier(*_outside()).verify(job, CheckpointId(attempt, step), is_repeated=is_repeated)
    except ReadFailed as error:
        raise self.retry(exc=error, countdown=WriterSettings().writer_retry_seconds * 5**num_before) from error
    except Unavailable as error:
        raise self.retry(exc=error, countdown=UNAVAILABLE_RETRY_SECONDS) from error


@app.task(name=PRUNE, bind=True, max_retries=None)  # type: ignore[untyped-decorator]
def prune(self: Any, job: str) -> None:
    """Remove a job's checkpoints that were taken out of use. What storage refuses is ordered again by the writer."""
    try:
        Pruning(*_outside()).prune(job)
    except (OSError, AttemptError) as error:
        log.error("checkpoints cannot be removed now", job_id=job, error=str(error))
    except Unavailable as error:
        raise self.retry(exc=error, countdown=UNAVAILABLE_RETRY_SECONDS) from error


def send_prune(job: str) -> None:
    """Order the removal of a job's DELETING checkpoints.

    Raises:
        BusUnavailable: the server does not answer.
    """
    _send(prune, job)


def send_verify(job: str, checkpoint: CheckpointId) -> None:
    """Order a verification.

    Raises:
        BusUnavailable: the server does not answer.
    """
    _send(verify, job, *checkpoint)


def _send(task: Any, *arguments: str | int) -> None:
    try:
        task.apply_async(arguments)
    except OperationalError as error:
        raise BusUnavailable(f"the Redis-compatible server takes no chores: {error}") from error
