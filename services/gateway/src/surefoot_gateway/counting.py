"""From a message to the numbers of its job. Called before showing.py, so the view is what was known until now."""

from __future__ import annotations

import math

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
    IncidentChanged,
    IncidentState,
    JobFinished,
    JobState,
    JobStateChanged,
    RankFailed,
    RankHung,
    RanksRestarted,
    RestoreFellBack,
    RollBack,
    SaveCheckpoint,
    SaveIntervalChosen,
    SetLearningRate,
    SnapshotSkipped,
    StepCompleted,
    StepsCleared,
    StorageFailed,
    StorageRecovered,
)
from surefoot_gateway.board import Job
from surefoot_gateway.table import OTHER

MAX_RANKS = 64
"""Ranks that have a series of their own."""

_ACTIONS = {RollBack.type: "rollback", SetLearningRate.type: "set_lr", SaveCheckpoint.type: "save"}


def job_state_changed(job: Job, event: JobStateChanged | JobFinished) -> None:
    """Show which state the job is in."""
    _in_state(job, event.state)


def attempt_started(job: Job, event: AttemptStarted) -> None:
    """Count the attempt; the step falls back to where it begins."""
    metrics = job.metrics
    metrics.add("surefoot_attempts_total", kind=event.source.lower())
    metrics.set("surefoot_job_attempt", event.attempt or 0)
    metrics.set("surefoot_job_step", event.from_step)
    metrics.set("surefoot_job_planned_steps", event.total_steps or 0)
    metrics.set("surefoot_job_ranks", event.world_size)
    if job.view.world_size is not None:
        for rank in range(event.world_size, min(job.view.world_size, MAX_RANKS)):
            metrics.drop("surefoot_rank_step_seconds", rank=str(rank))


def step_completed(job: Job, event: StepCompleted) -> None:
    """Count the step and show its numbers."""
    metrics = job.metrics
    metrics.add("surefoot_steps_total", outcome="applied" if event.applied else "skipped")
    metrics.add("surefoot_samples_total", event.num_samples)
    metrics.add("surefoot_tokens_total", event.num_tokens or 0)
    metrics.set("surefoot_job_step", event.step)
    metrics.set("surefoot_job_last_step_timestamp_seconds", event.ts.timestamp())
    metrics.set("surefoot_training_loss", event.loss)
    metrics.set("surefoot_gradient_norm", math.nan if event.grad_norm is None else event.grad_norm)
    metrics.set("surefoot_learning_rate", event.learning_rate)
    metrics.observe("surefoot_step_seconds", max(event.step_seconds, default=0.0))
    for rank, seconds in enumerate(event.step_seconds[:MAX_RANKS]):
        metrics.set("surefoot_rank_step_seconds", seconds, rank=str(rank))
    # The sender's count begins anew with each of its processes.
    before = 0 if job.view.last is None else job.view.last.dropped_events
    dropped = event.dropped_events - before
    metrics.add("surefoot_events_dropped_total", dropped if dropped >= 0 else event.dropped_events)
    if job.view.state in (None, JobState.PENDING, JobState.STARTING):
        _in_state(job, JobState.RUNNING)


def checkpoint_staged(job: Job, event: CheckpointStaged) -> None:
    """Note what the copy cost."""
    job.metrics.observe("surefoot_checkpoint_copy_seconds", event.copy_seconds)


def checkpoint_committed(job: Job, event: CheckpointCommitted) -> None:
    """Count the checkpoint, its bytes and its seconds."""
    metrics = job.metrics
    metrics.add("surefoot_checkpoints_total", outcome="committed")
    metrics.add("surefoot_checkpoint_written_bytes_total", event.num_bytes)
    metrics.observe("surefoot_checkpoint_write_seconds", event.write_seconds)
    if event.staged_age_seconds is not None:
        metrics.observe("surefoot_checkpoint_durable_seconds", event.staged_age_seconds)
    metrics.set("surefoot_checkpoint_committed_step", event.step)
    metrics.set("surefoot_checkpoint_last_committed_timestamp_seconds", event.ts.timestamp())
    # A drain that was killed while storage failed says nothing of its recovery; its successor's success does.
    metrics.set("surefoot_storage_failing", 0)


def checkpoint_verified(job: Job, event: CheckpointVerified) -> None:
    """Count the verdict."""
    job.metrics.add("surefoot_checkpoints_total", outcome="verified" if event.problem is None else "damaged")


def checkpoint_promoted(job: Job, event: CheckpointPromoted) -> None:
    """Count the checkpoint as STABLE."""
    job.metrics.add("surefoot_checkpoints_total", outcome="promoted")
    job.metrics.set("surefoot_checkpoint_stable_step", event.step)


def checkpoint_quarantined(job: Job, event: CheckpointQuarantined) -> None:
    """Count it."""
    del event
    job.metrics.add("surefoot_checkpoints_total", outcome="quarantined")


def checkpoint_pruned(job: Job, event: CheckpointPruned) -> None:
    """Count it and its bytes."""
    job.metrics.add("surefoot_checkpoints_total", outcome="pruned")
    job.metrics.add("surefoot_checkpoint_pruned_bytes_total", event.num_bytes)


def storage_failed(job: Job, event: StorageFailed) -> None:
    """Count it."""
    del event
    job.metrics.add("surefoot_storage_failures_total")
    job.metrics.set("surefoot_storage_failing", 1)


def storage_recovered(job: Job, event: StorageRecovered) -> None:
    """Note how long it took."""
    job.metrics.set("surefoot_storage_failing", 0)
    job.metrics.observe("surefoot_storage_outage_seconds", event.seconds)


def save_interval_chosen(job: Job, event: SaveIntervalChosen) -> None:
    """Show it, and what it follows from."""
    job.metrics.set("surefoot_save_interval_seconds", event.interval_seconds)
    job.metrics.set("surefoot_save_cost_seconds", event.save_cost_seconds)


def snapshot_skipped(job: Job, event: SnapshotSkipped) -> None:
    """Count it."""
    del event
    job.metrics.add("surefoot_snapshots_skipped_total")


def restore_fell_back(job: Job, event: RestoreFellBack) -> None:
    """Count it."""
    del event
    job.metrics.add("surefoot_restore_fallbacks_total")


def rank_failed(job: Job, event: RankFailed) -> None:
    """Count it by how the rank ended."""
    job.metrics.add("surefoot_rank_failures_total", kind="signal" if event.exit_code < 0 else "error")


def rank_hung(job: Job, event: RankHung) -> None:
    """Count it."""
    del event
    job.metrics.add("surefoot_rank_failures_total", kind="hang")


def ranks_restarted(job: Job, event: RanksRestarted) -> None:
    """Count restarts; the first start is none."""
    if event.restart > 0:
        job.metrics.add("surefoot_restarts_total")


def anomaly_detected(job: Job, event: AnomalyDetected) -> None:
    """Count it."""
    job.metrics.add("surefoot_anomalies_total", kind=event.kind, severity=event.severity)


def anomaly_cleared(job: Job, event: AnomalyCleared) -> None:
    """Count it."""
    job.metrics.add("surefoot_anomalies_cleared_total", kind=event.kind)


def steps_cleared(job: Job, event: StepsCleared) -> None:
    """Show it."""
    job.metrics.set("surefoot_cleared_step", event.through_step)


def incident_changed(job: Job, event: IncidentChanged) -> None:
    """Count an incident when it is new and when it ends; its seconds and steps when they are first known."""
    metrics, before = job.metrics, job.view.incidents.get(event.incident_id)
    num_open = job.view.num_open_incidents - (before is not None and before.is_open)
    closed = event.state in (IncidentState.HEALED, IncidentState.ESCALATED)
    metrics.set("surefoot_incidents_open", num_open + (not closed))
    if before is None:
        metrics.add("surefoot_incidents_total", kind=event.kind)
    if closed and (before is None or before.state != event.state):
        metrics.add("surefoot_incidents_closed_total", kind=event.kind, outcome=event.state.lower())
    if event.recovery_seconds is not None and (before is None or before.recovery_seconds is None):
        metrics.observe("surefoot_recovery_seconds", event.recovery_seconds, kind=event.kind)
    lost_before = (before and before.steps_lost) or 0
    metrics.add("surefoot_steps_lost_total", max(0, (event.steps_lost or 0) - lost_before))


def command_applied(job: Job, event: CommandApplied) -> None:
    """Count it and its seconds."""
    action = _ACTIONS.get(event.command, OTHER)
    job.metrics.add("surefoot_commands_total", action=action, outcome="applied")
    job.metrics.observe("surefoot_command_seconds", event.seconds, action=action)


def command_refused(job: Job, event: CommandRefused) -> None:
    """Count it."""
    job.metrics.add("surefoot_commands_total", action=_ACTIONS.get(event.command, OTHER), outcome="refused")


def _in_state(job: Job, state: JobState) -> None:
    for each in JobState:
        job.metrics.set("surefoot_job_state", float(each is state), state=each)
