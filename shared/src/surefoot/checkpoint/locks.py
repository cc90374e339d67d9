"""POSIX record locks (`fcntl.lockf`), the only locks that the kernel gives back when their owner is killed.

Three properties of them shape this module (fcntl(2), "Advisory record locking"):
- Closing *any* descriptor of a file drops all locks that the process has on it. So a process opens each such
  file
  once: `LockedFile.open` hands out the one object per file, and whoever needs the file uses that descriptor.
- They belong to the process: two threads never exclude each other. The object keeps count to make up for
  that.
- A forked child does not inherit them. It must not use the parent's objects; each checks this and refuses.
  That is also why not flock(2): its locks would live on in a forked child after the death of the rank itself.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from pathlib import Path

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_open_files: dict[tuple[int, int], LockedFile] = {}
_open_files_guard = threading.Lock()


class LockedFile:
    """The one descriptor of a file in this process, and the process's lock on it. Any thread."""

    def __init__(self, path: Path, fd: int, key: tuple[int, int]) -> None:
        self.path = path
        self.fd = fd
        self._key = key
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._exclusive = False
        self._num_shared = 0

    @classmethod
    def open(cls, path: Path, *, create: bool = False) -> LockedFile:
        """Open the file, or return the object that this process already has for it.

        Args:
            path: An ordinary file.
            create: Make it (mode 0600) when it is not there.

        Raises:
            FileNotFoundError: not there, and not asked to create it.
        """
        with _open_files_guard:
            known = _lookup(path)
            if known is not None:
                return known
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
            status = os.fstat(fd)
            opened = cls(path, fd, (status.st_dev, status.st_ino))
            _open_files[opened._key] = opened
            return opened

    def try_exclusive(self) -> bool:
        """Take the lock for this process alone; False at once when anybody, this process included, has it."""
        with self._guard:
            self._check_process()
            if self._exclusive or self._num_shared:
                return False
            self._exclusive = _try_lock(self.fd, fcntl.LOCK_EX)
            return self._exclusive

    def try_own(self) -> str | None:
        """Take the lock for this process alone and leave its pid in the file for whoever comes second.

        Returns:
            None when this process has it now; else the pid of who has it, as text.
        """
        if not self.try_exclusive():
            return os.pread(self.fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, f"{os.getpid()}\n".encode(), 0)
        return None

    def try_shared(self) -> bool:
        """Take the lock together with other readers; False at once when somebody has it exclusively."""
        with self._guard:
            self._check_process()
            if self._exclusive or not (self._num_shared or _try_lock(self.fd, fcntl.LOCK_SH)):
                return False
            self._num_shared += 1
            return True

    def wait_shared(self) -> None:
        """Take the lock together with other readers; wait while another process has it exclusively."""
        with self._guard:
            self._check_process()
            if not self._num_shared:
                fcntl.lockf(self.fd, fcntl.LOCK_SH)
            self._num_shared += 1

    def release(self) -> None:
        """Give back what one successful `try_*` or `wait_*` call took."""
        with self._guard:
            self._check_process()
            if self._num_shared > 1:
                self._num_shared -= 1
                return
            self._exclusive, self._num_shared = False, 0
            fcntl.lockf(self.fd, fcntl.LOCK_UN)

    def is_current(self) -> bool:
        """Tell whether the path still leads to this file, and not to nothing or to a newer one."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return False
        return (status.st_dev, status.st_ino) == self._key

    def close(self) -> None:
        """Drop every lock of this process on the file and forget it. Twice is fine."""
        with _open_files_guard:
            if _open_files.get(self._key) is self:
                del _open_files[self._key]
                os.close(self.fd)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError(f"{self.path}: a forked child must not use the locks of its parent")


def holder_pid(path: Path) -> int | None:
    """Return the pid of the process that holds an exclusive lock on the file; None where nobody does.

    Asks the kernel (F_GETLK) and takes nothing, so it never gets in the way of whoever is about to take the
    lock. Not for a file that this process has open as a `LockedFile`: the close would drop its lock.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        answer = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
        kind, _, _, _, pid = _FLOCK.unpack(answer)
        return None if kind == fcntl.F_UNLCK else int(pid)
    finally:
        os.close(fd)


def _lookup(path: Path) -> LockedFile | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return _open_files.get((status.st_dev, status.st_ino))


def _try_lock(fd: int, operation: int) -> bool:
    try:
        fcntl.lockf(fd, operation | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows either errno, EAGAIN or EACCES
        return False
    return True


def _forget_in_child() -> None:
    # The guard may have been held by another thread of the parent at the moment of the fork.
    global _open_files_guard  # noqa: PLW0603
    _open_files_guard = threading.Lock()
    _open_files.clear()


os.register_at_fork(after_in_child=_forget_in_child)
