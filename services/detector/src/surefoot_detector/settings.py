"""Settings of the detector, beside the common ones."""

from __future__ import annotations

from pydantic import Field

from surefoot.settings import CommonSettings


class DetectorSettings(CommonSettings):
    """What the detector needs to know. Prefix SUREFOOT_, so the fields carry the rest of SUREFOOT_DETECTOR_*."""

    detector_max_jobs: int = Field(default=1000, ge=1)
    """Jobs followed at once, about 100 KB each; the one silent for longest is forgotten, and would warm up again."""
