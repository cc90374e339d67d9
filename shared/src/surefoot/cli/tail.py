"""Following files that other processes append to, by byte offset."""

from __future__ import annotations

import re
from pathlib import Path

from surefoot.events import Event, read_events

LOG_HEADER = "--- surefoot: "
"""Begins the line that the launcher puts into a rank's log at each start; events say the same."""
_RANK_LOG = re.compile(r"rank-(\d+)\.(out|err)")


class EventTail:
    """The events that are appended to a file after this object was made.

    A job's file goes on from run to run; making the tail before the run starts leaves earlier runs out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = _size_bytes(path)

    def poll(self) -> list[Event]:
        """Return the events that are new since the last call."""
        if _size_bytes(self.path) <= self._offset:
            return []
        events, self._offset = read_events(self.path, self._offset)
        return events


class RankLogTail:
    """The lines that ranks write to `<folder>/rank-00000.out` and `.err` after this object was made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._offsets = {path: _size_bytes(path) for path in self._files()}

    def poll(self) -> list[tuple[int, str]]:
        """Return (rank, line) of the complete lines that are new since the last call."""
        return [pair for path in self._files() for pair in self._new_lines(path)]

    def _files(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("rank-*") if _RANK_LOG.fullmatch(path.name))

    def _new_lines(self, path: Path) -> list[tuple[int, str]]:
        offset = self._offsets.get(path, 0)
        size_bytes = _size_bytes(path)
        if size_bytes == offset:
            return []
        if size_bytes < offset:  # made anew by a later start
            offset = 0
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offsets[path] = offset + len(complete)
        rank = int(path.name[5:10])
        lines = complete.decode(errors="replace").splitlines()
        return [(rank, line) for line in lines if not line.startswith(LOG_HEADER)]


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
