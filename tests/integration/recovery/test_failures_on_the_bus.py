"""Ranks that die or hang, as incidents."""

from __future__ import annotations

import time

import pytest

from helpers.recovery import FakeJob, Service, prepare
from surefoot.bus.redis_bus import RedisBus
from surefoot.catalogue.database import Database
from surefoot.events import JobState, RankHung


@pytest.fixture
def job(bus: RedisBus, database: Database) -> FakeJob:
    prepare(database)
    job = FakeJob(bus)
    job.start()
    job.train(57)
    return job


def test_a_killed_rank(bus: RedisBus, database: Database, job: FakeJob) -> None:
    service = Service(bus, database)
    job.lose_rank(rank=1, detected_seconds=time.monotonic() - 5.0)
    service.settle()
    (incident,) = service.incidents()
    assert (incident.kind, incident.state, incident.onset_step) == ("rank_failure", "ACTING", 57)
    assert incident.cause == "Rank 1 (pid 4711) was ended by SIGKILL after step 57."

    job.start(2, 1, 56)
    job.train(57)
    service.settle()
    (incident,) = service.incidents()
    assert (incident.state, incident.resumed_attempt, incident.steps_lost) == ("RESUMED", 2, 1)
    assert incident.recovery_seconds == pytest.approx(5.0, abs=1.9)  # from the launcher's own clock
    (action,) = service.actions()
    assert (action.kind, action.state, action.new_attempt) == ("restart", "APPLIED", 2)

    job.cleared_through(57)
    service.settle()
    assert service.incidents()[0].state == "HEALED"
    assert service.told() == [(1, "ACTING"), (1, "RESUMED"), (1, "HEALED")]
    assert service.commands() == []


def test_a_restart_of_the_service_in_between_loses_nothing(bus: RedisBus, database: Database, job: FakeJob) -> None:
    job.lose_rank()
    Service(bus, database).settle()
    job.start(2, 1, 50)
    Service(bus, database).settle()
    job.train(51)
    service = Service(bus, database)
    service.settle()
    (incident,) = service.incidents()
    assert (incident.state, incident.steps_lost) == ("RESUMED", 7)


def test_a_hang_and_its_kill_are_one_incident(bus: RedisBus, database: Database, job: FakeJob) -> None:
    service = Service(bus, database)
    fields = {"rank": 1, "pid": 4711, "phase": "step", "step": 57, "seconds": 301.0, "limit_seconds": 300.0}
    job.say(RankHung(job="demo", attempt=1, **fields))
    job.lose_rank()
    service.settle()
    (incident,) = service.incidents()
    assert incident.kind == "hang"
    assert "no progress in phase step for 301.0 s (limit 300.0 s)" in incident.cause
    assert "was ended by SIGKILL" in incident.outcome
    job.start(2, 1, 57)
    job.train(58)
    service.settle()
    (incident,) = service.incidents()
    assert (incident.state, incident.steps_lost) == ("RESUMED", 0)


def test_ranks_that_do_not_come_up_again_are_the_same_incident(bus: RedisBus, database: Database, job: FakeJob) -> None:
    service = Service(bus, database)
    job.lose_rank()
    job.lose_rank(exit_code=1, error_type="ImportError", error_message="no module named x", step=None)
    job.finish(JobState.FAILED, "the same exception twice")
    service.settle()
    (incident,) = service.incidents()
    assert incident.state == "ESCALATED"
    assert incident.outcome.splitlines()[1:] == [
        "Rank 1 (pid 4711) exited with 1: ImportError: no module named x.",
        "The job ended FAILED: the same exception twice",
    ]
    assert [action.state for action in service.actions()] == ["EXPIRED"]


def test_each_failure_is_an_incident_of_its_own(bus: RedisBus, database: Database, job: FakeJob) -> None:
    service = Service(bus, database)
    for attempt in (2, 3):
        job.lose_rank()
        job.start(attempt, attempt - 1, 57)
        job.train(58)
    job.finish(JobState.SUCCEEDED)
    service.settle()
    assert [(incident.attempt, incident.state) for incident in service.incidents()] == [(1, "HEALED"), (2, "HEALED")]


def test_a_job_that_failed_and_is_submitted_again_begins_afresh(
    bus: RedisBus, database: Database, job: FakeJob
) -> None:
    service = Service(bus, database)
    job.lose_rank()
    job.finish(JobState.FAILED)
    job.lose_rank(attempt=None, step=None)
    service.settle()
    assert [incident.state for incident in service.incidents()] == ["ESCALATED", "ACTING"]
