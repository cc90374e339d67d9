"""Carries the events of one job from its event file to the bus: at least once, in order, numbered by line."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from surefoot.bus.base import Bus, Outgoing
from surefoot.bus.streams import EVENTS
from surefoot.events import Message, decode_message
from surefoot_worker.service.lines import LineTail
from surefoot_worker.service.state_files import place_within


class EventForwarder:
    """Publishes each line of an event file with its line number, so that readers see what was lost or came twice.

    The source is named after the file's first line, which holds a random id: a new file is a new source. A line that
    is no event (half of one, after a full disk) is left out, and is a gap for readers. One thread.

    Args:
        job: Name of the job.
        path: The event file; it need not be there yet.
        bus: Where to.
        done: What `position` returned in an earlier process.
        on_message: Called with each message, once, before it is published.
    """

    def __init__(
        self,
        job: str,
        path: Path,
        bus: Bus,
        done: tuple[str, int, int] = ("", 0, 0),
        on_message: Callable[[Message], None] = lambda _: None,
    ) -> None:
        self._on_message = on_message
        self._job = job
        self._bus = bus
        self._file_id, offset, line = done
        if self._file_id != _id_of(path):
            self._file_id, offset, line = "", 0, 0
        offset, line = place_within(path, offset, line)
        self._tail = LineTail(path, offset, line)
        self._done = (offset, line)
        self._unsent: list[Outgoing] = []

    @property
    def position(self) -> tuple[str, int, int]:
        """The file's id, and byte and line up to which everything is on the bus."""
        return (self._file_id, *self._done)

    def forward(self) -> bool:
        """Publish what is new; True when there was something, so there may be more.

        Raises:
            BusUnavailable: tried again with the next call; the file keeps it all.
        """
        if not self._unsent:
            lines = self._tail.read()
            if not lines:
                return False
            first = self._tail.num_lines - len(lines) + 1
            if first == 1:
                self._file_id = _hash(lines[0])
            self._unsent = self._decode(lines, first)
        if self._unsent:
            self._bus.publish(EVENTS, self._unsent)
        self._unsent = []
        self._done = (self._tail.offset, self._tail.num_lines)
        return True

    def _decode(self, lines: list[bytes], first: int) -> list[Outgoing]:
        source = f"job:{self._job}:{self._file_id}"
        items = []
        for number, line in enumerate(lines, first):
            try:
                message = decode_message(line)
            except ValueError:
                continue
            if message is not None:
                self._on_message(message)
                items.append(Outgoing(message, source, number))
        return items


def _id_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            line = file.readline()
    except FileNotFoundError:
        return ""
    return _hash(line.rstrip(b"\n")) if line.endswith(b"\n") else ""


def _hash(line: bytes) -> str:
    return hashlib.blake2b(line, digest_size=8).hexdigest()
