"""Storage that fails or is slow beside a real job: case C9, case P5, and the part of C6 that needs a job."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from contextlib import contextmanager

import pytest

from helpers.waiting import wait_until
from surefoot.checkpoint.catalog import verify
from surefoot.checkpoint.drain_start import start_drain
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.locks import holder_pid
from surefoot.checkpoint.staging_folder import StagingFolder
from surefoot.events import CheckpointCommitted, StorageFailed, StorageRecovered
from surefoot.progress import ProgressPage, progress_path
from surefoot.spec import JobSpec

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(150)]

LARGEST_FILE_BYTES = 150_000
"""Larger than the drain's log and events, smaller than a shard of two of the model below."""
LARGE_MODEL = ["--hidden", "4000"]


def step_of(job):
    try:
        progress = ProgressPage.open(progress_path(job.staging, 0)).read()
    except FileNotFoundError:
        return -1
    return -1 if progress is None or progress.start_step < 0 else progress.step


@contextmanager
def drained(job):
    """Have a drain at work before the job starts, so that nothing depends on how long that takes; yield its pid."""
    spec = JobSpec.model_validate(json.loads(job.write_spec().read_text()))
    folder = StagingFolder.create(spec.checkpoint.staging_dir, spec.job, spec.storage)
    folder.hold_session()
    pid = start_drain(spec, folder.path, prune=False)
    try:
        wait_until(lambda: holder_pid(folder.path / "drain.lock") == pid, 30, "the drain has its lock")
        yield pid, folder
    finally:
        folder.release_session()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextmanager
def started(job):
    """Start a job that does not outlive the test, and wait until it trains."""
    with job.start() as process:
        try:
            wait_until(lambda: step_of(job) >= 1, 60, "step 1 is trained")
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def go_through_trouble(job, mend):
    wait_until(lambda: job.events(StorageFailed), 30, "the drain says that it cannot write", every_seconds=0.002)
    # Due after step 5. The file is read a moment after the event was written, and steps take 0.1 s.
    assert 5 <= step_of(job) <= 7
    wait_until(lambda: len(job.events(StorageFailed)) >= 3 and step_of(job) >= 8, 30, "it fails, training goes on")
    assert job.committed() == []
    mend()
    wait_until(lambda: job.events(StorageRecovered), 30, "storage works again")


@pytest.mark.parametrize("nproc", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_c9_storage_fails_in_the_background_and_training_goes_on(make_job, nproc):
    """Cases C6 and C9: a real error of the drain's writes; an event at once, no step lost, all well when it is over."""
    job = make_job(
        nproc=nproc,
        trainer=["--steps", "30", "--step-seconds", "0.1", *LARGE_MODEL],
        checkpoint={"save_every_steps": 5},
    )
    with drained(job) as (drain, folder):
        _, hard = resource.prlimit(drain, resource.RLIMIT_FSIZE)
        resource.prlimit(drain, resource.RLIMIT_FSIZE, (LARGEST_FILE_BYTES, hard))
        with started(job) as process:
            folder.release_session()
            go_through_trouble(job, lambda: resource.prlimit(drain, resource.RLIMIT_FSIZE, (hard, hard)))
            output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    failed = job.events(StorageFailed)
    assert [event.num_failures for event in failed] == list(range(1, len(failed) + 1))
    assert failed[0].operation.startswith("write step-000000005-a0001/rank-0000")
    assert failed[0].reason.startswith("EFBIG: File too large: ")
    (recovered,) = job.events(StorageRecovered)
    assert recovered.num_failures == len(failed)
    committed = job.committed()
    assert committed[0] == CheckpointId(1, 5)
    assert committed[-1] == CheckpointId(1, 30)
    for checkpoint in committed:
        verify(job.store, checkpoint)
    assert len(job.lines()) == nproc * 30
    assert list(job.store.root.rglob(".tmp-*")) == []


@pytest.mark.parametrize("save_seconds", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_p5_a_save_of_many_seconds_completes_while_the_job_is_stopped(make_job, save_seconds):
    """Case P5: the launcher was told to stop; the drain stands still for so long, and nobody ends either of them."""
    job = make_job(trainer=["--steps", "100000", "--step-seconds", "0.02"])
    with drained(job) as (drain, folder), started(job) as process:
        folder.release_session()
        os.kill(drain, signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(save_seconds)
        os.kill(drain, signal.SIGCONT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    (committed,) = job.events(CheckpointCommitted)
    assert committed.write_seconds + committed.staged_age_seconds >= save_seconds
    assert job.committed() == [CheckpointId(1, committed.step)]
    verify(job.store, CheckpointId(1, committed.step))
    assert max(line["step"] for line in job.lines()) == committed.step
    assert not job.staging.exists()
