"""Which part of which shard holds a region of a tensor. Pure: layouts in, boxes out; torch-free.

A tensor lies in one shard as a whole, or in several as parts. Whoever loads it may want it whole, or another part of
it (a different number of ranks, another way of sharding): what it wants is a box of the whole tensor, and so is what
is stored; it copies where the two overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from surefoot.checkpoint.layout import ShardLayout, TensorEntry, TensorSpec
from surefoot.checkpoint.placement import find_gap
from surefoot.errors import CheckpointError


@dataclass(frozen=True)
class Box:
    """A box-shaped region of a tensor, in items per dimension; without dimensions it is the one item of a scalar."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the region that is all of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def of(cls, spec: TensorSpec) -> Box:
        """Return the region that a stored part is."""
        return cls.whole(spec.shape) if spec.global_offset is None else cls(spec.global_offset, spec.shape)

    @property
    def num_items(self) -> int:
        """Number of items in it."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Return what two regions of one tensor have in common; None when that is nothing."""
        starts = [max(ours, theirs) for ours, theirs in zip(self.offset, other.offset, strict=True)]
        stops = [min(ours, theirs) for ours, theirs in zip(self._stops(), other._stops(), strict=True)]
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return None
        return Box(tuple(starts), tuple(stop - start for start, stop in zip(starts, stops, strict=True)))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the index of this region in memory that holds all of `outer`, which contains it."""
        starts = [ours - theirs for ours, theirs in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + length) for start, length in zip(starts, self.shape, strict=True))

    def _stops(self) -> list[int]:
        return [start + length for start, length in zip(self.offset, self.shape, strict=True)]


class StoredPart(NamedTuple):
    """A part of a tensor in the shard of a rank."""

    rank: int
    entry: TensorEntry
    box: Box


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, wherever its parts lie.

    Args:
        name: Under which it is stored; an alias leads here.
        dtype: A key of `layout.DTYPE_BYTES`.
        shape: Of the whole tensor.
        parts: In rank order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]

    def pieces(self, box: Box) -> list[tuple[StoredPart, Box]]:
        """Return the parts that a region is made of, each with what of the region lies in it."""
        if [part.box for part in self.parts] == [box]:  # as a rule, and there are hundreds of tensors
            return [(self.parts[0], box)] if box.num_items else []
        return [(part, common) for part in self.parts if (common := part.box.intersect(box)) is not None]


def merge_layouts(layouts: Iterable[ShardLayout]) -> dict[str, StoredTensor]:
    """Return all tensors of a checkpoint by name, aliases included.

    Args:
        layouts: Of all its shards.

    Raises:
        CheckpointError: the parts of a tensor do not make it up exactly, or an alias leads nowhere.
    """
    parts: dict[str, list[StoredPart]] = {}
    aliases: dict[str, str] = {}
    for layout in layouts:
        aliases |= layout.aliases
        for entry in layout.entries:
            parts.setdefault(entry.name, []).append(StoredPart(layout.rank, entry, Box.of(entry)))
    tensors = {name: _merge(name, found) for name, found in parts.items()}
    lost = sorted(stored for stored in aliases.values() if stored not in tensors)
    if lost:
        raise CheckpointError(f"the tensors that others are tied to are in no shard: {', '.join(lost)}")
    return tensors | {name: tensors[stored] for name, stored in aliases.items()}


def _merge(name: str, parts: list[StoredPart]) -> StoredTensor:
    kinds = {(part.entry.dtype, part.entry.global_shape or part.entry.shape) for part in parts}
    if len(kinds) > 1:
        raise CheckpointError(f"parts of {name} do not fit together: {sorted(kinds)}")
    dtype, shape = kinds.pop()
    if [part.box for part in parts] == [Box.whole(shape)]:
        return StoredTensor(name, dtype, shape, tuple(parts))
    gap = find_gap(shape, [(part.box.offset, part.box.shape) for part in parts])
    if gap is not None:
        raise CheckpointError(f"{name} is not whole: {gap}")
    return StoredTensor(name, dtype, shape, tuple(sorted(parts, key=lambda part: part.rank)))
