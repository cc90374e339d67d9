"""A drain for every staging folder that has something in it, and patience for them when the writer ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import structlog

from surefoot.checkpoint.drain_start import start_drain
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.locks import holder_pid
from surefoot.checkpoint.staging_folder import StagingFolder, staging_folder_path
from surefoot.errors import UsageError
from surefoot.spec import JobSpec

WAIT_POLL_SECONDS = 0.05

log = structlog.get_logger(__name__)


class Drains:
    """The drains of this machine's staging folders; `drain.lock` decides between several. One thread.

    Args:
        drainless_seconds: A folder without a drain for so long gets one. Ranks start one themselves a moment after
            they made the folder, and a drain that fails at once is not started without end.
        monotonic: CLOCK_MONOTONIC in seconds.
    """

    def __init__(self, drainless_seconds: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._drainless_seconds = drainless_seconds
        self._monotonic = monotonic
        self._without_since: dict[Path, float] = {}
        self._children: set[int] = set()

    def ensure(self, specs: Iterable[JobSpec]) -> None:
        """Start the drains that are missing."""
        self._reap()
        now = self._monotonic()
        missing: dict[Path, float] = {}
        for spec in specs:
            path = _folder(spec).path
            if path.is_dir() and holder_pid(path / "drain.lock") is None:
                since = self._without_since.get(path, now)
                if now - since >= self._drainless_seconds:
                    self._start(spec, path)
                    since = now
                missing[path] = since
        self._without_since = missing

    def report_damage(self, spec: JobSpec, checkpoint: CheckpointId, reason: str) -> None:
        """Have a damaged checkpoint looked into and moved to quarantine, by the job's drain or by one for this alone.

        The drain reads it again and believes only itself; a report may come twice.

        Raises:
            OSError: the staging file system fails.
        """
        folder = _folder(spec)
        try:
            folder.write_report(checkpoint, "", reason)
        except FileNotFoundError:
            try:
                folder = StagingFolder.create(spec.checkpoint.staging_dir, spec.job, spec.storage)
            except UsageError as error:
                raise OSError(str(error)) from error
            folder.write_report(checkpoint, "", reason)
            self._start(spec, folder.path)

    def wait_until_idle(self, specs: Iterable[JobSpec], timeout_seconds: float) -> list[Path]:
        """Wait until nothing is left to be written; return the folders where there still is something."""
        deadline = self._monotonic() + timeout_seconds
        specs = list(specs)
        folders = [_folder(spec) for spec in specs]
        while (busy := [folder.path for folder in folders if _has_work(folder)]) and self._monotonic() < deadline:
            self.ensure(specs)
            time.sleep(WAIT_POLL_SECONDS)
        return busy

    def _start(self, spec: JobSpec, path: Path) -> None:
        try:
            pid = start_drain(spec, path, prune=False)
        except OSError as error:
            log.error("a drain cannot be started", job_id=spec.job, error=str(error))
            return
        self._children.add(pid)
        log.info("started a drain: the staging folder had none", job_id=spec.job, staging=str(path), pid=pid)

    def _reap(self) -> None:
        for pid in list(self._children):
            with suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    continue
            self._children.discard(pid)


def _folder(spec: JobSpec) -> StagingFolder:
    return StagingFolder(staging_folder_path(spec.checkpoint.staging_dir, spec.job, spec.storage))


def _has_work(folder: StagingFolder) -> bool:
    """Tell whether a snapshot waits to be written, or the job has ended and its last one is being written."""
    if folder.is_end_announced():
        return True
    buffers = folder.buffers()
    try:
        return any(buffer.unwritten() is not None for buffer in buffers)
    finally:
        # A mapping that stays open keeps the memory of a job that is gone.
        for buffer in buffers:
            buffer.close()
