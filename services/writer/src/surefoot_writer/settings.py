"""Settings of the writer, beside the common ones."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from surefoot.settings import CommonSettings


class WriterSettings(CommonSettings):
    """What the writer needs to know. Prefix SUREFOOT_, so the fields carry the rest of SUREFOOT_WRITER_*."""

    writer_rescan_seconds: float = Field(default=30.0, gt=0)
    """How often storage is compared with the catalogue."""
    writer_drainless_seconds: float = Field(default=2.0, ge=0)
    """A staging folder without a drain for so long gets one; its ranks normally start one themselves."""
    writer_stop_seconds: float = Field(default=60.0, ge=0)
    """On SIGTERM: how long to wait for drains that have something to write."""
    writer_resend_seconds: float = Field(default=600.0, gt=0)
    """A verification that was ordered and has not ended for so long is ordered again."""
    writer_retry_seconds: float = Field(default=10.0, gt=0)
    """Delay of the second try of a verification after an I/O error; the third waits five times as long."""

    @property
    def cleared_dir(self) -> Path:
        """Folder of what the detector has cleared, one file per job."""
        return self.home / "run" / "writer" / "cleared"
