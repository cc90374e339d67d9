"""What lies on a job's storage. Reads names and manifests; changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from surefoot.checkpoint.attempts import ATTEMPTS_FOLDER
from surefoot.checkpoint.catalog import read_manifest
from surefoot.checkpoint.damage import QUARANTINE_FOLDER
from surefoot.checkpoint.ids import CheckpointId, folder_name, parse_folder_name
from surefoot.checkpoint.manifest import MANIFEST_FILE
from surefoot.checkpoint.marks import PINNED_FILE, STABLE_FILE
from surefoot.checkpoint.prune import FactReader, has_trash
from surefoot.checkpoint.store import LocalStore
from surefoot.errors import CheckpointError


class Marks(NamedTuple):
    """Which marks lie beside a manifest."""

    stable: bool
    pinned: bool


@dataclass(frozen=True)
class Survey:
    """The checkpoints of one job as their folders say.

    Attributes:
        committed: The committed ones and their marks.
        quarantined: Those that were moved away and have not been written again.
        has_trash: Somebody began to remove a checkpoint and was cut off.
    """

    committed: dict[CheckpointId, Marks]
    quarantined: frozenset[CheckpointId]
    has_trash: bool = False


@dataclass(frozen=True)
class Facts:
    """What a row repeats of a committed checkpoint; zeros where its manifest cannot be used."""

    num_bytes: int
    world_size: int
    committed_at: datetime
    loss: float | None = None


def survey(store: LocalStore) -> Survey | None:
    """Look through a job's storage.

    Returns:
        None: the job's folder is not there or has no attempt records: nothing began, or it is not mounted.

    Raises:
        OSError: storage fails.
    """
    if not store.list(ATTEMPTS_FOLDER):
        return None
    committed: dict[CheckpointId, Marks] = {}
    for name in store.list(""):
        checkpoint = parse_folder_name(name)
        if checkpoint is not None and MANIFEST_FILE in (files := store.list(name)):
            committed[checkpoint] = Marks(STABLE_FILE in files, PINNED_FILE in files)
    # The drain calls a second one of the same name `<name>-2`.
    moved = (parse_folder_name("-".join(name.split("-")[:3])) for name in store.list(QUARANTINE_FOLDER))
    quarantined = frozenset(id_ for id_ in moved if id_ is not None and id_ not in committed)
    return Survey(committed, quarantined, has_trash(store))


def facts(store: LocalStore, checkpoint: CheckpointId) -> Facts:
    """Return what a row repeats of a committed checkpoint.

    Raises:
        OSError: storage fails, or the checkpoint was moved away just now.
    """
    seconds = (store.root / folder_name(checkpoint) / MANIFEST_FILE).stat().st_mtime
    committed_at = datetime.fromtimestamp(seconds, UTC)
    content = FactReader(store).content(checkpoint)
    try:
        manifest = read_manifest(store, checkpoint)
    except CheckpointError:  # verification says what is wrong with it
        return Facts(0, 0, committed_at)
    shards = (manifest.shard(rank).num_bytes for rank in range(manifest.world_size))
    return Facts(sum(shards), manifest.world_size, committed_at, None if content is None else content.loss)
