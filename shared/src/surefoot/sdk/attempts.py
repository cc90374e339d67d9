"""The job's attempt records as every rank knows them, and the claim of the next one."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import structlog

from surefoot.checkpoint.attempts import AttemptLog, AttemptRecord, Source, StartsFrom
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.lineage import on_lineage
from surefoot.sdk.host import Host

STORAGE_PATIENCE_SECONDS = 1200.0
"""Longest that rank 0 tries to write the record of its attempt; less than the ranks wait for each other."""

_CONTROL_STATE = ("lr_factor", "lr_hold_steps", "lr_rewarm_steps", "lr_from_step", "command", "skip_windows")
"""What an attempt takes over from the newest record unless a command says otherwise."""

log = structlog.get_logger(__name__)


class Attempts:
    """The same records on every rank. Main thread of the rank only; the constructor and `claim` are collective.

    Args:
        host: Whose store holds the records; rank 0 reads them and tells the others.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._log = AttemptLog(host.store)
        mine = None
        if host.group.rank == 0:
            mine = [record.model_dump(mode="json") for record in self._log.read_all().values()]
        shared = [AttemptRecord.model_validate(data) for data in host.group.broadcast_json(mine)]
        self.records: dict[int, AttemptRecord] = {record.attempt: record for record in shared}
        self._answers: dict[CheckpointId, bool] = {}

    @property
    def newest(self) -> AttemptRecord | None:
        """The record with the highest number; None before the first attempt."""
        return self.records.get(max(self.records, default=0))

    def is_on_lineage(self, checkpoint_id: CheckpointId) -> bool:
        """Return whether a checkpoint is on the lineage of the newest attempt. Asked at every step, so remembered."""
        answer = self._answers.get(checkpoint_id)
        if answer is None:
            answer = on_lineage(checkpoint_id, max(self.records, default=0), self.records)
            self._answers[checkpoint_id] = answer
        return answer

    def claim(self, starts_from: StartsFrom, cause: str, **changes: Any) -> AttemptRecord:
        """Claim the next attempt on rank 0 and tell the others; it is the newest record from then on.

        Args:
            starts_from: Where the attempt begins.
            cause: Why there is a new attempt, for people.
            changes: Fields of the record that are not taken over from the one before.

        Raises:
            AttemptTaken: somebody else was quicker.
            OSError: storage does not take the record.
        """
        newest = self.newest
        control = {} if newest is None else {name: getattr(newest, name) for name in _CONTROL_STATE}
        if starts_from.source is Source.SEED:
            control["lr_from_step"] = 0  # steps are counted anew
        claimed = None
        if self._host.group.rank == 0:
            claim = partial(
                self._log.claim,
                after=0 if newest is None else newest.attempt,
                starts_from=starts_from,
                cause=cause,
                world_size=self._host.group.world_size,
                host=socket.gethostname(),
                started_at=datetime.now(UTC),
                **(control | changes),
            )
            claimed = claim_with_patience(claim).model_dump(mode="json")
        record = AttemptRecord.model_validate(self._host.group.broadcast_json(claimed))
        self.records[record.attempt] = record
        self._answers.clear()
        return record


def claim_with_patience(claim: Callable[[], AttemptRecord]) -> AttemptRecord:
    """Claim, and while storage refuses the record try again: giving up would only use up the restart budget.

    Raises:
        OSError: storage did not come back in `STORAGE_PATIENCE_SECONDS`.
    """
    deadline = time.monotonic() + STORAGE_PATIENCE_SECONDS
    delay_seconds = 0.1
    while True:
        try:
            return claim()
        except OSError as error:
            if time.monotonic() + delay_seconds > deadline:
                raise
            log.warning("the attempt record cannot be written, trying again", error=str(error))
            time.sleep(delay_seconds)
            delay_seconds = min(5.0, 2 * delay_seconds)
