"""From an alarm to a healed incident, on a real server and a real database."""

from __future__ import annotations

from datetime import timedelta

import pytest

from helpers.recovery import Clock, FakeJob, Service, prepare
from surefoot.bus.redis_bus import RedisBus
from surefoot.catalogue.database import Database
from surefoot.catalogue.models import Run
from surefoot.checkpoint.attempts import SkipWindow
from surefoot.events import AnomalyKind, JobState, RollBack, SetLearningRate, Severity, StopTraining


@pytest.fixture
def job(bus: RedisBus) -> FakeJob:
    job = FakeJob(bus)
    job.start()
    job.train(190)
    return job


def test_a_spike_is_rolled_back_and_heals(bus: RedisBus, database: Database, job: FakeJob) -> None:
    prepare(database)
    service = Service(bus, database)
    job.train(193)
    alarm = job.alarm(onset_step=191)
    service.settle()

    (command,) = service.commands()
    assert isinstance(command, RollBack)
    assert (command.attempt, command.to_attempt, command.to_step) == (1, 1, 150)
    assert (command.lr_factor, command.lr_hold_steps, command.lr_rewarm_steps) == (0.5, 20, 20)
    assert command.skip_windows == (SkipWindow(start=186, stop=194),)
    assert [action.state for action in service.actions()] == ["SENT"]

    job.train(194)
    job.apply(command)
    job.train(152)
    service.settle()
    (incident,) = service.incidents()
    assert (incident.state, incident.resumed_attempt, incident.steps_lost) == ("RESUMED", 2, 44)
    assert incident.recovery_seconds is not None
    assert 0 <= incident.recovery_seconds < 20

    for _ in range(2):
        job.all_clear(alarm)  # at step 152, far from where it began: that says nothing yet
    service.settle()
    (incident,) = service.incidents()
    assert incident.state == "RESUMED"
    assert incident.outcome.splitlines()[-1] == "Back in band at step 152: back in band"
    assert incident.outcome.count("Back in band") == 1

    job.train(193)
    job.cleared_through(191)
    service.settle()
    assert service.incidents()[0].state == "RESUMED"
    job.cleared_through(192)
    service.settle()
    (incident,) = service.incidents()
    assert incident.state == "HEALED"
    assert incident.closed_at is not None
    assert service.told() == [(1, "ACTING"), (1, "RESUMED"), (1, "HEALED")]


def test_steps_cleared_beyond_the_onset_heal_too(bus: RedisBus, database: Database, job: FakeJob) -> None:
    prepare(database)
    service = Service(bus, database)
    job.alarm(onset_step=188)
    service.settle()
    job.apply(service.commands()[0])
    job.train(187)
    job.cleared_through(187)
    service.settle()
    assert service.incidents()[0].state == "RESUMED"
    job.train(190)
    job.cleared_through(189)
    service.settle()
    assert service.incidents()[0].state == "HEALED"


def test_what_comes_back_at_the_same_step_is_one_incident_and_climbs_the_ladder(
    bus: RedisBus, database: Database, job: FakeJob
) -> None:
    """A permanent fault: not finite from step 190 on, however often training goes back."""
    prepare(database)
    service = Service(bus, database)
    job.alarm(onset_step=190, kind=AnomalyKind.NONFINITE)
    job.train(193)
    alarm = job.alarm(onset_step=190, kind=AnomalyKind.NONFINITE, severity=Severity.CRITICAL, event_id="again")
    service.settle()
    for _ in range(2):
        job.apply(service.commands()[-1])
        job.train(job.step + 2)
        job.all_clear(alarm)
        job.cleared_through(job.step)
        job.train(190)
        job.cleared_through(189)
        alarm = job.alarm(onset_step=190, kind=AnomalyKind.NONFINITE)
        service.settle()
    assert [action.rung for action in service.actions()] == ["leave-out", "rollback", "older", "stop"]
    assert [incident.state for incident in service.incidents()] == ["ESCALATED"]


def test_the_newest_onset_counts(bus: RedisBus, database: Database, job: FakeJob) -> None:
    prepare(database)
    service = Service(bus, database)
    job.alarm(onset_step=188)
    service.settle()
    job.apply(service.commands()[0])
    job.train(195)
    alarm = job.alarm(onset_step=194)  # before step 189 was said to be free: the same trouble, a little later
    service.settle()
    job.apply(service.commands()[1])
    job.train(192)
    job.all_clear(alarm)
    job.cleared_through(191)
    service.settle()
    assert [incident.state for incident in service.incidents()] == ["RESUMED"]


def test_a_job_that_recovery_stopped_can_go_on(bus: RedisBus, database: Database, job: FakeJob) -> None:
    """Whatever was open is over, and the ladder is as new: a person has decided."""
    ladder = [{"name": "rollback", "kinds": ["spike"], "action": "rollback"}, {"name": "stop", "action": "stop"}]
    prepare(database, ladder=ladder)
    clock = Clock()
    service = Service(bus, database, clock)
    job.alarm(onset_step=170)
    service.settle()
    job.train(220)
    job.alarm(onset_step=220, kind=AnomalyKind.DIVERGENCE)  # far away: another incident
    service.settle()
    assert [incident.state for incident in service.incidents()] == ["ACTING", "ESCALATED"]
    job.finish(JobState.STOPPED, "recovery ordered it")
    service.settle()
    assert [incident.state for incident in service.incidents()] == ["ESCALATED", "ESCALATED"]
    assert service.incidents()[0].outcome.splitlines()[-1].startswith("Recovery stopped the job: divergence")
    assert [action.state for action in service.actions()] == ["EXPIRED", "APPLIED"]

    clock.ahead = timedelta(seconds=60)
    with database.write() as session:
        run = session.get_one(Run, "demo")
        run.generation, run.started_at = 2, clock()
    clock.ahead = timedelta(seconds=70)
    job.start(2, 1, 220)
    job.train(260)
    service.settle()
    assert len(service.actions()) == 2, "nothing is acted on again"
    job.alarm(onset_step=260)
    service.settle()
    assert [action.rung for action in service.actions()] == ["rollback", "stop", "rollback"]


def test_a_stop_that_was_given_up_and_obeyed_after_all(bus: RedisBus, database: Database, job: FakeJob) -> None:
    prepare(database, ladder=[{"name": "stop", "action": "stop"}])
    clock = Clock()
    service = Service(bus, database, clock)
    job.alarm(onset_step=188)
    service.settle()
    clock.ahead = timedelta(seconds=31)
    job.train(206)
    service.settle()
    assert [action.state for action in service.actions()] == ["EXPIRED"]
    job.finish(JobState.STOPPED)
    service.settle()
    assert [action.state for action in service.actions()] == ["APPLIED"]


def test_many_alarms_of_one_trouble_are_one_incident_and_one_roll_back(
    bus: RedisBus, database: Database, job: FakeJob
) -> None:
    prepare(database)
    service = Service(bus, database)
    job.alarm(onset_step=188, severity=Severity.WARNING)
    job.alarm(onset_step=188)
    job.alarm(onset_step=187, kind=AnomalyKind.EXPLODING_GRADIENT)
    service.settle()
    job.train(194)
    job.alarm(onset_step=189, kind=AnomalyKind.DIVERGENCE)
    job.apply(service.commands()[0])
    job.alarm(onset_step=190, attempt=1)  # a late one, about what was left behind
    job.train(160)
    service.settle()
    assert len(service.commands()) == 1
    (incident,) = service.incidents()
    assert (incident.kind, incident.severity) == ("spike", "critical")
    assert len(incident.evidence["anomalies"]) == 5


def test_a_warning_is_only_shown(bus: RedisBus, database: Database, job: FakeJob) -> None:
    prepare(database)
    service = Service(bus, database)
    job.alarm(onset_step=190, severity=Severity.WARNING)
    service.settle()
    assert service.incidents()[0].state == "OPEN"
    job.train(200)
    job.cleared_through(199)
    service.settle()
    assert (service.incidents()[0].state, service.actions()) == ("HEALED", [])


def test_what_comes_again_goes_up_the_ladder_to_the_end(bus: RedisBus, database: Database, job: FakeJob) -> None:
    prepare(database)
    clock = Clock()
    service = Service(bus, database, clock)
    job.alarm(onset_step=188)
    service.settle()
    job.apply(service.commands()[0])
    job.train(175)
    job.alarm(onset_step=170)
    service.settle()
    second = service.commands()[1]
    assert isinstance(second, RollBack)
    assert (second.attempt, second.to_step, second.lr_factor) == (2, 100, 0.25)
    job.apply(second)
    job.train(101)
    service.settle()
    service.detector_position = "0-0"
    job.train(140)  # wait_steps later it has not healed, but the detector is away
    service.settle()
    assert len(service.commands()) == 2
    service.detector_position = "9999999999999-0"
    job.train(141)
    service.settle()
    assert len(service.commands()) == 2, "what the detector says may be on its way"
    clock.ahead = timedelta(seconds=3)
    job.train(142)
    service.settle()
    assert isinstance(service.commands()[2], StopTraining)
    (incident,) = service.incidents()
    assert incident.state == "ESCALATED"
    job.finish(JobState.STOPPED)
    service.settle()
    assert [action.state for action in service.actions()] == ["APPLIED"] * 3


def test_without_a_stable_checkpoint_the_learning_rate_is_cut(bus: RedisBus, database: Database, job: FakeJob) -> None:
    prepare(database, stable=[(1, 185)])
    service = Service(bus, database)
    job.alarm(onset_step=188)
    service.settle()
    (command,) = service.commands()
    assert isinstance(command, SetLearningRate)
    assert "no STABLE checkpoint at step 178 or before" in command.reason
    assert command.lr_factor == 0.5


def test_a_batch_that_is_not_finite_is_left_to_the_ranks_first(bus: RedisBus, database: Database, job: FakeJob) -> None:
    prepare(database)
    service = Service(bus, database)
    alarm = job.alarm(onset_step=190, kind=AnomalyKind.NONFINITE)
    service.settle()
    assert service.commands() == []
    job.train(191)
    job.all_clear(alarm)
    service.settle()
    assert service.incidents()[0].state == "HEALED"

    job.train(300)
    job.alarm(onset_step=300, kind=AnomalyKind.NONFINITE)
    service.settle()
    assert isinstance(service.commands()[0], RollBack)  # the budget of the first rung is used up


def test_a_refused_command_is_decided_anew(bus: RedisBus, database: Database, job: FakeJob) -> None:
    prepare(database)
    service = Service(bus, database)
    job.alarm(onset_step=188)
    service.settle()
    job.refuse(service.commands()[0], "step 150 of attempt 1 is not on storage")
    service.settle()
    first, second = service.commands()
    assert isinstance(first, RollBack)
    assert isinstance(second, RollBack)
    assert (first.to_step, second.to_step) == (150, 100)
    assert [action.state for action in service.actions()] == ["REFUSED", "SENT"]


def test_a_command_without_an_answer_is_given_up(bus: RedisBus, database: Database, job: FakeJob) -> None:
    prepare(database)
    clock = Clock()
    service = Service(bus, database, clock)
    job.alarm(onset_step=188)
    service.settle()
    job.train(205)
    service.settle()
    assert len(service.commands()) == 1, "steps alone are not enough: after an outage they come in a heap"
    clock.ahead = timedelta(seconds=31)
    job.train(206)
    service.settle()
    first, second = service.commands()
    assert [action.state for action in service.actions()] == ["EXPIRED", "SENT"]

    job.apply(first)  # late, but it counts; the ranks then refuse the second one
    job.refuse(second, "attempt 2 is not attempt 1")
    job.train(160)
    service.settle()
    assert len(service.commands()) == 2
    assert [action.state for action in service.actions()] == ["APPLIED", "REFUSED"]
    assert service.incidents()[0].state == "RESUMED"


def test_a_restart_in_between_is_met_with_a_new_command(bus: RedisBus, database: Database, job: FakeJob) -> None:
    prepare(database)
    service = Service(bus, database)
    job.alarm(onset_step=188)
    job.lose_rank()
    job.start(2, 1, 189)  # staged, and as bad as it was
    job.train(190)
    service.settle()
    assert [command.attempt for command in service.commands()] == [1, 2]
    assert [action.state for action in service.actions()] == ["EXPIRED", "APPLIED", "SENT"]


def test_a_restart_from_before_the_onset_needs_no_roll_back(bus: RedisBus, database: Database, job: FakeJob) -> None:
    prepare(database)
    service = Service(bus, database)
    job.alarm(onset_step=188)
    job.lose_rank()
    job.start(2, 1, 150)
    job.train(190)
    service.settle()
    assert [command.attempt for command in service.commands()] == [1]
    assert [incident.state for incident in service.incidents()] == ["RESUMED", "RESUMED"]
    job.cleared_through(189)
    service.settle()
    assert [incident.state for incident in service.incidents()] == ["HEALED", "HEALED"]


def test_budgets_survive_a_restart(bus: RedisBus, database: Database, job: FakeJob) -> None:
    prepare(database)
    for number in range(3):
        service = Service(bus, database)
        alarm = job.alarm(onset_step=job.step - 2)
        service.settle()
        job.apply(service.commands()[number])
        job.train(191)
        job.all_clear(alarm)
        service.settle()
    assert [action.rung for action in service.actions()] == ["rollback", "rollback", "older"]
    assert [command.to_step for command in service.commands()] == [150, 150, 100]
    assert "used 2 of 2 times" in service.actions()[2].reason
    assert [incident.state for incident in service.incidents()] == ["HEALED"] * 3


@pytest.mark.parametrize(
    ("mode", "words"), [("advise", "Only advice (policy.mode): spike from step 188"), ("off", "policy.mode is off.")]
)
def test_a_policy_that_does_not_act(bus: RedisBus, database: Database, job: FakeJob, mode: str, words: str) -> None:
    prepare(database, mode=mode)
    service = Service(bus, database)
    job.alarm(onset_step=188)
    job.train(300)
    service.settle()
    (incident,) = service.incidents()
    assert (incident.state, service.commands(), service.actions()) == ("OPEN", [], [])
    assert incident.outcome.startswith(words)


def test_an_unknown_job_is_left_alone(bus: RedisBus, database: Database, job: FakeJob) -> None:
    service = Service(bus, database)
    job.alarm(onset_step=188)
    job.lose_rank()
    job.finish(JobState.FAILED)
    service.settle()
    assert (service.incidents(), service.actions()) == ([], [])


def test_a_job_that_ends_takes_its_orders_with_it(bus: RedisBus, database: Database, job: FakeJob) -> None:
    prepare(database)
    service = Service(bus, database)
    job.alarm(onset_step=188)
    job.finish(JobState.SUCCEEDED)
    service.settle()
    assert [action.state for action in service.actions()] == ["EXPIRED"]
    (incident,) = service.incidents()
    assert incident.state == "OPEN"
    assert incident.closed_at is not None


def test_an_alarm_about_a_job_that_has_ended_is_only_written_down(
    bus: RedisBus, database: Database, job: FakeJob
) -> None:
    prepare(database)
    service = Service(bus, database)
    job.finish(JobState.SUCCEEDED)
    job.alarm(onset_step=188)
    service.settle()
    (incident,) = service.incidents()
    assert (incident.state, service.commands()) == ("OPEN", [])
    assert incident.closed_at is not None


def test_a_stopped_job_is_rolled_back_when_it_goes_on(bus: RedisBus, database: Database, job: FakeJob) -> None:
    prepare(database)
    service = Service(bus, database)
    job.alarm(onset_step=188)
    job.finish(JobState.STOPPED)
    service = Service(bus, database)
    service.settle()
    job.start(2, 1, 190)
    job.train(191)
    service.settle()
    assert [command.attempt for command in service.commands()] == [1, 2]
