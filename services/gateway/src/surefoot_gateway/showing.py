"""From a message to what the live page shows of its job, in words where it is worth reading."""

from __future__ import annotations

import signal
from typing import TypeVar

from surefoot.events import (
    AnomalyCleared,
    AnomalyDetected,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointPromoted,
    CheckpointPruned,
    CheckpointQuarantined,
    CheckpointVerified,
    CommandApplied,
    CommandRefused,
    DataPrepared,
    Event,
    IncidentChanged,
    IncidentState,
    JobFinished,
    JobState,
    JobStateChanged,
    RankFailed,
    RankHung,
    RestoreFellBack,
    SaveIntervalChosen,
    Severity,
    SnapshotSkipped,
    StepCompleted,
    StepsCleared,
    StorageFailed,
    StorageRecovered,
)
from surefoot_gateway.board import Job
from surefoot_gateway.view import AttemptLine, CheckpointLine, IncidentLine, SavingLine, StorageProblem

T = TypeVar("T")

_INCIDENT_TONES = {IncidentState.HEALED: "good", IncidentState.ESCALATED: "bad", IncidentState.RESUMED: "info"}
_JOB_TONES = {JobState.SUCCEEDED: "good", JobState.FAILED: "bad", JobState.DEGRADED: "warning"}
_ANOMALY_TONES = {Severity.CRITICAL: "bad", Severity.WARNING: "warning"}


def job_state_changed(job: Job, event: JobStateChanged | JobFinished) -> None:
    """Take over the state."""
    if event.state is not job.view.state:
        _note(job, event, f"the job is {event.state}: {event.reason}", _JOB_TONES.get(event.state, "info"))
    job.view.state, job.view.reason = event.state, event.reason


def attempt_started(job: Job, event: AttemptStarted) -> None:
    """Add the attempt; the job is at the step where it begins."""
    view, attempt = job.view, event.attempt or 0
    if view.attempt is not None and attempt < view.attempt:
        view.begin_anew()
    windows = [(window.start, window.stop) for window in event.skip_windows]
    view.put_attempt(
        AttemptLine(
            attempt=attempt,
            from_attempt=event.from_attempt,
            from_step=event.from_step,
            source=event.source,
            cause=event.cause,
            lr_factor=event.lr_factor,
            skip_windows=windows,
            world_size=event.world_size,
            at=event.ts.timestamp(),
        )
    )
    view.attempt, view.step = attempt, event.from_step
    view.world_size, view.total_steps = event.world_size, event.total_steps
    view.recent.clear()
    start = f"step {event.from_step:,} of attempt {event.from_attempt}" if event.from_attempt else "the seed"
    _note(job, event, f"attempt {attempt} begins from {start}: {event.cause}", step=event.from_step)


def step_completed(job: Job, event: StepCompleted) -> None:
    """Add the step to the curve."""
    view = job.view
    view.step, view.last = event.step, event
    view.attempt = event.attempt if event.attempt is not None else view.attempt
    view.recent.append(event)
    view.curve.add(event)
    if view.state in (None, JobState.PENDING, JobState.STARTING):
        view.state, view.reason = JobState.RUNNING, "steps are being completed"
    if not event.applied:
        ranks = ", ".join(map(str, event.nonfinite_ranks))
        text = f"step {event.step:,}: gradient not finite on rank {ranks}, nobody updated"
        _note(job, event, text, "warning", event.step)


def checkpoint_committed(job: Job, event: CheckpointCommitted) -> None:
    """Add the checkpoint; storage works."""
    _checkpoint(job, event, event.step, "committed", event.num_bytes)
    job.view.storage_problem = None


def checkpoint_verified(job: Job, event: CheckpointVerified) -> None:
    """Mark a damaged one."""
    if event.problem is not None:
        _checkpoint(job, event, event.step, "damaged")
        _note(job, event, f"checkpoint of step {event.step:,} is damaged: {event.problem}", "bad", event.step)


def checkpoint_promoted(job: Job, event: CheckpointPromoted) -> None:
    """Mark it as STABLE."""
    _checkpoint(job, event, event.step, "stable")
    _note(job, event, f"checkpoint of step {event.step:,} is STABLE", "good", event.step)


def checkpoint_quarantined(job: Job, event: CheckpointQuarantined) -> None:
    """Mark it."""
    _checkpoint(job, event, event.step, "quarantined")
    _note(job, event, f"checkpoint of step {event.step:,} moved to quarantine: {event.reason}", "bad", event.step)


def checkpoint_pruned(job: Job, event: CheckpointPruned) -> None:
    """Show the checkpoint no more: there is none."""
    job.view.checkpoints.pop((event.attempt or 0, event.step), None)


def storage_failed(job: Job, event: StorageFailed) -> None:
    """Say what storage refuses: at the first failure, and when it refuses for another reason."""
    before = job.view.storage_problem
    if before is None or before.reason != event.reason:
        text = f"storage fails to {event.operation}: {event.reason}; training goes on, what is to be saved waits"
        _note(job, event, text, "bad")
    since = event.ts.timestamp() if before is None else before.since
    job.view.storage_problem = StorageProblem(since, event.operation, event.reason, event.num_failures)


def storage_recovered(job: Job, event: StorageRecovered) -> None:
    """Say so."""
    job.view.storage_problem = None
    times = "once" if event.num_failures == 1 else f"{event.num_failures} times"
    _note(job, event, f"storage takes writes again, after {event.seconds:.1f} s; it failed {times}", "good")


def save_interval_chosen(job: Job, event: SaveIntervalChosen) -> None:
    """Show it, and say why."""
    job.view.saving = SavingLine(event.interval_seconds, event.save_cost_seconds, event.reason)
    _note(job, event, f"saves every {event.interval_seconds:.0f} s from now on: {event.reason}", step=event.step)


def snapshot_skipped(job: Job, event: SnapshotSkipped) -> None:
    """Say so, when it was to be kept."""
    if event.persist:
        _note(job, event, f"no snapshot of step {event.step:,}: {event.reason}", "warning", event.step)


def restore_fell_back(job: Job, event: RestoreFellBack) -> None:
    """Say so."""
    text = f"step {event.candidate_step:,} of attempt {event.candidate_attempt} could not be used: {event.reason}"
    _note(job, event, text, "warning", event.candidate_step)


def rank_failed(job: Job, event: RankFailed) -> None:
    """Say how the rank ended."""
    how = _signal_name(-event.exit_code) if event.exit_code < 0 else f"exit code {event.exit_code}"
    error = f" ({event.error_type}: {event.error_message})" if event.error_type else ""
    after = f" after step {event.step:,}" if event.step is not None else ""
    _note(job, event, f"rank {event.rank} ended with {how}{after}{error}", "bad", event.step)


def rank_hung(job: Job, event: RankHung) -> None:
    """Say where it hung."""
    text = f"rank {event.rank} made no progress for {event.seconds:.0f} s in phase {event.phase}"
    _note(job, event, text, "bad", event.step)


def anomaly_detected(job: Job, event: AnomalyDetected) -> None:
    """Say what was seen."""
    tone = _ANOMALY_TONES.get(event.severity, "info")
    _note(job, event, f"{event.severity}: {event.message}", tone, event.onset_step)


def anomaly_cleared(job: Job, event: AnomalyCleared) -> None:
    """Say so."""
    _note(job, event, event.message, "good", event.step)


def steps_cleared(job: Job, event: StepsCleared) -> None:
    """Take over the step."""
    job.view.cleared_step = event.through_step


def incident_changed(job: Job, event: IncidentChanged) -> None:
    """Add the incident, or change it; what is known of it stays."""
    at, before = event.ts.timestamp(), job.view.incidents.get(event.incident_id)
    line = IncidentLine(
        id=event.incident_id,
        attempt=event.attempt if before is None else before.attempt,
        kind=event.kind,
        severity=event.severity,
        state=event.state,
        onset_step=_first_known(event.onset_step, before and before.onset_step),
        action=_first_known(event.action, before and before.action),
        reason=event.reason,
        recovery_seconds=_first_known(event.recovery_seconds, before and before.recovery_seconds),
        steps_lost=_first_known(event.steps_lost, before and before.steps_lost),
        opened_at=at if before is None else before.opened_at,
        changed_at=at,
    )
    job.view.put_incident(line)
    tone = _INCIDENT_TONES.get(event.state, "warning")
    _note(job, event, f"incident {line.id} ({line.kind}) is {line.state}: {event.reason}", tone, line.onset_step)


def command_applied(job: Job, event: CommandApplied) -> None:
    """Say so."""
    begun = f", attempt {event.new_attempt} began" if event.new_attempt is not None else ""
    _note(job, event, f"{event.command} {event.number} applied in {event.seconds:.2f} s{begun}", step=event.step)


def command_refused(job: Job, event: CommandRefused) -> None:
    """Say why."""
    _note(job, event, f"{event.command} {event.number} refused: {event.reason}", "warning", event.step)


def data_prepared(job: Job, event: DataPrepared) -> None:
    """Say so."""
    _note(job, event, f"{event.stage} prepared in {event.seconds:.1f} s: {event.detail}")


def _checkpoint(job: Job, event: Event, step: int, state: str, num_bytes: int = 0) -> None:
    before = job.view.checkpoints.get((event.attempt or 0, step))
    at = event.ts.timestamp()
    if before is not None:
        # A repeated commit does not undo a promotion.
        state, num_bytes, at = before.state if state == "committed" else state, before.num_bytes or num_bytes, before.at
    job.view.put_checkpoint(CheckpointLine(event.attempt or 0, step, state, num_bytes, at))


def _note(job: Job, event: Event, text: str, tone: str = "info", step: int | None = None) -> None:
    job.view.note(event.ts, text, tone, event.attempt, step)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _first_known(new: T | None, old: T | None) -> T | None:
    return old if new is None else new
