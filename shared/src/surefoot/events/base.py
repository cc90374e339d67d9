from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import ClassVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field


class Event(BaseModel):
    """A fact about a job. Subclasses set `type` and add their own fields.

    `ser_json_inf_nan="strings"` keeps NaN and Inf through JSON, which has neither.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")

    type: ClassVar[str]
    lifecycle: ClassVar[bool] = True
    """Lifecycle events are never dropped; the others give way when a queue is full."""

    event_id: str = Field(default_factory=lambda: uuid4().hex)
    ts: datetime = Field(default_factory=lambda: datetime.now(UTC))
    monotonic_seconds: float = Field(default_factory=time.monotonic)
    """CLOCK_MONOTONIC of the sender: comparable between processes of one host only."""
    job: str
    attempt: int | None = None
    rank: int | None = None
