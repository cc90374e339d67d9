"""What page 0 to 2 of a staging file say. Pure: bytes in, values out.

Page 0 and 1 hold one header slot each. The other slot is written every time, so a death in the middle of a
write leaves the previous header readable; the slot with the highest sequence and a valid CRC32 is the truth.
Page 2 holds the drained mark: the sequence of the last READY header that the drain is done with.
"""

from __future__ import annotations

import enum
import hashlib
import struct
import zlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from surefoot.checkpoint.ids import CheckpointId

_MAGIC = b"SFSTAGE1"
_SLOT = struct.Struct("<8s Q I I q q I I ? 7x 16s 16s Q Q d")
_MARK = struct.Struct("<8s Q")
_CRC = struct.Struct("<I")
SLOT_BYTES = _SLOT.size + _CRC.size
MARK_BYTES = _MARK.size + _CRC.size


class BufferState(enum.IntEnum):
    """FREE or READY -> FILLING -> READY, or -> FREE when given up. FILLING of a dead rank counts as FREE."""

    FREE = 0
    FILLING = 1
    READY = 2


class BufferHeader(NamedTuple):
    """One header slot.

    Args:
        sequence: Grows by one with every header written to this file; never reused.
        state: See `BufferState`; only a READY buffer has content.
        job_digest: `job_digest` of the staging folder: another job's file, or one of before a reboot, is no
            content.
        attempt: Attempt of the snapshot.
        step: Number of global batches completed in the snapshot.
        world_size: Number of ranks that took part in it.
        rank: The rank whose shard this is.
        persist: Make it durable.
        plan_digest: `layout.plan_digest`; the parts of one snapshot agree in it.
        shard_bytes: Length of the shard.
        scalars_bytes: Length of the scalars.
        saved_monotonic: CLOCK_MONOTONIC seconds when the snapshot was complete.
        local_world_size: Ranks of it whose parts are staged in this folder; those of other nodes are in a folder of
            that node. 0, as headers of older versions have it: all of them.
    """

    sequence: int
    state: BufferState
    job_digest: bytes
    attempt: int
    step: int
    world_size: int
    rank: int
    persist: bool
    plan_digest: bytes
    shard_bytes: int
    scalars_bytes: int
    saved_monotonic: float
    local_world_size: int = 0

    @property
    def num_local_ranks(self) -> int:
        """How many ranks' parts make the snapshot complete as far as this node goes."""
        return self.local_world_size or self.world_size

    @property
    def checkpoint_id(self) -> CheckpointId:
        """The (attempt, step) of the snapshot."""
        return CheckpointId(self.attempt, self.step)


@cache
def job_digest(folder_name: str) -> bytes:
    """Return 16 bytes for a staging folder in this boot of the machine.

    The boot takes part because after a power failure a staging file on a real disk may have its header and
    not its
    payload: writes reach a disk in any order. On tmpfs nothing is left then anyway.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return hashlib.blake2b(folder_name.encode() + b"\0" + boot, digest_size=16).digest()


def pack_slot(header: BufferHeader) -> bytes:
    """Return the bytes of a slot, CRC32 included."""
    body = _SLOT.pack(
        _MAGIC,
        header.sequence,
        header.state,
        header.rank,
        header.attempt,
        header.step,
        header.world_size,
        header.local_world_size,
        header.persist,
        header.job_digest,
        header.plan_digest,
        header.shard_bytes,
        header.scalars_bytes,
        header.saved_monotonic,
    )
    return body + _CRC.pack(zlib.crc32(body))


def unpack_slot(slot: bytes) -> BufferHeader | None:
    """Return the header in a slot, or None where none was ever written completely."""
    body = slot[: _SLOT.size]
    if _CRC.unpack_from(slot, _SLOT.size)[0] != zlib.crc32(body):
        return None
    magic, sequence, state, rank, attempt, step, world_size, local, persist, job, plan, shard, scalars, saved = (
        _SLOT.unpack(body)
    )
    if magic != _MAGIC:
        return None
    return BufferHeader(
        sequence,
        BufferState(state),
        job,
        attempt,
        step,
        world_size,
        rank,
        persist,
        plan,
        shard,
        scalars,
        saved,
        local,
    )


def newest(slots: Iterable[bytes]) -> BufferHeader | None:
    """Return the header with the highest sequence among the valid slots."""
    headers = [header for header in map(unpack_slot, slots) if header is not None]
    return max(headers, key=lambda header: header.sequence, default=None)


def pack_mark(sequence: int) -> bytes:
    """Return the bytes of a drained mark."""
    body = _MARK.pack(_MAGIC, sequence)
    return body + _CRC.pack(zlib.crc32(body))


def unpack_mark(mark: bytes) -> int:
    """Return the sequence of a drained mark; 0, which no header has, where there is none or it is torn."""
    body = mark[: _MARK.size]
    magic, sequence = _MARK.unpack(body)
    valid = magic == _MAGIC and _CRC.unpack_from(mark, _MARK.size)[0] == zlib.crc32(body)
    return sequence if valid else 0
