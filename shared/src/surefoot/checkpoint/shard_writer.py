"""Write the shards of a staged snapshot and their part files. Nothing of it counts without a manifest."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from surefoot.checkpoint.ids import folder_name
from surefoot.checkpoint.layout import ShardLayout
from surefoot.checkpoint.manifest import ShardPart, encode_part, part_file, shard_file
from surefoot.checkpoint.staged import StagedPart, StagedSnapshot
from surefoot.checkpoint.store import Store
from surefoot.errors import CheckpointError
from surefoot.faultpoints import reach

_log = logging.getLogger("surefoot.drain")


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

    def write(self, snapshot: StagedSnapshot) -> list[tuple[bytes, ShardPart]] | None:
        """Write shard and part file of every rank, one after the other.

        Returns:
            The part files with their content; None when a buffer changed meanwhile or is in use.

        Raises:
            CheckpointError: what is staged is not a checkpoint that could be loaded.
            OSError: storage fails.
        """
        parts = []
        for rank in sorted(snapshot.parts):
            self._keep_reserve()
            part = self._write_shard(snapshot, snapshot.parts[rank])
            if part is None:
                _log.warning("%s: the buffer of rank %d changed or is in use", folder_name(snapshot.id), rank)
                return None
            reach("drain.shard_written")
            data = encode_part(part)
            self._store.write(f"{folder_name(snapshot.id)}/{part_file(rank)}", [data])
            reach("drain.part_written")
            parts.append((data, part))
        return parts

    def _write_shard(self, snapshot: StagedSnapshot, staged: StagedPart) -> ShardPart | None:
        buffer, expected = staged.buffer, staged.header
        file = shard_file(expected.rank)
        with buffer.lock_shared() as header:
            if header != expected:
                return None
            shard = buffer.shard[: expected.shard_bytes]
            _check_shard(shard)
            scalars = _decode_scalars(buffer.scalars()) if expected.rank == 0 else None
            written = self._store.write(f"{folder_name(snapshot.id)}/{file}", [shard])
            if buffer.header() != expected:
                return None
        return ShardPart(
            job=self._job,
            attempt=snapshot.id.attempt,
            step=snapshot.id.step,
            world_size=snapshot.world_size,
            rank=expected.rank,
            plan_digest=snapshot.plan_digest.hex(),
            file=file,
            num_bytes=written.num_bytes,
            xxh3_128=written.xxh3_128,
            scalars=scalars,
        )


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


def _decode_scalars(data: bytes) -> dict[str, Any]:
    try:
        scalars = json.loads(data)
    except ValueError as error:
        raise CheckpointError(f"the scalars in staging are not JSON: {error}") from None
    if not isinstance(scalars, dict):
        raise CheckpointError("the scalars in staging are not a JSON object")
    return scalars
