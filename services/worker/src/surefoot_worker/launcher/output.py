"""Output that is kept if it can be: no file system makes a program wait for its logs or die of them."""

from __future__ import annotations

import io
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def open_for_append(path: Path) -> int:
    """Return a descriptor that appends to a file, or one of /dev/null where the file cannot be opened."""
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


class LossyWriter(io.RawIOBase):
    """Writes to a descriptor and drops what it refuses (a full disk, say); counts it, and says so when it can again.

    Args:
        fd: An open descriptor; stays open when this is closed.
        name: For `name` of the stream.
    """

    def __init__(self, fd: int, name: str) -> None:
        self.name = name
        self.mode = "wb"
        self.num_dropped_bytes = 0
        self._fd = fd

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """Tell whether it is a terminal."""
        return os.isatty(self._fd)

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        """Write what the file takes, and claim to have written the rest."""
        view = memoryview(data).cast("B")
        try:
            if self.num_dropped_bytes:
                os.write(self._fd, f"--- surefoot: {self.num_dropped_bytes} bytes of output were lost ---\n".encode())
                self.num_dropped_bytes = 0
            return os.write(self._fd, view)
        except OSError:
            self.num_dropped_bytes += len(view)
            return len(view)


def lossy_text(fd: int, name: str) -> io.TextIOWrapper:
    """Return a line-buffered text stream on a descriptor that never raises OSError."""
    buffer = io.BufferedWriter(LossyWriter(fd, name))
    return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)


class LossyLogFile(logging.Handler):
    """Appends log records to a file; what cannot be written is lost without a word.

    `logging.FileHandler` would print a traceback for each such record, and raise when it is closed.

    Args:
        path: The file; its folder need not exist.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = open_for_append(path)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Append one record, in one write. Any thread."""
        with suppress(OSError):
            os.write(self._fd, f"{self.format(record)}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            with suppress(OSError):  # the error of an earlier write may come only now
                os.close(self._fd)
            self._fd = -1
        super().close()
