"""Staging that is still there after the stack: made durable and freed, or kept and named; no drain is left."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from helpers.stacks import processes_of
from helpers.staging import Ranks, claim
from helpers.waiting import wait_until
from surefoot.catalogue import migrate
from surefoot.catalogue.database import Database
from surefoot.catalogue.models import Job
from surefoot.checkpoint.catalog import list_committed
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.staging_folder import StagingFolder
from surefoot.checkpoint.store import LocalStore
from surefoot.embedded.layout import Layout
from surefoot.embedded.leftovers import drain_leftovers
from surefoot.spec import JobSpec


class StagedJob:
    """A job of a stack that has ended with one snapshot staged and not drained."""

    def __init__(self, folder: Path) -> None:
        self.layout = Layout(folder / "home")
        self.layout.make()
        self.spec = JobSpec(job="left", entrypoint="x", storage=folder / "storage", run_dir=folder / "run").absolute()
        self._add_row()
        self.staging = StagingFolder.create(self.spec.checkpoint.staging_dir, "left", self.spec.storage)
        self.store = LocalStore(self.spec.storage / "left")
        claim(self.store, after=0)
        assert Ranks(self.staging, attempt=1).save(7, persist=True)

    def _add_row(self) -> None:
        url = f"sqlite:///{self.layout.database_file}"
        migrate.upgrade(url)
        database = Database(url)
        now = datetime.now(UTC)
        row = Job(
            name="left", spec=self.spec.model_dump(mode="json"), desired_state="RUNNING", created_at=now, updated_at=now
        )
        with database.write() as session:
            session.add(row)
        database.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[StagedJob]:
    made = StagedJob(tmp_path)
    yield made
    shutil.rmtree(made.staging.path, ignore_errors=True)
    wait_until(lambda: not processes_of(made.spec.storage), 20, "the drain has ended")


def test_what_is_staged_becomes_durable_and_its_memory_is_freed(job: StagedJob) -> None:
    waited: list[tuple[str, Path]] = []
    assert drain_leftovers(job.layout, lambda name, folder: waited.append((name, folder))) == []
    assert waited == [("left", job.staging.path)]
    assert not job.staging.path.exists()
    assert list_committed(job.store) == [CheckpointId(1, 7)]
    assert processes_of(job.spec.storage) == []


def test_what_cannot_be_drained_stays_and_is_named(job: StagedJob) -> None:
    shutil.move(job.spec.storage / "left", job.spec.storage / "away")
    (job.spec.storage / "left").write_text("not a folder")
    (left,) = drain_leftovers(job.layout, lambda name, folder: None, timeout_seconds=4.0)
    assert (left.job, left.folder) == ("left", job.staging.path)
    assert left.reason.startswith(f"no record of attempt 1 in {job.spec.storage}")
    assert processes_of(job.spec.storage) == []
    # Nothing is lost: with storage back the next one can do it.
    (job.spec.storage / "left").unlink()
    shutil.move(job.spec.storage / "away", job.spec.storage / "left")
    assert drain_leftovers(job.layout, lambda name, folder: None) == []
    assert list_committed(job.store) == [CheckpointId(1, 7)]


def test_what_somebody_else_trains_with_is_let_alone(job: StagedJob) -> None:
    job.staging.hold_session()
    try:
        # This process would find its own lock; a POSIX lock belongs to a process.
        (left,) = drain_leftovers(job.layout, lambda name, folder: None, timeout_seconds=1.0)
        assert left.reason == "somebody else is training with it"
        assert job.staging.path.exists()
    finally:
        job.staging.release_session()


def test_nothing_is_left_where_there_was_no_stack(tmp_path: Path) -> None:
    assert drain_leftovers(Layout(tmp_path), lambda name, folder: None) == []
