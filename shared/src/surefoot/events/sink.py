"""Where events go. Files now; the bus is another sink with the same one method."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from surefoot.events.base import Event
from surefoot.events.registry import decode_message, encode_message


class EventSink(Protocol):
    """Takes events. Callable from any thread; may block on a disk, so never call it on the step path."""

    def emit(self, event: Event) -> None:
        """Hand over one event."""


class MemorySink:
    """Keeps events in a list, for tests."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        """Append the event."""
        self.events.append(event)


class JsonlSink:
    """Appends one JSON line per event. Several processes may share a file: each line is one O_APPEND write.

    The file and its folder are made with the first event, so that a full disk is that event's error and nobody else's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def emit(self, event: Event) -> None:
        """Append the event as one line.

        Raises:
            OSError: the file system refuses it.
        """
        if self._fd < 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        line = encode_message(event).encode() + b"\n"
        if os.write(self._fd, line) != len(line):
            # Half a line is skipped by readers; ending it keeps the next one whole.
            os.write(self._fd, b"\n")
            raise OSError(errno.ENOSPC, "only a part of the event could be written", str(self.path))

    def close(self) -> None:
        """Close the file. No event may follow."""
        if self._fd >= 0:
            os.close(self._fd)


def read_events(path: Path, offset: int = 0) -> tuple[list[Event], int]:
    """Return the known events of a JSONL file from a byte offset on, and the offset to go on from.

    A last line that is not complete yet is left for the next call.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return [], offset
    complete = data[: data.rfind(b"\n") + 1]
    return list(_decode_lines(complete)), offset + len(complete)


def _decode_lines(data: bytes) -> Iterator[Event]:
    for line in data.splitlines():
        try:
            event = decode_message(line)
        except ValueError:
            continue
        if isinstance(event, Event):
            yield event
