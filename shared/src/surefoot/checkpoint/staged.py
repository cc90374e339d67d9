"""Snapshots as they lie in staging: the parts of all ranks put together. Reads no tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.staging import StagingBuffer
from surefoot.checkpoint.staging_header import BufferHeader
from surefoot.errors import CheckpointError
from surefoot.parsing import parse_json


class StagedPart(NamedTuple):
    """One rank's READY buffer, with the header as it was when scanned."""

    buffer: StagingBuffer
    header: BufferHeader
    drained: bool


@dataclass(frozen=True)
class StagedSnapshot:
    """What is staged of one (attempt, step).

    Args:
        id: Attempt and step.
        world_size: Number of ranks that took part.
        num_local_ranks: Number of them on this node.
        plan_digest: The plan that all `parts` have in common.
        parts: By rank; this node's only.
    """

    id: CheckpointId
    world_size: int
    num_local_ranks: int
    plan_digest: bytes
    parts: dict[int, StagedPart]

    @property
    def complete(self) -> bool:
        """Every rank's part is here: one can restore from it."""
        return len(self.parts) == self.world_size

    @property
    def complete_here(self) -> bool:
        """The part of every rank of this node is here: all that this node's drain can write of it."""
        return len(self.parts) == self.num_local_ranks

    @property
    def persist(self) -> bool:
        """Some rank wants it durable (all ranks agree unless one died in between)."""
        return any(part.header.persist for part in self.parts.values())

    @property
    def drained(self) -> bool:
        """Nothing is left to do for it."""
        return all(part.drained for part in self.parts.values())


def group_parts(parts: Iterable[StagedPart]) -> dict[CheckpointId, StagedSnapshot]:
    """Put the parts of each snapshot together. Pure.

    Parts of one id that disagree about plan or number of ranks never mix: the group that is complete, else the
    larger one, stands for the id. Of two buffers of one rank with the same snapshot, the one to persist is
    taken, then the newer.
    """
    groups: dict[tuple[CheckpointId, int, int, bytes], dict[int, StagedPart]] = {}
    for part in sorted(parts, key=lambda part: (part.header.persist, part.header.saved_monotonic)):
        header = part.header
        if header.rank < header.world_size:
            key = (header.checkpoint_id, header.world_size, header.num_local_ranks, header.plan_digest)
            groups.setdefault(key, {})[header.rank] = part
    found: dict[CheckpointId, StagedSnapshot] = {}
    for (checkpoint, world_size, num_local, digest), by_rank in sorted(groups.items(), key=lambda item: item[0]):
        snapshot = StagedSnapshot(checkpoint, world_size, num_local, digest, dict(sorted(by_rank.items())))
        other = found.get(checkpoint)
        if other is None or (snapshot.complete_here, len(by_rank)) > (other.complete_here, len(other.parts)):
            found[checkpoint] = snapshot
    return found


def decode_scalars(data: bytes) -> dict[str, Any]:
    """Return the document that rank 0 staged beside its tensors; `data` is `StagingBuffer.scalars`.

    Raises:
        CheckpointError: it is not a JSON object.
    """
    try:
        scalars = parse_json(data)
    except ValueError as error:  # not UTF-8, or not JSON
        raise CheckpointError(f"the staged scalars are not JSON: {error}") from None
    if not isinstance(scalars, dict):
        raise CheckpointError("the staged scalars are not a JSON object")
    return scalars
