"""What a PATH|JOB argument means: a checkpoint folder, a job folder, a storage root, or the name of a job."""

from __future__ import annotations

import os
import re
from pathlib import Path

from surefoot.checkpoint.attempts import ATTEMPTS_FOLDER, AttemptLog
from surefoot.checkpoint.catalog import list_committed
from surefoot.checkpoint.ids import CheckpointId, parse_folder_name
from surefoot.checkpoint.lineage import candidates
from surefoot.checkpoint.manifest import MANIFEST_FILE
from surefoot.checkpoint.store import LocalStore
from surefoot.errors import SurefootError, UsageError
from surefoot.spec import JOB_NAME_PATTERN

ALLOWED = (
    "allowed: a checkpoint folder (<storage>/<job>/step-<step>-a<attempt>), a job folder (<storage>/<job>), "
    "a storage root (<storage>), or the name of a job in <home>/checkpoints"
)


def locate(words: str, home: Path) -> Path:
    """Return the folder that PATH|JOB names. A path that exists wins over a job of that name.

    Raises:
        UsageError: there is neither.
    """
    if not words.strip():  # Path("") is the current folder, which nobody meant
        raise UsageError("PATH|JOB", f"is empty; {ALLOWED}")
    path = Path(words)
    if path.exists():
        return path
    if re.fullmatch(JOB_NAME_PATTERN, words):
        folder = home / "checkpoints" / words
        if folder.is_dir():
            return folder
        raise UsageError("PATH|JOB", f"there is no path {words} and no folder {folder}; {ALLOWED}")
    raise UsageError("PATH|JOB", f"there is no path {words}; {ALLOWED}")


def is_job_folder(path: Path) -> bool:
    """Return whether a folder holds attempts or checkpoints."""
    return (path / ATTEMPTS_FOLDER).is_dir() or any(parse_folder_name(name.name) for name in path.glob("step-*"))


def job_folders(path: Path) -> list[Path]:
    """Return the job folder that `path` is, or those in the storage root that it is.

    Raises:
        UsageError: it is neither.
    """
    if not path.is_dir():
        raise UsageError("PATH|JOB", f"{path} is not a folder; {ALLOWED}")
    if is_job_folder(path):
        return [path]
    jobs = sorted(child for child in path.iterdir() if child.is_dir() and is_job_folder(child))
    if not jobs:
        raise UsageError("PATH|JOB", f"{path} holds no checkpoint and no job; {ALLOWED}")
    return jobs


def one_job_folder(path: Path) -> Path:
    """Return the job folder that `path` is, or the only one in a storage root.

    Raises:
        UsageError: there is none or several.
    """
    jobs = job_folders(path)
    if len(jobs) > 1:
        raise UsageError("PATH|JOB", f"{path} holds several jobs, name one: {', '.join(str(job) for job in jobs)}")
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
    if not os.path.lexists(path / MANIFEST_FILE):  # a link that leads nowhere is damage, as in list_committed
        problem = f"{path} is not a checkpoint: it has no {MANIFEST_FILE}, so it was never committed"
        raise UsageError("PATH|JOB", problem)
    return path.parent, checkpoint_id


def pick_checkpoint(path: Path, step: int | None, attempt: int | None) -> tuple[Path, CheckpointId]:
    """Return (job folder, id) of the one checkpoint that is meant.

    Args:
        path: A checkpoint folder, or a job folder; of the latter the newest current one unless step or attempt say
            otherwise.
        step: Its step.
        attempt: Its attempt.

    Raises:
        UsageError: there is no such checkpoint, or several.
        SurefootError: the job has none that is current.
    """
    single = checkpoint_folder(path)
    if single is not None:
        if (step, attempt) not in {(None, None), (single[1].step, attempt), (step, single[1].attempt)}:
            raise UsageError("--step", f"{path} names a checkpoint already; leave --step and --attempt out")
        return single
    job = one_job_folder(path)
    store = LocalStore(job)
    current = current_checkpoints(store)
    if step is None and attempt is None:
        if not current:
            raise SurefootError(f"{job} has no current checkpoint")
        return job, current[0]
    fitting = [id_ for id_ in list_committed(store) if step in (None, id_.step) and attempt in (None, id_.attempt)]
    if not fitting:
        there = ", ".join(f"step {id_.step} of attempt {id_.attempt}" for id_ in list_committed(store)[:-6:-1])
        key = "--step" if step is not None else "--attempt"
        raise UsageError(key, f"{job} has no such checkpoint; allowed, newest first: {there or 'none, it has none'}")
    # Of several with one step the current one is meant.
    chosen = [id_ for id_ in fitting if id_ in current] or fitting
    if step is not None and len(chosen) > 1:
        attempts = ", ".join(str(id_.attempt) for id_ in chosen)
        raise UsageError("--attempt", f"is needed: step {step} was saved by attempts {attempts}")
    return job, chosen[-1]


def current_checkpoints(store: LocalStore) -> list[CheckpointId]:
    """Return the checkpoints on the lineage of the newest attempt, newest first."""
    records = AttemptLog(store).read_all()
    return candidates(list_committed(store), max(records, default=0), records)
