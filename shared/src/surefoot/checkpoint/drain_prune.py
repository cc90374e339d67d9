"""Retention in the drain: for jobs that no writer service looks after."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from surefoot.checkpoint.outbox import Outbox
from surefoot.checkpoint.prune import FactReader, prune
from surefoot.checkpoint.store import Store


class RetentionRules(BaseModel):
    """The section `checkpoint.retention` of a spec as it comes on the command line; see `RetentionSpec`.

    The spec itself would have the drain import all that a spec may hold.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    keep_last: int | None
    keep_every_steps: int | None
    keep_best: int
    keep_stable: int


class Pruning:
    """Removes what retention does not keep, when something was committed. The drain's one thread.

    Args:
        rules: What is kept.
        store: The job's storage.
        outbox: Takes the events.
        job: Name of the job.
    """

    def __init__(self, rules: RetentionRules, store: Store, outbox: Outbox, job: str) -> None:
        self._rules = rules
        self._store = store
        self._outbox = outbox
        self._job = job
        self._reader = FactReader(store, promotes=False)
        self.is_due = True
        """Something was committed, or an earlier drain may have left something unfinished."""

    def run(self) -> None:
        """Remove what is to go, unless nothing has changed since it was done.

        Raises:
            OSError: storage fails. Call it again.
            AttemptError: the lineage is not known; nothing was removed.
        """
        if self.is_due:
            prune(self._store, self._rules, job=self._job, emit=self._outbox.emit, reader=self._reader)
            self.is_due = False
