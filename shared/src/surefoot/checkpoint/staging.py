"""One snapshot buffer: a mmapped file that outlives the rank that fills it.

Layout of the file: page 0 and 1 header slots, page 2 drained mark, 1 MiB scalars, then the shard, which is a
safetensors file as it stands. Filling: take the lock exclusively, write FILLING, copy, write READY, unlock. A
reader takes the lock shared and looks at the header again: READY under the lock is a complete snapshot. The
order matters, the payload is complete before the READY slot is written; the CRC of the slot tells a torn one.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.locks import LockedFile
from surefoot.checkpoint.staging_header import (
    MARK_BYTES,
    SLOT_BYTES,
    BufferHeader,
    BufferState,
    job_digest,
    newest,
    pack_mark,
    pack_slot,
    unpack_mark,
)
from surefoot.errors import StagingTooSmall
from surefoot.faultpoints import reach

PAGE_BYTES = 4096
SCALARS_CAPACITY_BYTES = 1 << 20
_MARK_OFFSET = 2 * PAGE_BYTES
_SCALARS_OFFSET = 3 * PAGE_BYTES
_SHARD_OFFSET = _SCALARS_OFFSET + SCALARS_CAPACITY_BYTES
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM}


def required_bytes(shard_capacity: int, num_buffers: int = 1) -> int:
    """Return the bytes that `num_buffers` buffers take in the staging file system."""
    return num_buffers * (_SHARD_OFFSET + -(-shard_capacity // PAGE_BYTES) * PAGE_BYTES)


def free_bytes(path: Path) -> int:
    """Return the bytes that can still be allocated in the file system of an existing path."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


class StagingBuffer:
    """One staging file. `create` and `open` return the one object per file and process.

    Its owner is one rank: only that fills it, from one thread at a time. Any process of the user may read it.
    A forked child must not use it (see `locks`).
    """

    def __init__(self, file: LockedFile, *, populate: bool) -> None:
        self._file = file
        self._digest = job_digest(file.path.parent.name)
        self._filling: BufferHeader | None = None
        self._reserved = False
        self._maps: list[mmap.mmap] = []
        self._map(populate=populate)

    @classmethod
    def create(cls, path: Path, shard_capacity: int) -> StagingBuffer:
        """Make the file with all its memory allocated and touched; reuse one that is large enough.

        A smaller one grows in place, so the snapshot in it stays. Called by the owning rank at start.

        Raises:
            StagingTooSmall: the file system is full (allocated here and now: later it would be a SIGBUS).
        """
        file = LockedFile.open(path, create=True)
        needed = required_bytes(shard_capacity)
        grown = os.fstat(file.fd).st_size < needed
        if grown:
            _allocate(file, needed)
        buffer = _buffers.get(file)
        if buffer is None:
            # Populating is for new memory only: at a restart this would cost a walk over all pages.
            buffer = _buffers[file] = cls(file, populate=grown)
        elif grown:
            buffer._map(populate=True)
        return buffer

    @classmethod
    def open(cls, path: Path) -> StagingBuffer:
        """Open a file that is there. Cheap: nothing is read.

        Raises:
            FileNotFoundError: it is gone.
            ValueError: it is still being created.
        """
        file = LockedFile.open(path)
        if file not in _buffers:
            _buffers[file] = cls(file, populate=False)
        return _buffers[file]

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    @property
    def shard_capacity(self) -> int:
        """Bytes of the longest shard that fits."""
        return len(self._view) - _SHARD_OFFSET

    @property
    def shard(self) -> memoryview:
        """The shard region, `shard_capacity` bytes. Write to it only between `begin_fill` and `commit`."""
        return self._view[_SHARD_OFFSET:]

    def header(self) -> BufferHeader | None:
        """Return the newest valid header; None for a fresh or a foreign file. Needs no lock."""
        header = newest(bytes(self._view[at : at + SLOT_BYTES]) for at in (0, PAGE_BYTES))
        return header if header is not None and header.job_digest == self._digest else None

    @property
    def is_filling(self) -> bool:
        """This process has begun to fill it and has not ended yet."""
        return self._filling is not None

    def reserve(self) -> bool:
        """Take the lock for filling; False at once when a reader has it. `begin_fill` does this by itself."""
        if not self._reserved:
            self._reserved = self._file.try_exclusive()
        return self._reserved

    def release(self) -> None:
        """Give back a reservation that is not going to be used."""
        if self._filling is not None:
            raise RuntimeError("a buffer being filled ends with commit() or abort()")
        if self._reserved:
            self._reserved = False
            self._file.release()

    def begin_fill(
        self,
        checkpoint: CheckpointId,
        *,
        world_size: int,
        rank: int,
        plan_digest: bytes,
        persist: bool,
        local_world_size: int = 0,
    ) -> bool:
        """Start a snapshot: what was in the buffer is gone from here on. The arguments are those of `BufferHeader`.

        Returns:
            False at once, and nothing has changed, when a reader has the lock.
        """
        if self._filling is not None:
            raise RuntimeError("begin_fill() again before commit() or abort()")
        if not self.reserve():
            return False
        header = BufferHeader(
            sequence=self._next_sequence(),
            state=BufferState.FILLING,
            job_digest=self._digest,
            attempt=checkpoint.attempt,
            step=checkpoint.step,
            world_size=world_size,
            rank=rank,
            persist=persist,
            plan_digest=plan_digest,
            shard_bytes=0,
            scalars_bytes=0,
            saved_monotonic=0.0,
            local_world_size=local_world_size,
        )
        self._write_slot(header)
        self._filling = header
        reach("staging.filling")
        return True

    def write_scalars(self, scalars: bytes) -> None:
        """Put the JSON with the counters in; between `begin_fill` and `commit`.

        Raises:
            ValueError: longer than `SCALARS_CAPACITY_BYTES`.
        """
        if len(scalars) > SCALARS_CAPACITY_BYTES:
            raise ValueError(
                f"the scalar state of a snapshot is {len(scalars)} bytes of JSON, at most {SCALARS_CAPACITY_BYTES} fit"
            )
        filling = self._require_filling()
        self._view[_SCALARS_OFFSET : _SCALARS_OFFSET + len(scalars)] = scalars
        self._filling = filling._replace(scalars_bytes=len(scalars))

    def commit(self, shard_bytes: int) -> BufferHeader:
        """Declare the snapshot complete and let readers in. The payload must be all there.

        Args:
            shard_bytes: Length of the shard from its first header byte on.
        """
        filling = self._require_filling()
        if not 0 <= shard_bytes <= self.shard_capacity:
            raise ValueError(f"a shard of {shard_bytes} bytes in a buffer of {self.shard_capacity}")
        reach("staging.copied")
        return self._end_fill(
            filling._replace(
                sequence=filling.sequence + 1,
                state=BufferState.READY,
                shard_bytes=shard_bytes,
                saved_monotonic=time.monotonic(),
            )
        )

    def abort(self) -> None:
        """Give up the snapshot being filled; the buffer is FREE."""
        filling = self._require_filling()
        self._end_fill(filling._replace(sequence=filling.sequence + 1, state=BufferState.FREE, scalars_bytes=0))

    def scalars(self) -> bytes:
        """Return the scalars of the snapshot in the buffer; call it under `lock_shared`."""
        header = self.header()
        num_bytes = header.scalars_bytes if header is not None else 0
        return bytes(self._view[_SCALARS_OFFSET : _SCALARS_OFFSET + num_bytes])

    @contextmanager
    def lock_shared(self) -> Iterator[BufferHeader | None]:
        """Keep the owner from refilling the buffer while the block runs. Never waits.

        Yields:
            The header as it is under the lock (check that it is READY and what you look for), or None when
            the buffer is being filled or has no header.
        """
        if not self._file.try_shared():
            yield None
            return
        try:
            header = self.header()
            if header is not None and header.shard_bytes > self.shard_capacity:
                self._map(populate=False)  # its owner made it grow since
            yield header
        finally:
            self._file.release()

    def mark_drained(self, sequence: int) -> None:
        """Note that the READY header of this sequence needs no more draining. Only the drain calls this."""
        self._view[_MARK_OFFSET : _MARK_OFFSET + MARK_BYTES] = pack_mark(sequence)

    def unwritten(self) -> CheckpointId | None:
        """Return the complete snapshot in it that is to become durable and is not marked drained; None: no such one."""
        header = self.header()
        if header is None or header.state is not BufferState.READY or not header.persist:
            return None
        return None if self.drained_sequence() == header.sequence else header.checkpoint_id

    def drained_sequence(self) -> int:
        """Return the sequence that was last marked drained; 0: none."""
        return unpack_mark(bytes(self._view[_MARK_OFFSET : _MARK_OFFSET + MARK_BYTES]))

    def close(self) -> None:
        """Drop the lock and the mapping: for files about to be deleted, and for tests. Twice is fine.

        Where a view is still in use the mapping stays until that is gone, and then takes this process's locks
        on the file with it, even those taken after opening the file again.
        """
        self._view.release()
        for mapping in self._maps:
            try:
                mapping.close()
            except BufferError:
                continue  # somebody still has a view; the mapping goes with the last of them
        self._maps.clear()
        _buffers.pop(self._file, None)
        self._file.close()

    def _map(self, *, populate: bool) -> None:
        num_bytes = os.fstat(self._file.fd).st_size
        if num_bytes < _SHARD_OFFSET:
            raise ValueError(f"{self.path} is not a complete staging file")
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        # mmap duplicates the descriptor, and closing that would drop our lock: an outgrown mapping is kept.
        self._maps.append(mmap.mmap(self._file.fd, num_bytes, flags=flags))
        self._view = memoryview(self._maps[-1])

    def _next_sequence(self) -> int:
        header = newest(bytes(self._view[at : at + SLOT_BYTES]) for at in (0, PAGE_BYTES))
        return max(header.sequence if header is not None else 0, self.drained_sequence()) + 1

    def _write_slot(self, header: BufferHeader) -> None:
        at = PAGE_BYTES * (header.sequence % 2)
        self._view[at : at + SLOT_BYTES] = pack_slot(header)

    def _require_filling(self) -> BufferHeader:
        if self._filling is None:
            raise RuntimeError("begin_fill() comes first")
        return self._filling

    def _end_fill(self, header: BufferHeader) -> BufferHeader:
        self._write_slot(header)
        self._filling = None
        self.release()
        return header


_buffers: dict[LockedFile, StagingBuffer] = {}


def choose_buffer(
    buffers: Iterable[StagingBuffer],
    keep: Collection[CheckpointId],
    is_on_lineage: Callable[[CheckpointId], bool],
) -> StagingBuffer | None:
    """Choose a buffer of this rank to fill next, and reserve it; called on the step path, never waits.

    Args:
        buffers: The rank's own buffers.
        keep: Snapshots that must stay, at least the newest one that is complete on all ranks.
        is_on_lineage: Whether a snapshot is on the lineage of the running attempt.

    Returns:
        An empty buffer or else the one with the oldest snapshot, reserved (follow with `begin_fill` or
        `release`); None when all are kept, waiting to be drained, or being read.
    """
    eligible: list[tuple[tuple[int, int], int, StagingBuffer]] = []
    for index, buffer in enumerate(buffers):
        if buffer.is_filling:
            continue
        header = buffer.header()
        if header is None or header.state is not BufferState.READY:
            eligible.append(((-1, -1), index, buffer))
            continue
        drained = buffer.drained_sequence() == header.sequence
        waiting = header.persist and not drained and is_on_lineage(header.checkpoint_id)
        if header.checkpoint_id not in keep and not waiting:
            eligible.append((header.checkpoint_id, index, buffer))
    return next((buffer for _, _, buffer in sorted(eligible) if buffer.reserve()), None)


def _allocate(file: LockedFile, needed: int) -> None:
    try:
        os.posix_fallocate(file.fd, 0, needed)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        has = os.fstat(file.fd).st_size
        if not has:
            file.path.unlink(missing_ok=True)
            file.close()
        directory = file.path.parent
        raise StagingTooSmall(str(directory), needed - has, free_bytes(directory)) from None
