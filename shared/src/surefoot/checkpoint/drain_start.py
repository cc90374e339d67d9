"""Start the drain process of a job. Light: imports nothing of the drain itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.spec import JobSpec

_NOT_FOR_THE_DRAIN = ("SUREFOOT_JOB_KEY", "SUREFOOT_FAULT")
"""The job key marks processes that a new launcher may kill: the drain shall live on."""


def start_drain(
    spec: JobSpec,
    staging: Path,
    *,
    prune: bool,
    log: Path | None = None,
    environment: dict[str, str] | None = None,
) -> int:
    """Start a drain that outlives this process. Where one is at work already the new one exits with 0 at once.

    Called by local rank 0 or the launcher after `StagingFolder.hold_session`; costs a fork and exec, nothing
    is awaited.

    Args:
        spec: The job.
        staging: The job's staging folder.
        prune: Remove after each commit what retention does not keep; see `retention.drain_prunes`.
        log: File that its log is appended to; made with its folder when missing. None: `drain_log(spec)`.
        environment: Its environment variables; None: those of this process without what marks it as one of
            the job.

    Returns:
        Its process id. It is a child of this process, to be waited for by whoever cares (os.waitpid).

    Raises:
        OSError: the log cannot be made, or no process.
    """
    if environment is None:
        environment = {key: value for key, value in os.environ.items() if key not in _NOT_FOR_THE_DRAIN}
    log = log or drain_log(spec)
    log.parent.mkdir(parents=True, exist_ok=True)
    # posix_spawn and not subprocess.Popen: that warns when its object goes before the process does, as here it shall.
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawn(
        sys.executable,
        _command(spec, staging, prune=prune),
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), append, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        # A session of its own: neither Ctrl-C nor the end of a terminal reaches it.
        setsid=True,
    )


def drain_log(spec: JobSpec) -> Path:
    """Return the file that the job's drains log to."""
    return spec.job_run_dir / "logs" / "drain.log"


def _command(spec: JobSpec, staging: Path, *, prune: bool) -> list[str]:
    # -P: what happens to lie in the current folder, the user's redis.py say, is not for the drain to import.
    command = [sys.executable, "-P", "-m", "surefoot.checkpoint.drain"]
    command += ["--staging", str(staging), "--storage", str(spec.storage)]
    command += ["--job", spec.job, "--events", str(spec.events_path)]
    if prune:
        command += ["--retention", spec.checkpoint.retention.model_dump_json()]
    return command
