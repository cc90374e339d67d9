"""Settings of the worker service, from the environment."""

from __future__ import annotations

import hashlib
import socket

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from surefoot.settings import CommonSettings


class WorkerSettings(CommonSettings):
    """Common settings and the worker's own, which are read from SUREFOOT_WORKER_*."""

    model_config = SettingsConfigDict(populate_by_name=True)

    identity: str = Field(default="", max_length=128, validation_alias="SUREFOOT_WORKER_IDENTITY")
    """Name in leases; empty: made of the host's name and the home folder. Must stay the same over restarts."""
    lease_seconds: float = Field(default=15.0, gt=0, validation_alias="SUREFOOT_WORKER_LEASE_SECONDS")
    """A job whose worker shows no sign of life for so long may be taken by another worker."""
    max_jobs: int = Field(default=8, ge=1, validation_alias="SUREFOOT_WORKER_MAX_JOBS")
    """Jobs that run here at the same time; the others stay PENDING."""
    stop_seconds: float = Field(default=60.0, gt=0, validation_alias="SUREFOOT_WORKER_STOP_SECONDS")
    """How long a stopping worker waits for its jobs to save, before it leaves snapshots in memory."""
    log_lines_per_second: float = Field(default=200.0, gt=0, validation_alias="SUREFOOT_WORKER_LOG_LINES_PER_SECOND")
    """Lines of output per job that are carried on; what exceeds it stays in the files alone."""

    @property
    def worker_identity(self) -> str:
        """The name in leases: the same for every worker process of this home on this host."""
        home = hashlib.blake2b(str(self.home.absolute()).encode(), digest_size=4).hexdigest()
        return self.identity or f"{socket.gethostname()[:100]}-{home}"
