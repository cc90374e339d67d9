"""The detector as a process, on a real server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.detector import JobEvents, flat, raised
from helpers.server import RealServer
from helpers.waiting import wait_until
from surefoot.bus.redis_bus import RedisBus
from surefoot.bus.streams import EVENTS
from surefoot.events import AnomalyCleared, AnomalyDetected, Message, StepsCleared
from surefoot.telemetry.health import HealthState, read_health

WAIT_SECONDS = 20.0


class Process:
    def __init__(self, url: str, home: Path) -> None:
        self.home, self.log = home, home / "detector.log"
        home.mkdir(exist_ok=True)
        environment = os.environ | {"SUREFOOT_REDIS_URL": url, "SUREFOOT_HOME": str(home)}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([sys.executable, "-m", "surefoot_detector"], env=environment, stderr=log)

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(10)

    @property
    def health(self) -> HealthState:
        return read_health(self.home / "run" / "health", "detector").state


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Process]]:
    made: list[Process] = []

    def make(url: str) -> Process:
        made.append(Process(url, tmp_path / "home"))
        return made[-1]

    yield make
    for process in made:
        if process.process.poll() is None:
            process.end(signal.SIGKILL)


def said(bus: RedisBus, *types: type[Message]) -> list[Message]:
    return [d.message for d in bus.read(EVENTS, "0", 100_000, 0.0) if isinstance(d.message, types)]


def through(bus: RedisBus) -> int:
    return max((m.through_step for m in said(bus, StepsCleared)), default=0)


def test_killed_in_an_alarm_the_next_one_goes_on(bus_url, bus, start):
    points = raised(flat(300), 200, 230, 1.3, 5.0)
    job = JobEvents("llm")
    first = start(bus_url)
    bus.publish(EVENTS, [*job.started(), *job.steps(points[:210])])
    wait_until(lambda: said(bus, AnomalyDetected), WAIT_SECONDS, "the anomaly is seen")
    first.end(signal.SIGKILL)
    bus.publish(EVENTS, job.steps(points[210:]))
    second = start(bus_url)
    wait_until(lambda: through(bus) >= 295, WAIT_SECONDS, "steps are cleared again")
    assert [(d.severity, d.onset_step, d.step) for d in said(bus, AnomalyDetected)] == [("critical", 200, 200)]
    assert [(c.onset_attempt, c.onset_step, c.step) for c in said(bus, AnomalyCleared)] == [(1, 200, 231)]
    assert not [m for m in said(bus, StepsCleared) if 200 <= m.through_step < 231]
    assert second.health is HealthState.OK
    assert second.end(signal.SIGTERM) == 0
    assert second.health is HealthState.ABSENT


def test_killed_at_any_moment_it_says_everything_once(bus_url, bus, start):
    """Every kill may fall between what is sent and its acknowledgement: what is sent again has the same id."""
    job = JobEvents("llm")
    bus.publish(EVENTS, job.started())
    points = raised(flat(600), 400, 404, 1.3, 5.0)
    for begin in range(0, 600, 300):
        process = start(bus_url)
        bus.publish(EVENTS, job.steps(points[begin : begin + 300]))
        wait_until(lambda seen=begin: through(bus) > seen, WAIT_SECONDS, "it works")
        process.end(signal.SIGKILL)
    start(bus_url)
    wait_until(lambda: through(bus) >= 595, WAIT_SECONDS, "all is cleared")
    assert {(d.event_id, d.onset_step) for d in said(bus, AnomalyDetected)} == {
        (said(bus, AnomalyDetected)[0].event_id, 400)
    }
    assert {c.onset_step for c in said(bus, AnomalyCleared)} == {400}


def test_a_server_that_is_away_at_the_start_and_later(make_server, start):
    server: RealServer = make_server()
    server.stop()
    process = start(server.url)
    wait_until(lambda: process.health is HealthState.WAITING, WAIT_SECONDS, "it waits")
    server.start()
    wait_until(lambda: process.health is HealthState.OK, WAIT_SECONDS, "it goes on")
    bus = RedisBus(server.url)
    job = JobEvents("llm")
    bus.publish(EVENTS, [*job.started(), *job.steps(flat(60))])
    wait_until(lambda: through(bus) >= 55, WAIT_SECONDS, "steps are cleared")
    server.kill()
    wait_until(lambda: process.health is HealthState.WAITING, WAIT_SECONDS, "it notices")
    server.start()
    bus.publish(EVENTS, job.steps(flat(40, seed=2)))
    wait_until(lambda: through(bus) >= 95, WAIT_SECONDS, "it goes on where it was")
    assert process.log.read_text().count("waiting; nothing is lost meanwhile") == 2
    bus.close()
