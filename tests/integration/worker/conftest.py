"""A worker in this process, with fake launchers, and a worker as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from helpers import fake_worker
from helpers.waiting import wait_until
from surefoot.bus.base import Bus
from surefoot.catalogue.database import Database
from surefoot.catalogue.models import Attempt, Job, Run
from surefoot.errors import Unavailable
from surefoot.events import JobState
from surefoot_worker.service import attempt_watch, job, supervisor
from surefoot_worker.service.attempt_watch import AttemptWatch
from surefoot_worker.service.job import Surroundings
from surefoot_worker.service.pump import Pump
from surefoot_worker.service.supervisor import StagingLeft, Supervisor
from surefoot_worker.settings import WorkerSettings


class Catalogue:
    """What the API does to the catalogue, and what a test looks up in it."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.database, self.folder = database, folder

    def spec(self, name: str, entrypoint: str, **keys: Any) -> dict[str, Any]:
        staging = self.folder / "staging"
        staging.mkdir(exist_ok=True)
        paths = {"storage": str(self.folder / "checkpoints"), "run_dir": str(self.folder / "run")}
        return {"job": name, "entrypoint": entrypoint, "checkpoint": {"staging_dir": str(staging)}, **paths, **keys}

    def submit(self, name: str, entrypoint: str, *, from_seed: bool = False, **keys: Any) -> None:
        now = datetime.now(UTC)
        with self.database.write() as session:
            session.add(
                Job(name=name, spec=self.spec(name, entrypoint, **keys), desired_state="RUNNING", from_seed=from_seed,
                    created_at=now, updated_at=now)
            )  # fmt: skip

    def change(self, name: str, **values: Any) -> None:
        with self.database.write() as session:
            row = session.get_one(Job, name)
            for key, value in values.items():
                setattr(row, key, value)

    def run(self, name: str) -> Run | None:
        with self.database.read() as session:
            return session.get(Run, name)

    def state(self, name: str) -> str | None:
        run = self.run(name)
        return None if run is None else run.state

    def attempts(self, name: str) -> list[Attempt]:
        with self.database.read() as session:
            return list(session.query(Attempt).filter_by(job=name).order_by(Attempt.attempt))


@pytest.fixture
def catalogue(database: Database, tmp_path: Path) -> Catalogue:
    return Catalogue(database, tmp_path)


class Worker:
    """A worker in this process; its loop turns only while a test waits."""

    def __init__(self, catalogue: Catalogue, bus: Bus, command: Sequence[str], **settings: Any) -> None:
        self.catalogue = catalogue
        self.settings = WorkerSettings(
            home=catalogue.folder / "home", **{f"worker_{name}": value for name, value in settings.items()}
        )
        self.pump = Pump(bus, self.settings.worker_log_lines_per_second)
        self.attempts = AttemptWatch()
        self.supervisor = Supervisor(
            self.settings, catalogue.database, Surroundings(bus, self.pump, command), self.attempts
        )
        self.outages: list[str] = []
        self.pump.start()
        self.attempts.start()

    def turn(self) -> None:
        try:
            self.supervisor.turn()
        except Unavailable as error:
            self.outages.append(str(error))

    def until(self, condition: Callable[[], Any], what: str, timeout_seconds: float = 20) -> None:
        def turned() -> bool:
            self.turn()
            return bool(condition())

        wait_until(turned, timeout_seconds, what, every_seconds=0)

    def until_state(self, name: str, state: JobState, timeout_seconds: float = 20) -> None:
        self.until(lambda: self.catalogue.state(name) == state, f"{name} is {state}", timeout_seconds)

    def close(self) -> None:
        with suppress(StagingLeft):  # a fake launcher that was killed left its folder, and there is no drain
            self.supervisor.close()
        self.attempts.close()
        self.pump.close()


@pytest.fixture
def make_worker(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []
    for name, seconds in {"_POLL_SECONDS": 0.1, "_TURN_SECONDS": 0.05, "_PROGRESS_SECONDS": 0.2}.items():
        monkeypatch.setattr(supervisor, name, seconds)
    monkeypatch.setattr(attempt_watch, "_EVERY_SECONDS", 0.1)
    monkeypatch.setattr(job, "_AGAIN_SECONDS", 0.1)

    def make(bus: Bus, command: Sequence[str] = fake_worker.FAKE_LAUNCHER, **settings: Any) -> Worker:
        made.append(Worker(catalogue, bus, command, **{"stop_seconds": 5.0} | settings))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


@pytest.fixture
def start_worker(
    database_url: str, bus_url: str, tmp_path: Path
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    made: list[subprocess.Popen[str]] = []

    def start(module: str = fake_worker.__file__, **settings: str) -> subprocess.Popen[str]:
        own = {f"SUREFOOT_WORKER_{key.upper()}": value for key, value in settings.items()}
        common = {"HOME": str(tmp_path / "home"), "REDIS_URL": bus_url, "DATABASE_URL": database_url}
        environment = os.environ | own | {f"SUREFOOT_{key}": value for key, value in common.items()}
        command = [sys.executable, "-m", module] if not module.endswith(".py") else [sys.executable, module]
        log = (tmp_path / f"worker-{len(made)}.log").open("w")
        with log:
            made.append(subprocess.Popen(command, env=environment, stderr=log, stdout=log, text=True))
        return made[-1]

    yield start
    for process in made:
        if process.poll() is None:
            process.kill()
            process.wait()
