"""Settings of the worker service, beside the common ones."""

from __future__ import annotations

import hashlib
import socket

from pydantic import Field

from surefoot.settings import CommonSettings


class WorkerSettings(CommonSettings):
    """What the worker needs to know. Prefix SUREFOOT_, so the fields carry the rest of SUREFOOT_WORKER_*."""

    worker_identity: str = Field(default="", max_length=128)
    """Name in leases; empty: made of the host's name and the home folder. Must stay the same over restarts."""
    worker_lease_seconds: float = Field(default=15.0, gt=0)
    """A job whose worker shows no sign of life for so long may be taken by another worker."""
    worker_max_jobs: int = Field(default=8, ge=1)
    """Jobs that run here at the same time; the others stay PENDING."""
    worker_stop_seconds: float = Field(default=60.0, gt=0)
    """How long a stopping worker waits for its jobs to save, before it leaves snapshots in memory."""
    worker_log_lines_per_second: float = Field(default=200.0, gt=0)
    """Lines of output per job that are carried on; what exceeds it stays in the files alone."""

    @property
    def lease_name(self) -> str:
        """The name in leases: the same for every worker process of this home on this host."""
        home = hashlib.blake2b(str(self.home.absolute()).encode(), digest_size=4).hexdigest()
        return self.worker_identity or f"{socket.gethostname()[:100]}-{home}"
