"""Redis and database away at start: every service waits with one clear message, and goes on when they are there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from helpers.server import RealServer, free_port
from helpers.waiting import wait_until
from surefoot.catalogue import migrate
from surefoot.telemetry.health import HealthState, read_health

SERVICES = ("api", "detector", "gateway", "recovery", "worker", "writer")


@pytest.fixture
def server(tmp_path):
    made = RealServer(tmp_path / "server")
    yield made
    made.close()


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


@pytest.mark.timeout(120)
def test_services_wait_for_redis_and_database_and_recover(tmp_path, server):
    database_url = f"sqlite:///{tmp_path / 'db' / 'surefoot.sqlite3'}"
    environment = os.environ | {
        "SUREFOOT_HOME": str(tmp_path / "home"),
        "SUREFOOT_REDIS_URL": server.url,
        "SUREFOOT_DATABASE_URL": database_url,
        "SUREFOOT_API_PORT": str(free_port()),
        "SUREFOOT_GATEWAY_PORT": str(free_port()),
    }
    health = tmp_path / "home" / "run" / "health"
    processes = {}
    try:
        for name in SERVICES:
            with (tmp_path / f"{name}.log").open("wb") as log:
                command = [sys.executable, "-m", "surefoot.embedded.serve", name]
                processes[name] = subprocess.Popen(command, env=environment, stderr=log, stdout=log)
        for name in SERVICES:
            wait_until(lambda n=name: read_health(health, n).state is HealthState.WAITING, 60, f"{name} waits")
        server.start()
        (tmp_path / "db").mkdir()
        migrate.upgrade(database_url)
        for name in SERVICES:
            wait_until(lambda n=name: read_health(health, n).state is HealthState.OK, 30, f"{name} is well")
        for name, process in processes.items():
            assert process.poll() is None, name
            process.terminate()
        assert {name: process.wait(30) for name, process in processes.items()} == dict.fromkeys(SERVICES, 0)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    for name in SERVICES:
        lines = lines_of(tmp_path / f"{name}.log")
        waiting = [line for line in lines if line["event"].startswith("waiting")]
        assert len(waiting) in (1, 2), f"{name}: one message per outage: {waiting}"
        assert waiting[0]["error"]
        assert any(line["event"] == "going on" for line in lines), name
