"""The api as a process: killed, stopped, started without what it needs. Case M1."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.api import api_process, until_ready
from helpers.jobs import Job
from helpers.launcher import finish, started
from helpers.rows import NOW, job_row
from helpers.server import free_port
from helpers.sse import reading
from helpers.waiting import wait_until
from surefoot.bus.base import Outgoing
from surefoot.bus.redis_bus import RedisBus
from surefoot.bus.streams import EVENTS
from surefoot.catalogue.database import Database
from surefoot.catalogue.models import Run
from surefoot.events import StepCompleted, read_events
from surefoot.telemetry.health import HealthState, read_health


@pytest.fixture
def environment(database_url: str, bus_url: str, tmp_path: Path) -> dict[str, str]:
    return {
        "SUREFOOT_DATABASE_URL": database_url,
        "SUREFOOT_REDIS_URL": bus_url,
        "SUREFOOT_HOME": str(tmp_path / "home"),
        "SUREFOOT_API_PORT": str(free_port()),
    }


@pytest.fixture
def url(environment: dict[str, str]) -> str:
    return f"http://127.0.0.1:{environment['SUREFOOT_API_PORT']}"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "api.log"


class Forwarder:
    """Stands in for the worker: what the job wrote goes to the bus and into the job's rows."""

    def __init__(self, job: Job, database: Database, bus: RedisBus) -> None:
        self._job, self._database, self._bus = job, database, bus
        self._offset = self._sequence = 0
        with database.write() as session:
            session.add(job_row(job.name))
            session.flush()
            session.add(Run(job=job.name, generation=1, state="RUNNING", updated_at=NOW))

    def step(self) -> int:
        """Bring everything up to date and return the job's step."""
        events, self._offset = read_events(self._job.events_path, self._offset)
        items = [Outgoing(event, "job", self._sequence + i) for i, event in enumerate(events, 1)]
        self._sequence += len(items)
        self._bus.publish(EVENTS, items)
        steps = [event.step for event in events if isinstance(event, StepCompleted)]
        with self._database.write() as session:
            run = session.get_one(Run, self._job.name)
            run.step = steps[-1] if steps else run.step
            return run.step or 0


def steps(frames: list[dict[str, str]]) -> list[str]:
    return [frame["id"] for frame in frames if frame.get("event") == "StepCompleted"]


@pytest.mark.slow  # chaos/test_services kills it beside a real job of a whole stack
def test_m1_killed_while_a_job_runs(
    environment: dict[str, str], url: str, log: Path, database: Database, bus: RedisBus, tmp_path: Path
) -> None:
    job = Job(tmp_path / "job", trainer=["--steps", "100000", "--step-seconds", "0.02"])
    with started(job) as launcher, ExitStack() as stack:
        forwarder = Forwarder(job, database, bus)
        api = stack.enter_context(api_process(environment, log))
        until_ready(url, api)
        wait_until(lambda: forwarder.step() > 5, 40, "the job trains")
        with reading(f"{url}/api/v1/jobs/case/events") as before:
            wait_until(lambda: len(steps(before.frames)) > 5, 10, "events")
            api.send_signal(signal.SIGKILL)
            assert before.ended.wait(10)
        at_kill = forwarder.step()
        wait_until(lambda: forwarder.step() > at_kill + 5, 20, "the job goes on")
        again = stack.enter_context(api_process(environment, log))
        until_ready(url, again)
        found = httpx.get(f"{url}/api/v1/jobs/case").json()
        assert (found["state"], found["step"] > at_kill) == ("RUNNING", True)
        seen = steps(before.frames)
        with reading(f"{url}/api/v1/jobs/case/events", headers={"Last-Event-ID": seen[-1]}) as after:
            launcher.terminate()  # it saves, and stops
            code, text = finish(launcher)
            assert code == 75, text
            num_steps = forwarder.step()
            wait_until(lambda: len(seen) + len(steps(after.frames)) == num_steps, 10, "every step once")
        assert len({*seen, *steps(after.frames)}) == num_steps
    assert {event.attempt for event in job.events(StepCompleted)} == {1}, "no rank was started again"


def test_m1_stops_within_10_s_with_clients_connected(
    environment: dict[str, str], url: str, log: Path, database: Database
) -> None:
    with database.write() as session:
        session.add(job_row("j"))
    with api_process(environment, log) as api, ExitStack() as stack:
        until_ready(url, api)
        for _ in range(4):
            stack.enter_context(reading(f"{url}/api/v1/jobs/j/events"))
        port = int(environment["SUREFOOT_API_PORT"])
        idle = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        idle.sendall(b"POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        began = time.monotonic()
        api.send_signal(signal.SIGTERM)
        assert api.wait(10) == 0
        assert time.monotonic() - began < 10


def test_it_waits_for_what_it_needs_and_says_so_once(
    environment: dict[str, str], url: str, log: Path, database_url: str, tmp_path: Path
) -> None:
    file = Path(database_url.removeprefix("sqlite:///"))
    away = file.rename(file.with_suffix(".away"))
    with api_process(environment, log) as api:
        health = tmp_path / "home" / "run" / "health"
        wait_until(lambda: read_health(health, "api").state is HealthState.WAITING, 20, "health is red")
        assert httpx.get(f"{url}/healthz").status_code == 200
        answer = httpx.get(f"{url}/readyz")
        assert (answer.status_code, answer.json()["away"]) == (503, ["database"])
        away.rename(file)
        until_ready(url, api)
        wait_until(lambda: read_health(health, "api").state is HealthState.OK, 10, "health is green")
    assert log.read_text().count("waiting; nothing is lost meanwhile") == 1


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"SUREFOOT_API_HOST": "0.0.0.0"}, 2, "SUREFOOT_API_TOKEN"),
        # unit/test_listening has the words; the gateway's start has the exit code
        pytest.param({"SUREFOOT_API_PORT": "taken"}, 1, "is in use", marks=pytest.mark.slow),
    ],
)
def test_refusals_at_start(environment: dict[str, str], change: dict[str, Any], code: int, words: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        given = environment | {name: value.replace("taken", port) for name, value in change.items()}
        command = [sys.executable, "-m", "surefoot_api"]
        done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, words in done.stderr) == (code, True)
    assert "Traceback" not in done.stderr
    assert port in done.stderr or code == 2
