"""Opening what a state can be loaded from: a snapshot in staging memory, or a committed checkpoint on storage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

import structlog

from surefoot.checkpoint.catalog import (
    new_memory,
    read_layout,
    read_manifest,
    read_part,
    read_shard,
    verify,
    verify_shard,
)
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.layout import ShardLayout
from surefoot.checkpoint.manifest import Manifest
from surefoot.checkpoint.staged import decode_scalars
from surefoot.checkpoint.staging_header import BufferState
from surefoot.errors import CheckpointError, DamagedCheckpoint, UsageError
from surefoot.sdk.host import Host
from surefoot.sdk.stored import StoredTensors

RETRY_DELAYS_SECONDS = (0.1, 0.5)
"""Waits between the tries of a read that fails with an I/O error."""

log = structlog.get_logger(__name__)

_T = TypeVar("_T")


class Opened(NamedTuple):
    """A state that can be loaded.

    Attributes:
        tensors: Read when they are filled into memory.
        scalars: What rank 0 stored beside them.
    """

    tensors: StoredTensors
    scalars: dict[str, Any]


def read_patiently(read: Callable[[], _T]) -> _T:
    """Read from storage, and after an I/O error try again; it says nothing about what is stored.

    Raises:
        OSError: of the last try.
    """
    for delay_seconds in RETRY_DELAYS_SECONDS:
        try:
            return read()
        except OSError as error:
            log.warning("storage cannot be read, trying again", error=str(error), delay_seconds=delay_seconds)
            time.sleep(delay_seconds)
    return read()


@contextmanager
def open_staged(host: Host, checkpoint_id: CheckpointId) -> Iterator[Opened]:
    """Open a staged snapshot; its memory is read as it lies, and locked against refilling meanwhile.

    Raises:
        CheckpointError: it is gone or damaged.
    """
    snapshot = host.folder.scan().get(checkpoint_id)
    if snapshot is None or not snapshot.complete:
        raise CheckpointError("the staged snapshot is gone")
    with ExitStack() as stack:
        shards: list[memoryview] = []
        for rank, part in snapshot.parts.items():
            header = stack.enter_context(part.buffer.lock_shared())
            if header is None or header.state is not BufferState.READY or header.sequence != part.header.sequence:
                raise CheckpointError(f"the staged snapshot of rank {rank} changed while it was opened")
            shards.append(part.buffer.shard[: header.shard_bytes])
        tensors = StoredTensors([_parse(shard) for shard in shards], lambda rank: nullcontext(shards[rank]))
        yield Opened(tensors, complete_scalars(snapshot.parts[0].buffer.scalars()))


@contextmanager
def open_committed(host: Host, checkpoint_id: CheckpointId) -> Iterator[Opened]:
    """Open a committed checkpoint. Shards are read one after the other into the same memory, verified before use.

    Raises:
        DamagedCheckpoint: a file is missing or not as it was written, now or when its tensors are filled.
        CheckpointError: it cannot be used.
        OSError: the disk fails, again and again.
    """
    try:
        yield _open_committed(host, checkpoint_id)
    except (UsageError, CheckpointError) as error:
        if not isinstance(error, DamagedCheckpoint):
            # Where everything lies was read before it was verified, so what seems not to fit may be a flipped bit.
            read_patiently(lambda: verify(host.store, checkpoint_id))
        raise


def _open_committed(host: Host, checkpoint_id: CheckpointId) -> Opened:
    store, job = host.store, host.settings.spec.job
    manifest = read_patiently(lambda: read_manifest(store, checkpoint_id, job))
    ranks = range(manifest.world_size)
    layouts = [read_patiently(partial(read_layout, store, manifest, rank)) for rank in ranks]
    # A checkpoint is whole or it is not: what nobody needs for loading is looked at as well.
    parts = [read_patiently(partial(read_part, store, manifest, rank)) for rank in ranks]
    for rank in (rank for rank in ranks if not layouts[rank].entries):
        read_patiently(partial(verify_shard, store, manifest, rank))
    memory: list[memoryview] = []

    @contextmanager
    def open_shard(rank: int) -> Iterator[memoryview]:
        if not memory:
            memory.append(new_memory(max(manifest.shard(rank).num_bytes for rank in ranks)))
        shard = read_patiently(lambda: read_shard(store, manifest, rank, into=memory[0]))
        if _parse(shard) != layouts[rank]:
            raise CheckpointError(f"the shard of rank {rank} changed while it was read")
        yield shard

    return Opened(StoredTensors(layouts, open_shard), parts[0].scalars or {})


def verify_share(host: Host, manifest: Manifest) -> None:
    """Verify some shards of a checkpoint; when all ranks do, every shard is. Needs no memory.

    The other files are verified by `open_committed`.

    Raises:
        DamagedCheckpoint: a shard is missing or not as it was written.
        OSError: the disk fails, again and again.
    """
    for rank in range(host.group.rank, manifest.world_size, host.group.world_size):
        read_patiently(partial(verify_shard, host.store, manifest, rank))


def complete_scalars(data: bytes) -> dict[str, Any]:
    """Return what rank 0 staged beside its tensors, with all in it that training goes on from.

    Raises:
        CheckpointError: it is damaged, or something is missing.
    """
    scalars = decode_scalars(data)
    if not {"step", "updates", "state"} <= scalars.keys():
        raise CheckpointError("the staged scalars are not complete")
    return scalars


def _parse(shard: memoryview) -> ShardLayout:
    try:
        return ShardLayout.parse(shard)
    except ValueError as error:
        raise CheckpointError(f"a shard cannot be understood: {error}") from None
