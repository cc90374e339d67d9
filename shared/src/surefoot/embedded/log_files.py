"""Logs of services: one JSON object per line, bounded in size."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path

MAX_BYTES = 8 * 2**20
"""A file that has grown so long becomes `<name>.1`, the one before is gone: twice this is the bound."""
LONGEST_LINE_BYTES = 256 * 2**10


class LogFile:
    """Takes what a process writes to its output. One thread.

    Lines that are JSON objects are kept as they are; others (of the server, of Celery, of an interpreter that dies)
    become the `event` of one.

    Args:
        path: Appended to.
        service: For lines that do not say it.
        max_bytes: See `MAX_BYTES`.
    """

    def __init__(self, path: Path, service: str, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._service, self._max_bytes = path, service, max_bytes
        self._fd = self._open()
        self._size = os.fstat(self._fd).st_size
        self._begun = b""

    def feed(self, data: bytes) -> None:
        """Take bytes as they came from the pipe; the last line may be incomplete."""
        *lines, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) > LONGEST_LINE_BYTES:
            lines.append(self._begun)
            self._begun = b""
        self._write(b"".join(_structured(line, self._service) for line in lines if line.strip()))

    def close(self) -> None:
        """Write what is left and close. Nothing may follow."""
        self.feed(b"\n")
        os.close(self._fd)

    def _write(self, data: bytes) -> None:
        if data and self._size + len(data) > self._max_bytes and self._size:
            os.close(self._fd)
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._fd = self._open()
            self._size = 0
        try:
            os.write(self._fd, data)
            self._size += len(data)
        except OSError:  # disk full: a log is not worth a service
            return

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _structured(line: bytes, service: str) -> bytes:
    if line.startswith(b"{") and line.endswith(b"}"):
        return line + b"\n"
    text = line.decode(errors="replace").rstrip()
    ts = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return json.dumps({"ts": ts, "level": "info", "service": service, "event": text}).encode() + b"\n"


def tail(path: Path, num_lines: int) -> list[str]:
    """Return the last lines of a log for people: what happened, without the JSON around it."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_LINE_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-num_lines:]
    except OSError:
        return []
    return [_for_people(line) for line in lines]


def _for_people(line: str) -> str:
    try:
        data = json.loads(line)
        words = [str(data[key]) for key in ("ts", "level", "event", "error") if data.get(key)]
    except (ValueError, TypeError, AttributeError, KeyError):
        return line
    return " ".join(words)
