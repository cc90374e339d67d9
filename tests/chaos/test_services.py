"""What DESIGN promises when parts of the stack fail while a job runs: the job does not notice, and nothing is lost."""

from __future__ import annotations

import os
import signal
import time

import pytest

from helpers.jobs import Job
from helpers.stack import TestStack, last_step, step_seconds
from helpers.waiting import wait_until
from surefoot.checkpoint.catalog import verify
from surefoot.events import AttemptStarted, JobState, StepCompleted

TRAINER = ["--steps", "100000", "--samples", "800000", "--step-seconds", "0.05"]
"""It goes on until the test has seen enough and asks for its end."""
CHECKPOINT = {"save_every_seconds": 1.0}
NOT_THE_WORKER = ("detector", "recovery", "writer", "writer-tasks", "gateway", "api")
SLOWER_RATIO = 1.25
"""Machines are noisy; `make bench-overhead` measures what is promised."""

pytestmark = pytest.mark.chaos


@pytest.fixture
def stack(tmp_path):
    with TestStack(tmp_path / "home") as started:
        yield started


def stop_and_check_that_nothing_was_lost(stack: TestStack, job: Job) -> None:
    """Every sample was trained on once, every event arrived, every checkpoint is good, nothing stays."""
    stack.api.post("jobs", job.name, "stop")
    assert stack.wait_for_end(job, 60)["state"] == JobState.STOPPED
    steps = max(checkpoint_id.step for checkpoint_id in job.committed())
    assert steps == last_step(job), "the last state is saved"
    ids = [sample for batch in job.joined_ids() for sample in batch]
    assert len(ids) == len(set(ids)) == 8 * steps
    told = {(e.attempt, e.step) for e in job.events(StepCompleted)}
    wait_until(
        lambda: {(m.attempt, m.step) for m in stack.messages(job) if isinstance(m, StepCompleted)} == told,
        20,
        "every step is on the stream",
    )
    assert all(event.dropped_events == 0 for event in job.events(StepCompleted))
    for checkpoint_id in job.committed():
        verify(job.store, checkpoint_id)
    rows = stack.api.list("checkpoints", "jobs", job.name, "checkpoints")
    assert {(row["attempt"], row["step"]) for row in rows} == {tuple(i) for i in job.committed()}
    stack.down()
    assert (stack.exit_code, stack.leftovers) == (0, [])
    assert not job.staging.exists()


def check_b3(stack: TestStack, job: Job, seconds: float) -> None:
    """Stop the server for so long: step time unchanged, saves durable in the meantime."""
    server = stack.stack.services["server"].pid
    began = time.monotonic()
    calm, saved = step_seconds(job, 0.0, began), max(job.committed())
    os.kill(server, signal.SIGSTOP)
    try:
        wait_until(lambda: time.monotonic() > began + seconds, seconds + 5, "the time passes", 0.1)
        ended = time.monotonic()
        assert step_seconds(job, began, ended) < SLOWER_RATIO * calm
        assert max(job.committed()) > saved
    finally:
        os.kill(server, signal.SIGCONT)


@pytest.mark.timeout(300)
def test_b3_m1_each_service_killed_once_and_redis_stopped_while_a_job_runs(stack, make_job):
    """All but the worker: not a step is lost. The worker: its launcher dies with it, the next one goes on."""
    job = make_job("chaos", trainer=TRAINER, checkpoint=CHECKPOINT)
    stack.submit(job)
    wait_until(lambda: last_step(job) >= 60, 60, "the job trains")
    calm = step_seconds(job, 0.0, time.monotonic())
    began = time.monotonic()
    for service in NOT_THE_WORKER:
        stack.kill(service)
    ended = time.monotonic()
    assert step_seconds(job, began, ended) < SLOWER_RATIO * calm
    check_b3(stack, job, 8)
    assert len(job.records()) == 1, "nobody restarted the ranks"
    stack.kill("worker")
    wait_until(lambda: len(job.records()) == 2, 60, "the next worker goes on with the job")
    wait_until(lambda: len(job.events(AttemptStarted)) == 2, 60, "its first step is done")
    _, second = job.events(AttemptStarted)
    # From memory; or from storage when the next worker came so late that the drain had saved the newest snapshot.
    assert second.from_step >= max(e.step for e in job.events(StepCompleted) if e.attempt == 1)
    assert [i["kind"] for i in stack.incidents(job)] in ([], ["rank_failure"])
    stop_and_check_that_nothing_was_lost(stack, job)


@pytest.mark.slow  # 8 s stand above
@pytest.mark.timeout(300)
def test_b3_redis_stopped_for_a_minute_while_a_job_trains(stack, make_job):
    """Step time unchanged, saves durable in the meantime, every event delivered afterwards, none dropped."""
    job = make_job("b3", trainer=TRAINER, checkpoint=CHECKPOINT)
    stack.submit(job)
    wait_until(lambda: last_step(job) >= 60, 60, "the job trains")
    check_b3(stack, job, 60)
    assert len(job.records()) == 1
    stop_and_check_that_nothing_was_lost(stack, job)
