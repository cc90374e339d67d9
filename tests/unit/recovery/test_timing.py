"""Recovery seconds: by the monotonic clock within one host, by the time of day between hosts."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from surefoot.events import AnomalyDetected, AnomalyKind, RankFailed, Severity, StepCompleted
from surefoot_recovery.timing import recovery_seconds

T = datetime(2026, 12, 1, tzinfo=UTC)


def completed(after_seconds: float, monotonic_seconds: float) -> StepCompleted:
    numbers: dict[str, Any] = {"updates": 1, "epoch": 0, "loss": 1.0, "learning_rate": 1.0, "num_samples": 1}
    return StepCompleted(
        job="demo", step=1, applied=True, step_seconds=(0.1,), ts=T + timedelta(seconds=after_seconds),
        monotonic_seconds=monotonic_seconds, **numbers,
    )  # fmt: skip


def failed(detected_before: float) -> dict[str, Any]:
    event = RankFailed(
        job="demo", pid=1, exit_code=-9, ts=T, monotonic_seconds=100.0, detected_seconds=100.0 - detected_before
    )
    return {"failures": [json.loads(event.model_dump_json())]}


def alarm(severity: Severity, monotonic_seconds: float) -> dict[str, Any]:
    event = AnomalyDetected(
        job="demo", kind=AnomalyKind.SPIKE, severity=severity, onset_step=1, step=1, rule="r", loss=1.0, message="m",
        ts=T + timedelta(seconds=monotonic_seconds - 100.0), monotonic_seconds=monotonic_seconds,
    )  # fmt: skip
    return dict(json.loads(event.model_dump_json()))


def test_one_host_counts_from_the_detection_by_its_own_clock() -> None:
    # The time of day was set back by a second meanwhile.
    assert recovery_seconds(failed(0.3), completed(-0.5, 100.5)) == pytest.approx(0.8)


@pytest.mark.parametrize("other_clock", [5.0, 1e6])
def test_two_hosts_count_by_the_time_of_day(other_clock: float) -> None:
    assert recovery_seconds(failed(0.3), completed(4.0, other_clock)) == pytest.approx(4.3)


def test_the_worst_alarm_counts() -> None:
    evidence = {"anomalies": [alarm(Severity.WARNING, 90.0), alarm(Severity.CRITICAL, 100.0)]}
    assert recovery_seconds(evidence, completed(1.0, 101.0)) == pytest.approx(1.0)


def test_it_is_never_negative() -> None:
    assert recovery_seconds(failed(0.0), completed(-9.0, 5.0)) == 0.0
