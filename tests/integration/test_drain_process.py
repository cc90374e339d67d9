"""The drain as a process: killed anywhere, started twice, left alone."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.staging import Ranks, claim, storage_files
from helpers.waiting import wait_until
from surefoot.checkpoint.catalog import list_committed, verify
from surefoot.checkpoint.drain_start import drain_log, start_drain
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.locks import holder_pid
from surefoot.checkpoint.staging_folder import StagingFolder
from surefoot.checkpoint.store import LocalStore
from surefoot.events import CheckpointCommitted, read_events
from surefoot.processes import find_job_processes
from surefoot.spec import JobSpec

TESTS = Path(__file__).parents[1]


class Job:
    """A job's folders, and drains of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.storage = root / "storage"
        self.events_path = root / "run" / "job" / "events.jsonl"
        self.spec = JobSpec(job="job", entrypoint="train.py", storage=self.storage, run_dir=root / "run")
        self.log = drain_log(self.spec)
        self.store = LocalStore(self.storage / "job")
        self.folder = StagingFolder.create(root / "staging", "job", self.storage)

    def command(self, *options: str) -> list[str]:
        command = [sys.executable, "-m", "surefoot.checkpoint.drain", "--linger-seconds", "0.05"]
        command += ["--staging", str(self.folder.path), "--storage", str(self.storage)]
        return [*command, "--job", "job", "--events", str(self.events_path), *options]

    def start(self, *options: str, fault: str = "") -> subprocess.Popen[bytes]:
        environment = os.environ | {"SUREFOOT_FAULT": fault}
        return subprocess.Popen(self.command(*options), env=environment, stderr=subprocess.PIPE)

    def run(self, *options: str, fault: str = "") -> int:
        process = self.start(*options, fault=fault)
        process.communicate(timeout=30)
        return process.returncode

    def events(self, kind: type = CheckpointCommitted) -> list:
        return [event for event in read_events(self.events_path)[0] if isinstance(event, kind)]


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    for buffer in job.folder.buffers():
        buffer.close()


def ids(*pairs):
    return [CheckpointId(*pair) for pair in pairs]


# Writes of a drain of two ranks: shard, part, shard, part, manifest.
KILL_POINTS = [
    *(
        f"store.write.{point}=kill@{nth}"
        for point in ("opened", "written", "synced", "renamed", "durable")
        for nth in (1, 2, 5)
    ),
    "drain.shard_written=kill@2",
    "drain.part_written=kill@1",
    "drain.before_manifest=kill",
    "drain.manifest_written=kill",
    "drain.event_emitted=kill",
    "drain.marked=kill",
]


@pytest.mark.chaos
@pytest.mark.parametrize("fault", KILL_POINTS)
def test_a_drain_killed_anywhere_is_finished_by_the_next(job, fault):
    claim(job.store, 0)
    ranks = Ranks(job.folder, attempt=1)
    ranks.save(10, persist=True)
    assert job.run(fault=fault) == -signal.SIGKILL
    assert list_committed(job.store) in ([], ids((1, 10)))
    assert job.run() == 0
    assert list_committed(job.store) == ids((1, 10))
    verify(job.store, CheckpointId(1, 10))
    ranks.check_committed(job.store, 10)
    files = storage_files(job.store.root)
    assert len(files) == 5 + len(["attempts/000001.json", "reserve.bin"]), files
    assert {event.step for event in job.events()} == {10}
    assert not job.folder.path.exists()


@pytest.mark.chaos
def test_half_of_an_older_attempt_is_cleaned_up(job):
    """The drain dies in the middle of step 10; the next attempt starts before it, so it is finished by nobody."""
    claim(job.store, 0)
    Ranks(job.folder, attempt=1).save(10, persist=True)
    assert job.run(fault="store.write.synced=kill@3") == -signal.SIGKILL
    claim(job.store, 1, attempt=1, step=9)
    Ranks(job.folder, attempt=2).save(10, persist=True)
    assert job.run() == 0
    assert job.store.list("") == ["attempts", "reserve.bin", "step-000000010-a0002"]
    assert not [name for name in storage_files(job.store.root) if ".tmp-" in name]


@pytest.mark.parametrize("fault", ["store.write.written=enospc", "store.write.synced=eio@2", "store.write.some=eio"])
def test_a_disk_error_is_retried_until_it_works(job, fault):
    claim(job.store, 0)
    ranks = Ranks(job.folder, attempt=1)
    ranks.save(10, persist=True)
    process = job.start(fault=fault)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0
    assert b"next try in 0.1 s" in log
    ranks.check_committed(job.store, 10)


def test_saves_become_durable_where_events_cannot_go(job):
    claim(job.store, 0)
    Ranks(job.folder, attempt=1).save(10, persist=True)
    (job.root / "run").write_text("a file where a folder should be")
    assert job.run() == 0
    assert list_committed(job.store) == ids((1, 10))


def test_a_second_drain_leaves_at_once(job):
    job.folder.hold_session()
    first = job.start()
    wait_until((job.folder.path / "drain.lock").exists, 20, "the drain has its lock")
    # The lock file is there a moment before it is locked; from then on every other drain ends with 0.
    claim(job.store, 0)
    Ranks(job.folder, attempt=1).save(1, persist=True)
    wait_until(lambda: list_committed(job.store), 20, "a checkpoint is committed")
    assert job.run() == 0
    assert first.poll() is None
    job.folder.release_session()
    first.communicate(timeout=30)
    assert first.returncode == 0
    assert job.run() == 0  # and so does one that comes when all is over


def test_it_wakes_up_when_told_to(job):
    claim(job.store, 0)
    ranks = Ranks(job.folder, attempt=1)
    job.folder.hold_session()
    drain = job.start()
    for step in (1, 2, 3):
        assert ranks.save(step, persist=True)
        job.folder.wake()
        wait_until(lambda step=step: CheckpointId(1, step) in list_committed(job.store), 20, f"{step} is committed")
    assert drain.poll() is None
    assert ranks.save(4)
    job.folder.release_session()
    drain.communicate(timeout=30)
    assert list_committed(job.store) == ids((1, 1), (1, 2), (1, 3), (1, 4))
    assert [event.step for event in job.events()] == [1, 2, 3, 4]
    assert not job.folder.path.exists()


def test_the_salvage_waits_out_the_linger(job):
    claim(job.store, 0)
    Ranks(job.folder, attempt=1).save(10)
    start = time.monotonic()
    drain = job.start("--linger-seconds", "1.5")
    wait_until(lambda: list_committed(job.store), 20, "a checkpoint is committed")
    assert time.monotonic() - start >= 1.5
    drain.communicate(timeout=30)
    assert list_committed(job.store) == ids((1, 10))


@pytest.mark.parametrize(("comes_back", "linger_seconds"), [(False, 25.0), (True, 1.5)])
def test_it_lingers_again_when_somebody_came_back_after_the_end(job, comes_back, linger_seconds):
    claim(job.store, 0)
    Ranks(job.folder, attempt=1).save(10)
    job.folder.announce_end()
    if comes_back:
        job.folder.hold_session()
        job.folder.release_session()
    start = time.monotonic()
    assert job.run("--linger-seconds", str(linger_seconds)) == 0
    assert (time.monotonic() - start >= linger_seconds) == comes_back
    assert list_committed(job.store) == ids((1, 10))


@pytest.mark.chaos
def test_a_drain_killed_while_it_removes_the_folder_leaves_no_memory(job):
    claim(job.store, 0)
    Ranks(job.folder, attempt=1).save(10)
    assert job.run(fault="staging.hidden=kill") == -signal.SIGKILL
    (left,) = job.folder.path.parent.iterdir()
    assert left.name.startswith(f".removing-{job.folder.path.name}-")
    assert (left / "rank-00000-buffer-0.stage").stat().st_size > 0
    assert job.run() == 0
    assert list(job.folder.path.parent.iterdir()) == []
    assert list_committed(job.store) == ids((1, 10))


def test_storage_that_is_gone_is_said_and_waited_for(job):
    claim(job.store, 0)
    ranks = Ranks(job.folder, attempt=1)
    job.folder.hold_session()
    ranks.save(10, persist=True)
    unmounted = job.root / "unmounted"
    job.storage.rename(unmounted)
    drain = job.start()
    assert b"next try in 0.1 s: no record of attempt 1" in next(line for line in drain.stderr if b"failed" in line)
    assert not job.storage.exists()
    unmounted.rename(job.storage)
    wait_until(lambda: list_committed(job.store) == ids((1, 10)), 20, "step 10 is committed")
    job.folder.release_session()
    drain.communicate(timeout=30)
    ranks.check_committed(job.store, 10)


def test_the_drain_keeps_no_descriptor_of_its_starter(job):
    """Gloo's sockets and epolls are made in C without CLOEXEC: rank 1 would not see the end of rank 0."""
    job.folder.hold_session()
    read_end, write_end = os.pipe()
    ours, theirs = socket.socketpair()
    with ours, theirs, select.epoll() as poll, os.fdopen(read_end, "rb") as reader:
        for fd in (theirs.fileno(), poll.fileno(), write_end):
            os.set_inheritable(fd, True)
        pid = start_drain(job.spec, job.folder.path, prune=False)
        theirs.close()
        os.close(write_end)
        # Both ends come only when the drain has closed its copies, and it lives on.
        assert ours.recv(1) == b""
        assert reader.read() == b""
        wait_until(lambda: holder_pid(job.folder.path / "drain.lock") == pid, 20, "the drain has its lock")
        open_files = {path.readlink() for path in Path(f"/proc/{pid}/fd").iterdir()}
        ours_now = [path for path in open_files if not path.is_relative_to(job.folder.path)]
        assert sorted(map(str, ours_now)) == [os.devnull, str(job.log)]
    job.folder.release_session()
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.chaos
def test_the_drain_survives_the_death_of_its_starter(job):
    """Rank 0 starts the drain, stages a snapshot and is killed with its whole process group."""
    claim(job.store, 0)
    code = f"""
import subprocess, sys, time
from pathlib import Path
from helpers.staging import Ranks
from surefoot.checkpoint.drain_start import start_drain
from surefoot.checkpoint.staging_folder import StagingFolder
from surefoot.spec import JobSpec
folder = StagingFolder(Path({str(job.folder.path)!r}))
folder.hold_session()
drain = start_drain(JobSpec.model_validate_json({job.spec.model_dump_json()!r}), folder.path, prune=False)
Ranks(folder, attempt=1).save(10)
subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL, start_new_session=True)
print(drain, flush=True)
time.sleep(60)
"""
    key = job.folder.path.name
    environment = os.environ | {"PYTHONPATH": str(TESTS), "SUREFOOT_JOB_KEY": key}
    starter = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, start_new_session=True
    )
    pid = int(starter.stdout.readline())
    wait_until(lambda: "surefoot.checkpoint.drain" in Path(f"/proc/{pid}/cmdline").read_text(), 20, "the drain starts")
    assert b"SUREFOOT_JOB_KEY" not in Path(f"/proc/{pid}/environ").read_bytes()
    os.killpg(starter.pid, signal.SIGKILL)
    starter.communicate()
    assert len(find_job_processes(key)) == 1  # what the script started
    wait_until(lambda: not job.folder.path.exists(), 20, "the staging folder is gone")
    assert find_job_processes(key) == []
    assert list_committed(job.store) == ids((1, 10))
    verify(job.store, CheckpointId(1, 10))
    assert "draining" in job.log.read_text()


TRAINER = """
import sys
from pathlib import Path
from helpers.staging import Ranks
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.staging_folder import StagingFolder
folder = StagingFolder(Path(sys.argv[1]))
folder.hold_session()
attempt, step = int(sys.argv[2]), int(sys.argv[3])
ranks = Ranks(folder, attempt)
# What a real session keeps: the snapshot that it starts from, then the newest complete one.
newest = max((i for i, s in folder.scan().items() if s.complete and i.step == step), default=None)
print("ready", flush=True)
while True:
    step += 1
    if ranks.save(step, persist=step % 3 == 0, keep={newest}):
        newest = CheckpointId(attempt, step)
    folder.wake()
"""


@pytest.mark.slow  # test_restore_property kills ranks and drains at random too
@pytest.mark.chaos
def test_random_kills_of_training_and_drain_never_commit_anything_but_the_truth(job):
    """12 attempts, each killed at random, the drain killed at random too; every commit is bit-equal to its source."""
    source = random.Random(7)
    step = 0
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    job.folder.hold_session()
    drain = job.start()
    for attempt in range(1, 13):
        claim(job.store, attempt - 1, attempt=attempt - 1, step=step)
        command = [sys.executable, "-c", TRAINER, str(job.folder.path), str(attempt), str(step)]
        trainer = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        assert trainer.stdout.readline() == b"ready\n"
        time.sleep(source.uniform(0.02, 0.15))
        if attempt % 3 == 0:
            drain.kill()
            drain.communicate()
            drain = job.start()
        trainer.kill()
        trainer.communicate()
        staged = [i.step for i, s in job.folder.scan().items() if s.complete and i.attempt == attempt]
        step = max(staged, default=step)
    job.folder.release_session()
    drain.communicate(timeout=30)
    assert drain.returncode == 0
    committed = list_committed(job.store)
    assert len(committed) >= 5
    for checkpoint in committed:
        verify(job.store, checkpoint)
        Ranks(None, checkpoint.attempt).check_committed(job.store, checkpoint.step)
    assert max(committed).step == step


def test_the_drain_imports_nothing_heavy():
    """Rank 0 starts it while it starts itself: it must not take the processor from it for long."""
    code = "import surefoot.checkpoint.drain, sys; print(*({'torch', 'numpy', 'yaml', 'typer'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"\n"


def test_usage_errors_exit_with_2():
    command = [sys.executable, "-m", "surefoot.checkpoint.drain"]
    result = subprocess.run(command, capture_output=True, check=False)
    assert result.returncode == 2
    assert b"--staging" in result.stderr
