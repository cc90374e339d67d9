"""The writer for tests: a submitted job, the service in this process with real parts, and both of its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.rows import job_row
from helpers.staging import Ranks, claim
from helpers.stored import Tensors, store_checkpoint
from helpers.waiting import wait_until
from surefoot.bus.consumer import Consumer
from surefoot.bus.publisher import Publisher
from surefoot.bus.redis_bus import RedisBus
from surefoot.bus.streams import EVENTS
from surefoot.catalogue.database import Database
from surefoot.catalogue.models import Checkpoint
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.staging_folder import StagingFolder, staging_folder_path
from surefoot.checkpoint.store import LocalStore
from surefoot.events import CheckpointCommitted, Message, StepsCleared
from surefoot.spec import JobSpec, parse_spec
from surefoot.telemetry.health import HealthState, read_health
from surefoot_writer.chores import Chores
from surefoot_writer.cleared import ClearedSteps
from surefoot_writer.drains import Drains
from surefoot_writer.handlers import Handlers
from surefoot_writer.index import CheckpointIndex
from surefoot_writer.jobs import KnownJobs
from surefoot_writer.orders import Orders
from surefoot_writer.promotion import Promoter
from surefoot_writer.pruning import Pruning
from surefoot_writer.retaining import Retainer
from surefoot_writer.verifying import Verifier

PROBATION_STEPS = 20


def committed(step: int, attempt: int = 1, job: str = "demo") -> CheckpointCommitted:
    return CheckpointCommitted(job=job, attempt=attempt, step=step, world_size=1, num_bytes=8, write_seconds=0.1)


def cleared(through_step: int, attempt: int = 1) -> StepsCleared:
    return StepsCleared(job="demo", attempt=attempt, through_step=through_step)


class Job:
    """A job in the catalogue, with storage, staging and one attempt."""

    def __init__(
        self, root: Path, database: Database, name: str = "demo", retention: dict[str, Any] | None = None
    ) -> None:
        self.database = database
        data = {
            "job": name,
            "entrypoint": "train.py",
            "storage": str(root / "storage"),
            "run_dir": str(root / "run"),
            "checkpoint": {"staging_dir": str(root / "staging"), "retention": retention or {}},
            "policy": {"probation_steps": PROBATION_STEPS},
        }
        self.spec: JobSpec = parse_spec(data)
        self.folder = self.spec.storage / name
        self.store = LocalStore(self.folder)
        self.staging_path = staging_folder_path(self.spec.checkpoint.staging_dir, name, self.spec.storage)
        with database.write() as session:
            session.add(job_row(name, spec=data))
        claim(self.store, after=0)

    def commit(self, step: int, *shards: Tensors, attempt: int = 1) -> Path:
        return store_checkpoint(self.folder, CheckpointId(attempt, step), *shards)

    def row(self, step: int, attempt: int = 1) -> Checkpoint | None:
        with self.database.read() as session:
            return session.get(Checkpoint, (self.spec.job, attempt, step))

    def rows(self) -> dict[CheckpointId, Checkpoint]:
        return CheckpointIndex(self.database).rows(self.spec.job)

    def ranks(self) -> Ranks:
        self.staging = StagingFolder.create(self.spec.checkpoint.staging_dir, self.spec.job, self.spec.storage)
        return Ranks(self.staging, attempt=1, num_buffers=1)

    def close(self) -> None:
        if hasattr(self, "staging"):
            for buffer in self.staging.buffers():
                buffer.close()


class Service:
    """The writer in this process: what main.py connects, with the thread's rounds and the tasks called by hand."""

    def __init__(self, root: Path, database: Database, bus: RedisBus) -> None:
        self.now = 1000.0
        self.ordered: list[tuple[str, CheckpointId]] = []
        self.to_prune: list[str] = []
        self.publisher = Publisher(bus, "test")
        self.sent = Publisher(bus, "writer")
        self.bus, self.database = bus, database
        jobs, index = KnownJobs(database), CheckpointIndex(database)
        steps = ClearedSteps(root / "cleared")
        self.drains = Drains(0.0, lambda: self.now)
        verifications = Orders(lambda *order: self.ordered.append(order), 600.0, lambda: self.now)
        removals = Orders(lambda *order: self.to_prune.extend(order), 600.0, lambda: self.now)
        promoter = Promoter(self.sent.publish, index.note_stable, index.end_verify, index.note_nonfinite)
        self.chores = Chores(
            jobs=jobs, index=index, cleared=steps, promoter=promoter, retainer=Retainer(index, removals),
            drains=self.drains, verifications=verifications, rescan_seconds=30.0, monotonic=lambda: self.now,
        )  # fmt: skip
        handlers = Handlers(jobs=jobs, index=index, cleared=steps, verifications=verifications, chores=self.chores)
        self.consumer = Consumer(bus.group(EVENTS, "writer", "writer"), handlers.by_type())

    def take(self, *messages: Message) -> None:
        """Send messages and handle all that is there, then one round of chores a rescan later."""
        for message in messages:
            self.publisher.publish(message)
        while self.bus.lag(EVENTS, "writer"):
            self.consumer.turn(0.01)
        self.now += 30.0
        self.chores.round()

    def verify_all(self) -> None:
        """Do what was ordered, as the Celery worker would."""
        verifier = Verifier(self.database, self.sent)
        orders, self.ordered = self.ordered, []
        for job, checkpoint in orders:
            verifier.verify(job, checkpoint, is_repeated=False)

    def prune_all(self) -> None:
        """Remove what was ordered to be, as the Celery worker would."""
        orders, self.to_prune = self.to_prune, []
        for job in orders:
            Pruning(self.database, self.sent).prune(job)

    def events(self, kind: type[Message]) -> list[Message]:
        return events(self.bus, kind)


def events(bus: RedisBus, kind: type[Message]) -> list[Message]:
    deliveries = bus.read(EVENTS, "0", 1000, 0.0)
    return [delivery.message for delivery in deliveries if isinstance(delivery.message, kind)]


class Stack:
    """The writer and its Celery worker as processes of their own."""

    def __init__(self, root: Path, database_url: str, bus_url: str, bus: RedisBus) -> None:
        self.home = root / "home"
        self.bus = bus
        self.publisher = Publisher(bus, "test")
        self.log = root / "writer.log"
        self.environment = os.environ | {
            "SUREFOOT_REDIS_URL": bus_url,
            "SUREFOOT_DATABASE_URL": database_url,
            "SUREFOOT_HOME": str(self.home),
            "SUREFOOT_WRITER_RESCAN_SECONDS": "0.5",
            "SUREFOOT_WRITER_RESEND_SECONDS": "2",
            "SUREFOOT_WRITER_RETRY_SECONDS": "0.1",
            "SUREFOOT_WRITER_DRAINLESS_SECONDS": "0",
        }
        self._started: list[subprocess.Popen[bytes]] = []

    def start_writer(self, fault: str = "") -> subprocess.Popen[bytes]:
        return self._start(["-m", "surefoot_writer"], fault)

    def start_celery(self, fault: str = "") -> subprocess.Popen[bytes]:
        words = ["-m", "celery", "-q", "-A", "surefoot_writer.tasks", "worker", "--pool", "solo"]
        return self._start([*words, "--without-gossip", "--without-mingle", "--without-heartbeat"], fault)

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        wait_until(condition, 30.0, f"{what}; log:\n{self.log.read_text()[-3000:]}", every_seconds=0.03)

    def wait_for_health(self, state: HealthState, detail: str = "") -> None:
        def has_come() -> bool:
            health = read_health(self.home / "run" / "health", "writer")
            return health.state is state and detail in health.detail

        self.wait_until(has_come, f"health {state} {detail}")

    def stop(self, process: subprocess.Popen[bytes]) -> int:
        process.send_signal(signal.SIGTERM)
        return process.wait(timeout=30)

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait()

    def _start(self, words: list[str], fault: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *words], env=self.environment | {"SUREFOOT_FAULT": fault}, stdout=log, stderr=log
            )
        self._started.append(process)
        return process
