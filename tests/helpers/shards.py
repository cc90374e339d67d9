"""Shards in plain memory, made and read by the code that makes and reads those in staging."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.checkpoint.layout import ShardLayout, TensorSpec
from surefoot.checkpoint.manifest import (
    MANIFEST_FILE,
    ShardPart,
    build_manifest,
    encode_manifest,
    encode_part,
    part_file,
    shard_file,
)
from surefoot.checkpoint.store import Store
from surefoot.sdk.shard_plan import list_held, plan_shard
from surefoot.sdk.sharding import local_part, tensor_over
from surefoot.sdk.state import TrainingState
from surefoot.sdk.stored import StoredTensors


@torch.no_grad()
def write_shard(
    tensors: Mapping[str, Tensor], held: Sequence[Sequence[TensorSpec]], aliases: Mapping[str, str], rank: int
) -> bytearray:
    """Return what one rank stores of its tensors, when the ranks hold `held`."""
    layout = plan_shard(held, aliases, rank)
    shard = bytearray(layout.shard_bytes)
    layout.write_header(memoryview(shard))
    for entry in layout.entries:
        view = layout.tensor_view(memoryview(shard), entry.name)
        tensor_over(view, entry).copy_(local_part(tensors[entry.name]))
    return shard


def plain_shards(state: TrainingState, tensors: Mapping[str, Tensor], world_size: int = 1) -> list[bytearray]:
    """Return the shards of a job whose ranks all hold these plain tensors."""
    held = list_held(tensors, state.is_replicated)
    lists = [held.shared] * world_size
    lists[0] = held.shared + held.of_rank_0
    return [write_shard(tensors, lists, state.aliases, rank) for rank in range(world_size)]


def open_shards(shards: Iterable[bytes | bytearray]) -> StoredTensors:
    """Return the checkpoint that shards make."""
    views = [memoryview(shard) for shard in shards]
    return StoredTensors([ShardLayout.parse(view) for view in views], lambda rank: nullcontext(views[rank]))


def commit(
    store: Store, job: str, checkpoint: CheckpointId, shards: Sequence[bytes | bytearray], scalars: dict[str, Any]
) -> None:
    """Write shards to storage as the drain does, with the manifest last."""
    parts = []
    for rank, shard in enumerate(shards):
        written = store.write(f"{folder_name(checkpoint)}/{shard_file(rank)}", [shard])
        part = ShardPart(
            job=job,
            attempt=checkpoint.attempt,
            step=checkpoint.step,
            world_size=len(shards),
            rank=rank,
            plan_digest=ShardLayout.parse(memoryview(shard)).plan_digest.hex(),
            file=shard_file(rank),
            num_bytes=written.num_bytes,
            xxh3_128=written.xxh3_128,
            scalars=scalars if rank == 0 else None,
        )
        parts.append((encode_part(part), part))
        store.write(f"{folder_name(checkpoint)}/{part_file(rank)}", [encode_part(part)])
    store.write(f"{folder_name(checkpoint)}/{MANIFEST_FILE}", [encode_manifest(build_manifest(parts))])
