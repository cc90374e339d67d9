"""Case C2 where no services run: the job's own drain removes what retention does not keep."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.staging import Ranks, claim
from helpers.waiting import wait_until
from surefoot.checkpoint import marks
from surefoot.checkpoint.catalog import list_committed, verify
from surefoot.checkpoint.drain_start import drain_log, start_drain
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.lineage import on_lineage
from surefoot.checkpoint.locks import holder_pid
from surefoot.checkpoint.prune import has_trash
from surefoot.checkpoint.staging_folder import StagingFolder
from surefoot.checkpoint.store import LocalStore
from surefoot.errors import DamagedCheckpoint
from surefoot.events import CheckpointPruned, read_events
from surefoot.spec import JobSpec, parse_spec


class Job:
    """A job whose two ranks are in this process, and its drain."""

    def __init__(self, root: Path, keep_last: int) -> None:
        data = {
            "job": "job", "entrypoint": "train.py", "storage": str(root / "storage"), "run_dir": str(root / "run"),
            "checkpoint": {"staging_dir": str(root / "staging"), "retention": {"keep_last": keep_last}},
        }  # fmt: skip
        self.spec: JobSpec = parse_spec(data)
        self.store = LocalStore(self.spec.storage / "job")
        self.folder = StagingFolder.create(self.spec.checkpoint.staging_dir, "job", self.spec.storage)
        self.folder.hold_session()
        self.records = {1: claim(self.store, after=0)}
        self.ranks = Ranks(self.folder, attempt=1, num_buffers=2)
        self.pid = 0

    def start_drain(self) -> None:
        self.pid = start_drain(self.spec, self.folder.path, prune=True)

    def kill_drain(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pid = 0

    def roll_back(self, attempt: int, step: int) -> None:
        newest = max(self.records)
        self.records[newest + 1] = claim(self.store, after=newest, attempt=attempt, step=step)
        self.ranks.attempt = newest + 1

    def save(self, step: int) -> bool:
        newest = max(self.records)
        taken = self.ranks.save(step, persist=True, on_lineage=lambda id_: on_lineage(id_, newest, self.records))
        self.folder.wake()
        return taken

    def steps(self) -> list[tuple[int, int]]:
        return [tuple(id_) for id_ in list_committed(self.store)]

    def pruned(self) -> list[CheckpointPruned]:
        return [event for event in read_events(self.spec.events_path)[0] if isinstance(event, CheckpointPruned)]

    def wait_until(self, condition: object, what: str) -> None:
        log = drain_log(self.spec)
        wait_until(condition, 20.0, f"{what}: {self.steps()}\n{log.read_text()[-2000:]}")  # type: ignore[arg-type]

    def close(self) -> None:
        self.folder.release_session()
        if self.pid:
            self.kill_drain()
        for buffers in self.ranks.buffers:
            for buffer in buffers:
                buffer.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path, keep_last=1)
    yield made
    made.close()


def test_c2_saves_come_faster_than_they_are_written(job: Job) -> None:
    """Case C2: keep = 1, the drain stopped, let go and killed at random; the newest durable one is always there."""
    rng, newest, step = random.Random(2), 0, 0
    for interruption in (signal.SIGSTOP, signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
        if not job.pid:
            job.start_drain()
        deadline, seen = time.monotonic() + 20, {newest}
        stop_after = rng.randint(2, 4)
        while len(seen) <= stop_after:
            step += 10
            job.save(step)
            newest = check_newest(job, newest)
            seen.add(newest)
            assert time.monotonic() < deadline, drain_log(job.spec).read_text()[-2000:]
        os.kill(job.pid, signal.SIGSTOP)
        for _ in range(3):  # the writer is blocked
            step += 10
            job.save(step)
            assert check_newest(job, newest) >= newest
        if interruption is signal.SIGKILL:
            job.kill_drain()
        else:
            os.kill(job.pid, signal.SIGCONT)
    job.start_drain()
    step += 10
    job.wait_until(lambda: job.save(step), "a free buffer")
    job.wait_until(lambda: job.steps() == [(1, step)] and not has_trash(job.store), "only the newest is left")
    job.ranks.check_committed(job.store, step)


def check_newest(job: Job, before: int) -> int:
    """Assert that the newest durable one is whole and no older than one that was seen before; return its step."""
    while steps := job.steps():
        with suppress(DamagedCheckpoint):
            verify(job.store, CheckpointId(*steps[-1]))
            assert steps[-1][1] >= before
            return steps[-1][1]
        assert job.steps()[-1] > steps[-1], "the newest one went without a newer one"
    assert before == 0
    return 0


def test_c2_where_a_roll_back_began_stays_until_nothing_starts_from_it(job: Job) -> None:
    """Case C2: the target of a roll-back is kept by the attempt record; a pin outlives everything."""
    job.start_drain()
    job.save(10)
    job.wait_until(lambda: job.steps() == [(1, 10)], "the first")
    job.roll_back(1, 10)
    for step in (20, 30):
        job.wait_until(lambda step=step: job.save(step), "a free buffer")
    job.wait_until(lambda: job.steps() == [(1, 10), (2, 30)], "target and newest")
    marks.pin(job.store, CheckpointId(2, 30), "the better half", "ada")
    job.roll_back(1, 10)
    for step in (15, 25):
        job.wait_until(lambda step=step: job.save(step), "a free buffer")
    job.wait_until(lambda: job.steps() == [(1, 10), (2, 30), (3, 25)], "target, pinned although abandoned, newest")
    job.wait_until(lambda: len(job.pruned()) == 2, "told")
    assert [(event.attempt, event.step) for event in job.pruned()] == [(2, 20), (3, 15)]
    assert holder_pid(job.folder.path / "drain.lock") == job.pid
