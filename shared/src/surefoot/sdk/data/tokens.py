"""A memory-mapped file of tokens as a dataset of fixed windows.

File: a 64-byte header (little-endian: 8 bytes magic, uint32 version, uint32 bytes per token, uint64 number of
tokens, zeros), then the tokens as little-endian uint16 or uint32.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from surefoot.checkpoint.store import sync_folder
from surefoot.errors import UsageError

HEADER_BYTES = 64
_MAGIC = b"SFTOKENS"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQ")
_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


class TokenFile(Dataset[dict[str, torch.Tensor]]):
    """Non-overlapping windows of a token file; sample i is tokens [i*L, (i+1)*L).

    `labels` are `input_ids`: Hugging Face's causal models shift them inside. Picklable, usable after a fork:
    the file is mapped on the first access. A rest shorter than a window is left out.

    Args:
        path: File made by `write_tokens`.
        sequence_length: Tokens per sample, L.

    Raises:
        UsageError: no such file, not a token file, or shorter than its header says.
    """

    def __init__(self, path: Path, sequence_length: int) -> None:
        if sequence_length < 1:
            raise UsageError("sequence_length", f"must be at least 1 (got {sequence_length})")
        self.path = Path(path)
        self.tokens_per_sample = sequence_length
        self._dtype, self.num_tokens = _read_header(self.path)
        self._tokens: npt.NDArray[Any] | None = None

    def __len__(self) -> int:
        return self.num_tokens // self.tokens_per_sample

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return {"input_ids", "labels"}, both the same int64 tensor of shape [sequence_length]."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        if self._tokens is None:
            shape = (self.num_tokens,)
            self._tokens = np.memmap(self.path, self._dtype, mode="r", offset=HEADER_BYTES, shape=shape)
        start = index * self.tokens_per_sample
        window = self._tokens[start : start + self.tokens_per_sample].astype(np.int64)
        input_ids = torch.from_numpy(window)
        return {"input_ids": input_ids, "labels": input_ids}

    def __getstate__(self) -> dict[str, Any]:
        # A mapping would be pickled as a copy of the whole file.
        return self.__dict__ | {"_tokens": None}


def write_tokens(path: Path, arrays: Iterable[npt.NDArray[Any]], *, bytes_per_token: int = 2) -> int:
    """Write a token file: all of it or nothing appears at `path`, also when this process is killed.

    Args:
        path: The file; replaced when it exists.
        arrays: One-dimensional integer arrays, written one after the other as they come.
        bytes_per_token: 2 (tokens below 65,536) or 4.

    Returns:
        The number of tokens.

    Raises:
        ValueError: a token does not fit.
        OSError: the file system refuses it.
    """
    dtype = _DTYPES[bytes_per_token]
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    num_tokens = 0
    try:
        with temporary.open("wb") as file:
            file.write(bytes(HEADER_BYTES))
            for array in arrays:
                if array.size and not 0 <= array.min() <= array.max() <= np.iinfo(dtype).max:
                    raise ValueError(f"token {array.max()} does not fit into {bytes_per_token} bytes")
                file.write(array.astype(dtype).tobytes())
                num_tokens += array.size
            file.seek(0)
            file.write(_HEADER.pack(_MAGIC, _VERSION, bytes_per_token, num_tokens))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return num_tokens


def _read_header(path: Path) -> tuple[np.dtype[Any], int]:
    try:
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
            num_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UsageError(str(path), f"cannot be read as a token file: {error.strerror}") from None
    if not header.startswith(_MAGIC):
        raise UsageError(str(path), "is not a token file (wrong magic bytes)")
    if len(header) < HEADER_BYTES:
        raise UsageError(str(path), f"is a truncated token file of {num_bytes} bytes")
    _, version, bytes_per_token, num_tokens = _HEADER.unpack_from(header)
    if version != _VERSION or bytes_per_token not in _DTYPES:
        raise UsageError(
            str(path),
            f"is a token file of version {version} with {bytes_per_token}-byte tokens; not known here",
        )
    expected_bytes = HEADER_BYTES + num_tokens * bytes_per_token
    if num_bytes != expected_bytes:
        raise UsageError(
            str(path),
            f"has {num_bytes} bytes, but its header says {expected_bytes}; it was truncated or damaged",
        )
    return _DTYPES[bytes_per_token], num_tokens
