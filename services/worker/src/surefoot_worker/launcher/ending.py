"""The launcher's last act: nobody comes back, so the drain makes everything durable and takes the memory away."""

from __future__ import annotations

import logging
import os
import select

from surefoot.checkpoint.drain_start import start_drain
from surefoot.checkpoint.locks import holder_pid
from surefoot.checkpoint.staging_folder import StagingFolder
from surefoot.spec import JobSpec

log = logging.getLogger("surefoot.launcher")

_LONG_WAIT_SECONDS = 5.0


def let_go(folder: StagingFolder, spec: JobSpec) -> None:
    """Give the session back and wait until the staging folder is gone. All ranks must have ended.

    What the ranks staged and did not save becomes durable first, also after a failed job. While storage fails the
    drain tries again, and this waits (an interrupt ends the wait, and the snapshot stays in memory for the next start).
    """
    if not folder.path.exists():
        return
    empty = not folder.buffers()
    folder.release_session()
    if empty:
        # No rank ever came to a snapshot, so no drain need be bothered.
        if folder.try_take_session():
            folder.remove()
            folder.release_session()
        return
    folder.announce_end()
    try:
        _wait_for_drain(folder, spec)
    except KeyboardInterrupt:
        log.warning("interrupted; the last snapshot stays in %s", folder.path)


def _wait_for_drain(folder: StagingFolder, spec: JobSpec) -> None:
    started = 0
    while folder.path.exists():
        pid = holder_pid(folder.path / "drain.lock")
        if pid is not None:
            _wait_for_end(pid)
            continue
        if started == 2:
            log.error("the drain ended and left %s as it is; see %s/logs/drain.log", folder.path, spec.job_run_dir)
            return
        started += 1
        new = start_drain(
            staging=folder.path,
            storage=spec.storage,
            job=spec.job,
            events=spec.events_path,
            log=spec.job_run_dir / "logs" / "drain.log",
        )
        os.waitpid(new, 0)


def _wait_for_end(pid: int) -> None:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if not select.select([process], [], [], _LONG_WAIT_SECONDS)[0]:
            log.warning("waiting for the last snapshot to become durable; Ctrl-C leaves it in memory")
            select.select([process], [], [])
    finally:
        os.close(process)
