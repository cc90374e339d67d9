"""The reading side of committed checkpoints: nothing is used before its size and checksum are found right.

Order and existence come from names and manifests, never from file times. A wrong size or checksum is
`DamagedCheckpoint`; a disk that fails to read is an OSError and says nothing about the checkpoint. Nothing
here changes storage.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from io import RawIOBase
from typing import Any

import xxhash

from surefoot.checkpoint.ids import CheckpointId, folder_name, parse_folder_name
from surefoot.checkpoint.layout import ShardLayout
from surefoot.checkpoint.manifest import (
    MANIFEST_FILE,
    FileEntry,
    Manifest,
    ShardPart,
    decode_manifest,
    decode_part,
)
from surefoot.checkpoint.safetensors_file import read_header
from surefoot.checkpoint.store import PIECE_BYTES, Store
from surefoot.errors import CheckpointError, DamagedCheckpoint


def list_committed(store: Store) -> list[CheckpointId]:
    """Return the checkpoints that exist (their folder holds a manifest), ascending by (attempt, step).

    The content of the manifests is not looked at: a damaged one is still listed and `verify` refuses it.
    """
    named = ((name, parse_folder_name(name)) for name in store.list(""))
    return sorted(i for name, i in named if i is not None and MANIFEST_FILE in store.list(name))


def read_manifest(store: Store, checkpoint_id: CheckpointId, job: str | None = None) -> Manifest:
    """Return the manifest of a checkpoint.

    Args:
        store: The job's storage.
        checkpoint_id: Which checkpoint.
        job: Who must have written it; None: not checked, so that copies under another name can be read.

    Raises:
        DamagedCheckpoint: there is none, it is not as it was written, or it belongs to another checkpoint.
        CheckpointError: it is whole and another job's: nothing that could be quarantined.
        OSError: the disk fails.
    """
    key = f"{folder_name(checkpoint_id)}/{MANIFEST_FILE}"
    with _open(store, key) as file:
        manifest = decode_manifest(file.readall(), _path(store, key))
    if manifest.checkpoint_id != checkpoint_id:
        step, attempt = manifest.step, manifest.attempt
        raise DamagedCheckpoint(_path(store, key), f"is the manifest of step {step} of attempt {attempt}")
    if job not in (None, manifest.job):
        raise CheckpointError(f"{_path(store, key)}: is a checkpoint of job {manifest.job!r} and not of job {job!r}")
    return manifest


def verify(store: Store, checkpoint_id: CheckpointId) -> None:
    """Check every file of a checkpoint: all sizes first (cheap, finds most damage), then checksums.

    Raises:
        DamagedCheckpoint: names the first file that is missing or not as it was written.
        OSError: the disk fails.
    """
    manifest = read_manifest(store, checkpoint_id)
    for entry in manifest.files:
        with _open_sized(store, manifest, entry):
            pass
    piece = memoryview(bytearray(min(PIECE_BYTES, max(entry.num_bytes for entry in manifest.files))))
    for entry in manifest.files:
        _verify_file(store, manifest, entry, piece)


def verify_shard(store: Store, manifest: Manifest, rank: int) -> None:
    """Check a rank's shard.

    Raises:
        DamagedCheckpoint: it is missing or not as it was written.
        OSError: the disk fails.
    """
    _verify_file(store, manifest, manifest.shard(rank), memoryview(bytearray(PIECE_BYTES)))


def _verify_file(store: Store, manifest: Manifest, entry: FileEntry, piece: memoryview) -> None:
    with _open_sized(store, manifest, entry) as file:
        digest = xxhash.xxh3_128()
        for num_bytes in _read_into(file, piece):
            digest.update(piece[:num_bytes])
    _check_digest(store, manifest, entry, digest.hexdigest())


def read_part(store: Store, manifest: Manifest, rank: int) -> ShardPart:
    """Return a rank's part, verified.

    Raises:
        DamagedCheckpoint: it is missing or not as it was written.
        OSError: the disk fails.
    """
    entry = manifest.part(rank)
    with _open_sized(store, manifest, entry) as file:
        data = file.readall()
    digest = xxhash.xxh3_128_hexdigest(data)
    _check_digest(store, manifest, entry, digest)
    return decode_part(data, _path(store, _key(manifest, entry)))


def read_scalars(store: Store, checkpoint_id: CheckpointId) -> dict[str, Any]:
    """Return the state that is not tensors, verified.

    Raises:
        DamagedCheckpoint: manifest or part is missing or not as it was written.
        OSError: the disk fails.
    """
    return read_part(store, read_manifest(store, checkpoint_id), 0).scalars or {}


def read_layout(store: Store, manifest: Manifest, rank: int) -> ShardLayout:
    """Return where the tensors of a rank's shard lie, from its first bytes, whose checksum nobody has looked at.

    Raises:
        DamagedCheckpoint: it is missing or has a wrong size.
        CheckpointError: this is no header of ours; whether it is damaged, `verify_shard` tells.
        OSError: the disk fails.
    """
    entry = manifest.shard(rank)
    with _open_sized(store, manifest, entry) as file:
        try:
            return ShardLayout.parse(read_header(file))
        except ValueError as error:
            raise CheckpointError(f"{_path(store, _key(manifest, entry))}: {error}") from None


def read_shard(store: Store, manifest: Manifest, rank: int, into: memoryview | None = None) -> memoryview:
    """Return the whole of a rank's shard (safetensors header and data), verified.

    What is returned is what was checked: bytes are read once, into memory of our own.

    Args:
        store: The job's storage.
        manifest: From `read_manifest`.
        rank: Whose shard.
        into: Writable memory of at least the shard's size to read into, e.g. a staging buffer. None:
            page-aligned memory that lives as long as the result.

    Raises:
        DamagedCheckpoint: it is missing or not as it was written; `into` then holds rubbish.
        OSError: the disk fails.
    """
    entry = manifest.shard(rank)
    with _open_sized(store, manifest, entry) as file:
        memory = new_memory(entry.num_bytes) if into is None else into.cast("B")
        if len(memory) < entry.num_bytes:
            raise ValueError(f"{len(memory)} bytes cannot hold the shard of {entry.num_bytes} bytes")
        shard = memory[: entry.num_bytes]
        digest = xxhash.xxh3_128()
        start = 0
        while start < len(shard):
            # In pieces, so that they are hashed while they are in the processor's cache.
            num_bytes = file.readinto(shard[start : start + PIECE_BYTES])
            if not num_bytes:
                break
            digest.update(shard[start : start + num_bytes])
            start += num_bytes
    _check_digest(store, manifest, entry, digest.hexdigest())
    return shard


def new_memory(num_bytes: int) -> memoryview:
    """Return page-aligned private memory, zeroed, that lives as long as the result."""
    # Private: shared anonymous memory would count as tmpfs. Not in huge pages: where memory is fragmented, as it is
    # beside checkpoints, the kernel compacts it first, and reading takes up to twice as long (measured).
    return memoryview(mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _key(manifest: Manifest, entry: FileEntry) -> str:
    return f"{folder_name(manifest.checkpoint_id)}/{entry.file}"


def _path(store: Store, key: str) -> str:
    return f"{store}/{key}"


@contextmanager
def _open(store: Store, key: str) -> Iterator[RawIOBase]:
    try:
        file = store.read(key)
    except FileNotFoundError:
        raise DamagedCheckpoint(_path(store, key), "is missing") from None
    with file:
        yield file


@contextmanager
def _open_sized(store: Store, manifest: Manifest, entry: FileEntry) -> Iterator[RawIOBase]:
    key = _key(manifest, entry)
    with _open(store, key) as file:
        num_bytes = file.seek(0, 2)
        if num_bytes != entry.num_bytes:
            raise DamagedCheckpoint(_path(store, key), f"has {num_bytes} bytes instead of {entry.num_bytes}")
        file.seek(0)
        yield file


def _read_into(file: RawIOBase, piece: memoryview) -> Iterator[int]:
    while num_bytes := file.readinto(piece):
        yield num_bytes


def _check_digest(store: Store, manifest: Manifest, entry: FileEntry, digest: str) -> None:
    if digest != entry.xxh3_128:
        path = _path(store, _key(manifest, entry))
        raise DamagedCheckpoint(path, f"has checksum {digest} instead of {entry.xxh3_128}")
