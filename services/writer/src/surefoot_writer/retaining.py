"""Retention as the writer has it: rows are taken out of use before files go, and no command may name them then.

The chores decide and mark; the Celery worker removes (`pruning`). Both decide by the same rules from files and rows,
so what changes between is seen: a pin, a command, a promotion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from surefoot.catalogue.models import Checkpoint, CheckpointState
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.prune import plan
from surefoot.checkpoint.retention import CheckpointFacts
from surefoot.checkpoint.store import LocalStore
from surefoot.faultpoints import reach
from surefoot.spec import JobSpec
from surefoot_writer.index import CheckpointIndex
from surefoot_writer.orders import Orders


def known_from(rows: Mapping[CheckpointId, Checkpoint]) -> Callable[[CheckpointFacts], CheckpointFacts]:
    """Return what adds to facts from files what only rows tell: verified, damaged, never to be promoted."""

    def add(facts: CheckpointFacts) -> CheckpointFacts:
        row = rows.get(facts.id)
        if row is None:
            return facts
        is_read = row.verified_at is not None
        return replace(
            facts,
            is_candidate=facts.is_candidate and row.nonfinite_tensor is None,
            is_verified=is_read and row.verify_problem is None,
            is_damaged=facts.is_damaged or (is_read and row.verify_problem is not None),
        )

    return add


class Retainer:
    """Decides which checkpoints of a job go. One thread.

    Args:
        index: The rows.
        removals: Where to order the removal of a job's DELETING checkpoints.
    """

    def __init__(self, index: CheckpointIndex, removals: Orders) -> None:
        self._index = index
        self._removals = removals

    def retain(self, spec: JobSpec, store: LocalStore, *, has_trash: bool = False) -> list[CheckpointId]:
        """Take out of use what nothing keeps, and order its removal; return what was taken.

        Args:
            spec: Of the job.
            store: Its storage.
            has_trash: A removal was cut off: it is to be finished whatever is decided now.

        Raises:
            AttemptError: attempt records are missing or damaged; nothing is removed.
            OSError: storage fails.
            Unavailable: bus or database do not answer; finished by the next call.
        """
        rows = self._index.rows(spec.job)
        decided = plan(
            store,
            spec.checkpoint.retention,
            protected=self._index.named_by_commands(spec.job),
            refine=known_from(rows),
        )
        usable = {id_ for id_, row in rows.items() if row.state == CheckpointState.COMMITTED}
        taken = self._index.note_deleting(spec.job, usable & {id_ for id_, _ in decided})
        reach("writer.deleting_marked")
        if taken:
            self._removals.forget(spec.job)
        if taken or has_trash or any(row.state == CheckpointState.DELETING for row in rows.values()):
            self._removals.order(spec.job)
        return taken
