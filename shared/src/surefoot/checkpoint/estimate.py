"""Does what retention keeps fit on storage? Asked before a job starts, or else its third hour finds the disk full."""

from __future__ import annotations

from pathlib import Path

from surefoot.checkpoint.ids import parse_folder_name
from surefoot.checkpoint.marks import TRASH_FOLDER
from surefoot.checkpoint.retention import Policy
from surefoot.checkpoint.staging import free_bytes
from surefoot.errors import UsageError

NUM_BEING_WRITTEN = 2
"""A new one is complete before an old one goes, and the next may have been begun by then."""


def most_checkpoints(policy: Policy, num_steps: int | None = None, save_every_steps: int | None = None) -> int:
    """Return how many checkpoints may be on storage at once, those that are being written included. Pure.

    Every rule is counted in full, as if no checkpoint were kept by two of them; pins are not known and not counted.

    Args:
        policy: The rules.
        num_steps: Steps of the whole job; None: not known, and rules without an end count as nothing.
        save_every_steps: Steps between saves where nothing else saves; None: any step may be saved.
    """
    kept = policy.keep_best + policy.keep_stable + 1  # the oldest that may yet become STABLE
    kept += policy.keep_last or 0
    if policy.keep_every_steps is not None and num_steps is not None:
        kept += num_steps // policy.keep_every_steps
    if num_steps is None:
        return kept + NUM_BEING_WRITTEN
    num_saves = num_steps if save_every_steps is None else num_steps // save_every_steps + 1  # the last step's too
    return num_saves if policy.keep_last is None else min(kept + NUM_BEING_WRITTEN, num_saves)


def check_storage_room(
    folder: Path,
    policy: Policy,
    checkpoint_bytes: int,
    *,
    num_steps: int | None = None,
    save_every_steps: int | None = None,
) -> None:
    """Refuse a job whose checkpoints will not fit. Reads the folder's sizes, writes nothing; any process, not a step.

    For a job that begins. One that goes on had better run and meet a full disk, which costs a save and not the job.

    Args:
        folder: `<storage>/<job>`; need not exist. What it holds already counts as room: retention replaces it.
        policy: The rules, `CheckpointSpec.retention`.
        checkpoint_bytes: Of one checkpoint, all ranks together.
        num_steps: See `most_checkpoints`.
        save_every_steps: See `most_checkpoints`.

    Raises:
        UsageError: it will not fit; key `storage`, and says what to lower.
    """
    num_checkpoints = most_checkpoints(policy, num_steps, save_every_steps)
    needed = num_checkpoints * checkpoint_bytes
    ancestor = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free, reused = free_bytes(ancestor), _held_bytes(folder)
    if needed <= free + reused:
        return
    has = f"{folder.parent} has {_gib(free)} free"
    if reused:
        has += f" and holds {_gib(reused)} of this job"
    raise UsageError(
        "storage",
        f"{has}, but there may be {num_checkpoints} checkpoints of {_gib(checkpoint_bytes)} at once, {_gib(needed)} "
        f"(checkpoint.retention {_spelled(policy)}, and {NUM_BEING_WRITTEN} being written); free some, point storage "
        "at a larger file system, or lower checkpoint.retention",
    )


def _held_bytes(folder: Path) -> int:
    if not folder.is_dir():
        return 0
    held = [path for path in folder.iterdir() if parse_folder_name(path.name) or path.name == TRASH_FOLDER]
    return sum(file.lstat().st_blocks * 512 for path in held for file in path.rglob("*"))


def _spelled(policy: Policy) -> str:
    rules = {
        "keep_last": policy.keep_last,
        "keep_every_steps": policy.keep_every_steps,
        "keep_best": policy.keep_best or None,
        "keep_stable": policy.keep_stable,
    }
    given = [f"{name}: {value}" for name, value in rules.items() if value is not None]
    return ", ".join(given if policy.keep_last is not None else ["keep_last: null", *given])


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
