"""What surrounds a running job in the launcher: its locks, its log, its environment; each is a context manager."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from surefoot.checkpoint.locks import LockedFile
from surefoot.checkpoint.staging_folder import StagingFolder
from surefoot.errors import UsageError
from surefoot.processes import JOB_KEY_ENVIRONMENT_KEY
from surefoot.spec import JobSpec
from surefoot_worker.launcher.output import LossyLogFile

log = logging.getLogger("surefoot.launcher")


@contextmanager
def owned_job(spec: JobSpec) -> Iterator[StagingFolder]:
    """Keep the job's staging folder alive, and keep other launchers out. Both end with this process at the latest.

    Raises:
        UsageError: another launcher has it.
    """
    folder = StagingFolder.create(spec.checkpoint.staging_dir, spec.job, spec.storage)
    folder.hold_session()
    lock = LockedFile.open(folder.path / "launcher.lock", create=True)
    try:
        owner = lock.try_own()
        if owner is not None:
            raise UsageError("job", f"is already being run by process {owner} (holds {lock.path})")
        yield folder
    finally:
        lock.close()
        folder.release_session()


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Append the launcher's log to a file, as far as that can be written."""
    handler = LossyLogFile(path)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
        handler.close()


@contextmanager
def environment(spec: JobSpec, job_key: str) -> Iterator[None]:
    """Set what the fork server and spawned ranks must be executed with, as long as the job runs."""
    ours = {
        JOB_KEY_ENVIRONMENT_KEY: job_key,
        # Torch then computes the ranks instead of exchanging them through the store.
        "TORCH_ELASTIC_WORKER_IDENTICAL": "1",
    }
    before = dict(os.environ)
    os.environ.update(spec.env | spec.to_environment() | ours)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
