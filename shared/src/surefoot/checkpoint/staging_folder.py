"""All staging files of one job on one node, and how its processes find, wake and outlive each other there.

<staging_dir>/surefoot-<uid>/<job>-<hash8>/      mode 0700
    rank-00000-buffer-0.stage ...                snapshot buffers (see `staging`)
    session.lock    held shared by ranks and launcher: "somebody still needs this folder"
    drain.lock      held by the one drain
    wake.fifo       a byte in it wakes the drain
    end             the launcher's last word: no restart follows
    reports/        damage that ranks found in committed checkpoints
    commands/       what recovery orders the ranks to do (see `surefoot.command_files`)
    storage-trouble.json    while storage refuses the drain's writes: since when, and how often
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import select
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.locks import LockedFile
from surefoot.checkpoint.staged import StagedPart, StagedSnapshot, group_parts
from surefoot.checkpoint.staging import StagingBuffer, free_bytes, required_bytes
from surefoot.checkpoint.staging_header import BufferState
from surefoot.errors import StagingTooSmall, UsageError
from surefoot.faultpoints import reach
from surefoot.parsing import parse_json

_DOOMED_PREFIX = ".removing-"
_BUFFER_NAME = re.compile(r"rank-(\d{5,})-buffer-(\d+)\.stage")


class DamageReport(NamedTuple):
    """A rank could not load a committed checkpoint. Ranks never change storage; the drain looks into it.

    Args:
        path: The report itself.
        checkpoint: The checkpoint.
        file: The file in it that is bad.
        reason: What was found.
    """

    path: Path
    checkpoint: CheckpointId
    file: str
    reason: str


def staging_folder_path(staging_dir: Path, job: str, storage: Path) -> Path:
    """Return the staging folder of a job. Two storages may hold jobs of one name; each has its own folder."""
    storage_hash = hashlib.blake2b(os.fsencode(storage.absolute()), digest_size=4).hexdigest()
    return staging_dir.absolute() / f"surefoot-{os.getuid()}" / f"{job}-{storage_hash}"


class StagingFolder:
    """A job's staging folder. Objects for the same folder in one process share the buffers in it."""

    def __init__(self, path: Path) -> None:
        """Use a folder that is there or may be there later; `create` makes one."""
        self.path = path
        self._fifo_fd: int | None = None
        self._session: LockedFile | None = None

    @classmethod
    def create(cls, staging_dir: Path, job: str, storage: Path) -> StagingFolder:
        """Make the folder (mode 0700) with all that belongs in it; one that is there is used as it is.

        Raises:
            UsageError: the folder cannot be made or is not ours.
        """
        folder = cls(staging_folder_path(staging_dir, job, storage))
        folder._make()
        return folder

    def create_buffers(self, rank: int, num_buffers: int, shard_capacity: int) -> list[StagingBuffer]:
        """Make or reuse the buffers of one rank; called by that rank at start.

        Args:
            rank: The owner.
            num_buffers: How many.
            shard_capacity: Bytes of the longest shard.

        Raises:
            StagingTooSmall: they do not fit; those made by this call are gone again.
        """
        paths = self._buffer_paths(rank, num_buffers)
        has = {path for path in paths if path.exists()}
        needed = self.missing_bytes(rank, num_buffers, shard_capacity)
        available = free_bytes(self.path)
        if needed > available:
            raise StagingTooSmall(str(self.path), needed, available)
        made: list[StagingBuffer] = []
        try:
            for path in paths:
                made.append(StagingBuffer.create(path, shard_capacity))
        except StagingTooSmall as error:  # another rank was quicker
            for buffer in made:
                if buffer.path not in has:
                    buffer.path.unlink()
                    buffer.close()
            raise StagingTooSmall(str(self.path), needed, error.available_bytes) from None
        return made

    def missing_bytes(self, rank: int, num_buffers: int, shard_capacity: int) -> int:
        """Return how much `create_buffers` with these arguments is going to allocate."""
        one = required_bytes(shard_capacity)
        paths = self._buffer_paths(rank, num_buffers)
        return sum(max(0, one - (path.stat().st_size if path.exists() else 0)) for path in paths)

    def _buffer_paths(self, rank: int, num_buffers: int) -> list[Path]:
        return [self.path / f"rank-{rank:05}-buffer-{index}.stage" for index in range(num_buffers)]

    def buffers(self, rank: int | None = None) -> list[StagingBuffer]:
        """Return the buffers of one rank, or of all ranks that ever were, ordered by rank and index."""
        found = []
        for name in _children(self.path):
            match = _BUFFER_NAME.fullmatch(name)
            if match is not None and rank in (None, int(match[1])):
                found.append((int(match[1]), int(match[2]), name))
        return [b for b in (_try_open(self.path / name) for _, _, name in sorted(found)) if b is not None]

    def remove_surplus(
        self, world_size: int, num_buffers: int, is_waiting: Callable[[CheckpointId], bool] = lambda _: False
    ) -> None:
        """Free the memory of buffers that the job does not use any more; called once newer snapshots exist.

        Args:
            world_size: Ranks from this one on are gone.
            num_buffers: Each rank uses so many.
            is_waiting: Whether a snapshot with `persist` is still to be written if it has not been.
        """
        for buffer in self.buffers():
            match = _BUFFER_NAME.fullmatch(buffer.path.name)
            assert match is not None, "buffers() lists only these names"
            unwritten = buffer.unwritten()
            surplus = int(match[1]) >= world_size or int(match[2]) >= num_buffers
            if surplus and not (unwritten is not None and is_waiting(unwritten)):
                buffer.path.unlink(missing_ok=True)
                buffer.close()

    def parts(self) -> list[StagedPart]:
        """Return every READY buffer. Reads headers only."""
        found = []
        for buffer in self.buffers():
            header = buffer.header()
            if header is not None and header.state is BufferState.READY:
                found.append(StagedPart(buffer, header, buffer.drained_sequence() == header.sequence))
        return found

    def scan(self) -> dict[CheckpointId, StagedSnapshot]:
        """Return what is staged, by id. Reads headers only, so it is cheap enough for a restart."""
        return group_parts(self.parts())

    def hold_session(self) -> None:
        """Say that this process needs the folder until it ends. Ranks and launcher call this first.

        Waits while a drain is just closing the folder down; the folder is then made anew, empty.
        """
        while self._session is None:
            try:
                session = LockedFile.open(self.path / "session.lock", create=True)
            except FileNotFoundError:
                self._make()
                continue
            session.wait_shared()
            if session.is_current():
                self._session = session
                # Of an earlier session: only now, or the drain could close the folder down in between.
                (self.path / "end").unlink(missing_ok=True)
            else:
                session.close()

    def try_take_session(self) -> bool:
        """Take the session lock for this process alone: True only when no rank and no launcher is left."""
        try:
            session = LockedFile.open(self.path / "session.lock", create=True)
        except FileNotFoundError:
            return False
        if session.try_exclusive():
            self._session = session
            return True
        return False

    def release_session(self) -> None:
        """Give the session lock back early; a process that ends gives it back anyway."""
        if self._session is not None:
            self._session.release()
            self._session = None

    def announce_end(self) -> None:
        """Say that no restart follows, so the drain need not linger. The launcher's last word; wakes the drain."""
        (self.path / "end").touch()
        self.wake()

    def is_end_announced(self) -> bool:
        """Return whether the launcher has ended and nobody has held the session since. Only the drain asks."""
        return (self.path / "end").exists()

    def wake(self) -> None:
        """Wake the drain if there is one. Never blocks; without it the drain looks every second anyway."""
        try:
            fd = os.open(self.path / "wake.fifo", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # ENXIO: nobody listens; ENOENT: nobody ever did
            return
        try:
            os.write(fd, b"\0")
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EPIPE):  # full: it will wake up anyway
                raise
        finally:
            os.close(fd)

    def wait_for_wake(self, timeout_seconds: float) -> bool:
        """Wait until woken or the time is over; True when woken. Only the drain calls this."""
        if self._fifo_fd is None:
            # Read-write, so that the pipe always has a writer and never reads as ended.
            self._fifo_fd = os.open(self.path / "wake.fifo", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        ready, _, _ = select.select([self._fifo_fd], [], [], timeout_seconds)
        if ready:
            os.read(self._fifo_fd, 65536)
        return bool(ready)

    def write_report(self, checkpoint: CheckpointId, file: str, reason: str) -> None:
        """Report a committed checkpoint as damaged and wake the drain. Called by ranks while they restore."""
        folder = self.path / "reports"
        folder.mkdir(exist_ok=True)
        text = json.dumps({"attempt": checkpoint.attempt, "step": checkpoint.step, "file": file, "reason": reason})
        name = os.urandom(16).hex()
        temporary = folder / f"{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.rename(folder / f"{name}.json")
        self.wake()

    def reports(self) -> list[DamageReport]:
        """Return the reports; whoever has dealt with one unlinks its `path`. Only the drain calls this."""
        found = []
        for path in sorted((self.path / "reports").glob("*.json")):
            try:
                data = parse_json(path.read_text(encoding="utf-8"))
                checkpoint = CheckpointId(int(data["attempt"]), int(data["step"]))
                found.append(DamageReport(path, checkpoint, str(data["file"]), str(data["reason"])))
            except (ValueError, KeyError, TypeError, OverflowError, FileNotFoundError):
                path.unlink(missing_ok=True)
        return found

    def remove(self) -> None:
        """Delete the folder. Only for whoever has the session lock alone.

        It is renamed first: a process that starts right now makes a new folder and never meets half of this
        one.
        """
        for buffer in self.buffers():
            buffer.close()
        if self._fifo_fd is not None:
            os.close(self._fifo_fd)
            self._fifo_fd = None
        # Random, since in a container every drain may have the same pid.
        doomed = self.path.with_name(f"{_DOOMED_PREFIX}{self.path.name}-{os.urandom(6).hex()}")
        self.path.rename(doomed)
        self.release_session()  # whoever waits for it finds its file gone and makes a new folder
        reach("staging.hidden")
        _remove_tree(doomed)

    def sweep(self) -> None:
        """Delete what is left of this job's folders where `remove` was killed: it is memory until a reboot.

        Any process, any time: nobody opens a file in a renamed folder. What cannot be deleted is left.
        """
        leftover = re.compile(re.escape(f"{_DOOMED_PREFIX}{self.path.name}-") + "[0-9a-f]+")
        for folder in _children(self.path.parent):
            if leftover.fullmatch(folder):
                with suppress(OSError):
                    _remove_tree(self.path.with_name(folder))

    def _make(self) -> None:
        try:
            self.path.parent.parent.mkdir(parents=True, exist_ok=True)
            for folder in (self.path.parent, self.path):
                folder.mkdir(mode=0o700, exist_ok=True)
                _check_ours(folder)
            self.sweep()
            (self.path / "reports").mkdir(exist_ok=True)
            with suppress(FileExistsError):
                os.mkfifo(self.path / "wake.fifo", 0o600)
        except FileNotFoundError:
            self._make()  # a drain just renamed the folder away
        except OSError as error:
            raise UsageError("checkpoint.staging_dir", f"{self.path}: {error.strerror}") from None


def _children(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208  called on every scan; names are all we need
    except FileNotFoundError:
        return []


def _try_open(path: Path) -> StagingBuffer | None:
    try:
        return StagingBuffer.open(path)
    except (FileNotFoundError, ValueError):  # just removed, or just being made
        return None


def _check_ours(folder: Path) -> None:
    # /dev/shm is writable by all: somebody else could have made the folder, or a link, before us.
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UsageError("checkpoint.staging_dir", f"{folder} is not a folder of user {os.getuid()}")


def _remove_tree(folder: Path) -> None:
    with suppress(FileNotFoundError):  # here and below: somebody else deletes it too
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    _remove_tree(Path(entry.path))
                else:
                    Path(entry.path).unlink(missing_ok=True)
        folder.rmdir()
