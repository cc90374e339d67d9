"""Read a checkpoint once and say whether it is as it was written and all its floating tensors are finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import RawIOBase
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.checkpoint.layout import ShardLayout
from surefoot.checkpoint.manifest import FileEntry, Manifest
from surefoot.checkpoint.safetensors_file import read_header
from surefoot.checkpoint.store import PIECE_BYTES, Store
from surefoot.errors import DamagedCheckpoint


class _Bits(NamedTuple):
    """An item that has all bits of `exponent` set is Inf or NaN (IEEE 754; F8 formats: OCP OFP8)."""

    dtype: str
    exponent: int


_FLOATS = {
    "F64": _Bits("<u8", 0x7FF0_0000_0000_0000),
    "F32": _Bits("<u4", 0x7F80_0000),
    "C64": _Bits("<u4", 0x7F80_0000),  # two F32
    "F16": _Bits("<u2", 0x7C00),
    "BF16": _Bits("<u2", 0x7F80),
    "F8_E5M2": _Bits("u1", 0x7C),
    "F8_E4M3": _Bits("u1", 0x7F),  # has no Inf; NaN alone has exponent and mantissa all ones
}


def find_nonfinite(
    store: Store, manifest: Manifest, checkpoint: CheckpointId, on_piece: Callable[[], None] = lambda: None
) -> str | None:
    """Read all shards of a checkpoint, in memory of one piece (8 MiB) however large they are.

    Args:
        store: The job's storage.
        manifest: Of the checkpoint, from `read_manifest`.
        checkpoint: Which it is.
        on_piece: Called now and then, to show that it goes on.

    Returns:
        The name of the first tensor with a NaN or Inf in it; None: there is none.

    Raises:
        DamagedCheckpoint: a shard is not as it was written.
        OSError: the disk fails.
    """
    bad: str | None = None
    for rank in range(manifest.world_size):
        entry = manifest.shard(rank)
        # To the end even when a bad tensor is found: damage is the graver finding, and may be what made it bad.
        bad = _scan_shard(store, f"{folder_name(checkpoint)}/{entry.file}", entry, on_piece) or bad
    return bad


def _scan_shard(store: Store, key: str, entry: FileEntry, on_piece: Callable[[], None]) -> str | None:
    path = f"{store}/{key}"
    digest = xxhash.xxh3_128()
    bad: str | None = None
    try:
        with store.read(key) as file:
            layout = _read_layout(file, path)
            file.seek(0)
            for name, bits, data in _pieces(file, layout):
                digest.update(data)
                if bad is None and bits is not None and _has_nonfinite(data, bits):
                    bad = name
                on_piece()
            rest = file.read(1)
    except FileNotFoundError:
        raise DamagedCheckpoint(path, "is missing") from None
    if rest or digest.hexdigest() != entry.xxh3_128:
        raise DamagedCheckpoint(path, f"has checksum {digest.hexdigest()} instead of {entry.xxh3_128}")
    return bad


def _read_layout(file: RawIOBase, path: str) -> ShardLayout:
    try:
        return ShardLayout.parse(read_header(file))
    except ValueError as error:
        raise DamagedCheckpoint(path, str(error)) from None


def _pieces(file: RawIOBase, layout: ShardLayout) -> Iterator[tuple[str, _Bits | None, memoryview]]:
    """Yield the file from its beginning, in pieces that lie in one tensor and end between two of its items."""
    memory = memoryview(bytearray(PIECE_BYTES))
    segments: list[tuple[str, _Bits | None, int]] = [("", None, layout.header_bytes)]
    segments += [(entry.name, _FLOATS.get(entry.dtype), entry.num_bytes) for entry in layout.entries]
    for name, bits, num_bytes in segments:
        left = num_bytes
        while left:
            piece = memory[: min(left, PIECE_BYTES)]
            filled = 0
            while filled < len(piece) and (got := file.readinto(piece[filled:])):
                filled += got
            yield name, bits, piece[:filled]
            if filled < len(piece):
                return  # cut short: the checksum will tell
            left -= filled


def _has_nonfinite(data: memoryview, bits: _Bits) -> bool:
    dtype: np.dtype[Any] = np.dtype(bits.dtype)
    whole = len(data) - len(data) % dtype.itemsize
    items: NDArray[Any] = np.frombuffer(data[:whole], dtype)
    exponent = dtype.type(bits.exponent)
    return bool(((items & exponent) == exponent).any())
