"""The api with everything real: its HTTP server, the bus, the database; in this process or in one of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx

from helpers.rows import NOW, job_row
from helpers.waiting import wait_until
from surefoot.bus.publisher import Publisher
from surefoot.bus.redis_bus import RedisBus
from surefoot.catalogue.database import Database
from surefoot.catalogue.models import Run
from surefoot.listening import listen
from surefoot_api.app import make_app
from surefoot_api.following import Follower
from surefoot_api.parts import Parts
from surefoot_api.server import Server
from surefoot_api.settings import ApiSettings


@dataclass
class Api:
    """A running api, its clients' end and its back."""

    client: httpx.Client
    parts: Parts
    url: str
    follower: Follower

    @property
    def database(self) -> Database:
        return self.parts.database

    def spec(self, folder: Path, job: str = "j", **keys: Any) -> dict[str, Any]:
        script = folder / "train.py"
        script.write_text("")
        return {
            "job": job, "entrypoint": str(script), "storage": str(folder / "checkpoints"),
            "run_dir": str(folder / "run"), **keys,
        }  # fmt: skip

    def add_job(self, name: str, state: str = "RUNNING", seconds: float = 0.0, **run: Any) -> None:
        """Put in what the api and a worker would have written."""
        with self.database.write() as session:
            session.add(job_row(name, created_at=NOW + timedelta(seconds=seconds)))
            session.flush()
            session.add(Run(job=name, generation=1, state=state, updated_at=NOW, **run))

    def set_run(self, name: str, **fields: Any) -> None:
        """Be the worker."""
        with self.database.write() as session:
            run = session.get(Run, name)
            if run is None:
                run = Run(job=name, generation=1, state="PENDING", updated_at=NOW)
                session.add(run)
            for key, value in fields.items():
                setattr(run, key, value)


@contextmanager
def serving(settings: ApiSettings, database: Database, bus: RedisBus) -> Iterator[Api]:
    """Serve in this process."""
    stopping = threading.Event()
    parts = Parts(settings, database, bus, Publisher(bus, "api"), stopping)
    app = make_app(parts)
    server = Server(app, listen(settings.api_host, settings.api_port, "SUREFOOT_API"))
    parts.readiness.found(frozenset())
    url = f"http://127.0.0.1:{server.port}"
    with httpx.Client(base_url=url, timeout=20) as client:
        try:
            yield Api(client, parts, url, app.state.follower)
        finally:
            stopping.set()
            server.stop()


@contextmanager
def api_process(environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `python -m surefoot_api`; it does not outlive the test."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "surefoot_api"], env={**os.environ, **environment}, stdout=file, stderr=file
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()


def until_ready(url: str, process: subprocess.Popen[bytes], timeout_seconds: float = 20.0) -> None:
    """Wait until everything that the api needs answers."""

    def is_ready() -> bool:
        assert process.poll() is None, "the api has ended"
        try:
            return httpx.get(f"{url}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    wait_until(is_ready, timeout_seconds, "the api is ready")
