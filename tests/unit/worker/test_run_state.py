"""What the worker makes of a job's events while storage fails."""

from __future__ import annotations

import pytest

from surefoot.events import (
    CheckpointCommitted,
    Event,
    JobState,
    RankFailed,
    StepCompleted,
    StorageFailed,
    StorageRecovered,
)
from surefoot_worker.handlers import EVENTS, PERSISTENT_SECONDS
from surefoot_worker.service.run_state import RunState


def feed(run: RunState, *events: Event) -> None:
    for event in events:
        EVENTS[type(event)](run, event)


def step(number: int, attempt: int = 1) -> StepCompleted:
    return StepCompleted(
        job="j", attempt=attempt, rank=0, step=number, updates=number, epoch=0, loss=1.0, learning_rate=0.1,
        applied=True, num_samples=1, step_seconds=(0.1,),
    )  # fmt: skip


def failed(at: float, number: int = 1) -> StorageFailed:
    return StorageFailed(
        job="j", operation="write step-5", reason="ENOSPC: no space", num_failures=number, monotonic_seconds=at
    )


RECOVERED = StorageRecovered(job="j", seconds=42.0, num_failures=9)
COMMITTED = CheckpointCommitted(job="j", attempt=1, step=5, world_size=2, num_bytes=1, write_seconds=0.1)


@pytest.fixture
def run() -> RunState:
    made = RunState("j", 1, JobState.STARTING)
    feed(made, step(1))
    assert made.state is JobState.RUNNING
    return made


def degraded(run: RunState) -> RunState:
    feed(run, failed(100.0), failed(100.0 + PERSISTENT_SECONDS, 2))
    assert run.state is JobState.DEGRADED
    return run


def test_a_short_failure_is_no_state(run: RunState) -> None:
    feed(run, failed(100.0), failed(104.9, 2), RECOVERED, failed(106.0), failed(110.9, 2))
    assert run.state is JobState.RUNNING


def test_degraded_while_nobody_can_save_although_steps_go_on(run: RunState) -> None:
    seen: list[JobState] = []
    run.on_change = lambda changed: seen.append(changed.state)
    degraded(run)
    assert run.reason == (
        "nobody can save since 5 s: storage fails to write step-5: ENOSPC: no space; training goes on, what is to be "
        "saved waits in memory"
    )
    feed(run, step(2), failed(130.0, 3), step(3))
    assert run.step == 3
    assert "since 30 s" in run.reason
    feed(run, RECOVERED, step(4))
    assert (run.reason, seen) == ("storage takes writes again, after 42 s", [JobState.DEGRADED, JobState.RUNNING])


def test_a_drain_that_was_killed_and_replaced_counts_on(run: RunState) -> None:
    """The next drain counts its failures from 1, and what it commits ends the trouble without StorageRecovered."""
    feed(run, failed(100.0), failed(103.0, 2), failed(106.0, 1))
    assert run.state is JobState.DEGRADED
    feed(run, COMMITTED)
    assert run.reason == "storage takes writes again: step 5 is durable"
    feed(run, failed(107.0))
    assert run.state is JobState.RUNNING


def test_a_failed_rank_comes_first(run: RunState) -> None:
    died = RankFailed(job="j", attempt=1, rank=1, pid=1, exit_code=-9, detected_seconds=1.0)
    feed(degraded(run), died)
    assert run.state is JobState.RECOVERING
    feed(run, failed(120.0, 3))
    assert run.state is JobState.RECOVERING  # no step is done: that storage fails may be why
    seen: list[JobState] = []
    run.on_change = lambda changed: seen.append(changed.state)
    feed(run, step(2, attempt=2))
    assert seen == [JobState.RUNNING, JobState.DEGRADED]


@pytest.mark.parametrize("event", [failed(200.0, 4), RECOVERED, COMMITTED])
def test_a_job_that_is_being_stopped_stays_so(run: RunState, event: Event) -> None:
    degraded(run).go(JobState.STOPPING, "on request")
    feed(run, event)
    assert (run.state, run.reason) == (JobState.STOPPING, "on request")
