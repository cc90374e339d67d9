"""A file system of a few megabytes that really fills up: a tmpfs in a mount namespace of this process alone."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000

_libc = ctypes.CDLL(None, use_errno=True)


def use_own_mounts() -> None:
    """See from here on mounts that nobody else sees, and that go with this process. Needs a process with one thread.

    Raises:
        OSError: forbidden here.
    """
    user, group = os.getuid(), os.getgid()
    if user:
        _check(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    else:
        _check(_libc.unshare(_CLONE_NEWNS), "unshare")
    _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount")


class SmallDisk:
    """A mounted file system.

    Args:
        path: An existing folder.
        num_bytes: All that fits, in whole pages.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._path = path
        self._filler = path / "filler"
        _check(_libc.mount(b"none", os.fsencode(path), b"tmpfs", 0, f"size={num_bytes}".encode()), "mount")

    def free_bytes(self) -> int:
        """Return what still fits."""
        status = os.statvfs(self._path)
        return status.f_bavail * status.f_frsize

    def fill(self, leave_bytes: int) -> None:
        """Leave room for so many bytes, in whole pages."""
        with self._filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.free_bytes() - leave_bytes)

    def empty(self) -> None:
        """Give the room back."""
        self._filler.unlink()

    def unmount(self) -> None:
        """Remove it with all in it."""
        _check(_libc.umount2(os.fsencode(self._path), 0), "umount")


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
