"""Write the shards of a staged snapshot and their part files. Nothing of it counts without a manifest.

A part file says that its shard is durable. So what a drain that died has written already is compared with what is
staged and not written again, and the part files of other nodes can be believed as they are.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import NamedTuple

from surefoot.checkpoint.ids import folder_name
from surefoot.checkpoint.layout import ShardLayout
from surefoot.checkpoint.manifest import ShardPart, checksum, decode_part, encode_part, part_file, shard_file
from surefoot.checkpoint.staged import StagedPart, StagedSnapshot, decode_scalars
from surefoot.checkpoint.store import Store
from surefoot.errors import CheckpointError
from surefoot.faultpoints import reach

_log = logging.getLogger("surefoot.drain")


class WrittenPart(NamedTuple):
    """A part file on storage, as `build_manifest` takes it."""

    data: bytes
    part: ShardPart


class ShardWriter:
    """Writes complete snapshots of one job to its storage. Used by the drain's one thread.

    Args:
        store: The job's storage.
        job: Name of the job.
        keep_reserve: Called before each shard; raises OSError when the disk has no room but for an attempt record.
    """

    def __init__(self, store: Store, job: str, keep_reserve: Callable[[], None]) -> None:
        self._store = store
        self._job = job
        self._keep_reserve = keep_reserve

    def write(self, snapshot: StagedSnapshot) -> list[WrittenPart] | None:
        """Write shard and part file of every rank of this node, one after the other.

        Returns:
            The part files; None when a buffer changed meanwhile or is in use.

        Raises:
            CheckpointError: what is staged is not a checkpoint that could be loaded.
            OSError: storage fails.
        """
        parts = []
        for rank in sorted(snapshot.parts):
            self._keep_reserve()
            part = self._write_part(snapshot, snapshot.parts[rank])
            if part is None:
                _log.warning("%s: the buffer of rank %d changed or is in use", folder_name(snapshot.id), rank)
                return None
            parts.append(part)
        return parts

    def read_others(self, snapshot: StagedSnapshot) -> list[WrittenPart] | None:
        """Return the part files of the ranks of other nodes; None while one of them is missing.

        Raises:
            OSError: storage fails.
        """
        parts = []
        for rank in sorted(set(range(snapshot.world_size)) - set(snapshot.parts)):
            part = self._read_part(snapshot, rank)
            if part is None:
                return None
            parts.append(part)
        return parts

    def _write_part(self, snapshot: StagedSnapshot, staged: StagedPart) -> WrittenPart | None:
        buffer, expected = staged.buffer, staged.header
        folder = folder_name(snapshot.id)
        with buffer.lock_shared() as header:
            if header != expected:
                return None
            shard = buffer.shard[: expected.shard_bytes]
            _check_shard(shard)
            scalars = decode_scalars(buffer.scalars()) if expected.rank == 0 else None
            known = self._read_part(snapshot, expected.rank)
            if known is not None and self._holds(folder, known.part, shard):
                return known
            written = self._store.write(f"{folder}/{shard_file(expected.rank)}", [shard])
            if buffer.header() != expected:
                return None
        reach("drain.shard_written")
        part = ShardPart(
            job=self._job,
            attempt=snapshot.id.attempt,
            step=snapshot.id.step,
            world_size=snapshot.world_size,
            rank=expected.rank,
            plan_digest=snapshot.plan_digest.hex(),
            file=shard_file(expected.rank),
            num_bytes=written.num_bytes,
            xxh3_128=written.xxh3_128,
            scalars=scalars,
        )
        data = encode_part(part)
        self._store.write(f"{folder}/{part_file(expected.rank)}", [data])
        reach("drain.part_written")
        return WrittenPart(data, part)

    def _read_part(self, snapshot: StagedSnapshot, rank: int) -> WrittenPart | None:
        """Return a rank's part of this very snapshot from storage, None where there is none."""
        key = f"{folder_name(snapshot.id)}/{part_file(rank)}"
        try:
            with self._store.read(key) as file:
                data = file.readall()
            part = decode_part(data, key)
        except (FileNotFoundError, CheckpointError):  # a damaged one is written anew by whoever has the shard
            return None
        ours = (self._job, *snapshot.id, snapshot.world_size, rank, snapshot.plan_digest.hex())
        theirs = (part.job, part.attempt, part.step, part.world_size, part.rank, part.plan_digest)
        return WrittenPart(data, part) if ours == theirs else None

    def _holds(self, folder: str, part: ShardPart, shard: memoryview) -> bool:
        """Tell whether storage has the shard already: a drain died after it had written the part file."""
        try:
            with self._store.read(f"{folder}/{part.file}") as file:
                num_bytes = file.seek(0, 2)
        except FileNotFoundError:
            return False
        return num_bytes == part.num_bytes == len(shard) and checksum(shard) == part.xxh3_128


def staged_loss(snapshot: StagedSnapshot) -> float | None:
    """Return the training loss that rank 0 staged; None where it is not here, not known or not finite."""
    part = snapshot.parts.get(0)
    try:
        loss = decode_scalars(part.buffer.scalars()).get("loss") if part is not None else None
    except CheckpointError:
        return None
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None


def _check_shard(shard: memoryview) -> None:
    """Refuse what no safetensors reader would take: committing it would only hide the loss.

    Raises:
        CheckpointError: it is no valid shard.
    """
    try:
        shard_bytes = ShardLayout.parse(shard).shard_bytes
    except ValueError as error:
        raise CheckpointError(f"a shard in staging is not valid: {error}") from None
    if shard_bytes != len(shard):
        raise CheckpointError(f"a shard in staging has {len(shard)} bytes instead of {shard_bytes}")
