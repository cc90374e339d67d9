"""What people ask for: a command, or a refusal that says why."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.recovery import FakeJob, Service, prepare
from helpers.rows import checkpoint_row, started_attempt
from surefoot.bus.publisher import Publisher
from surefoot.bus.redis_bus import RedisBus
from surefoot.bus.streams import REQUESTS
from surefoot.catalogue.database import Database
from surefoot.catalogue.models import Run
from surefoot.events import (
    RollBack,
    RollBackRequested,
    SaveCheckpoint,
    SaveRequested,
    SetLearningRate,
    SetLearningRateRequested,
)

WHO: dict[str, Any] = {"job": "demo", "actor": "ann", "operation_id": "op-1"}


@pytest.fixture
def job(bus: RedisBus, database: Database) -> FakeJob:
    prepare(database)
    job = FakeJob(bus)
    job.start()
    job.train(190)
    return job


@pytest.fixture
def service(bus: RedisBus, database: Database, job: FakeJob) -> Service:
    service = Service(bus, database)
    service.settle()
    return service


def test_back_to_the_newest_stable_one(service: Service, job: FakeJob) -> None:
    action = service.ask(RollBackRequested(**WHO))
    (command,) = service.commands()
    assert isinstance(command, RollBack)
    assert (command.number, command.attempt, command.to_step, command.lr_factor) == (action.id, 1, 150, 1.0)
    assert (action.operation_id, action.state) == ("op-1", "SENT")
    assert command.reason == "ann: back to step 150 of attempt 1, the newest STABLE checkpoint; learning rate x 1"
    job.apply(command)
    service.settle()
    assert (service.actions()[0].state, service.actions()[0].new_attempt) == ("APPLIED", 2)


def test_back_to_a_named_one_with_another_learning_rate(service: Service, database: Database) -> None:
    with database.write() as session:
        session.add(checkpoint_row(1, 180))
    service.ask(RollBackRequested(**WHO, to_step=180, lr_factor=0.2))
    (command,) = service.commands()
    assert isinstance(command, RollBack)
    assert (command.to_attempt, command.to_step, command.lr_factor, command.lr_hold_steps) == (1, 180, 0.2, None)


def test_the_learning_rate_stays_as_it_is_with_what_is_left_of_it(
    bus: RedisBus, database: Database, job: FakeJob
) -> None:
    with database.write() as session:
        lr = {"lr_factor": 0.5, "lr_hold_steps": 20, "lr_rewarm_steps": 20, "lr_from_step": 180}
        session.add_all([started_attempt(1), started_attempt(2, 1, 180, **lr)])
    job.start(2, 1, 180, lr_factor=0.5)
    job.train(210)
    service = Service(bus, database)
    service.settle()
    service.ask(RollBackRequested(**WHO))
    (command,) = service.commands()
    assert isinstance(command, RollBack)
    assert command.lr_factor == pytest.approx(0.75)
    assert (command.lr_hold_steps, command.lr_rewarm_steps) == (0, 10)


def test_another_learning_rate(service: Service) -> None:
    service.ask(SetLearningRateRequested(**WHO, lr_factor=0.5, lr_hold_steps=10, lr_rewarm_steps=5))
    (command,) = service.commands()
    assert isinstance(command, SetLearningRate)
    assert (command.lr_factor, command.lr_hold_steps, command.lr_rewarm_steps) == (0.5, 10, 5)


def test_a_save_may_come_at_any_time(service: Service) -> None:
    service.ask(RollBackRequested(**WHO))
    service.ask(SaveRequested(**WHO | {"operation_id": "op-2"}))
    assert [type(command) for command in service.commands()] == [RollBack, SaveCheckpoint]


def test_asked_twice_is_done_once(service: Service, bus: RedisBus) -> None:
    request = SaveRequested(**WHO)
    for _ in range(2):
        Publisher(bus, "api").publish(request, REQUESTS)
    service.settle()
    assert len(service.commands()) == 1


@pytest.mark.parametrize(
    ("request_type", "fields", "problem"),
    [
        (RollBackRequested, {"to_step": 123}, "no checkpoint of step 123 is known"),
        (RollBackRequested, {"to_step": 150, "to_attempt": 7}, "no checkpoint of step 150 of attempt 7 is known"),
        (RollBackRequested, {"to_step": 300}, "attempt 1 did not come from step 300"),
        (RollBackRequested, {"to_step": 170}, "the checkpoint of step 170 is QUARANTINED"),
        (RollBackRequested, {"attempt": 3}, "it was asked for attempt 3, and attempt 1 is the newest"),
        (RollBackRequested, {"lr_factor": float("inf")}, "lr_factor must be a positive number (got inf)"),
        (SetLearningRateRequested, {"lr_factor": 0.0}, "lr_factor must be a positive number (got 0.0)"),
        (SetLearningRateRequested, {"lr_factor": 1.0, "lr_hold_steps": -1}, "must not be negative"),
    ],
)
def test_what_cannot_be_done_is_refused(
    service: Service, database: Database, request_type: type[Any], fields: dict[str, Any], problem: str
) -> None:
    with database.write() as session:
        session.add_all([checkpoint_row(2, 300), checkpoint_row(1, 170, state="QUARANTINED")])
    action = service.ask(request_type(**WHO | fields))
    assert (action.state, service.commands()) == ("REFUSED", [])
    assert problem in action.problem


def test_nothing_is_ordered_of_a_job_that_does_not_train(service: Service, database: Database) -> None:
    with database.write() as session:
        session.get_one(Run, "demo").state = "SUCCEEDED"
    assert service.ask(SaveRequested(**WHO)).problem == "the job is SUCCEEDED, it does not train"


def test_no_stable_checkpoint(bus: RedisBus, database: Database) -> None:
    prepare(database, stable=[])
    job = FakeJob(bus)
    job.start()
    job.train(5)
    problem = Service(bus, database).ask(RollBackRequested(**WHO)).problem
    assert problem == "no checkpoint that attempt 1 came from is STABLE yet"


def test_one_new_attempt_at_a_time(service: Service, job: FakeJob) -> None:
    first = service.ask(SetLearningRateRequested(**WHO, lr_factor=0.5))
    second = service.ask(RollBackRequested(**WHO | {"operation_id": "op-2"}))
    assert (second.state, second.problem) == ("REFUSED", f"command {first.id} (set_lr) is not answered yet")


def test_a_request_whose_attempt_ended_is_given_up(service: Service, job: FakeJob) -> None:
    service.ask(RollBackRequested(**WHO))
    job.lose_rank()
    job.start(2, 1, 190)
    job.train(191)
    service.settle()
    (request, restart) = service.actions()
    assert (request.state, request.problem) == ("EXPIRED", "Attempt 1 ended before the ranks did it.")
    assert restart.state == "APPLIED"
