"""What the gateway does with each message: count it, then show it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from surefoot.events import (
    AnomalyCleared,
    AnomalyDetected,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointPromoted,
    CheckpointPruned,
    CheckpointQuarantined,
    CheckpointStaged,
    CheckpointVerified,
    CommandApplied,
    CommandRefused,
    DataPrepared,
    IncidentChanged,
    JobFinished,
    JobStateChanged,
    Message,
    RankFailed,
    RankHung,
    RanksRestarted,
    RestoreFellBack,
    SaveIntervalChosen,
    SnapshotSkipped,
    StepCompleted,
    StepsCleared,
    StorageFailed,
    StorageRecovered,
)
from surefoot_gateway import counting, showing
from surefoot_gateway.board import Job

Handler = Callable[[Job, Any], None]


def _both(count: Handler, show: Handler) -> Handler:
    def handle(job: Job, message: Any) -> None:
        count(job, message)
        show(job, message)

    return handle


HANDLERS: Mapping[type[Message], Handler] = {
    JobStateChanged: _both(counting.job_state_changed, showing.job_state_changed),
    JobFinished: _both(counting.job_state_changed, showing.job_state_changed),
    AttemptStarted: _both(counting.attempt_started, showing.attempt_started),
    StepCompleted: _both(counting.step_completed, showing.step_completed),
    CheckpointStaged: counting.checkpoint_staged,
    CheckpointCommitted: _both(counting.checkpoint_committed, showing.checkpoint_committed),
    CheckpointVerified: _both(counting.checkpoint_verified, showing.checkpoint_verified),
    CheckpointPromoted: _both(counting.checkpoint_promoted, showing.checkpoint_promoted),
    CheckpointQuarantined: _both(counting.checkpoint_quarantined, showing.checkpoint_quarantined),
    CheckpointPruned: _both(counting.checkpoint_pruned, showing.checkpoint_pruned),
    StorageFailed: _both(counting.storage_failed, showing.storage_failed),
    StorageRecovered: _both(counting.storage_recovered, showing.storage_recovered),
    SaveIntervalChosen: _both(counting.save_interval_chosen, showing.save_interval_chosen),
    SnapshotSkipped: _both(counting.snapshot_skipped, showing.snapshot_skipped),
    RestoreFellBack: _both(counting.restore_fell_back, showing.restore_fell_back),
    RankFailed: _both(counting.rank_failed, showing.rank_failed),
    RankHung: _both(counting.rank_hung, showing.rank_hung),
    RanksRestarted: counting.ranks_restarted,
    AnomalyDetected: _both(counting.anomaly_detected, showing.anomaly_detected),
    AnomalyCleared: _both(counting.anomaly_cleared, showing.anomaly_cleared),
    StepsCleared: _both(counting.steps_cleared, showing.steps_cleared),
    IncidentChanged: _both(counting.incident_changed, showing.incident_changed),
    CommandApplied: _both(counting.command_applied, showing.command_applied),
    CommandRefused: _both(counting.command_refused, showing.command_refused),
    DataPrepared: showing.data_prepared,
}
"""A message of another type says nothing that is counted or shown; it still keeps its job on the page."""
