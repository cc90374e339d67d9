"""Which message does what. Handlers write rows and order work; they never wait for storage."""

from __future__ import annotations

from surefoot.bus.base import Delivery
from surefoot.bus.consumer import Handler
from surefoot.checkpoint.ids import CheckpointId
from surefoot.events import (
    CheckpointCommitted,
    CheckpointPruned,
    CheckpointQuarantined,
    CheckpointVerified,
    Message,
    StepsCleared,
)
from surefoot.faultpoints import reach
from surefoot_writer.chores import Chores
from surefoot_writer.cleared import Cleared, ClearedSteps
from surefoot_writer.index import CheckpointIndex
from surefoot_writer.jobs import KnownJobs
from surefoot_writer.orders import Orders
from surefoot_writer.survey import Facts


class Handlers:
    """The handlers of the writer, with what they work on. One thread. All are idempotent.

    Args:
        jobs: The jobs.
        index: The rows.
        cleared: What the detector said.
        verifications: Where to order them.
        chores: Woken when there is something for it.
    """

    def __init__(
        self,
        *,
        jobs: KnownJobs,
        index: CheckpointIndex,
        cleared: ClearedSteps,
        verifications: Orders,
        chores: Chores,
    ) -> None:
        self._jobs, self._index, self._cleared = jobs, index, cleared
        self._verifications, self._chores = verifications, chores

    def by_type(self) -> dict[type[Message], Handler]:
        """Return the handlers by type of message."""
        return {
            CheckpointCommitted: self.on_committed,
            CheckpointQuarantined: self.on_quarantined,
            CheckpointVerified: self.on_verified,
            CheckpointPruned: self.on_pruned,
            StepsCleared: self.on_cleared,
        }

    def on_committed(self, event: CheckpointCommitted, delivery: Delivery) -> None:
        """Index the checkpoint, order its verification, and have an older one go for it."""
        del delivery
        spec = self._jobs.specs().get(event.job) or self._jobs.refresh().get(event.job)
        if spec is None:
            return  # not a job of this catalogue
        checkpoint = _id(event)
        if self._index.note_committed(spec, checkpoint, Facts(event.num_bytes, event.world_size, event.ts, event.loss)):
            self._verifications.forget(event.job, checkpoint)
        reach("writer.row_written")
        self._verifications.order(event.job, checkpoint)
        reach("writer.verify_ordered")
        self._chores.retain_soon(event.job)

    def on_quarantined(self, event: CheckpointQuarantined, delivery: Delivery) -> None:
        """Take the checkpoint out of use."""
        del delivery
        self._index.note_quarantined(event.job, _id(event), event.reason)

    def on_verified(self, event: CheckpointVerified, delivery: Delivery) -> None:
        """Have a damaged one quarantined; a good one may let others go."""
        del delivery
        self._verifications.forget(event.job, _id(event))
        if event.problem is not None:
            self._chores.rescan_soon()
        else:
            self._chores.retain_soon(event.job)

    def on_pruned(self, event: CheckpointPruned, delivery: Delivery) -> None:
        """Drop its row, whoever removed it."""
        del delivery
        self._index.note_gone(event.job, _id(event))

    def on_cleared(self, event: StepsCleared, delivery: Delivery) -> None:
        """Remember it; whatever has its probation behind it now is promoted."""
        del delivery
        if self._cleared.note(event.job, Cleared(event.attempt or 0, event.through_step)):
            self._chores.wake()


def _id(event: CheckpointCommitted | CheckpointPruned | CheckpointQuarantined | CheckpointVerified) -> CheckpointId:
    return CheckpointId(event.attempt or 0, event.step)
