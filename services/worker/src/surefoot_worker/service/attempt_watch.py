"""Looks at the attempt records of running jobs once a second, on a thread that storage may hold up."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass, field

import structlog

from surefoot.checkpoint.attempts import AttemptLog, AttemptRecord
from surefoot.checkpoint.store import LocalStore
from surefoot.errors import AttemptError
from surefoot.spec import JobSpec

_EVERY_SECONDS = 1.0

log = structlog.get_logger(__name__)


@dataclass
class WatchedAttempts:
    """The attempt records of one job, as they were a second ago at most where storage answers.

    Attributes:
        log: Reads them.
        newest_before: Number of the newest when the job was taken.
        records: All of them by number.
    """

    log: AttemptLog
    newest_before: int | None = None
    records: dict[int, AttemptRecord] = field(default_factory=dict)

    @property
    def other_host(self) -> str | None:
        """The host that claimed the newest attempt, if that is not this one and came after the job was taken."""
        newest = self.records.get(max(self.records, default=0))
        if newest is None or self.newest_before is None or newest.attempt <= self.newest_before:
            return None
        return None if newest.host == socket.gethostname() else newest.host


class AttemptWatch:
    """Watches all jobs of this worker, on a thread of its own."""

    def __init__(self) -> None:
        self._jobs: dict[str, WatchedAttempts] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="attempts", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def add(self, spec: JobSpec) -> WatchedAttempts:
        """Watch a job from now on. Any thread."""
        watched = WatchedAttempts(AttemptLog(LocalStore(spec.storage / spec.job)))
        self._jobs[spec.job] = watched
        return watched

    def remove(self, job: str) -> None:
        """Watch a job no more. Any thread."""
        self._jobs.pop(job, None)

    def close(self) -> None:
        """End the thread; does not wait, as storage may not answer."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_SECONDS):
            for job, watched in list(self._jobs.items()):
                try:
                    look(watched)
                except (OSError, AttemptError) as error:
                    log.warning("attempt records cannot be read", job_id=job, error=str(error))
                except Exception:  # the other jobs are looked at all the same
                    log.exception("attempt records cannot be read", job_id=job)


def look(watched: WatchedAttempts) -> None:
    """Read what is new. Costs a folder listing.

    Raises:
        OSError: storage does not answer.
        AttemptError: a record cannot be understood.
    """
    records = watched.log.read_all()
    if watched.newest_before is None:
        watched.newest_before = max(records, default=0)
    watched.records = records
