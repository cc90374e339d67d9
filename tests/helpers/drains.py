"""Drains of a job as real processes that start in milliseconds, for `helpers.forked.Forge("helpers.drains")`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from helpers.ptrace import run_traced, why_not
from surefoot import faultpoints
from surefoot.checkpoint.drain import main
from surefoot.checkpoint.staging_folder import StagingFolder, staging_folder_path
from surefoot.checkpoint.store import LocalStore
from surefoot.events import Event, read_events


def drain(arguments: list[str], fault: str = "") -> int:
    """Be a drain."""
    faultpoints.plan(fault)
    return main(arguments)


def traced_drain(arguments: list[str], kill_at: int | None, report: str) -> int:
    """Run a drain until it enters its `kill_at`-th counted system call; leave a list of the calls in a file."""
    traced = run_traced(lambda: main(arguments), kill_at)
    Path(report).write_text(json.dumps(traced.calls))
    return 0 if kill_at is None or traced.exit_code == -9 else 1


def write_why_not(report: str) -> int:
    """Say in a file why processes cannot be traced here; nothing when they can."""
    Path(report).write_text(why_not() or "")
    return 0


class Node:
    """A node of a job: its staging folder, and how to drain it. Storage may be shared with other nodes."""

    def __init__(self, root: Path, storage: Path, job: str = "job") -> None:
        self.storage = storage
        self.events_path = root / "events.jsonl"
        self.log = root / "drain.log"
        self.store = LocalStore(storage / job)
        self.job = job
        root.mkdir(parents=True, exist_ok=True)
        self.folder = StagingFolder(staging_folder_path(root / "staging", job, storage))

    def make(self) -> Node:
        """Make the staging folder."""
        self.folder = StagingFolder.create(self.folder.path.parents[1], self.job, self.storage)
        return self

    def make_wake(self) -> None:
        """Make what is no file in a staging folder that was copied."""
        os.mkfifo(self.folder.path / "wake.fifo", 0o600)

    def arguments(self, *options: str) -> list[str]:
        """Return the command line of a drain that does not linger."""
        required = {"staging": self.folder.path, "storage": self.storage, "job": self.job, "events": self.events_path}
        named = [word for name, value in required.items() for word in (f"--{name}", str(value))]
        return [*named, "--linger-seconds", "0.01", *options]

    def events(self, kind: type[Event] = Event) -> list[Event]:
        """Return what the drains have reported."""
        if not self.events_path.exists():
            return []
        return [event for event in read_events(self.events_path)[0] if isinstance(event, kind)]

    def close(self) -> None:
        """Let go of the buffers that this process has open."""
        for buffer in self.folder.buffers():
            buffer.close()
