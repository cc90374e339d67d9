"""What the routes work with, made in `main.py`."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from surefoot.bus.publisher import Publisher
from surefoot.bus.redis_bus import RedisBus
from surefoot.catalogue.database import Database
from surefoot_api.settings import ApiSettings

READINESS_SECONDS = 10.0
"""An older answer is worth nothing: whoever should have looked is stuck."""


class Readiness:
    """What does not answer, as the service's own loop last found: probes of a load balancer cost nothing."""

    def __init__(self) -> None:
        self._away: frozenset[str] = frozenset({"not checked yet"})
        self._at_seconds = -READINESS_SECONDS

    def found(self, away: frozenset[str]) -> None:
        """Say what does not answer. The service's loop only."""
        self._away, self._at_seconds = away, time.monotonic()

    def away(self) -> frozenset[str]:
        """Return what does not answer. Any thread."""
        if time.monotonic() - self._at_seconds > READINESS_SECONDS:
            return frozenset({"the api's own loop"})
        return self._away


@dataclass(frozen=True)
class Parts:
    """Everything that a route may use.

    Attributes:
        settings: Of the api.
        database: The catalogue.
        bus: To follow streams.
        publisher: To send requests.
        stopping: Set when the service ends; what takes long must look at it.
        readiness: Whether bus and catalogue answer.
    """

    settings: ApiSettings
    database: Database
    bus: RedisBus
    publisher: Publisher
    stopping: threading.Event
    readiness: Readiness = field(default_factory=Readiness)


def _parts(request: Request) -> Parts:
    parts: Parts = request.app.state.parts
    return parts


def _actor(request: Request) -> str:
    actor: str = request.scope["state"]["actor"]
    return actor


UsesParts = Annotated[Parts, Depends(_parts)]
Actor = Annotated[str, Depends(_actor)]
