"""What the worker does about messages: a launcher's and its ranks' events, and commands for the ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from surefoot.command_files import write_command
from surefoot.events import (
    AttemptStarted,
    CheckpointCommitted,
    JobFinished,
    JobState,
    Message,
    RankFailed,
    RankHung,
    RollBack,
    SaveCheckpoint,
    SetLearningRate,
    StepCompleted,
    StorageFailed,
    StorageRecovered,
)
from surefoot_worker.service.run_state import RunState

PERSISTENT_SECONDS = 5.0
"""Storage that fails for longer than this is worth a state: shorter ones are what retries are for."""


def _attempt_started(run: RunState, event: AttemptStarted) -> None:
    if run.attempt != event.attempt:  # else its first step was told before it
        run.attempt, run.step = event.attempt, event.from_step
    run.world_size = event.world_size
    run.total_steps = event.total_steps or run.total_steps


def _step_completed(run: RunState, event: StepCompleted) -> None:
    run.attempt, run.step = event.attempt, event.step
    # Steps go on while nothing can be saved: that a degraded job trains is no news.
    if run.state not in (JobState.RUNNING, JobState.DEGRADED) and (event.attempt or 0) > run.recovering_from:
        run.go_if_allowed(JobState.RUNNING, "training")
        _degrade_if_due(run)


def _rank_failed(run: RunState, event: RankFailed) -> None:
    _recover(run, event.attempt, f"rank {event.rank} failed; the ranks are started again")


def _rank_hung(run: RunState, event: RankHung) -> None:
    _recover(run, event.attempt, f"rank {event.rank} hung in phase {event.phase}; the ranks are started again")


def _recover(run: RunState, attempt: int | None, reason: str) -> None:
    run.recovering_from = attempt or run.recovering_from
    run.go_if_allowed(JobState.RECOVERING, reason)


def _storage_failed(run: RunState, event: StorageFailed) -> None:
    if not event.operation.startswith("write "):
        return  # a removal or a look at an old checkpoint: saves still become durable
    first = run.storage_failures[0] if run.storage_failures else event
    run.storage_failures = (first, event)
    _degrade_if_due(run)


def _degrade_if_due(run: RunState) -> None:
    if not run.storage_failures or run.state not in (JobState.RUNNING, JobState.DEGRADED):
        return
    first, last = run.storage_failures
    seconds = last.monotonic_seconds - first.monotonic_seconds
    if seconds >= PERSISTENT_SECONDS:
        reason = f"nobody can save since {seconds:.0f} s: storage fails to {last.operation}: {last.reason}"
        run.go(JobState.DEGRADED, f"{reason}; training goes on, what is to be saved waits in memory")


def _storage_recovered(run: RunState, event: StorageRecovered) -> None:
    _storage_works(run, f"storage takes writes again, after {event.seconds:.0f} s")


def _checkpoint_committed(run: RunState, event: CheckpointCommitted) -> None:
    # Of a drain that was killed while storage failed nobody says that it recovered.
    _storage_works(run, f"storage takes writes again: step {event.step} is durable")


def _storage_works(run: RunState, reason: str) -> None:
    run.storage_failures = ()
    if run.state is JobState.DEGRADED:
        run.go(JobState.RUNNING, reason)


def _job_finished(run: RunState, event: JobFinished) -> None:
    run.end_reason = event.reason


EVENTS: dict[type[Message], Callable[[RunState, Any], None]] = {
    AttemptStarted: _attempt_started,
    StepCompleted: _step_completed,
    RankFailed: _rank_failed,
    RankHung: _rank_hung,
    StorageFailed: _storage_failed,
    StorageRecovered: _storage_recovered,
    CheckpointCommitted: _checkpoint_committed,
    JobFinished: _job_finished,
}
"""From the event file of a job that runs here, in order. Of several StepCompleted only the newest is looked at."""

COMMANDS: dict[type[Message], Callable[[Path, Any], object]] = {
    RollBack: write_command,
    SetLearningRate: write_command,
    SaveCheckpoint: write_command,
}
"""From `surefoot:commands:<job>`: put into the job's staging folder, where rank 0 finds them."""
