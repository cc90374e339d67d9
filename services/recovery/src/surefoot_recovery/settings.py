"""Settings of recovery, beside the common ones."""

from __future__ import annotations

from pydantic import Field

from surefoot.settings import CommonSettings


class RecoverySettings(CommonSettings):
    """What recovery needs to know. Prefix SUREFOOT_, so the fields carry the rest of SUREFOOT_RECOVERY_*."""

    recovery_merge_steps: int = Field(default=20, ge=0)
    """An alarm that begins no further than this after another is part of the same incident."""
