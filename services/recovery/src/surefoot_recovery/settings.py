"""Settings of the recovery service."""

from __future__ import annotations

from pydantic import Field

from surefoot.settings import CommonSettings


class RecoverySettings(CommonSettings):
    """The common settings, and its own."""

    merge_steps: int = Field(default=20, ge=0, validation_alias="SUREFOOT_RECOVERY_MERGE_STEPS")
    """An alarm that begins no further than this after another is part of the same incident."""
