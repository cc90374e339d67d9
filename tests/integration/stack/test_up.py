"""`surefoot up | status | down` with all real services: one stack, in the order of a user's day."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.jobs import Job
from helpers.stacks import is_alive, kill_stack, processes_of
from helpers.waiting import wait_until
from surefoot.checkpoint.catalog import verify
from surefoot.embedded.stack_file import running_stack
from surefoot.embedded.status import report
from surefoot.events import StepCompleted

SERVICES = ["server", "detector", "recovery", "writer", "writer-tasks", "gateway", "worker", "api"]


def surefoot(home: Path, *words: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "surefoot.cli.main", *words, "--home", str(home)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def status(home: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(surefoot(home, "status", "--json").stdout)
    return found


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "home"
    kill_stack(tmp_path / "home")


def submit(home: Path, spec: Path) -> None:
    stack = running_stack(home)
    assert stack is not None
    request = urllib.request.Request(
        f"{stack.urls['api']}/api/v1/jobs",
        data=json.dumps({"spec": json.loads(spec.read_text())}).encode(),
        headers={"Authorization": f"Bearer {stack.token}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.status == 201


def let_in_without_password(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.sendall(b"CONFIG GET dir\r\n")
        return not connection.recv(100).startswith(b"-NOAUTH")


@pytest.mark.timeout(240)
def test_a_day_of_the_stack(home: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = surefoot(home, "up", "--gateway-port", str(port))
    assert refused.returncode == 1
    assert f"--gateway-port: port {port} of 127.0.0.1 is in use" in refused.stderr
    assert processes_of(home) == []

    started = surefoot(home, "up", "--gateway-port", str(port))
    assert started.returncode == 0, started.stderr
    assert f"live page  http://127.0.0.1:{port}/" in started.stdout
    found = status(home)
    assert found["healthy"]
    assert [service["name"] for service in found["services"]] == SERVICES
    assert (home / "run" / "token").stat().st_mode & 0o077 == 0
    assert not let_in_without_password(int(found["urls"]["redis"].split(":")[2].split("/")[0]))

    again = surefoot(home, "up")
    assert (again.returncode, again.stdout.splitlines()[0]) == (0, "the stack is running already")
    pids = {service["name"]: service["pid"] for service in found["services"]}
    assert {service.name: service.pid for service in report(home).services} == pids

    os.kill(pids["detector"], signal.SIGKILL)
    os.kill(pids["server"], signal.SIGKILL)
    wait_until(lambda: report(home).healthy and restarts(home) == {"server": 1, "detector": 1}, 60, "all well again")

    job = Job(tmp_path / "job", "day", trainer=["--steps", "100000", "--step-seconds", "0.02"], nproc=1)
    submit(home, job.write_spec())
    try:
        wait_until(lambda: len(job.events(StepCompleted)) > 5, 60, "the job makes steps")
        stopped = surefoot(home, "down")
    finally:
        launcher_logs = job.logs()
    assert stopped.returncode == 0, stopped.stderr + launcher_logs
    assert stopped.stdout.splitlines()[-1] == "stopped"
    assert job.committed()
    verify(job.store, job.committed()[-1])
    assert job.committed()[-1].step >= job.events(StepCompleted)[-1].step - 1
    assert not job.staging.exists()
    assert processes_of(home) == []
    assert processes_of(tmp_path) == []
    assert not any(is_alive(pid) for pid in pids.values())
    assert surefoot(home, "status").returncode == 1
    assert surefoot(home, "down").returncode == 0


def restarts(home: Path) -> dict[str, int]:
    return {service.name: service.restarts for service in report(home).services if service.restarts}


def test_a_service_that_cannot_start_is_shown_with_its_log(home: Path) -> None:
    command = [sys.executable, "-m", "surefoot.cli.main", "up", "--home", str(home)]
    environment = os.environ | {"SUREFOOT_LOG_LEVEL": "loud"}
    failed = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert failed.returncode == 1
    assert "end of " in failed.stderr
    assert "SUREFOOT_LOG_LEVEL: String should match pattern" in failed.stderr
    assert processes_of(home) == []


@pytest.mark.slow  # so are the stacks of tests/chaos
def test_in_the_foreground_until_a_signal(home: Path) -> None:
    command = [sys.executable, "-m", "surefoot.cli.main", "up", "--foreground", "--home", str(home)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        wait_until(lambda: (stack := running_stack(home)) is not None and stack.pid == process.pid, 30, "it starts")
        wait_until((home / "run" / "health" / "detector.json").exists, 60, "a service runs")
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=50)[0]
    assert process.returncode == 0, output
    assert processes_of(home) == []


def test_serve_and_upgrade_and_doctor(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'db' / 'x.sqlite3'}"
    command = [sys.executable, "-m", "surefoot.cli.main"]
    for said in ("the database is upgraded", "the database is up to date"):
        upgraded = subprocess.run(
            [*command, "db", "upgrade", "--database-url", url], capture_output=True, text=True, timeout=50, check=False
        )
        assert (upgraded.returncode, upgraded.stdout.strip()) == (0, said), upgraded.stderr
    unknown = subprocess.run([*command, "serve", "nobody"], capture_output=True, text=True, timeout=50, check=False)
    assert unknown.returncode == 2
    assert "there is no service 'nobody'; installed: api, detector" in unknown.stderr
    examined = surefoot(tmp_path / "home", "doctor", "--json")
    assert {finding["check"] for finding in json.loads(examined.stdout)} >= {"python", "server", "stack"}
