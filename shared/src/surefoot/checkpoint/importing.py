"""A checkpoint of any job, from anywhere, as the start of a new job. Torch-free.

The new job gets the state as its own checkpoint of attempt 1, and the record of that attempt: whoever starts the job
goes on from there with everything (weights, optimizer, schedule, data order), exactly as after a restart.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from surefoot.checkpoint.attempts import ATTEMPTS_FOLDER, AttemptLog, AttemptRecord, Source, StartsFrom
from surefoot.checkpoint.catalog import read_manifest, read_part, verify
from surefoot.checkpoint.ids import CheckpointId, folder_name, parse_folder_name
from surefoot.checkpoint.manifest import (
    MANIFEST_FILE,
    FileEntry,
    Manifest,
    build_manifest,
    encode_manifest,
    encode_part,
    part_file,
    shard_file,
)
from surefoot.checkpoint.store import PIECE_BYTES, LocalStore
from surefoot.errors import AttemptError, AttemptTaken, DamagedCheckpoint, UsageError
from surefoot.faultpoints import reach
from surefoot.spec import JOB_NAME_PATTERN

FIRST_ATTEMPT = 1


class Imported(NamedTuple):
    """What a job begins with now.

    Attributes:
        folder: The new checkpoint.
        step: Its step.
        num_bytes: Of its files.
        linked: Its shards are the source's files under a second name: no byte was copied.
        note: What a person should know; "" when everything came along.
    """

    folder: Path
    step: int
    num_bytes: int
    linked: bool
    note: str


def import_checkpoint(source: LocalStore, checkpoint: CheckpointId, target: LocalStore, *, copy: bool) -> Imported:
    """Make a checkpoint the start of a job that has none; durable on return. Any process.

    Interrupted anywhere it leaves a job that was not begun; calling it again finishes.

    Args:
        source: Storage of the job that the checkpoint is of.
        checkpoint: Which one.
        target: Storage of the new job, `<storage>/<job>`.
        copy: Copy the shards also where a hard link would do.

    Raises:
        UsageError: the new job has attempts or checkpoints of its own, or a name that is not allowed.
        DamagedCheckpoint: the checkpoint is not as it was written.
        AttemptTaken: somebody started the job at this moment.
        OSError: a disk fails or is full.
    """
    manifest = read_manifest(source, checkpoint)
    imported = CheckpointId(FIRST_ATTEMPT, manifest.step)
    _check_new(target, imported)
    if target.root.exists() and target.root.samefile(source.root):  # or its only copy would be deleted here
        raise UsageError("JOB", f"{target} is the folder of the checkpoint itself; name a new job")
    target.delete(folder_name(imported))  # what an import that was killed has left
    try:
        linked = _write(source, manifest, target, imported, copy=copy)
    except BaseException:
        with suppress(OSError):  # the first error is the one to report
            target.delete(folder_name(imported))
        raise
    reach("import.committed")
    # Last: a record without its checkpoint would be a job that starts at step 0.
    try:
        note = _claim(source, manifest, target)
    except AttemptTaken:
        target.delete(folder_name(imported))  # or the next restart would take it for one of that attempt's
        raise
    return Imported(target.root / folder_name(imported), manifest.step, manifest.num_bytes, linked, note)


def _write(
    source: LocalStore, manifest: Manifest, target: LocalStore, imported: CheckpointId, *, copy: bool
) -> bool:
    """Write the checkpoint under its new name; return whether its shards were linked."""
    linked = not copy and _can_link(source, target, manifest)
    if linked:  # a link gives no chance to look at the bytes on the way
        verify(source, manifest.checkpoint_id)
    parts = []
    for rank in range(manifest.world_size):
        _take_shard(source, manifest, rank, target, imported, linked=linked)
        part = read_part(source, manifest, rank).model_copy(update={"job": target.root.name, "attempt": FIRST_ATTEMPT})
        data = encode_part(part)
        target.write(f"{folder_name(imported)}/{part_file(rank)}", [data])
        parts.append((data, part))
        reach("import.part_written")
    target.write(f"{folder_name(imported)}/{MANIFEST_FILE}", [encode_manifest(build_manifest(parts))])
    return linked


def _check_new(target: LocalStore, imported: CheckpointId) -> None:
    job = target.root.name
    allowed = "allowed: a job that has neither, i.e. a folder <storage>/<job> that is new"
    if re.fullmatch(JOB_NAME_PATTERN, job) is None:
        raise UsageError("JOB", f"{job!r} is not the name of a job; it must match {JOB_NAME_PATTERN}")
    if target.list(ATTEMPTS_FOLDER):
        raise UsageError("JOB", f"{target} has attempts already; {allowed}")
    others = [name for name in target.list("") if parse_folder_name(name) not in (None, imported)]
    if others:
        raise UsageError("JOB", f"{target} has checkpoints already ({others[0]}); {allowed}")


def _can_link(source: LocalStore, target: LocalStore, manifest: Manifest) -> bool:
    """Return whether files of the source can get a second name in the target: one file system that knows links."""
    probe = f"{folder_name(CheckpointId(FIRST_ATTEMPT, manifest.step))}/link-probe"
    shard = source.root / folder_name(manifest.checkpoint_id) / shard_file(0)
    target.write(probe, [b""])
    path = target.root / probe
    try:
        path.unlink()
        os.link(shard, path)
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def _take_shard(
    source: LocalStore, manifest: Manifest, rank: int, target: LocalStore, imported: CheckpointId, *, linked: bool
) -> None:
    entry = manifest.shard(rank)
    from_key = f"{folder_name(manifest.checkpoint_id)}/{entry.file}"
    to_key = f"{folder_name(imported)}/{entry.file}"
    if linked:
        # Files of a checkpoint are never written again, so two names for one are as good as two files.
        os.link(source.root / from_key, target.root / to_key)
        return
    written = target.write(to_key, _pieces(source, from_key))
    if (written.num_bytes, written.xxh3_128) != (entry.num_bytes, entry.xxh3_128):
        raise DamagedCheckpoint(f"{source}/{from_key}", _difference(entry, written.num_bytes, written.xxh3_128))


def _difference(entry: FileEntry, num_bytes: int, digest: str) -> str:
    if num_bytes != entry.num_bytes:
        return f"has {num_bytes} bytes instead of {entry.num_bytes}"
    return f"has checksum {digest} instead of {entry.xxh3_128}"


def _pieces(store: LocalStore, key: str) -> Iterator[memoryview]:
    memory = memoryview(bytearray(PIECE_BYTES))
    try:
        file = store.read(key)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{store}/{key}", "is missing") from None
    with file:
        while num_bytes := file.readinto(memory):
            yield memory[:num_bytes]


def _claim(source: LocalStore, manifest: Manifest, target: LocalStore) -> str:
    """Write the record of attempt 1, with the control state that the source trained under."""
    record, note = _record_of(source, manifest)
    control = {} if record is None else record.model_dump(
        include={"lr_factor", "lr_hold_steps", "lr_rewarm_steps", "lr_from_step"}
    )  # fmt: skip
    AttemptLog(target).claim(
        after=0,
        starts_from=StartsFrom(attempt=0, step=0, source=Source.SEED),
        **control,
        skip_windows=() if record is None else record.skip_windows,
        cause=f"imported from {source.root.absolute() / folder_name(manifest.checkpoint_id)} of job {manifest.job}",
        world_size=manifest.world_size,
        host=socket.gethostname(),
        started_at=datetime.now(UTC),
    )
    return note


def _record_of(source: LocalStore, manifest: Manifest) -> tuple[AttemptRecord | None, str]:
    """Return the record of the attempt that made the checkpoint: batches it left out must stay left out."""
    with suppress(AttemptError, OSError):
        record = AttemptLog(source).read_all().get(manifest.attempt)
        if record is not None:
            return record, ""
    return None, (
        f"the record of attempt {manifest.attempt} is not beside the checkpoint: if recovery had skipped batches or "
        "changed the learning rate by then, the new job does not know of it"
    )
