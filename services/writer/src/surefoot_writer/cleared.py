"""What the detector has cleared last, by job: kept in files, so that a restart forgets nothing."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, NonNegativeInt, TypeAdapter

from surefoot.small_files import write_atomically


class Cleared(NamedTuple):
    """No step of the attempt up to `through_step` is suspected of anything. The newest compares highest."""

    attempt: int
    through_step: int


_PAIR = TypeAdapter(tuple[NonNegativeInt, Annotated[int, Field(ge=-1)]])


class ClearedSteps:
    """The newest `Cleared` of each job. Any thread.

    Args:
        folder: One small file per job is kept there; made when it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._newest: dict[str, Cleared] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.json"):
            with suppress(ValueError, OSError):  # the next message of that job makes it new
                pair = _PAIR.validate_json(path.read_bytes(), strict=True)
                self._newest[path.name.removesuffix(".json")] = Cleared(*pair)

    def newest(self, job: str) -> Cleared | None:
        """Return the newest for a job, None before the first."""
        with self._lock:
            return self._newest.get(job)

    def note(self, job: str, cleared: Cleared) -> bool:
        """Keep it when it is newer than what is known; return whether it was."""
        with self._lock:
            if cleared <= self._newest.get(job, Cleared(0, -1)):
                return False
            self._newest[job] = cleared
            write_atomically(self._folder / f"{job}.json", json.dumps(cleared))
            return True
