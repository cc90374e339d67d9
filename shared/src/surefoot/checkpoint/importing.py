"""A checkpoint of any job, from anywhere, as the start of a new job. Torch-free.

The new job gets the state as its own checkpoint of attempt 1, and the record of that attempt: whoever starts the job
goes on from there with everything (weights, optimizer, schedule, data order), exactly as after a restart.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from surefoot.checkpoint.attempts import (
    ATTEMPTS_FOLDER,
    IMPORT_CAUSE_PREFIX,
    AttemptLog,
    AttemptRecord,
    Source,
    StartsFrom,
)
from surefoot.checkpoint.catalog import read_manifest, read_part, verify
from surefoot.checkpoint.export_files import new_folder
from surefoot.checkpoint.ids import CheckpointId, folder_name
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
from surefoot.checkpoint.staging_folder import staging_folder_path
from surefoot.checkpoint.store import PIECE_BYTES, LocalStore, sync_folder
from surefoot.errors import AttemptError, DamagedCheckpoint, UsageError
from surefoot.faultpoints import reach
from surefoot.spec import JOB_NAME_PATTERN

FIRST_ATTEMPT = 1
DEFAULT_STAGING_DIR = Path("/dev/shm")  # noqa: S108  where snapshots are unless a spec says otherwise

_ALLOWED = "allowed: a job that has neither, i.e. a folder <storage>/<job> that is new"


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


def import_checkpoint(
    source: LocalStore,
    checkpoint: CheckpointId,
    target: LocalStore,
    *,
    copy: bool,
    staging_dir: Path = DEFAULT_STAGING_DIR,
) -> Imported:
    """Make a checkpoint the start of a job that has none; durable on return. Any process.

    Of several at once for one job at most one succeeds. Interrupted before the attempt is claimed it leaves a job that
    was not begun; between claim and checkpoint a job that refuses to start. Calling it again finishes either.

    Args:
        source: Storage of the job that the checkpoint is of.
        checkpoint: Which one.
        target: Storage of the new job, `<storage>/<job>`.
        copy: Copy the shards also where a hard link would do.
        staging_dir: `checkpoint.staging_dir` of the new job's spec.

    Raises:
        UsageError: the new job has attempts, checkpoints or snapshots of its own, or a name that is not allowed, or
            another import into it is under way.
        DamagedCheckpoint: the checkpoint is not as it was written.
        AttemptTaken: somebody started the job at this moment.
        OSError: a disk fails or is full.
    """
    manifest = read_manifest(source, checkpoint)
    imported = CheckpointId(FIRST_ATTEMPT, manifest.step)
    folder = target.root / folder_name(imported)
    cause = f"{IMPORT_CAUSE_PREFIX}{source.root.resolve() / folder_name(checkpoint)} of job {manifest.job}"
    _check_name(target)
    with _lock(target):
        is_claimed = _is_claimed(target, cause)
        _check_new(source, target)
        _check_no_snapshots(target, staging_dir)
        record, note = _record_of(source, manifest)
        # Under a private name until the claim: only whose attempt it is may put a checkpoint on its lineage.
        with new_folder(folder) as temporary:
            linked = _write(source, manifest, LocalStore(temporary), target.root.name, copy=copy)
            reach("import.copied")
            if not is_claimed:
                _claim(target, manifest, record, cause)
            # Killed here the record stands alone; its cause keeps a start from beginning at step 0.
            reach("import.claimed")
    return Imported(folder, manifest.step, manifest.num_bytes, linked, note)


def _write(source: LocalStore, manifest: Manifest, target: LocalStore, job: str, *, copy: bool) -> bool:
    """Write the checkpoint of a job into a folder; return whether its shards were linked."""
    linked = not copy and _can_link(source, target, manifest)
    if linked:  # a link gives no chance to look at the bytes on the way
        verify(source, manifest.checkpoint_id)
    parts = []
    for rank in range(manifest.world_size):
        _take_shard(source, manifest, rank, target, linked=linked)
        part = read_part(source, manifest, rank).model_copy(update={"job": job, "attempt": FIRST_ATTEMPT})
        data = encode_part(part)
        target.write(part_file(rank), [data])
        parts.append((data, part))
        reach("import.part_written")
    target.write(MANIFEST_FILE, [encode_manifest(build_manifest(parts))])
    return linked


def _check_name(target: LocalStore) -> None:
    job = target.root.name
    if re.fullmatch(JOB_NAME_PATTERN, job) is None:
        raise UsageError("JOB", f"{job!r} is not the name of a job; it must match {JOB_NAME_PATTERN}")


@contextmanager
def _lock(target: LocalStore) -> Iterator[None]:
    """Keep other imports out of the job's folder, which is made; a killed process gives the lock back.

    Raises:
        UsageError: another import has it, or there is a file of that name.
    """
    try:
        made = [path for path in (target.root, *target.root.parents) if not path.exists()]
        target.root.mkdir(parents=True, exist_ok=True)
        for path in made:
            sync_folder(path.parent)
    except (FileExistsError, NotADirectoryError):
        raise UsageError("JOB", f"{target} is not a folder; {_ALLOWED}") from None
    fd = os.open(target.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Where folders cannot be locked (NFS) the claim alone decides which import wins.
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(fd)
            problem = f"another import into {target} is under way; wait for it, or name another job"
            raise UsageError("JOB", problem) from None
    try:
        yield
    finally:
        os.close(fd)


def _is_claimed(target: LocalStore, cause: str) -> bool:
    """Return whether the same import was killed after its claim, so that only the checkpoint is missing.

    Raises:
        UsageError: the job has other attempts, or has begun.
    """
    if not target.list(ATTEMPTS_FOLDER):
        return False
    records = AttemptLog(target).read_all()
    if list(records) != [FIRST_ATTEMPT] or records[FIRST_ATTEMPT].cause != cause:
        raise UsageError("JOB", f"{target} has attempts already; {_ALLOWED}")
    return True


def _check_new(source: LocalStore, target: LocalStore) -> None:
    if target.root.samefile(source.root):
        raise UsageError("JOB", f"{target} is the folder of the checkpoint itself; name a new job")
    # In quarantine/ and trash/ too: with any of them the claim would not be of attempt 1.
    for key in AttemptLog(target).folders():
        raise UsageError("JOB", f"{target} has checkpoints already ({key}); {_ALLOWED}")


def _check_no_snapshots(target: LocalStore, staging_dir: Path) -> None:
    """Refuse a name whose last job left snapshots in memory: a start would take them for newer than the checkpoint."""
    storage = target.root.absolute().parent
    # The folder's name depends on how the storage is written.
    for spelling in dict.fromkeys((storage, Path(os.path.normpath(storage)), storage.resolve())):
        staging = staging_folder_path(staging_dir, target.root.name, spelling)
        if any(staging.glob("rank-*-buffer-*.stage")):
            raise UsageError(
                "JOB",
                f"{staging} holds snapshots of an earlier job {target.root.name} of this storage, which its start "
                f"would go on from instead; stop that job if it runs and delete the folder (rm -r {staging}), or name "
                "another job",
            )


def _can_link(source: LocalStore, target: LocalStore, manifest: Manifest) -> bool:
    """Return whether files of the source can get a second name in the target: one file system that knows links."""
    shard = source.root / folder_name(manifest.checkpoint_id) / shard_file(0)
    probe = target.root / "link-probe"
    try:
        os.link(shard, probe)
    except OSError:
        return False
    probe.unlink()
    return True


def _take_shard(source: LocalStore, manifest: Manifest, rank: int, target: LocalStore, *, linked: bool) -> None:
    entry = manifest.shard(rank)
    key = f"{folder_name(manifest.checkpoint_id)}/{entry.file}"
    if linked:
        # Files of a checkpoint are never written again, so two names for one are as good as two files.
        os.link(source.root / key, target.root / entry.file)
        return
    written = target.write(entry.file, _pieces(source, key))
    if (written.num_bytes, written.xxh3_128) != (entry.num_bytes, entry.xxh3_128):
        raise DamagedCheckpoint(f"{source}/{key}", _difference(entry, written.num_bytes, written.xxh3_128))


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


def _claim(target: LocalStore, manifest: Manifest, record: AttemptRecord | None, cause: str) -> None:
    """Write the record of attempt 1, with the control state of the source's attempt `record`."""
    control = {} if record is None else record.model_dump(
        include={"lr_factor", "lr_hold_steps", "lr_rewarm_steps", "lr_from_step"}
    )  # fmt: skip
    AttemptLog(target).claim(
        after=0,
        starts_from=StartsFrom(attempt=0, step=0, source=Source.SEED),
        **control,
        skip_windows=() if record is None else record.skip_windows,
        cause=cause,
        world_size=manifest.world_size,
        host=socket.gethostname(),
        started_at=datetime.now(UTC),
    )


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
