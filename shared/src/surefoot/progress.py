"""Two small mmapped pages that let processes of one host see each other without a call.

Each rank keeps a ProgressPage: where it is. The launcher keeps one ControlPage: what it asks of the ranks.
Both are plain memory reads and writes on tmpfs, so they may stand on the step path.

A page holds two slots; the writer fills the one that is not current, then makes it current by its sequence
number, and a checksum tells a reader that it caught a slot in the middle of a write.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

_SLOT = struct.Struct("<QqqqqqdI")  # sequence, five integers, monotonic seconds, CRC32 of what stands before
_SLOT_BYTES = 128
_PAGE_BYTES = 4096
_BODY_BYTES = _SLOT.size - 4


class Phase(IntEnum):
    """What a rank is doing; each has its own time limit."""

    START = 0
    STEP = 1
    SAVE = 2
    EVAL = 3
    CLOSE = 4
    DONE = 5
    """The session is closed: what the program does after it takes as long as it takes."""


@dataclass(frozen=True)
class Progress:
    """Where a rank is.

    Attributes:
        pid: Process id of the rank.
        attempt: 0 before it is claimed.
        step: Last step that this rank has completed.
        start_step: The step this attempt started from, -1 before it is known.
        phase: What it is doing.
        monotonic_seconds: CLOCK_MONOTONIC of the last change.
    """

    pid: int
    attempt: int
    step: int
    start_step: int
    phase: Phase
    monotonic_seconds: float


class _Page:
    """The two-slot page underneath. One writing process; any number of readers."""

    def __init__(self, path: Path, *, create: bool) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if os.fstat(fd).st_size < _PAGE_BYTES:
                if not create:
                    raise FileNotFoundError(f"{path}: not a complete page yet")
                os.posix_fallocate(fd, 0, _PAGE_BYTES)
            self._map = mmap.mmap(fd, _PAGE_BYTES)
        finally:
            os.close(fd)
        current = self._newest()
        self._sequence = current[0] if current else 0
        self._fields: tuple[int, ...] = ()

    def _slot(self, index: int) -> tuple[int, int, int, int, int, int, float] | None:
        raw = self._map[index * _SLOT_BYTES : index * _SLOT_BYTES + _SLOT.size]
        *fields, checksum = _SLOT.unpack(raw)
        if fields[0] == 0 or checksum != zlib.crc32(raw[:_BODY_BYTES]):
            return None
        return tuple(fields)

    def _newest(self) -> tuple[int, int, int, int, int, int, float] | None:
        slots = [slot for slot in (self._slot(0), self._slot(1)) if slot]
        return max(slots, default=None)

    def _put(self, *fields: int) -> None:
        self._sequence += 1
        self._fields = fields
        padded = fields + (0,) * (5 - len(fields))
        body = _SLOT.pack(self._sequence, *padded, time.monotonic(), 0)[:_BODY_BYTES]
        offset = (self._sequence % 2) * _SLOT_BYTES
        self._map[offset : offset + _SLOT.size] = body + struct.pack("<I", zlib.crc32(body))

    def close(self) -> None:
        """Unmap the page; the file stays."""
        self._map.close()


class ProgressPage(_Page):
    """Where one rank is. Written by the rank's main thread; read by the launcher and by tools."""

    @classmethod
    def create(cls, path: Path) -> ProgressPage:
        """Open the page for writing, making the file when it is not there."""
        return cls(path, create=True)

    @classmethod
    def open(cls, path: Path) -> ProgressPage:
        """Open an existing page for reading.

        Raises:
            FileNotFoundError: the rank has not made it yet.
        """
        return cls(path, create=False)

    def write(self, *, attempt: int, step: int, start_step: int, phase: Phase) -> None:
        """Say where this process is. A few microseconds."""
        self._put(os.getpid(), attempt, step, start_step, int(phase))

    def beat(self, phase: Phase | None = None) -> None:
        """Say again where this process is, after `write`: it goes on, in another phase if one is given."""
        *where, before = self._fields
        self._put(*where, before if phase is None else int(phase))

    def read(self) -> Progress | None:
        """Return the newest complete entry, None before the first."""
        slot = self._newest()
        if slot is None:
            return None
        _, pid, attempt, step, start_step, phase, seconds = slot
        return Progress(pid, attempt, step, start_step, Phase(phase), seconds)


class ProgressReader:
    """Reads a rank's page again and again, although the staging folder and the page in it may be made anew.

    Args:
        path: Of the page; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._page: ProgressPage | None = None
        self._identity: tuple[int, int] | None = None

    def read(self) -> Progress | None:
        """Return where the rank is; None while there is no page. About 10 microseconds."""
        try:
            status = self._path.stat()
            identity = (status.st_dev, status.st_ino)
            if identity != self._identity:
                self._page, self._identity = ProgressPage.open(self._path), identity
        except FileNotFoundError:
            return None
        return None if self._page is None else self._page.read()


@dataclass(frozen=True)
class Control:
    """What the launcher asks of the ranks.

    Attributes:
        stop_requested: Save, stop at the next step boundary and exit 0.
        save_requests: Grows by one with each request to save now.
    """

    stop_requested: bool = False
    save_requests: int = 0


class ControlPage(_Page):
    """What the launcher asks of the ranks. Written by the launcher only, also from its signal handlers."""

    @classmethod
    def create(cls, path: Path) -> ControlPage:
        """Open the page for writing, making the file when it is not there."""
        return cls(path, create=True)

    @classmethod
    def open(cls, path: Path) -> ControlPage:
        """Open an existing page for reading.

        Raises:
            FileNotFoundError: no launcher made one (plain torchrun).
        """
        return cls(path, create=False)

    def write(self, control: Control) -> None:
        """Replace what is asked."""
        self._put(int(control.stop_requested), control.save_requests)

    def read(self) -> Control:
        """Return what is asked; nothing before the first write."""
        slot = self._newest()
        return Control() if slot is None else Control(bool(slot[1]), slot[2])


def progress_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's progress page in the staging folder."""
    return folder / f"rank-{rank:05d}.progress"


def control_path(folder: Path) -> Path:
    """Return the path of the control page in the staging folder."""
    return folder / "control.page"
