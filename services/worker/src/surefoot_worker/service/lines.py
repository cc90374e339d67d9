"""Following a file that other processes append lines to."""

from __future__ import annotations

import os
from pathlib import Path

_READ_BYTES = 256 * 1024


class LineTail:
    """The complete lines of a file from a position on. Costs one `stat` while there is nothing new. One thread.

    A file that was made anew, or became shorter, is read from its beginning.

    Args:
        path: The file; it need not be there yet.
        offset: Byte to begin with.
        num_lines: Lines before that byte.
    """

    def __init__(self, path: Path, offset: int = 0, num_lines: int = 0) -> None:
        self.path = path
        self.offset = offset
        self.num_lines = num_lines
        self._inode: int | None = None

    def read(self) -> list[bytes]:
        """Return the next complete lines, 256 KiB at most; an empty list when there are none.

        A line longer than that comes in pieces.
        """
        try:
            status = os.stat(self.path)  # noqa: PTH116  40 times a second
        except FileNotFoundError:
            return []
        is_other = self._inode is not None and status.st_ino != self._inode
        self._inode = status.st_ino
        if is_other or status.st_size < self.offset:
            self.offset = self.num_lines = 0
        if status.st_size == self.offset:
            return []
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            data = file.read(_READ_BYTES)
        end = data.rfind(b"\n") + 1
        if not end and len(data) == _READ_BYTES:
            end = len(data)
        lines = data[:end].splitlines() if end else []
        self.offset += end
        self.num_lines += len(lines)
        return lines

    def rest(self) -> list[bytes]:
        """Return all that is left, also what follows the last line break; for a file that nobody writes to any more."""
        lines: list[bytes] = []
        while more := self.read():
            lines += more
        if not self.path.exists():
            return lines
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read(_READ_BYTES)
        self.offset += len(data)
        self.num_lines += bool(data)
        return [*lines, data] if data else lines

    def skip_to_end(self) -> None:
        """Leave out what is there already."""
        self.offset = self.path.stat().st_size if self.path.exists() else 0
