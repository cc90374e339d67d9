"""What makes a save on two ranks: steps, time and `auto`. Requests and signals are in test_preemption."""

from __future__ import annotations

import os
import signal
from itertools import pairwise

import pytest

from helpers.launcher import finish, started, until
from surefoot.checkpoint.catalog import read_scalars
from surefoot.events import CheckpointCommitted, CheckpointStaged, RanksRestarted, SaveIntervalChosen, StepCompleted
from surefoot.sdk.save_interval import optimal_seconds

FOR_EVER = ["--steps", "100000", "--step-seconds", "0.01"]


def stop(process):
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 75


@pytest.mark.slow  # unit/sdk has the schedule
@pytest.mark.timeout(120)
def test_by_steps_and_by_time(make_job):
    """At every 50th step, or as soon after it as storage has caught up; else when the last save is 0.4 s ago."""
    job = make_job(trainer=FOR_EVER, checkpoint={"save_every_steps": 50, "save_every_seconds": 0.4})

    def gaps():
        staged = {event.step: event.monotonic_seconds for event in job.events(CheckpointStaged)}
        both = [(before, after) for before, after in pairwise(sorted(staged))]
        by_step = [(before, after) for before, after in both if before // 50 < after // 50]
        by_time = [staged[after] - staged[before] for before, after in both if before // 50 == after // 50]
        return by_step, by_time

    with started(job) as process:
        until(lambda: len(gaps()[0]) >= 3 and len(gaps()[1]) >= 2, "both kinds of saves are made", 60)
        stop(process)
    by_step, by_time = gaps()
    assert any(after % 50 == 0 for _, after in by_step)
    assert all(seconds >= 0.39 for seconds in by_time[:-1])  # the last one may be the end


@pytest.mark.chaos
@pytest.mark.timeout(120)
def test_auto_measures_saves_and_counts_failures_over_attempts(make_job):
    """Each attempt sets the interval from its first save on, and says why; the second knows of the kill before it.

    A checkpoint carries the loss of the steps before it and the seconds trained, and a restart goes on counting.
    """
    job = make_job(trainer=FOR_EVER, checkpoint={"save_every_steps": 10, "save_every_seconds": "auto"})
    with started(job) as process:
        until(lambda: len(job.events(SaveIntervalChosen)) == 1, "an interval is chosen", 60)
        os.kill(job.events(RanksRestarted)[0].pids[1], signal.SIGKILL)
        until(lambda: len(job.events(SaveIntervalChosen)) == 2, "an interval is chosen again", 60)
        stop(process)
    chosen = job.events(SaveIntervalChosen)
    assert [event.attempt for event in chosen] == [1, 2]
    for event, num_failures in zip(chosen, (0, 1), strict=True):
        assert (event.rank, event.num_failures) == (0, num_failures)
        optimum = optimal_seconds(event.save_cost_seconds, event.mean_seconds_between_failures)
        assert event.interval_seconds == max(10.0, optimum)
        assert f"({num_failures} seen in " in event.reason
    assert chosen[0].mean_seconds_between_failures > 2.9 * chosen[1].mean_seconds_between_failures
    losses = {event.step: event.loss for event in job.events(StepCompleted)}
    committed = job.events(CheckpointCommitted)
    for event in committed:
        last = [losses[n] for n in range(max(1, event.step - 19), event.step + 1)]
        assert event.loss == pytest.approx(sum(last) / len(last), rel=1e-12)
    seconds = [read_scalars(job.store, checkpoint)["trained_seconds"] for checkpoint in job.committed()]
    assert seconds == sorted(seconds)
    assert seconds[-1] >= 0.01 * committed[-1].step
