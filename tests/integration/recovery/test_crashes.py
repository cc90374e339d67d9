"""The service dies, or what it depends on is away: nothing is forgotten, nothing is done twice. Case B2."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from helpers.recovery import FakeJob, Service, prepare
from helpers.server import RealServer
from helpers.waiting import wait_until
from surefoot import faultpoints
from surefoot.bus.redis_bus import RedisBus
from surefoot.bus.streams import EVENTS
from surefoot.catalogue.database import Database
from surefoot.errors import BusUnavailable, CatalogueUnavailable
from surefoot.events import RollBack
from surefoot.telemetry.health import HealthState, read_health

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path, bus_url: str, database_url: str) -> Iterator[Start]:
    """Start the service as a real process; it is gone when the test ends."""
    started: list[subprocess.Popen[bytes]] = []

    def start(fault: str = "") -> subprocess.Popen[bytes]:
        variables = {"SUREFOOT_REDIS_URL": bus_url, "SUREFOOT_DATABASE_URL": database_url, "SUREFOOT_FAULT": fault}
        environment = os.environ | variables | {"SUREFOOT_HOME": str(tmp_path)}
        with (tmp_path / f"log-{len(started)}").open("wb") as log_file:
            process = subprocess.Popen([sys.executable, "-m", "surefoot_recovery"], env=environment, stderr=log_file)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("place", ["read", "decided", "published", "done"])
def test_b2_sigkill_between_reading_and_acknowledging_means_one_roll_back(
    place: str, start: Start, bus: RedisBus, database: Database
) -> None:
    prepare(database)
    job = FakeJob(bus)
    job.start()
    job.train(193)
    job.alarm(onset_step=191)
    assert start(f"recovery.{place}=kill").wait(30) == -signal.SIGKILL

    service = Service(bus, database)
    service.settle()
    (action,) = service.actions()
    (incident,) = service.incidents()
    assert (action.kind, action.state, incident.state) == ("rollback", "SENT", "ACTING")
    # Ranks ignore a number at or below the last one that they applied.
    assert {(type(command), command.number) for command in service.commands()} == {(RollBack, action.id)}

    job.apply(service.commands()[0])
    job.train(193)
    job.cleared_through(192)
    service.settle()
    assert len(service.actions()) == 1
    assert service.incidents()[0].state == "HEALED"


def test_everything_delivered_again_changes_nothing(bus: RedisBus, database: Database) -> None:
    prepare(database)
    job = FakeJob(bus)
    job.start()
    job.train(190)
    job.alarm(onset_step=188)
    service = Service(bus, database)
    service.settle()
    job.apply(service.commands()[0])
    job.train(190)
    job.cleared_through(189)
    job.lose_rank()
    job.start(3, 2, 190)
    job.train(195)
    job.cleared_through(194)
    service.settle()
    before = [(i.state, i.outcome) for i in service.incidents()], [a.state for a in service.actions()], service.told()

    bus.call(lambda: bus._redis.xgroup_destroy(EVENTS, "recovery"))
    bus.call(lambda: bus._redis.delete(f"{EVENTS}:seen:recovery"))
    again = Service(bus, database)
    again.settle()
    assert before == (
        [(i.state, i.outcome) for i in again.incidents()],
        [a.state for a in again.actions()],
        again.told(),
    )
    assert [incident.state for incident in again.incidents()] == ["HEALED", "HEALED"]
    assert len(again.commands()) == 1


def test_the_bus_is_away_when_the_command_is_to_be_sent(
    make_server: Callable[[], RealServer], database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(database)
    server = make_server()
    bus = RedisBus(server.url, answer_seconds=0.5)
    job = FakeJob(bus)
    job.start()
    job.train(190)
    job.alarm(onset_step=188)
    service = Service(bus, database)

    def away(name: str) -> None:
        if name == "recovery.decided":
            server.stop()

    with monkeypatch.context() as patch:
        patch.setattr(faultpoints, "reach", away)
        with pytest.raises(BusUnavailable):
            service.settle()
    assert [action.state for action in service.actions()] == ["PENDING"]

    server.start()
    wait_until(lambda: _settled(service), 20, "it goes on by itself")
    assert [action.state for action in service.actions()] == ["SENT"]
    assert len(service.commands()) == 1
    bus.close()


def _settled(service: Service) -> bool:
    try:
        service.settle()
    except BusUnavailable:
        return False
    return True


def test_the_database_is_away_when_an_alarm_comes(bus: RedisBus, database: Database) -> None:
    prepare(database)
    job = FakeJob(bus)
    job.start()
    job.alarm(onset_step=0)
    service = Service(bus, database)
    with database.write() as session:
        session.execute(text("ALTER TABLE incidents RENAME TO elsewhere"))
    with pytest.raises(CatalogueUnavailable):
        service.settle()
    with database.write() as session:
        session.execute(text("ALTER TABLE elsewhere RENAME TO incidents"))
    service.settle()
    assert len(service.incidents()) == 1


def test_the_service_ends_in_good_order(start: Start, bus: RedisBus, tmp_path: Path) -> None:
    process = start()
    health_dir = tmp_path / "run" / "health"
    wait_until(lambda: read_health(health_dir, "recovery").state is HealthState.OK, 20, "it is well")
    process.terminate()
    assert process.wait(5) == 0
    assert read_health(health_dir, "recovery").state is HealthState.ABSENT
