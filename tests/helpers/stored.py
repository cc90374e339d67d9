"""Committed checkpoints with real tensors in them, as the drain writes them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.checkpoint.layout import DTYPE_BYTES, ShardLayout, TensorSpec
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

Tensors = Mapping[str, tuple[str, bytes]]
"""Name -> (safetensors dtype, data)."""


def f32(*values: float) -> tuple[str, bytes]:
    return "F32", np.asarray(values, dtype="<f4").tobytes()


def store_checkpoint(
    job: Path, checkpoint: CheckpointId, *shards: Tensors, scalars: Mapping[str, Any] | None = None
) -> Path:
    """Commit a checkpoint, one shard per argument; return its folder."""
    store, folder = LocalStore(job), folder_name(checkpoint)
    shards = shards or ({"weight": f32(1.0, 2.0)},)
    digest = hashlib.blake2b(repr(shards).encode(), digest_size=16).digest()
    parts = []
    for rank, tensors in enumerate(shards):
        specs = [TensorSpec(name, kind, (len(data) // DTYPE_BYTES[kind],)) for name, (kind, data) in tensors.items()]
        layout = ShardLayout.build(specs, rank=rank, world_size=len(shards), plan_digest=digest)
        data = b"".join(tensors[entry.name][1] for entry in layout.entries)
        written = store.write(f"{folder}/{shard_file(rank)}", [layout.header, data])
        part = ShardPart(
            job=job.name, attempt=checkpoint.attempt, step=checkpoint.step, world_size=len(shards), rank=rank,
            plan_digest=digest.hex(), file=shard_file(rank), num_bytes=written.num_bytes, xxh3_128=written.xxh3_128,
            scalars=dict(scalars or {"updates": checkpoint.step}) if rank == 0 else None,
        )  # fmt: skip
        store.write(f"{folder}/{part_file(rank)}", [encode_part(part)])
        parts.append((encode_part(part), part))
    store.write(f"{folder}/{MANIFEST_FILE}", [encode_manifest(build_manifest(parts))])
    return job / folder
