from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import ClassVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field


class Message(BaseModel):
    """What is sent about a job. Subclasses of `Event`, `Command` and `Request` set `type` and add their own fields.

    `ser_json_inf_nan="strings"` keeps NaN and Inf through JSON, which has neither.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")

    type: ClassVar[str]
    lifecycle: ClassVar[bool] = True
    """Lifecycle messages are never dropped; the others give way when a queue is full."""

    event_id: str = Field(default_factory=lambda: uuid4().hex)
    ts: datetime = Field(default_factory=lambda: datetime.now(UTC))
    monotonic_seconds: float = Field(default_factory=time.monotonic)
    """CLOCK_MONOTONIC of the sender: comparable between processes of one host only."""
    job: str
    attempt: int | None = None
    rank: int | None = None


class Event(Message):
    """A fact: something that has happened. Named in the past tense."""


class Command(Message):
    """An order to the ranks of one attempt, named in the imperative. Issued by recovery alone.

    `attempt` is the attempt it was decided for; any other attempt refuses it.
    """

    number: int = Field(ge=1)
    """Row id of its action. Ranks apply numbers in rising order and never one at or below the last applied."""
    reason: str
    """Why, for people."""


class Request(Message):
    """What a person asks for through the API. Recovery turns it into a command, or refuses it and says why."""

    operation_id: str
    """Of the API's operations table."""
    actor: str
    """Who asked."""
