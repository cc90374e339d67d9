"""Numbers of commands that the ranks would ignore, and tries that must not use up the ladder."""

from __future__ import annotations

from datetime import timedelta

import pytest

from helpers.recovery import POLICY, Clock, FakeJob, Service, prepare
from helpers.rows import started_attempt
from surefoot.bus.redis_bus import RedisBus
from surefoot.catalogue.database import Database
from surefoot.checkpoint.ids import CheckpointId
from surefoot.command_files import too_low
from surefoot.events import RollBack, SaveCheckpoint, SaveRequested

ONCE = {
    "ladder": [
        {"name": "rollback", "action": "rollback", "max_per_window": 1, "cool_down_steps": 1000},
        POLICY["ladder"][-1],
    ]
}


@pytest.fixture
def job(bus: RedisBus, database: Database) -> FakeJob:
    prepare(database, **ONCE)
    job = FakeJob(bus)
    job.start()
    job.train(190)
    return job


def test_numbers_go_on_from_the_attempt_records_after_the_database_was_lost(
    bus: RedisBus, database: Database, job: FakeJob
) -> None:
    with database.write() as session:
        session.add_all([started_attempt(1), started_attempt(2, 1, 160, command=41), started_attempt(3, 2, 170)])
    job.start(3, 2, 170)
    job.train(190)
    service = Service(bus, database)
    action = service.ask(SaveRequested(job="demo", actor="ann", operation_id="op-1"))
    assert (action.id, service.commands()[0].number) == (42, 42)
    assert service.ask(SaveRequested(job="demo", actor="ann", operation_id="op-2")).id == 43


def test_a_number_that_is_too_low_is_raised_and_costs_nothing(bus: RedisBus, database: Database, job: FakeJob) -> None:
    service = Service(bus, database)
    job.alarm(onset_step=188)
    service.settle()
    for newest in (70, 80):
        job.refuse(service.commands()[-1], too_low(service.commands()[-1].number, newest))
        service.settle()
    commands = service.commands()
    assert [command.number for command in commands] == [1, 71, 81]
    assert len({command.event_id for command in commands}) == 3
    assert all(isinstance(command, RollBack) and command.to_step == 150 for command in commands)
    assert {action.rung for action in service.actions()} == {"rollback"}
    assert service.incidents()[0].state == "ACTING"
    job.apply(commands[-1])
    job.train(151)
    service.settle()
    assert service.incidents()[0].state == "RESUMED"


def test_a_persons_order_is_repeated_too(bus: RedisBus, database: Database, job: FakeJob) -> None:
    service = Service(bus, database)
    service.ask(SaveRequested(job="demo", actor="ann", operation_id="op-1"))
    job.refuse(service.commands()[0], too_low(1, 7))
    service.settle()
    first, second = service.commands()
    assert isinstance(second, SaveCheckpoint)
    assert (second.number, second.attempt, second.reason) == (8, 1, first.reason)
    assert [(a.operation_id, a.state) for a in service.actions()] == [(None, "REFUSED"), ("op-1", "SENT")]


def test_a_command_without_an_answer_uses_its_rung_once(bus: RedisBus, database: Database, job: FakeJob) -> None:
    """It is given once more although the budget is one, and for the next incident it counts as one."""
    clock = Clock()
    service = Service(bus, database, clock)
    job.alarm(onset_step=188)
    service.settle()
    clock.ahead = timedelta(seconds=31)
    job.train(206)
    service.settle()
    assert [(a.rung, a.state) for a in service.actions()] == [("rollback", "EXPIRED"), ("rollback", "SENT")]
    assert service.commands()[1].number == 2
    job.apply(service.commands()[1])
    job.train(190)
    job.cleared_through(189)
    job.train(240)
    job.alarm(onset_step=240)
    service.settle()
    assert [a.rung for a in service.actions()] == ["rollback", "rollback", "stop"]
    assert "rollback (used 1 of 1 times within 3600 s)" in service.actions()[-1].reason
    assert isinstance(service.commands()[1], RollBack)
    assert CheckpointId(service.commands()[1].to_attempt, service.commands()[1].to_step) == CheckpointId(1, 150)
