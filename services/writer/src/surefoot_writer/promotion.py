"""Promotion: a committed checkpoint becomes STABLE once probation is over and it is whole and finite.

`stable.json` in its folder is the promotion; the row and the event follow it, so a writer that dies in between is
finished by the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from uuid import NAMESPACE_URL, uuid5

import structlog

from surefoot.checkpoint.attempts import AttemptLog, AttemptRecord
from surefoot.checkpoint.catalog import read_manifest
from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.checkpoint.lineage import candidates
from surefoot.checkpoint.marks import StableMark, promote, read_stable
from surefoot.checkpoint.store import Store
from surefoot.errors import CheckpointError, DamagedCheckpoint
from surefoot.events import CheckpointPromoted
from surefoot.faultpoints import reach
from surefoot_writer.cleared import Cleared
from surefoot_writer.finite import find_nonfinite

log = structlog.get_logger(__name__)


def due(
    committed: Collection[CheckpointId],
    records: Mapping[int, AttemptRecord],
    cleared: Cleared,
    probation_steps: int,
) -> list[CheckpointId]:
    """Return which checkpoints have their probation behind them, oldest first. Pure.

    Args:
        committed: Those that are not STABLE yet.
        records: Attempt records by number.
        cleared: What the detector said last.
        probation_steps: Steps that must have been cleared after the checkpoint.

    Raises:
        AttemptError: a record that the answer depends on is missing.
    """
    newest = max(records, default=0)
    # Of the attempt that was cleared, and not left behind by a newer one since.
    wanted = set(candidates(committed, cleared.attempt, records)) & set(candidates(committed, newest, records))
    return sorted(id_ for id_ in wanted if cleared.through_step >= id_.step + probation_steps)


class Promoter:
    """Promotes the checkpoints of one job at a time. One thread.

    Args:
        publish: Sends the event.
        set_stable: Writes the row.
        on_damage: Told of one that turned out damaged; it must not be in `waiting` again.
        on_nonfinite: Told of one with a NaN or Inf in it, and of the tensor; it must not be in `waiting` again.
    """

    def __init__(
        self,
        publish: Callable[[CheckpointPromoted], None],
        set_stable: Callable[[str, CheckpointId, datetime], None],
        on_damage: Callable[[str, CheckpointId, str], object],
        on_nonfinite: Callable[[str, CheckpointId, str], None],
    ) -> None:
        self._publish = publish
        self._set_stable = set_stable
        self._on_damage = on_damage
        self._on_nonfinite = on_nonfinite

    def promote_due(
        self,
        job: str,
        store: Store,
        waiting: Collection[CheckpointId],
        *,
        cleared: Cleared,
        probation_steps: int,
        on_piece: Callable[[], None] = lambda: None,
    ) -> list[CheckpointId]:
        """Promote those of `waiting` that are due; returns them.

        Args:
            job: Name of the job.
            store: Its storage.
            waiting: Committed and not STABLE yet.
            cleared: What the detector said last.
            probation_steps: Of the job's policy.
            on_piece: Called now and then during long reads.

        Raises:
            AttemptError: attempt records are missing or damaged; nothing was promoted.
            OSError: storage fails.
            Unavailable: bus or database do not answer; finished by the next call.
        """
        if not waiting:
            return []
        records = AttemptLog(store).read_all()
        if cleared.attempt not in records:
            return []
        promoted = []
        for id_ in due(waiting, records, cleared, probation_steps):
            if self._is_fit(job, store, id_, on_piece):
                mark = StableMark(
                    job=job,
                    attempt=id_.attempt,
                    step=id_.step,
                    cleared_attempt=cleared.attempt,
                    cleared_through_step=cleared.through_step,
                    probation_steps=probation_steps,
                    promoted_at=datetime.now(UTC),
                )
                try:
                    promote(store, id_, mark)
                except CheckpointError as error:  # quarantined or removed while it was read
                    log.warning("not promoted", job_id=job, error=str(error))
                    continue
                reach("writer.stable_written")
                self.finish(job, store, id_)
                promoted.append(id_)
        return promoted

    def finish(self, job: str, store: Store, checkpoint: CheckpointId) -> None:
        """Send the event of a promotion whose file is there, then set the row: the event at least once.

        Raises:
            OSError: storage fails.
            Unavailable: bus or database do not answer.
        """
        try:
            mark = read_stable(store, checkpoint)
        except CheckpointError as error:
            log.error("a promotion that cannot be read counts for nothing", job_id=job, error=str(error))
            return
        if mark is None:  # quarantined or removed since
            return
        self._publish(
            CheckpointPromoted(
                event_id=_event_id(job, checkpoint),
                job=job,
                attempt=checkpoint.attempt,
                step=checkpoint.step,
                cleared_through_step=mark.cleared_through_step,
            )
        )
        reach("writer.promotion_published")
        self._set_stable(job, checkpoint, mark.promoted_at)
        log.info("promoted", job_id=job, attempt=checkpoint.attempt, step=checkpoint.step)

    def _is_fit(self, job: str, store: Store, checkpoint: CheckpointId, on_piece: Callable[[], None]) -> bool:
        where = {"job_id": job, "attempt": checkpoint.attempt, "step": checkpoint.step}
        try:
            nonfinite = find_nonfinite(store, read_manifest(store, checkpoint), checkpoint, on_piece)
        except DamagedCheckpoint as error:
            log.error("not promoted: it is damaged", error=str(error), **where)
            self._on_damage(job, checkpoint, str(error))
            return False
        if nonfinite is not None:
            log.error("not promoted: a tensor is not finite", tensor=nonfinite, **where)
            self._on_nonfinite(job, checkpoint, nonfinite)
        return nonfinite is None


def _event_id(job: str, checkpoint: CheckpointId) -> str:
    # The same for a promotion that is told twice.
    return uuid5(NAMESPACE_URL, f"surefoot:promoted:{job}:{folder_name(checkpoint)}").hex
