"""Start the drain process of a job. Light: imports nothing of the drain itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_NOT_FOR_THE_DRAIN = ("SUREFOOT_JOB_KEY", "SUREFOOT_FAULT")
"""The job key marks processes that a new launcher may kill: the drain shall live on."""


def start_drain(
    *,
    staging: Path,
    storage: Path,
    job: str,
    events: Path,
    log: Path,
    environment: dict[str, str] | None = None,
) -> int:
    """Start a drain that outlives this process. Where one is at work already the new one exits with 0 at once.

    Called by local rank 0 or the launcher after `StagingFolder.hold_session`; costs a fork and exec, nothing
    is awaited.

    Args:
        staging: The job's staging folder.
        storage: Root of all jobs' checkpoints.
        job: Name of the job.
        events: File that events are appended to.
        log: File that its log is appended to; made with its folder when missing.
        environment: Its environment variables; None: those of this process without what marks it as one of
            the job.

    Returns:
        Its process id. It is a child of this process, to be waited for by whoever cares (os.waitpid).
    """
    if environment is None:
        environment = {key: value for key, value in os.environ.items() if key not in _NOT_FOR_THE_DRAIN}
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "surefoot.checkpoint.drain"]
    command += ["--staging", str(staging), "--storage", str(storage), "--job", job, "--events", str(events)]
    # posix_spawn and not subprocess.Popen: that warns when its object goes before the process does, as here it shall.
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawn(
        sys.executable,
        command,
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), append, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        # A session of its own: neither Ctrl-C nor the end of a terminal reaches it.
        setsid=True,
    )
