"""Which message leads where. Open this first."""

from __future__ import annotations

from surefoot.bus.consumer import Handler
from surefoot.events import (
    AnomalyCleared,
    AnomalyDetected,
    AttemptStarted,
    CommandApplied,
    CommandRefused,
    JobFinished,
    Message,
    RankFailed,
    RankHung,
    RollBackRequested,
    SaveRequested,
    SetLearningRateRequested,
    StepCompleted,
    StepsCleared,
)
from surefoot_recovery.anomalies import Anomalies
from surefoot_recovery.desk import Desk
from surefoot_recovery.failures import Failures
from surefoot_recovery.progress import Progress
from surefoot_recovery.requests import Requests


def event_handlers(desk: Desk) -> dict[type[Message], Handler]:
    """Return what handles the facts of `surefoot:events`."""
    anomalies, failures, progress = Anomalies(desk), Failures(desk), Progress(desk)
    return {
        AnomalyDetected: anomalies.detected,
        AnomalyCleared: anomalies.cleared,
        StepsCleared: anomalies.steps_cleared,
        RankFailed: failures.rank_failed,
        RankHung: failures.rank_hung,
        JobFinished: failures.job_finished,
        AttemptStarted: progress.attempt_started,
        StepCompleted: progress.step_completed,
        CommandApplied: progress.applied,
        CommandRefused: progress.refused,
    }


def request_handlers(desk: Desk) -> dict[type[Message], Handler]:
    """Return what handles the wishes of `surefoot:requests`."""
    requests = Requests(desk)
    return {
        RollBackRequested: requests.roll_back,
        SetLearningRateRequested: requests.set_learning_rate,
        SaveRequested: requests.save,
    }
