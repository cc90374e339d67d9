"""Staging folders that are still there when the stack has stopped: drained if possible, named if not."""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from sqlalchemy import select as select_rows

from surefoot.catalogue.database import Database
from surefoot.catalogue.models import Job
from surefoot.checkpoint.drain_start import drain_log, start_drain
from surefoot.checkpoint.locks import holder_pid
from surefoot.checkpoint.staging_folder import StagingFolder, staging_folder_path
from surefoot.embedded.layout import Layout
from surefoot.spec import JobSpec

DRAIN_SECONDS = 60.0
_KILL_AFTER_SECONDS = 5.0
_POLL_SECONDS = 0.05
_RETRY = re.compile(r"^failed \d+ times, next try in [\d.]+ s: ")


class Leftover(NamedTuple):
    """A staging folder that stays.

    Attributes:
        job: Whose.
        folder: Where.
        reason: Why it could not be drained, as far as known.
    """

    job: str
    folder: Path
    reason: str


def drain_leftovers(
    layout: Layout, on_wait: Callable[[str, Path], None], timeout_seconds: float = DRAIN_SECONDS
) -> list[Leftover]:
    """Drain and remove the staging folders of the stack's jobs; no drain is left behind.

    Args:
        layout: Of the stack, which has stopped.
        on_wait: Called with the job and the folder before it waits for one.
        timeout_seconds: How long storage may take, for all of them together.

    Returns:
        The folders that stay, with what is in them.

    Raises:
        CatalogueUnavailable: nobody can tell which jobs there are.
    """
    deadline = time.monotonic() + timeout_seconds
    found = [(spec, folder) for spec in _jobs(layout) if (folder := _staging_folder(spec)).exists()]
    # Where a drain is at work already the new one ends at once.
    drains = {folder: start_drain(spec, folder, prune=False) for spec, folder in found}
    left = []
    for spec, folder in found:
        if _is_in_use(folder):
            left.append(Leftover(spec.job, folder, "somebody else is training with it"))
            continue
        with suppress(FileNotFoundError):  # done already
            StagingFolder(folder).announce_end()
        on_wait(spec.job, folder)
        if not _wait_until_drained(folder, deadline):
            _end_drain(folder, drains[folder])
            left.append(Leftover(spec.job, folder, _last_word(drain_log(spec))))
    if not any(_is_in_use(leftover.folder) for leftover in left):
        for pid in drains.values():
            os.waitpid(pid, 0)
    return left


def _jobs(layout: Layout) -> list[JobSpec]:
    if not layout.database_file.exists():
        return []
    database = Database(f"sqlite:///{layout.database_file}")
    try:
        with database.read() as session:
            specs = list(session.scalars(select_rows(Job.spec)))
    finally:
        database.close()
    return [spec for data in specs if (spec := _parse(data)) is not None]


def _parse(data: dict[str, Any]) -> JobSpec | None:
    try:
        return JobSpec.model_validate(data)
    except ValidationError:  # of another version of Surefoot: nobody here could drain it
        return None


def _staging_folder(spec: JobSpec) -> Path:
    return staging_folder_path(spec.checkpoint.staging_dir, spec.job, spec.storage)


def _is_in_use(folder: Path) -> bool:
    """Return whether a rank or a launcher, of `surefoot run` say, needs the folder."""
    staging = StagingFolder(folder)
    if not folder.exists() or staging.try_take_session():
        staging.release_session()
        return False
    return folder.exists()


def _wait_until_drained(folder: Path, deadline: float) -> bool:
    # The drain renames the folder before it removes it, and ends after that.
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return not folder.exists()


def _end_drain(folder: Path, started: int) -> None:
    """End the drain of a folder: the one at work, or the one just started that has not come to its lock yet."""
    pid = holder_pid(folder / "drain.lock") or started
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            for number in (signal.SIGTERM, signal.SIGKILL):
                signal.pidfd_send_signal(pidfd, number)
                if poll.poll(1000 * _KILL_AFTER_SECONDS):
                    return
        finally:
            os.close(pidfd)


def _last_word(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    said = next((line for line in reversed(lines) if line.strip()), "")
    return _RETRY.sub("", said.rpartition("surefoot.drain: ")[2])
