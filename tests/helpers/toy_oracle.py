"""What there is of a toy job, and what the next start must therefore find.

The rules of DESIGN 3 and 5 in a few lines of their own: it looks at names of folders, at which of them were harmed, and
at which staged snapshots are complete. What a state must be comes from `toy_state`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.toy_state import Trail
from surefoot.checkpoint.attempts import AttemptLog, AttemptRecord, Source
from surefoot.checkpoint.ids import CheckpointId, parse_folder_name
from surefoot.checkpoint.staging_folder import StagingFolder, staging_folder_path
from surefoot.checkpoint.store import LocalStore
from surefoot.events import Event, read_events

JOB = "toy"
STAGING_DIR = Path("/dev/shm")


@dataclass(frozen=True)
class Outlook:
    """What a start must find.

    Attributes:
        id: The state it goes on from; (0, 0): the seed; None: the job had progress and nothing is left.
        source: Where that lies.
        fall_backs: Newer ones that it must find damaged, newest first.
        told_before: Those of them that the drain may quarantine before the ranks look.
    """

    id: CheckpointId | None
    source: Source
    fall_backs: tuple[CheckpointId, ...] = ()
    told_before: frozenset[CheckpointId] = frozenset()


class Oracle:
    """One job's files.

    Args:
        root: The folder with its storage and its run folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.storage = root / "checkpoints"
        self.store = LocalStore(self.storage / JOB)
        self.staging = staging_folder_path(STAGING_DIR, JOB, self.storage)
        self.events_path = root / "run" / JOB / "events.jsonl"
        self._unusable: dict[CheckpointId, int] = {}

    def records(self) -> dict[int, AttemptRecord]:
        return AttemptLog(self.store).read_all()

    def events(self, *kinds: type[Event]) -> list[Any]:
        if not self.events_path.exists():
            return []
        return [event for event in read_events(self.events_path)[0] if isinstance(event, kinds)]

    def committed(self) -> list[CheckpointId]:
        """Return what has a manifest, newest first."""
        folders = self.store.root.iterdir() if self.store.root.exists() else ()
        ids = ((parse_folder_name(f.name), f) for f in folders)
        return sorted((i for i, f in ids if i is not None and (f / "manifest.json").exists()), reverse=True)

    def quarantined(self) -> list[CheckpointId | None]:
        folder = self.store.root / "quarantine"
        return [parse_folder_name(path.name[: len("step-000000000-a0000")]) for path in folder.glob("*")]

    def path(self, checkpoint: CheckpointId) -> Path:
        return self.store.root / f"step-{checkpoint.step:09d}-a{checkpoint.attempt:04d}"

    def note_unusable(self, checkpoint: CheckpointId) -> None:
        """Take note that no start may use this checkpoint, for damage or because it is not this job's."""
        self._unusable[checkpoint] = self.path(checkpoint).stat().st_ino

    def forget(self, checkpoint: CheckpointId) -> None:
        """Take note that it does not exist any more; written again it is a new one."""
        self._unusable.pop(checkpoint, None)

    def is_unusable(self, checkpoint: CheckpointId) -> bool:
        """Return whether it is still the folder that was noted, and not one written since."""
        inode = self._unusable.get(checkpoint)
        return inode is not None and self.path(checkpoint).stat().st_ino == inode

    @property
    def ever_unusable(self) -> set[CheckpointId]:
        return set(self._unusable)

    def on_lineage(self, ids: Sequence[CheckpointId]) -> list[CheckpointId]:
        """Return those that led to the newest attempt, in the same order."""
        records = self.records()
        last_steps, attempt = {max(records, default=0): math.inf}, max(records, default=0)
        limit = math.inf
        while attempt:
            start = records[attempt].starts_from
            limit = min(limit, start.step)
            attempt = start.attempt
            last_steps[attempt] = limit
        return [i for i in ids if i.step <= last_steps.get(i.attempt, -1)]

    def trail(self, attempt: int, step: int) -> Trail:
        """Return the steps that led to a state, from the attempt records alone."""
        if attempt == 0:
            return ()
        start = self.records()[attempt].starts_from
        if step < start.step:
            return self.trail(start.attempt, step)
        return self.trail(start.attempt, start.step) + tuple((attempt, s) for s in range(start.step + 1, step + 1))

    def outlook(self) -> Outlook:
        """Return what the next start must find."""
        with self.folder() as folder:
            staged = self.on_lineage(sorted((i for i, s in folder.scan().items() if s.complete), reverse=True))
            told = frozenset(report.checkpoint for report in folder.reports())
        committed = self.committed()
        had_progress = bool(committed) or any(record.starts_from.step for record in self.records().values())
        fall_backs: list[CheckpointId] = []
        if self.records():
            current = self.on_lineage(committed)
            for candidate in sorted({*staged, *current}, reverse=True):
                if candidate in staged:
                    return Outlook(candidate, Source.STAGED, tuple(fall_backs), told)
                if not self.is_unusable(candidate):
                    return Outlook(candidate, Source.COMMITTED, tuple(fall_backs), told)
                fall_backs.append(candidate)
        seed = None if had_progress else CheckpointId(0, 0)
        return Outlook(seed, Source.SEED, tuple(fall_backs), told)

    @contextmanager
    def folder(self) -> Iterator[StagingFolder]:
        """Look into the staging folder and let go of it."""
        folder = StagingFolder(self.staging)
        try:
            yield folder
        finally:
            for buffer in folder.buffers():
                buffer.close()
