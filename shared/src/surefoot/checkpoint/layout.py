"""Where each tensor of a rank lies in its shard. Pure: data in, data out.

A shard is a valid safetensors file from its first byte on: 8 bytes little-endian header length, a JSON
header, the data without holes (https://huggingface.co/docs/safetensors, "Format"). Here the header is padded
with spaces, so that the data starts at a multiple of 4096 and the whole shard can be written with O_DIRECT
just as it lies in staging. Tensors are ordered by item size, largest first, then by name: each is then
naturally aligned although the format allows no padding between them.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from surefoot.parsing import parse_json

ALIGNMENT_BYTES = 4096
"""Data of a shard starts at a multiple of this: a page, and what O_DIRECT needs."""

DTYPE_BYTES: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes of one item of each dtype, by its safetensors name."""

_LENGTH = struct.Struct("<Q")
_METADATA_KEY = "surefoot"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors reader itself
_CRUMB_BYTES = 16


@dataclass(frozen=True)
class TensorSpec:
    """One tensor, or one rank's part of a tensor, without its place.

    Args:
        name: Its name in the checkpoint.
        dtype: The safetensors name, a key of `DTYPE_BYTES`.
        shape: Of this part; () is a scalar.
        global_shape: Of the whole tensor, when this is only a part of it.
        global_offset: Where the part begins in the whole tensor, in items per dimension.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...] | None = None
    global_offset: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"tensor {self.name}: dtype {self.dtype} is not one of {', '.join(DTYPE_BYTES)}")
        if (self.global_shape is None) != (self.global_offset is None):
            raise ValueError(f"tensor {self.name}: global_shape and global_offset go together")
        if self.name == "__metadata__":
            raise ValueError("a tensor cannot be named __metadata__: safetensors keeps that name for itself")

    @property
    def num_bytes(self) -> int:
        """Bytes of this part."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class TensorEntry(TensorSpec):
    """A tensor with its place: `offset` bytes after the start of the shard's data."""

    offset: int = 0


@dataclass(frozen=True)
class ShardLayout:
    """The places of all tensors of one rank's shard, computed once per attempt; made by `build` or `parse`.

    Args:
        rank: Whose shard this is.
        world_size: Number of shards of the checkpoint.
        plan_digest: `plan_digest` of all ranks' specs: shards with different ones never make one checkpoint.
        entries: In the order of their offsets.
        aliases: Name of each tied tensor -> name under which its data is stored (maybe in another shard).
    """

    rank: int
    world_size: int
    plan_digest: bytes
    entries: tuple[TensorEntry, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        specs: Iterable[TensorSpec],
        *,
        rank: int,
        world_size: int,
        plan_digest: bytes,
        aliases: Mapping[str, str] | None = None,
    ) -> ShardLayout:
        """Lay out the tensors of one rank.

        Raises:
            ValueError: a name occurs twice, or is an alias as well.
        """
        ordered = sorted(specs, key=_order)
        aliases = dict(sorted((aliases or {}).items()))
        names = [spec.name for spec in ordered] + list(aliases)
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"tensor names occur twice: {', '.join(twice)}")
        entries, offset = [], 0
        for spec in ordered:
            entries.append(
                TensorEntry(spec.name, spec.dtype, spec.shape, spec.global_shape, spec.global_offset, offset)
            )
            offset += spec.num_bytes
        return cls(rank, world_size, plan_digest, tuple(entries), aliases)

    @classmethod
    def parse(cls, shard: bytes | memoryview) -> ShardLayout:
        """Read the layout back from the beginning of a shard (more bytes than the header are fine).

        Raises:
            ValueError: this is not the header of a shard written by Surefoot.
        """
        header = _read_json_header(shard)
        try:
            ours = parse_json(header.pop("__metadata__")[_METADATA_KEY])
            parts = ours["parts"]
            entries = [_parse_entry(name, value, parts.get(name)) for name, value in header.items()]
            layout = cls(
                rank=ours["rank"],
                world_size=ours["world_size"],
                plan_digest=bytes.fromhex(ours["plan_digest"]),
                entries=tuple(sorted(entries, key=_order)),
                aliases=ours["aliases"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the header of a Surefoot shard: {error!r}") from None
        _check_contiguous(layout.entries)
        return layout

    @cached_property
    def header(self) -> bytes:
        """The shard's first bytes: length, JSON, spaces up to where the data starts."""
        parts = {
            e.name: [list(e.global_shape), list(e.global_offset)]
            for e in self.entries
            if e.global_shape is not None and e.global_offset is not None
        }
        ours = {
            "aliases": dict(self.aliases),
            "parts": parts,
            "plan_digest": self.plan_digest.hex(),
            "rank": self.rank,
            "world_size": self.world_size,
        }
        content: dict[str, Any] = {"__metadata__": {"format": "pt", _METADATA_KEY: _to_json(ours)}}
        for e in self.entries:
            offsets = [e.offset, e.offset + e.num_bytes]
            content[e.name] = {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": offsets}
        text = _to_json(content).encode()
        padded = text.ljust(_round_up(_LENGTH.size + len(text)) - _LENGTH.size)
        return _LENGTH.pack(len(padded)) + padded

    @property
    def header_bytes(self) -> int:
        """Length of the header: where the data starts, a multiple of 4096."""
        return len(self.header)

    @cached_property
    def data_bytes(self) -> int:
        """Length of the data."""
        return sum(e.num_bytes for e in self.entries)

    @property
    def shard_bytes(self) -> int:
        """Length of the whole shard, header and data."""
        return self.header_bytes + self.data_bytes

    def write_header(self, shard: memoryview) -> None:
        """Copy the header to the beginning of a shard in memory."""
        shard[: self.header_bytes] = self.header

    def tensor_view(self, shard: memoryview, name: str) -> memoryview:
        """Return the bytes of one tensor inside a shard in memory; no copy. An alias gives the stored tensor.

        Args:
            shard: The shard from its first byte on, as long as `shard_bytes` or longer.
            name: A tensor stored in this shard, or an alias of one.

        Raises:
            KeyError: no such tensor in this shard.
        """
        entry = self.by_name[self.aliases.get(name, name)]
        start = self.header_bytes + entry.offset
        return shard[start : start + entry.num_bytes]

    @cached_property
    def by_name(self) -> dict[str, TensorEntry]:
        """The entries by name, without aliases."""
        return {e.name: e for e in self.entries}


def share_out(held: Sequence[Sequence[TensorSpec]]) -> list[list[TensorSpec]]:
    """Decide which rank stores which of the parts that the ranks hold, so that each writes about as many bytes.

    A part that several ranks hold alike is stored once. Greedy: the largest first, each by that one of its holders
    that has the least so far. Deterministic, whatever the order of the lists, so every rank that knows them comes to
    the same answer.

    Args:
        held: For each rank the parts that it could store.

    Returns:
        One list per rank, in rank order.
    """
    holders: dict[TensorSpec, list[int]] = {}
    for rank, specs in enumerate(held):
        for spec in specs:
            if not _is_empty_part(spec):
                holders.setdefault(spec, []).append(rank)
    shares: list[list[TensorSpec]] = [[] for _ in held]
    loads = [0] * len(held)
    for spec in sorted(holders, key=lambda spec: (-spec.num_bytes, spec.name, spec.global_offset or ())):
        # Crumbs (Adam counts the steps of each parameter) go together: scattered, they would make every rank of a
        # sharded job read every shard at a restore.
        may = sorted(holders[spec])[: 1 if spec.num_bytes <= _CRUMB_BYTES else None]
        rank = min(may, key=lambda r: (loads[r], len(shares[r]), r))
        shares[rank].append(spec)
        loads[rank] += spec.num_bytes
    return shares


def plan_digest(specs_by_rank: Sequence[Sequence[TensorSpec]], world_size: int) -> bytes:
    """Return 16 bytes that stand for "who stores what"; equal on all ranks exactly when their plans agree.

    Args:
        specs_by_rank: What each rank stores, in rank order.
        world_size: Number of ranks.
    """
    plan = [
        sorted([s.name, s.dtype, s.shape, s.global_shape or (), s.global_offset or ()] for s in specs)
        for specs in specs_by_rank
    ]
    return hashlib.blake2b(_to_json([world_size, plan]).encode(), digest_size=16).digest()


def _is_empty_part(spec: TensorSpec) -> bool:
    """An uneven sharding leaves some ranks without items; a tensor that has none at all is stored nevertheless."""
    return spec.num_bytes == 0 and math.prod(spec.global_shape or spec.shape) > 0


def _order(spec: TensorSpec) -> tuple[int, str]:
    return -DTYPE_BYTES[spec.dtype], spec.name


def _read_json_header(shard: bytes | memoryview) -> dict[str, Any]:
    if len(shard) < _LENGTH.size:
        raise ValueError("too short for a safetensors header")
    (length,) = _LENGTH.unpack(shard[: _LENGTH.size])
    if not 2 <= length <= min(len(shard) - _LENGTH.size, _MAX_HEADER_BYTES):
        raise ValueError(f"a header of {length} bytes cannot be")
    header = parse_json(bytes(shard[_LENGTH.size : _LENGTH.size + length]))
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    return header


def _parse_entry(name: str, value: dict[str, Any], part: list[list[int]] | None) -> TensorEntry:
    begin, end = value["data_offsets"]
    global_shape, global_offset = (tuple(part[0]), tuple(part[1])) if part else (None, None)
    entry = TensorEntry(name, value["dtype"], tuple(value["shape"]), global_shape, global_offset, begin)
    if end - begin != entry.num_bytes:
        raise ValueError(f"tensor {name}: {end - begin} bytes do not fit its shape and dtype")
    return entry


def _check_contiguous(entries: Iterable[TensorEntry]) -> None:
    offset = 0
    for entry in entries:
        if entry.offset != offset:
            raise ValueError(f"tensor {entry.name}: starts at {entry.offset} instead of {offset}")
        offset += entry.num_bytes


def _to_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=False)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
