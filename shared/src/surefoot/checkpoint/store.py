"""Durable files of one job. A key holds complete old content, complete new content, or nothing.

The seam to storage is the Protocol `Store`; an object store is another implementation of its five methods
(put, put-if-absent, get, list, copy and delete are all that it takes).
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import xxhash

from surefoot.faultpoints import reach

TEMP_PREFIX = ".tmp-"
"""Not content: `.tmp-<pid>-<random>-<name>` is being written by that process or is debris."""

BLOCK_BYTES = 4096
"""Offset, length and address of an O_DIRECT write are multiples of this."""

PIECE_BYTES = 8 * 2**20
"""The most that is hashed and written at once."""

_DIRECT_MIN_BYTES = 2**20


class Written(NamedTuple):
    """What was written."""

    num_bytes: int
    xxh3_128: str


class Store(Protocol):
    """Files of one job under "/"-separated keys relative to `<storage>/<job>`.

    Any thread and any number of processes may call it. It waits for a disk: never on the step path.
    `str(store)` says where it is, for messages.
    """

    def write(self, key: str, chunks: Iterable[bytes | memoryview], *, if_absent: bool = False) -> Written:
        """Make `key` hold the chunks, all of them or nothing, durable on return. Parent folders appear.

        Args:
            key: Where to.
            chunks: The content, in order. Consumed once.
            if_absent: Write only where there is nothing yet; of several writers exactly one succeeds.

        Returns:
            Number of bytes and their XXH3-128 as hex, computed from what was handed to the system.

        Raises:
            FileExistsError: `if_absent` and there is something.
            OSError: the disk is full or broken; `key` is as before.
        """

    def read(self, key: str) -> io.RawIOBase:
        """Open `key` for reading; the caller closes it (`with`).

        Reads, not a mapping: a bad disk or a file cut short is then an error and not a SIGBUS.

        Raises:
            FileNotFoundError: there is no such file.
            OSError: it is a folder, or anything else but a file; or the disk fails.
        """

    def list(self, prefix: str) -> list[str]:
        """Return the sorted names of the direct children of folder `prefix` ("": the job's own).

        Temporary names are left out. A folder that is missing has no children.
        """

    def move(self, source: str, target: str) -> None:
        """Rename a file or a folder, durable on return. Parents of the target appear as needed.

        Raises:
            FileNotFoundError: there is no `source`.
            OSError: `target` is a folder with something in it.
        """

    def delete(self, key: str) -> None:
        """Remove a file, or a folder with all in it, in one moment as readers see it. Missing is fine."""


class LocalStore:
    """A `Store` on a mounted file system (local disk or NFS).

    Args:
        root: `<storage>/<job>`; made when first written to.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    def write(self, key: str, chunks: Iterable[bytes | memoryview], *, if_absent: bool = False) -> Written:
        """Write a private temporary file, fsync it, rename (or link) it to its name, fsync the folder."""
        path = self._path(key)
        _make_folders(path.parent)
        with _private_file(path) as (fd, temp):
            reach("store.write.opened")
            written = _write_chunks(fd, chunks)
            reach("store.write.written")
            os.fsync(fd)
            reach("store.write.synced")
            if if_absent:
                _link(fd, temp, path)
            else:
                temp.rename(path)
            reach("store.write.renamed")
        sync_folder(path.parent)
        reach("store.write.durable")
        return written

    def read(self, key: str) -> io.RawIOBase:
        """Open the file without a buffer. What is no regular file is refused at once, a FIFO without a writer too."""
        return open(self._path(key), "rb", buffering=0, opener=_open_regular)

    def list(self, prefix: str) -> list[str]:
        """List the folder, without temporary names."""
        folder = self._path(prefix) if prefix else self.root
        try:
            names = [path.name for path in folder.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            if error.errno == errno.ELOOP:  # a symbolic link to itself leads to no folder
                return []
            raise
        return sorted(name for name in names if not name.startswith(TEMP_PREFIX))

    def move(self, source: str, target: str) -> None:
        """Rename, then fsync both parents."""
        from_path, to_path = self._path(source), self._path(target)
        from_path.lstat()  # or else folders would be made for nothing
        _make_folders(to_path.parent)
        from_path.rename(to_path)
        reach("store.move.renamed")
        sync_folder(to_path.parent)
        if from_path.parent != to_path.parent:
            sync_folder(from_path.parent)
        reach("store.move.durable")

    def delete(self, key: str) -> None:
        """Unlink a file. Rename a folder to a temporary name first, so that nobody ever sees half of it."""
        path = self._path(key)
        doomed = path.with_name(temp_name(path.name)) if path.is_dir() and not path.is_symlink() else None
        try:
            path.unlink() if doomed is None else path.rename(doomed)
        except FileNotFoundError:
            return
        reach("store.delete.hidden")
        sync_folder(path.parent)
        reach("store.delete.durable")
        if doomed is not None:
            # What cannot be removed now is debris, not content: remove_debris tries again.
            shutil.rmtree(doomed, ignore_errors=True)

    def remove_debris(self) -> tuple[str, ...]:
        """Remove temporary files and folders that no living process writes; return their keys.

        A writer holds flock on its temporary file, so this is safe next to other writers, on other hosts too.
        """
        removed = []
        for folder, folders, files in os.walk(self.root):
            here = Path(folder)
            for name in [n for n in folders if n.startswith(TEMP_PREFIX)]:
                folders.remove(name)
                shutil.rmtree(here / name, ignore_errors=True)
                removed.append(str((here / name).relative_to(self.root)))
            for name in files:
                if name.startswith(TEMP_PREFIX) and _unlink_if_abandoned(here / name):
                    removed.append(str((here / name).relative_to(self.root)))
        return tuple(sorted(removed))

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if any(part in ("", ".", "..") or part.startswith(TEMP_PREFIX) for part in parts):
            raise ValueError(f"not a storage key: {key!r}")
        return self.root.joinpath(*parts)


def _open_regular(path: str, flags: int) -> int:
    # Opening a FIFO would wait for a writer; of a regular file O_NONBLOCK changes nothing.
    fd = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "Is not a regular file", str(path))


def temp_name(name: str) -> str:
    """Return a name for what is not content yet and is going to be called `name`."""
    # Random too: on shared storage another host, or another container, may have our pid.
    return f"{TEMP_PREFIX}{os.getpid()}-{os.urandom(6).hex()}-{name}"


@contextmanager
def _private_file(path: Path) -> Iterator[tuple[int, Path]]:
    """Open a new locked file next to `path`. Whatever happens, its name and descriptor are gone after."""
    fd, temp = _open_private(path)
    try:
        yield fd, temp
    finally:
        try:
            temp.unlink(missing_ok=True)
        finally:
            os.close(fd)


def _open_private(path: Path) -> tuple[int, Path]:
    while True:
        temp = path.with_name(temp_name(path.name))
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with suppress(OSError):  # without locks on this file system remove_debris removes no files there
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink == 1:
            return fd, temp
        os.close(fd)  # remove_debris came between open and lock


def _unlink_if_abandoned(temp: Path) -> bool:
    try:
        fd = os.open(temp, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temp.unlink()
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _link(fd: int, temp: Path, path: Path) -> None:
    try:
        os.link(temp, path)
    except FileExistsError:
        # NFS: a request sent twice says so after success too. The count of links tells (open(2), O_EXCL).
        if os.fstat(fd).st_nlink != 2:
            raise


def _write_chunks(fd: int, chunks: Iterable[bytes | memoryview]) -> Written:
    digest = xxhash.xxh3_128()
    writer = _Writer(fd)
    with ThreadPoolExecutor(1, "checksum") as hasher:  # its thread starts with the first large piece
        for piece in _pieces(chunks):
            if len(piece) < _DIRECT_MIN_BYTES:
                digest.update(piece)
                writer.write(piece)
            else:
                # While the disk writes it, for both leave the interpreter: in turn they take a quarter longer.
                hashed = hasher.submit(digest.update, piece)
                writer.write(piece)
                hashed.result()
    return Written(writer.offset, digest.hexdigest())


def _pieces(chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    for chunk in chunks:
        view = memoryview(chunk)
        if view.nbytes:
            view = view.cast("B")
            for start in range(0, len(view), PIECE_BYTES):
                yield view[start : start + PIECE_BYTES]


class _Writer:
    """Append to a file, with O_DIRECT wherever offset, length and the file system allow.

    Direct writes keep gigabytes of checkpoint out of the page cache that the training process needs.
    """

    def __init__(self, fd: int) -> None:
        self.offset = 0
        self._fd = fd
        self._flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        self._direct = False
        self._direct_works = True

    def write(self, piece: memoryview) -> None:
        while len(piece):
            num_bytes = self._write_some(piece)
            if num_bytes == 0:
                raise OSError(errno.EIO, "the file system took no bytes")
            self.offset += num_bytes
            piece = piece[num_bytes:]
            reach("store.write.some")

    def _write_some(self, piece: memoryview) -> int:
        direct_bytes = len(piece) - len(piece) % BLOCK_BYTES
        # Decided anew each time: a short write may leave the offset anywhere.
        wanted = self._direct_works and self.offset % BLOCK_BYTES == 0 and len(piece) >= _DIRECT_MIN_BYTES
        if wanted or (self._direct and self.offset % BLOCK_BYTES == 0 and direct_bytes):
            try:
                self._set_direct(True)
                return os.write(self._fd, piece[:direct_bytes])
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self._direct_works = False  # not on this file system, or memory that is not aligned
        self._set_direct(False)
        return os.write(self._fd, piece)

    def _set_direct(self, direct: bool) -> None:
        if direct != self._direct:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, self._flags | os.O_DIRECT if direct else self._flags)
            self._direct = direct


def _make_folders(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    folder.mkdir(exist_ok=True)
    reach("store.folder.made")
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
