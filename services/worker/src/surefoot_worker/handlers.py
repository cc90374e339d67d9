"""What the worker does about messages: a launcher's and its ranks' events, and commands for the ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from surefoot.command_files import write_command
from surefoot.events import (
    AttemptStarted,
    JobFinished,
    JobState,
    Message,
    RankFailed,
    RankHung,
    RollBack,
    SaveCheckpoint,
    SetLearningRate,
    StepCompleted,
)
from surefoot_worker.service.run_state import RunState


def _attempt_started(run: RunState, event: AttemptStarted) -> None:
    if run.attempt != event.attempt:  # else its first step was told before it
        run.attempt, run.step = event.attempt, event.from_step
    run.world_size = event.world_size
    run.total_steps = event.total_steps or run.total_steps


def _step_completed(run: RunState, event: StepCompleted) -> None:
    run.attempt, run.step = event.attempt, event.step
    if run.state is not JobState.RUNNING and (event.attempt or 0) > run.recovering_from:
        run.go_if_allowed(JobState.RUNNING, "training")


def _rank_failed(run: RunState, event: RankFailed) -> None:
    _recover(run, event.attempt, f"rank {event.rank} failed; the ranks are started again")


def _rank_hung(run: RunState, event: RankHung) -> None:
    _recover(run, event.attempt, f"rank {event.rank} hung in phase {event.phase}; the ranks are started again")


def _recover(run: RunState, attempt: int | None, reason: str) -> None:
    run.recovering_from = attempt or run.recovering_from
    run.go_if_allowed(JobState.RECOVERING, reason)


def _job_finished(run: RunState, event: JobFinished) -> None:
    run.end_reason = event.reason


EVENTS: dict[type[Message], Callable[[RunState, Any], None]] = {
    AttemptStarted: _attempt_started,
    StepCompleted: _step_completed,
    RankFailed: _rank_failed,
    RankHung: _rank_hung,
    JobFinished: _job_finished,
}
"""From the event file of a job that runs here, in order. Of several StepCompleted only the newest is looked at."""

COMMANDS: dict[type[Message], Callable[[Path, Any], object]] = {
    RollBack: write_command,
    SetLearningRate: write_command,
    SaveCheckpoint: write_command,
}
"""From `surefoot:commands:<job>`: put into the job's staging folder, where rank 0 finds them."""
