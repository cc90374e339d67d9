"""Committed checkpoints with real tensors, whole or in parts, for tests of what reads them without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.checkpoint.layout import ShardLayout, TensorSpec, plan_digest
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

DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "uint8": "U8", "bool": "BOOL"}


class Part(NamedTuple):
    """What one rank stores of a tensor; `offset` None: it is all of it."""

    name: str
    values: np.ndarray[Any, Any]
    global_shape: tuple[int, ...] | None = None
    offset: tuple[int, ...] | None = None
    dtype: str = ""

    @property
    def spec(self) -> TensorSpec:
        dtype = self.dtype or DTYPES[str(self.values.dtype)]
        return TensorSpec(self.name, dtype, self.values.shape, self.global_shape, self.offset)


def part_of(name: str, whole: np.ndarray[Any, Any], index: tuple[slice, ...]) -> Part:
    """The region `index` of a tensor; every slice has a start."""
    values = np.ascontiguousarray(whole[index])
    return Part(name, values, whole.shape, tuple(s.start for s in index))


def commit_model(
    job: Path,
    checkpoint: CheckpointId,
    ranks: Sequence[Sequence[Part]],
    *,
    aliases: Mapping[str, str] | None = None,
    scalars: Mapping[str, Any] | None = None,
) -> Path:
    """Write a committed checkpoint of these parts, as a drain does; return its folder."""
    specs = [[part.spec for part in parts] for parts in ranks]
    digest = plan_digest(specs, len(ranks))
    shards = []
    for rank, parts in enumerate(ranks):
        layout = ShardLayout.build(specs[rank], rank=rank, world_size=len(ranks), plan_digest=digest, aliases=aliases)
        shard = memoryview(bytearray(layout.shard_bytes))
        layout.write_header(shard)
        for part in parts:
            layout.tensor_view(shard, part.name)[:] = part.values.tobytes()
        shards.append(shard)
    return commit_shards(job, checkpoint, shards, scalars or {})


def commit_shards(
    job: Path, checkpoint: CheckpointId, shards: Sequence[bytes | bytearray | memoryview], scalars: Mapping[str, Any]
) -> Path:
    """Write a committed checkpoint of these shards; return its folder."""
    store, folder, files = LocalStore(job), folder_name(checkpoint), []
    document = {"step": checkpoint.step, "updates": checkpoint.step, "state": {}} | dict(scalars)
    for rank, shard in enumerate(shards):
        written = store.write(f"{folder}/{shard_file(rank)}", [memoryview(shard)])
        described = ShardPart(
            job=job.name, attempt=checkpoint.attempt, step=checkpoint.step, world_size=len(shards), rank=rank,
            plan_digest=ShardLayout.parse(memoryview(shard)).plan_digest.hex(), file=shard_file(rank),
            num_bytes=written.num_bytes, xxh3_128=written.xxh3_128, scalars=document if rank == 0 else None,
        )  # fmt: skip
        store.write(f"{folder}/{part_file(rank)}", [encode_part(described)])
        files.append((encode_part(described), described))
    store.write(f"{folder}/{MANIFEST_FILE}", [encode_manifest(build_manifest(files))])
    return job / folder
