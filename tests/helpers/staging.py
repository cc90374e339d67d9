"""Ranks that save, without torch: shards of random bytes with a valid layout, in real staging files."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from surefoot.checkpoint.attempts import AttemptLog, AttemptRecord, Source, StartsFrom
from surefoot.checkpoint.catalog import read_manifest, read_shard
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.layout import ShardLayout, TensorSpec, plan_digest, share_out
from surefoot.checkpoint.staging import choose_buffer
from surefoot.checkpoint.staging_folder import StagingFolder
from surefoot.checkpoint.store import Store

SPECS = [TensorSpec(f"layer{i}.weight", "F32", (257, 31 + i)) for i in range(4)] + [
    TensorSpec("embedding", "BF16", (129, 16)),
    TensorSpec("step", "I64", ()),
    TensorSpec("mask", "BOOL", (3,)),
]


def claim(store: Store, after: int, attempt: int = 0, step: int = 0) -> AttemptRecord:
    """Claim attempt `after + 1`, starting from (attempt, step)."""
    source = Source.STAGED if attempt else Source.SEED
    return AttemptLog(store).claim(
        after=after,
        starts_from=StartsFrom(attempt=attempt, step=step, source=source),
        cause="test",
        world_size=2,
        host="test",
        started_at=datetime.now(UTC),
    )


class Ranks:
    """The ranks of one attempt, all in this process. Without a folder they only know what they would save.

    Args:
        folder: The staging folder of a node.
        attempt: Of all that they stage.
        world_size: Number of ranks.
        num_buffers: Of each rank.
        here: The ranks of this node; None: all.
    """

    def __init__(
        self,
        folder: StagingFolder | None,
        attempt: int,
        world_size: int = 2,
        num_buffers: int = 3,
        here: Sequence[int] | None = None,
    ) -> None:
        self.attempt = attempt
        self.world_size = world_size
        self.here = range(world_size) if here is None else here
        shares = share_out([SPECS] * world_size)
        self.digest = plan_digest(shares, world_size)
        self.layouts = [
            ShardLayout.build(share, rank=rank, world_size=world_size, plan_digest=self.digest)
            for rank, share in enumerate(shares)
        ]
        self.buffers = [
            folder.create_buffers(rank, num_buffers, max(layout.shard_bytes for layout in self.layouts))
            if rank in self.here
            else []
            for rank in range(world_size if folder is not None else 0)
        ]

    def shard(self, rank: int, step: int) -> bytes:
        """Return the shard of a rank: the same for the same attempt and step, different for others."""
        layout = self.layouts[rank]
        source = random.Random(f"{self.attempt}-{step}-{rank}")
        return layout.header + source.randbytes(layout.data_bytes)

    def scalars(self, step: int) -> dict[str, object]:
        return {"step": step, "attempt": self.attempt, "loss": float("inf")}

    def begin(self, rank: int, step: int, *, persist: bool = False, keep=(), on_lineage=lambda _: True):
        """Begin to fill a buffer; None when there is no free one."""
        buffer = choose_buffer(self.buffers[rank], set(keep), on_lineage)
        if buffer is not None:
            assert buffer.begin_fill(
                CheckpointId(self.attempt, step),
                world_size=self.world_size,
                rank=rank,
                plan_digest=self.digest,
                persist=persist,
                local_world_size=len(self.here),
            )
        return buffer

    def save(self, step: int, *, persist: bool = False, ranks=None, keep=(), on_lineage=lambda _: True) -> bool:
        """Take a snapshot on all ranks, or some; False when a rank had no free buffer."""
        taken = True
        for rank in self.here if ranks is None else ranks:
            buffer = self.begin(rank, step, persist=persist, keep=keep, on_lineage=on_lineage)
            if buffer is None:
                taken = False
                continue
            shard = self.shard(rank, step)
            buffer.shard[: len(shard)] = shard
            buffer.write_scalars(json.dumps(self.scalars(step)).encode() if rank == 0 else b"")
            buffer.commit(len(shard))
        return taken

    def check_committed(self, store: Store, step: int) -> None:
        """Assert that storage holds exactly this attempt's snapshot of a step, bit for bit."""
        manifest = read_manifest(store, CheckpointId(self.attempt, step))
        assert manifest.world_size == self.world_size
        for rank in range(self.world_size):
            assert read_shard(store, manifest, rank) == self.shard(rank, step)


def storage_files(root: Path) -> list[str]:
    """Return all files below a folder, temporary ones too."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
