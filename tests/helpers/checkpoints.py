"""Committed checkpoints for tests that only read them."""

from __future__ import annotations

from pathlib import Path

from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.checkpoint.manifest import (
    MANIFEST_FILE,
    ShardPart,
    build_manifest,
    encode_manifest,
    encode_part,
    part_file,
    shard_file,
)
from surefoot.checkpoint.store import LocalStore


def commit(job: Path, checkpoint_id: CheckpointId, world_size: int = 2) -> Path:
    """Write a committed checkpoint as the drain does; return its folder. The shards hold no tensors."""
    store, folder, parts = LocalStore(job), folder_name(checkpoint_id), []
    for rank in range(world_size):
        written = store.write(f"{folder}/{shard_file(rank)}", [f"weights of {rank}".encode() * 100])
        part = ShardPart(
            job=job.name, attempt=checkpoint_id.attempt, step=checkpoint_id.step, world_size=world_size, rank=rank,
            plan_digest="ab" * 16, file=shard_file(rank), num_bytes=written.num_bytes, xxh3_128=written.xxh3_128,
            scalars={"updates": checkpoint_id.step} if rank == 0 else None,
        )  # fmt: skip
        store.write(f"{folder}/{part_file(rank)}", [encode_part(part)])
        parts.append((encode_part(part), part))
    store.write(f"{folder}/{MANIFEST_FILE}", [encode_manifest(build_manifest(parts))])
    return job / folder
