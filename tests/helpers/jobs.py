"""Runs real jobs in real processes and reads what they left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.checkpoint.attempts import AttemptLog, AttemptRecord
from surefoot.checkpoint.catalog import list_committed, read_manifest, read_scalars, read_shard, verify
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.layout import ShardLayout
from surefoot.checkpoint.lineage import newest_on_lineage, on_lineage
from surefoot.checkpoint.staging_folder import staging_folder_path
from surefoot.checkpoint.store import LocalStore
from surefoot.events import Event, read_events
from surefoot.testing.faults import Fault, FaultInjector, InjectedFault

TRAINER = Path(__file__).parent / "trainer.py"
STAGING_DIR = Path("/dev/shm")


@dataclass
class Job:
    """A job of the field cases in a folder of its own."""

    folder: Path
    name: str = "case"
    nproc: int = 2
    trainer: Sequence[str] = ()
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)
    entrypoint: str | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.faults_done: list[InjectedFault] = []

    @property
    def storage(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def staging(self) -> Path:
        return staging_folder_path(STAGING_DIR, self.name, self.storage)

    @property
    def store(self) -> LocalStore:
        return LocalStore(self.storage / self.name)

    @property
    def events_path(self) -> Path:
        return self.folder / "run" / self.name / "events.jsonl"

    def write_spec(self) -> Path:
        arguments = " ".join(["--out", str(self.out), *self.trainer])
        spec: dict[str, Any] = {
            "job": self.name,
            "entrypoint": self.entrypoint or f"{TRAINER} {arguments}",
            "nproc_per_node": self.nproc,
            "storage": str(self.storage),
            "run_dir": str(self.folder / "run"),
            "seed": 11,
            "threads_per_rank": 1,
            "checkpoint": {"save_every_seconds": None, **self.checkpoint},
            **self.spec,
        }
        path = self.folder / "spec.json"
        path.write_text(json.dumps(spec))
        return path

    def start(self, *options: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "surefoot_worker.launcher", str(self.write_spec()), *options]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )

    def run(
        self, faults: Sequence[Fault] = (), *options: str, timeout: float = 50, expect: int = 0
    ) -> subprocess.CompletedProcess[str]:
        process = self.start(*options)
        with FaultInjector(self.staging, faults) as injector:
            try:
                output, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
                raise AssertionError(f"job did not end in {timeout} s:\n{output}\n{self.logs()}") from None
        self.faults_done += injector.done
        assert process.returncode == expect, f"exit {process.returncode}:\n{output}\n{self.logs()}"
        assert len(injector.done) == len(faults), f"only {injector.done} of {faults} happened"
        return subprocess.CompletedProcess(process.args, process.returncode, output)

    def logs(self) -> str:
        paths = sorted((self.folder / "run" / self.name / "logs").glob("*"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in paths)

    def records(self) -> dict[int, AttemptRecord]:
        return AttemptLog(self.store).read_all()

    def events(self, kind: type[Event] | None = None) -> list[Any]:
        events, _ = read_events(self.events_path)
        return [event for event in events if kind is None or isinstance(event, kind)]

    def lines(self) -> list[dict[str, Any]]:
        """What the ranks logged on the final lineage, by step then rank then micro-batch."""
        records = self.records()
        newest = max(records)
        lines = []
        for path in sorted(self.out.glob("rank-*.jsonl")):
            rank = int(path.stem.split("-")[1])
            for text in path.read_text().splitlines():
                line = json.loads(text) | {"rank": rank}
                if on_lineage(CheckpointId(line["attempt"], line["step"]), newest, records):
                    lines.append(line)
        return sorted(lines, key=lambda line: (line["step"], line["rank"]))

    def joined_ids(self) -> list[list[int]]:
        """For each step in order the ids of the whole global batch, rank after rank."""
        by_step: dict[int, list[int]] = {}
        for line in self.lines():
            assert line["ids"] == line["seen"]
            by_step.setdefault(line["step"], []).extend(line["ids"])
        return [by_step[step] for step in sorted(by_step)]

    def committed(self) -> list[CheckpointId]:
        return list_committed(self.store)

    def newest_state(self) -> tuple[dict[str, bytes], dict[str, Any]]:
        """All tensors (name -> bytes) and the scalars of the newest checkpoint on the lineage; verified."""
        records = self.records()
        newest = newest_on_lineage(self.committed(), max(records), records)
        assert newest is not None
        verify(self.store, newest)
        manifest = read_manifest(self.store, newest)
        tensors: dict[str, bytes] = {}
        for rank in range(manifest.world_size):
            shard = read_shard(self.store, manifest, rank)
            layout = ShardLayout.parse(shard)
            tensors |= {entry.name: bytes(layout.tensor_view(shard, entry.name)) for entry in layout.entries}
        scalars = read_scalars(self.store, newest)
        del scalars["saved_at"], scalars["trained_seconds"]
        return tensors, scalars
