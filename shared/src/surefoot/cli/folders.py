"""What a PATH argument points at: a checkpoint folder, a job folder or a storage root."""

from __future__ import annotations

from pathlib import Path

from surefoot.checkpoint.attempts import ATTEMPTS_FOLDER
from surefoot.checkpoint.ids import CheckpointId, parse_folder_name
from surefoot.checkpoint.manifest import MANIFEST_FILE
from surefoot.errors import UsageError

ALLOWED = (
    "allowed: a checkpoint folder (<storage>/<job>/step-<step>-a<attempt>), a job folder (<storage>/<job>) "
    "or a storage root (<storage>)"
)


def is_job_folder(path: Path) -> bool:
    """Return whether a folder holds attempts or checkpoints."""
    return (path / ATTEMPTS_FOLDER).is_dir() or any(parse_folder_name(name.name) for name in path.glob("step-*"))


def job_folders(path: Path) -> list[Path]:
    """Return the job folder that `path` is, or those in the storage root that it is.

    Raises:
        UsageError: it is neither.
    """
    if not path.is_dir():
        raise UsageError("PATH", f"{path} is not a folder; {ALLOWED}")
    if is_job_folder(path):
        return [path]
    jobs = sorted(child for child in path.iterdir() if child.is_dir() and is_job_folder(child))
    if not jobs:
        raise UsageError("PATH", f"{path} holds no checkpoint and no job; {ALLOWED}")
    return jobs


def one_job_folder(path: Path) -> Path:
    """Return the job folder that `path` is, or the only one in a storage root.

    Raises:
        UsageError: there is none or several.
    """
    jobs = job_folders(path)
    if len(jobs) > 1:
        raise UsageError("PATH", f"{path} holds several jobs, name one: {', '.join(str(job) for job in jobs)}")
    return jobs[0]


def checkpoint_folder(path: Path) -> tuple[Path, CheckpointId] | None:
    """Return (job folder, id) when `path` is a committed checkpoint, None when it is some other folder.

    Raises:
        UsageError: it is named like a checkpoint and was never committed.
    """
    path = path.absolute()
    checkpoint_id = parse_folder_name(path.name)
    if checkpoint_id is None or not path.is_dir():
        return None
    if not (path / MANIFEST_FILE).exists():
        raise UsageError("PATH", f"{path} is not a checkpoint: it has no {MANIFEST_FILE}, so it was never committed")
    return path.parent, checkpoint_id
