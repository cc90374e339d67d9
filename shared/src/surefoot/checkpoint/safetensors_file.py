"""The safetensors format, header only: which tensors a file holds and where. Torch-free, nothing is unpickled.

8 bytes little-endian header length, a JSON header, the data (https://huggingface.co/docs/safetensors, "Format").
`layout` makes and reads our own shards, which are such files with more in their header; this reads anybody's.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from io import RawIOBase
from typing import Any, NamedTuple

from surefoot.checkpoint.layout import DTYPE_BYTES
from surefoot.parsing import parse_json

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors reader itself."""

_LENGTH = struct.Struct("<Q")


class TensorPlace(NamedTuple):
    """One tensor in a file.

    Attributes:
        dtype: Its safetensors name; may be one that `DTYPE_BYTES` does not know.
        shape: () is a scalar.
        start: Where its data begins, in bytes from the beginning of the file.
        num_bytes: Length of its data.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def read_exactly(file: RawIOBase, num_bytes: int) -> bytes:
    """Return so many bytes, fewer only at the end of the file. A raw file may give less at a time."""
    pieces: list[bytes] = []
    while num_bytes > 0 and (piece := file.read(num_bytes)):
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)


def read_header(file: RawIOBase) -> bytes:
    """Return the header with its length field, as it stands at the beginning of the file.

    Raises:
        ValueError: the file is too short, or no safetensors file.
        OSError: the disk fails.
    """
    file_bytes = file.seek(0, 2)
    file.seek(0)
    length_field = read_exactly(file, _LENGTH.size)
    if len(length_field) < _LENGTH.size:
        raise ValueError(f"has {file_bytes} bytes, too few for a safetensors header")
    (length,) = _LENGTH.unpack(length_field)
    if not 2 <= length <= min(file_bytes - _LENGTH.size, MAX_HEADER_BYTES):
        raise ValueError(f"is no safetensors file: a header of {length} bytes cannot be in {file_bytes} bytes")
    return length_field + read_exactly(file, length)


def parse_header(header: bytes, file_bytes: int) -> dict[str, TensorPlace]:
    """Return the tensors by name; `__metadata__` is left out. Pure.

    Args:
        header: From `read_header`.
        file_bytes: Length of the whole file.

    Raises:
        ValueError: the header does not describe a file of that length.
    """
    try:
        content = parse_json(header[_LENGTH.size :])
        content.pop("__metadata__", None)
        places = {name: _place(value, len(header)) for name, value in content.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"is no safetensors file: {error!r}") from None
    end = len(header)
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if place.start != end:
            raise ValueError(f"tensor {name} starts at byte {place.start} instead of {end}")
        end += place.num_bytes
    if end != file_bytes:
        raise ValueError(f"has {file_bytes} bytes instead of {end}")
    return places


def _place(value: dict[str, Any], header_bytes: int) -> TensorPlace:
    begin, end = value["data_offsets"]
    place = TensorPlace(value["dtype"], tuple(value["shape"]), header_bytes + begin, end - begin)
    if min((begin, place.num_bytes, *place.shape)) < 0:
        raise ValueError("a negative size")
    item_bytes = DTYPE_BYTES.get(place.dtype)
    if item_bytes is not None and math.prod(place.shape) * item_bytes != place.num_bytes:
        raise ValueError(f"{place.num_bytes} bytes do not fit shape {list(place.shape)} of {place.dtype}")
    return place


def build_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, TensorPlace]]:
    """Return the header of a file with these tensors, and where each goes. Pure.

    Args:
        tensors: (dtype, shape) by name. They are laid out by item size, largest first, then by name, so that each is
            aligned; the header is padded with spaces to a multiple of 8 bytes, as safetensors itself does.
    """
    ordered = sorted(tensors, key=lambda name: (-DTYPE_BYTES[tensors[name][0]], name))
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in ordered:
        dtype, shape = tensors[name]
        num_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    text = json.dumps(content, separators=(",", ":")).encode()
    padded = text.ljust(-(-len(text) // 8) * 8)
    header = _LENGTH.pack(len(padded)) + padded
    return header, parse_header(header, len(header) + offset)
