"""A session of one rank in the test's own process: real staging memory, a real drain, orders given on the way."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from helpers.waiting import wait_until
from surefoot import sdk
from surefoot.checkpoint.attempts import AttemptLog, AttemptRecord
from surefoot.checkpoint.catalog import list_committed
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.staging_folder import StagingFolder, staging_folder_path
from surefoot.checkpoint.store import LocalStore
from surefoot.command_files import write_command
from surefoot.events import Command, Event, read_events

JOB = "unit"


class Samples:
    """Samples that depend on their index and on the RNG that the session seeds."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(6.0) * (index + 1)) + 0.1 * torch.rand(6)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda update: 1.0 / (1 + 0.1 * update)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 50),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=12), lr_scheduler.CosineAnnealingLR(o, 50)], milestones=[12]
    ),
}


@dataclass
class Built:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    scaler: Any


def build(schedule: str = "LambdaLR", *, scaled: bool = False) -> Built:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4) if scaled else None
    return Built(model, optimizer, SCHEDULES[schedule](optimizer), scaler)


def schedule_values(schedule: str, num_steps: int) -> list[float]:
    """Return the schedule's own learning rate of steps 1, 2, ..., as torch gives it to a loop without a session."""
    built = build(schedule)
    values = []
    for _ in range(num_steps):
        values.append(built.optimizer.param_groups[0]["lr"])
        built.optimizer.step()
        built.schedule.step()
    return values


class Place:
    """A job's storage, events and staging, below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.storage = root / "checkpoints"
        self.store = LocalStore(self.storage / JOB)
        self.staging = staging_folder_path(Path("/dev/shm"), JOB, self.storage)
        self._sessions: list[sdk.Session] = []

    def attach(self, built: Built, **options: Any) -> sdk.Session:
        options = {"total_steps": 30, "checkpoint": {"save_every_steps": 5, "save_every_seconds": None}} | options
        session = sdk.attach(
            built.model,
            built.optimizer,
            lr_scheduler=built.schedule,
            grad_scaler=built.scaler,
            dataset=Samples(),
            global_batch_size=4,
            max_grad_norm=1.0,
            job=JOB,
            seed=5,
            storage=self.storage,
            run_dir=self.root / "run",
            **options,
        )
        self._sessions.append(session)
        return session

    def order(self, kind: type[Command], number: int, *, attempt: int | None = 1, **fields: Any) -> None:
        write_command(self.staging, kind(job=JOB, number=number, attempt=attempt, reason="test", **fields))

    def wait_committed(self, attempt: int, step: int) -> None:
        here = CheckpointId(attempt, step)
        wait_until(lambda: here in list_committed(self.store), 20, f"{here} is durable", every_seconds=0.002)

    def events(self, *kinds: type[Event]) -> list[Any]:
        found, _ = read_events(self.root / "run" / JOB / "events.jsonl")
        return [event for event in found if isinstance(event, kinds)]

    def records(self) -> dict[int, AttemptRecord]:
        return AttemptLog(self.store).read_all()

    def committed(self) -> list[CheckpointId]:
        return list_committed(self.store)

    def copy_to(self, other: Place, keep: list[CheckpointId], attempts: int) -> None:
        """Give another place this one's first attempt records and some of its checkpoints, as if that was all."""
        for checkpoint in keep:
            name = f"step-{checkpoint.step:09d}-a{checkpoint.attempt:04d}"
            shutil.copytree(self.storage / JOB / name, other.storage / JOB / name)
        (other.storage / JOB / "attempts").mkdir(parents=True)
        for number in range(1, attempts + 1):
            shutil.copy(self.storage / JOB / f"attempts/{number:06d}.json", other.storage / JOB / "attempts")

    def remove(self) -> None:
        for session in self._sessions:
            session._host.close()  # its background thread looks after the drain until then
        for buffer in StagingFolder(self.staging).buffers():
            buffer.close()
        shutil.rmtree(self.staging, ignore_errors=True)


Actions = Mapping[tuple[int, int], Callable[[], object]]
"""(attempt, step) -> what is done just before that step ends, so that its exchange sees it."""


def train(
    session: sdk.Session, actions: Actions | None = None, *, settle: bool = True
) -> list[tuple[int, int, list[int]]]:
    """Run the loop; return (attempt, step, sample ids) of every step.

    Args:
        session: Whose loop.
        actions: What happens on the way.
        settle: Let each save be written before the next step, so that every one that is due takes place.
    """
    trained = []
    for batch in session:
        here = (session.attempt, session.global_step + 1)
        trained.append((*here, session.micro_batch.indices.tolist()))
        action = (actions or {}).get(here)
        if action is not None:
            action()
        while settle and session._snapshots.has_unwritten_save():
            time.sleep(0.001)
        session.step(session.model(batch).pow(2).mean())
    return trained


def state_of(built: Built) -> dict[str, Any]:
    """Return everything that training depends on, for comparison bit by bit."""
    state = {f"model.{name}": value.clone() for name, value in built.model.state_dict().items()}
    for index, values in built.optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{index}.{key}": value.clone() for key, value in values.items()}
    state["groups"] = built.optimizer.state_dict()["param_groups"]
    state["schedule"] = {k: v for k, v in built.schedule.state_dict().items() if not k.startswith("_schedulers")}
    state["scaler"] = None if built.scaler is None else built.scaler.state_dict()
    return state


def assert_same(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        same = torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name]
        assert same, f"{name}: {value} and {theirs[name]}"
