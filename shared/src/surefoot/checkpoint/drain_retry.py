"""What the drain does about errors: it tries again, the longer it fails the later, and says so each time."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from surefoot.checkpoint.watched_store import WatchedStore, explain
from surefoot.errors import SurefootError
from surefoot.events import Event, StorageFailed, StorageRecovered
from surefoot.parsing import parse_json

FIRST_DELAY_SECONDS = 0.1

_log = logging.getLogger("surefoot.drain")


class StorageTrouble:
    """From the first failure until storage works again: one event per failure and one for the end. One thread.

    Args:
        job: Name of the job.
        store: The storage, which knows what failed.
        emit: Takes the events; never fails.
        note: File that is there while there is trouble: should this drain die in it, the next one tells the end.
        monotonic: CLOCK_MONOTONIC in seconds.
    """

    def __init__(
        self,
        job: str,
        store: WatchedStore,
        emit: Callable[[Event], None],
        note: Path,
        monotonic: Callable[[], float],
    ) -> None:
        self._job = job
        self._note = note
        self._store = store
        self._emit = emit
        self._monotonic = monotonic
        self._since: float | None = None
        self._num_failures = 0
        self._num_written: int | None = None
        self._failing: set[object] = set()
        self._take_over()

    def failed(self, work: object, error: OSError | SurefootError) -> None:
        """Report a failure at once.

        Args:
            work: What failed: trouble lasts until all that failed was done.
            error: Why.
        """
        if self._since is None:
            self._since = self._monotonic()
        self._num_failures += 1
        self._failing.add(work)
        operation = self._store.operation_of(error)
        verb, _, key = (operation or "").partition(" ")
        # Having nothing to write any more does not show that writing works: only a write does.
        self._num_written = self._store.num_written if verb == "write" else self._num_written
        self._write_note()
        self._emit(
            StorageFailed(
                job=self._job,
                operation=operation or ("read the job's records" if isinstance(error, SurefootError) else "drain"),
                reason=explain(error, f"{self._store}/{key}" if operation else ""),
                num_failures=self._num_failures,
            )
        )

    def worked(self, work: object) -> None:
        """Take note that something was done; report the end of the trouble when it was the last to fail."""
        self._failing.discard(work)
        if self._since is None or self._failing or self._num_written == self._store.num_written:
            return
        seconds = self._monotonic() - self._since
        self._emit(StorageRecovered(job=self._job, seconds=seconds, num_failures=self._num_failures))
        _log.info("storage works again after %.1f s and %d failures", seconds, self._num_failures)
        self._since, self._num_failures, self._num_written = None, 0, None
        with suppress(OSError):
            self._note.unlink(missing_ok=True)

    def dropped(self, work: object) -> None:
        """Take note that something that failed is not tried again: that storage works, only a write shows now."""
        if work in self._failing:
            self._failing.discard(work)
            self._num_written = self._store.num_written

    def _write_note(self) -> None:
        with suppress(OSError):
            self._note.write_text(json.dumps([self._since, self._num_failures]), encoding="ascii")

    def _take_over(self) -> None:
        # Torn or foreign: then nobody tells the end of that trouble, as if there were no note.
        with suppress(OSError, ValueError, TypeError, OverflowError):
            since, num_failures = parse_json(self._note.read_text(encoding="ascii"))
            self._since, self._num_failures = float(since), int(num_failures)
            self._num_written = self._store.num_written


class Retried:
    """A piece of work that is tried again after an error, the longer it fails the later. One thread.

    Training goes on whatever happens to storage.

    Args:
        work: May raise OSError and SurefootError; is called again then.
        max_delay_seconds: Longest time between two tries; the first is 0.1 s, then doubling.
        monotonic: CLOCK_MONOTONIC in seconds.
        trouble: Is told of every failure, and when it is over.
    """

    def __init__(
        self,
        work: Callable[[], object],
        max_delay_seconds: float,
        monotonic: Callable[[], float],
        trouble: StorageTrouble,
    ) -> None:
        self.num_failures = 0
        self.next_try = 0.0
        self._work = work
        self._max_delay_seconds = max_delay_seconds
        self._monotonic = monotonic
        self._trouble = trouble

    def call(self) -> bool:
        """Do it, unless it failed a moment ago. True: done."""
        if self.num_failures and self._monotonic() < self.next_try:
            return False
        try:
            self._work()
        except (OSError, SurefootError) as error:
            delay_seconds = min(self._max_delay_seconds, FIRST_DELAY_SECONDS * 2 ** min(self.num_failures, 20))
            self.num_failures += 1
            self.next_try = self._monotonic() + delay_seconds
            _log.error("failed %d times, next try in %.1f s: %s", self.num_failures, delay_seconds, error)
            self._trouble.failed(self, error)
            return False
        self.num_failures = 0
        self._trouble.worked(self)
        return True

    def drop(self) -> None:
        """Take it that nobody wants it any more; the next call begins anew."""
        self.num_failures = 0
        self._trouble.dropped(self)
