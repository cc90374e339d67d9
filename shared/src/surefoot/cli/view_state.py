"""What the progress view knows: a fold over a job's events. No clock, no terminal, no file.

`HANDLERS` says what each event does to it.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from surefoot.events import (
    AnomalyDetected,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointPromoted,
    CheckpointQuarantined,
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
    RanksRestarted,
    RestoreFellBack,
    SaveIntervalChosen,
    SnapshotSkipped,
    StepCompleted,
    StorageFailed,
    StorageRecovered,
)

RATE_WINDOW_STEPS = 20
NUM_NOTES_KEPT = 100
NUM_INCIDENTS_KEPT = 1000
SOURCE_WORDS = {"SEED": "the seed", "STAGED": "the memory snapshot", "COMMITTED": "the checkpoint"}


@dataclass(frozen=True)
class Note:
    """Something worth a line of its own. `style` is good, bad or plain."""

    ts: datetime
    text: str
    style: str = "plain"


@dataclass
class ViewState:
    """Everything that is shown about one job. Feed it every event in file order."""

    job: str
    total_steps: int | None = None
    step: int = 0
    loss: float | None = None
    first_loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    attempt: int | None = None
    num_attempts: int = 0
    """Attempts begun in the events seen."""
    restarts: int = 0
    world_size: int | None = None
    committed: CheckpointCommitted | None = None
    """The newest durable checkpoint."""
    restored_step: int | None = None
    """Of the durable checkpoint that an attempt of this run started from."""
    num_committed: int = 0
    prepared: DataPrepared | None = None
    """The last stage of data preparation that ended, until the first step."""
    finished: JobFinished | None = None
    recovery_seconds: float | None = None
    """From noticing the last failure to the next completed step."""
    skipped_saves: int = 0
    storage_problem: StorageFailed | None = None
    """The last refusal; None: storage works."""
    saving: SaveIntervalChosen | None = None
    """How often `save_every_seconds: auto` saves; None: it does not, or has not said yet."""
    job_state: JobState | None = None
    """As the worker service says; None where there is none."""
    stable_step: int | None = None
    """Of the checkpoint that was promoted last."""
    incidents: dict[int, IncidentChanged] = field(default_factory=dict)
    """What was last said of each."""
    notes: deque[Note] = field(default_factory=lambda: deque(maxlen=NUM_NOTES_KEPT))
    num_notes: int = 0
    """Notes ever made; a reader that remembers it knows which ones are new."""
    _failed_at_seconds: float | None = None
    _window: deque[StepCompleted] = field(default_factory=lambda: deque(maxlen=RATE_WINDOW_STEPS + 1))

    def apply(self, event: Event) -> None:
        """Take in one event; types that are not shown are ignored."""
        handler = HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event)

    def note(self, event: Event, text: str, style: str = "plain") -> None:
        """Remember a line about an event."""
        first_line = text.strip().partition("\n")[0]  # a reason may carry a traceback
        self.notes.append(Note(event.ts, first_line, style))
        self.num_notes += 1

    def throughput(self) -> tuple[float, str] | None:
        """Return (rate, unit) over the last steps of this attempt; None with fewer than two.

        Tokens per second where every step tells its tokens, samples per second otherwise.
        """
        if len(self._window) < 2:
            return None
        seconds = self._window[-1].monotonic_seconds - self._window[0].monotonic_seconds
        if seconds <= 0:
            return None
        steps = list(self._window)[1:]
        tokens = [step.num_tokens for step in steps if step.num_tokens is not None]
        if len(tokens) == len(steps):
            return sum(tokens) / seconds, "tokens/s"
        return sum(step.num_samples for step in steps) / seconds, "samples/s"

    def checkpoint_age_seconds(self, now_monotonic: float) -> float | None:
        """Return how long ago the newest checkpoint became durable."""
        return None if self.committed is None else max(0.0, now_monotonic - self.committed.monotonic_seconds)


def _step_completed(state: ViewState, event: StepCompleted) -> None:
    if state.attempt is not None and event.attempt is not None and event.attempt < state.attempt:
        return  # written late by a rank that is gone
    if state._window and state._window[-1].attempt != event.attempt:
        state._window.clear()  # the pause of a restart is not a rate
    state.step, state.loss, state.prepared = event.step, event.loss, None
    state.grad_norm, state.learning_rate = event.grad_norm, event.learning_rate
    state.first_loss = event.loss if state.first_loss is None else state.first_loss
    state._window.append(event)
    if not event.applied:
        ranks = ", ".join(map(str, event.nonfinite_ranks)) or "?"
        state.note(event, f"step {event.step}: gradient not finite on rank {ranks}; update skipped", "bad")
    if state._failed_at_seconds is not None and event.monotonic_seconds > state._failed_at_seconds:
        state.recovery_seconds = event.monotonic_seconds - state._failed_at_seconds
        state._failed_at_seconds = None
        state.note(event, f"recovered in {state.recovery_seconds:.2f} s: step {event.step} is done", "good")


def _attempt_started(state: ViewState, event: AttemptStarted) -> None:
    state.attempt, state.world_size = event.attempt, event.world_size
    if not state._window or state._window[-1].attempt != event.attempt:  # its first step may be told before it is
        state.step = event.from_step
    state.total_steps = event.total_steps if event.total_steps is not None else state.total_steps
    state.num_attempts += 1
    if event.source.upper() == "SEED":
        text = f"attempt {event.attempt} starts at step 0 on {event.world_size} ranks"
    else:
        source = SOURCE_WORDS.get(event.source.upper(), event.source)
        text = f"attempt {event.attempt} restored from {source} of step {event.from_step}"
        if event.total_steps is not None and event.from_step >= event.total_steps:
            text += ": nothing is left to do"
    if event.source.upper() == "COMMITTED":
        state.restored_step = event.from_step
    state.note(event, text, "good" if event.from_step else "plain")


def _rank_failed(state: ViewState, event: RankFailed) -> None:
    if state._failed_at_seconds is None:  # the ranks that fall with the first one do not restart the clock
        state._failed_at_seconds = event.detected_seconds
    state.note(event, f"rank {event.rank} (pid {event.pid}) {describe_exit(event)}", "bad")


def _ranks_restarted(state: ViewState, event: RanksRestarted) -> None:
    state.restarts = max(state.restarts, event.restart)
    if event.start_method_reason:
        state.note(event, f"ranks start by {event.start_method}: {event.start_method_reason}")


def _committed(state: ViewState, event: CheckpointCommitted) -> None:
    state.num_committed += 1
    state.committed, state.storage_problem = event, None


def _quarantined(state: ViewState, event: CheckpointQuarantined) -> None:
    state.note(event, f"checkpoint of step {event.step} is damaged ({event.file}: {event.reason})", "bad")


def _fell_back(state: ViewState, event: RestoreFellBack) -> None:
    source = SOURCE_WORDS.get(event.source.upper(), event.source)
    state.note(event, f"{source} of step {event.candidate_step} was not usable: {event.reason}", "bad")


def _skipped(state: ViewState, event: SnapshotSkipped) -> None:
    if event.persist:
        state.skipped_saves += 1
        state.note(event, f"step {event.step}: save put off, {event.reason}")


def _storage_failed(state: ViewState, event: StorageFailed) -> None:
    before = state.storage_problem
    if before is None or before.reason != event.reason:  # it is tried again and again
        state.note(event, f"storage fails to {event.operation}: {event.reason}; what is to be saved waits", "bad")
    state.storage_problem = event


def _storage_recovered(state: ViewState, event: StorageRecovered) -> None:
    state.storage_problem = None
    state.note(event, f"storage takes writes again, after {event.seconds:.1f} s", "good")


def _saving(state: ViewState, event: SaveIntervalChosen) -> None:
    state.saving = event
    state.note(event, f"saves every {event.interval_seconds:.0f} s from now on: {event.reason}")


def _prepared(state: ViewState, event: DataPrepared) -> None:
    state.prepared = event
    state.note(event, f"data: {event.stage}: {event.detail} ({event.seconds:.1f} s)")


def _state_changed(state: ViewState, event: JobStateChanged) -> None:
    state.job_state = event.state
    if event.state in (JobState.PENDING, JobState.STARTING, JobState.PAUSED, JobState.STOPPING):
        state.note(event, f"{event.state}: {event.reason}")  # of the others, the events behind them tell more


def _promoted(state: ViewState, event: CheckpointPromoted) -> None:
    state.stable_step = event.step


def _anomaly(state: ViewState, event: AnomalyDetected) -> None:
    state.note(event, f"{event.severity}: {event.message}", "bad" if event.severity == "critical" else "plain")


def _incident(state: ViewState, event: IncidentChanged) -> None:
    state.incidents[event.incident_id] = event
    if len(state.incidents) > NUM_INCIDENTS_KEPT:
        del state.incidents[min(state.incidents)]
    numbers = []
    if event.recovery_seconds is not None:
        numbers.append(f"{event.recovery_seconds:.2f} s")
    if event.steps_lost is not None:
        numbers.append(f"{event.steps_lost} steps lost")
    what = f"incident {event.incident_id}, {event.kind}: {event.state}{', ' + event.action if event.action else ''}"
    what += f" ({', '.join(numbers)})" if numbers else ""
    good = event.state in (IncidentState.RESUMED, IncidentState.HEALED)
    state.note(event, f"{what}: {event.reason}", "good" if good else "bad")


def _applied(state: ViewState, event: CommandApplied) -> None:
    state.note(event, f"step {event.step}: {event.command} was applied in {event.seconds:.2f} s", "good")


def _refused(state: ViewState, event: CommandRefused) -> None:
    state.note(event, f"step {event.step}: {event.command} was refused: {event.reason}", "bad")


def _hung(state: ViewState, event: RankHung) -> None:
    where = f"in {event.phase} after step {event.step}"
    state.note(event, f"rank {event.rank} has hung {where} for {event.seconds:.0f} s", "bad")


def _finished(state: ViewState, event: JobFinished) -> None:
    state.finished = event
    style = {JobState.SUCCEEDED: "good", JobState.FAILED: "bad"}.get(event.state, "plain")
    state.note(event, f"{event.state}: {event.reason}", style)


HANDLERS: dict[type[Event], Callable[[ViewState, Any], None]] = {
    StepCompleted: _step_completed,
    AttemptStarted: _attempt_started,
    RankFailed: _rank_failed,
    RanksRestarted: _ranks_restarted,
    CheckpointCommitted: _committed,
    CheckpointQuarantined: _quarantined,
    RestoreFellBack: _fell_back,
    SnapshotSkipped: _skipped,
    StorageFailed: _storage_failed,
    StorageRecovered: _storage_recovered,
    SaveIntervalChosen: _saving,
    DataPrepared: _prepared,
    JobFinished: _finished,
    JobStateChanged: _state_changed,
    CheckpointPromoted: _promoted,
    AnomalyDetected: _anomaly,
    IncidentChanged: _incident,
    CommandApplied: _applied,
    CommandRefused: _refused,
    RankHung: _hung,
}


def describe_exit(event: RankFailed) -> str:
    """Say in words how a rank ended."""
    if event.error_type:
        return f"raised {event.error_type}: {(event.error_message or '').strip()}"
    if event.exit_code >= 0:
        return f"exited with status {event.exit_code}"
    try:
        return f"was killed by {signal.Signals(-event.exit_code).name}"
    except ValueError:
        return f"was killed by signal {-event.exit_code}"
