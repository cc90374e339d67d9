"""Health as a file: written by the service's own loop, so that a stuck loop cannot look well.

`<home>/run/health/<service>.json`, replaced about once a second. A file older than `STALE_SECONDS` is red whatever
it says.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from surefoot.small_files import write_atomically

STALE_SECONDS = 10.0


class HealthState(StrEnum):
    """What a service can say of itself."""

    STARTING = "starting"
    OK = "ok"
    WAITING = "waiting"
    """Something it depends on does not answer; it tries again and loses nothing."""
    STALE = "stale"
    """Its loop has not come round for `STALE_SECONDS`; only a reader says this."""
    ABSENT = "absent"
    """There is no file; only a reader says this."""


@dataclass(frozen=True)
class Health:
    """How a service was when its loop last came round.

    Attributes:
        service: Its name.
        state: See `HealthState`.
        detail: What it waits for, one sentence; empty when all is well.
        pid: Its process.
        monotonic_seconds: CLOCK_MONOTONIC of the last turn of its loop.
        since_seconds: CLOCK_MONOTONIC since when it has been in that state.
    """

    service: str
    state: HealthState
    detail: str
    pid: int
    monotonic_seconds: float
    since_seconds: float


class HealthFile:
    """Where one service writes how it is. The thread of its loop only.

    Args:
        directory: Made when it is not there.
        service: Name of the service.
    """

    WRITE_EVERY_SECONDS = 1.0

    def __init__(self, directory: Path, service: str) -> None:
        self._path = directory / f"{service}.json"
        self._service = service
        self._state, self._detail, self._since = HealthState.STARTING, "", time.monotonic()
        self._written = -self.WRITE_EVERY_SECONDS
        directory.mkdir(parents=True, exist_ok=True)

    def turn(self, state: HealthState, detail: str = "") -> None:
        """Say that the loop came round, and how things are. Cheap: writes on a change and once a second."""
        now = time.monotonic()
        if (state, detail) != (self._state, self._detail):
            if state is not self._state:
                self._since = now
            self._state, self._detail = state, detail
        elif now - self._written < self.WRITE_EVERY_SECONDS:
            return
        self._written = now
        health = Health(self._service, state, detail, os.getpid(), now, self._since)
        write_atomically(self._path, json.dumps(asdict(health)))

    def remove(self) -> None:
        """Remove the file: the service has ended in good order."""
        self._path.unlink(missing_ok=True)


def read_health(directory: Path, service: str) -> Health:
    """Return how a service of this host is; never raises for a missing or half-written file."""
    try:
        data = json.loads((directory / f"{service}.json").read_text(encoding="utf-8"))
        health = Health(**(data | {"state": HealthState(data["state"])}))
        age = time.monotonic() - float(health.monotonic_seconds)
    except (OSError, ValueError, TypeError, KeyError):
        return Health(service, HealthState.ABSENT, "it has not said anything", 0, 0.0, 0.0)
    if age <= STALE_SECONDS:
        return health
    detail = f"its loop has not come round for {age:.0f} s"
    return Health(service, HealthState.STALE, detail, health.pid, health.monotonic_seconds, health.since_seconds)
