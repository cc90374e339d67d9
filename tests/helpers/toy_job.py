"""What the processes of a toy job run, each forked (see `forked`): a rank with the real sdk, the real drain."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch imports it on first use: in every child anew
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler

from helpers.toy_state import SHAPES, digest, gradient
from surefoot import faultpoints, sdk
from surefoot.checkpoint import drain as drain_module
from surefoot.checkpoint import prune as prune_module
from surefoot.checkpoint.staging_folder import StagingFolder, staging_folder_path
from surefoot.checkpoint.store import LocalStore
from surefoot.command_files import write_command
from surefoot.errors import SurefootError
from surefoot.events import RollBack
from surefoot.spec import RetentionSpec

STAGING_DIR = Path("/dev/shm")
JOB = "toy"


class _Toy(nn.Module):
    """Its loss has exactly the gradient that `toy_state` says."""

    num_forwards: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self.register_buffer("num_forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, attempt: int, step: int) -> torch.Tensor:
        self.num_forwards += 1
        gradients = {name: torch.from_numpy(gradient(attempt, step, name)) for name in SHAPES}
        return torch.stack([(self.get_parameter(name) * g).sum() for name, g in gradients.items()]).sum()


class _Trail:
    """The steps trained so far, as a user's own state."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "last": torch.tensor(self.steps[-1] if self.steps else [0, 0])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = [list(step) for step in state["steps"]]
        assert state["last"].tolist() == (self.steps[-1] if self.steps else [0, 0])


def train(
    *,
    root: str,
    out: str,
    rank: int,
    world_size: int,
    total_steps: int,
    faults: str,
    checkpoint: dict[str, Any],
    roll_back: dict[str, int] | None,
) -> int:
    """Be a rank: restore, say what was restored, wait for the go, train to the end.

    Lines of JSON go to `out`: first {"trail", "digests", ...} or {"error"}, then one per step that has ended, with the
    newest snapshot in staging memory: nothing may take that away from then on but a newer one, or a roll-back past it.
    The go is a file `<out>.go`; `faults` are planned from then on.
    """
    torch.set_num_threads(1)
    if world_size > 1:
        meeting = Path(out).with_name("meeting")  # one per start
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    model, trail = _Toy(), _Trail()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    log = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(**line: Any) -> None:
        os.write(log, json.dumps(line).encode() + b"\n")

    try:
        session = sdk.attach(
            model,
            optimizer,
            dataset=torch.arange(64),
            global_batch_size=2,
            lr_scheduler=schedule,
            total_steps=total_steps,
            extra_state={"trail": trail},
            job=JOB,
            storage=Path(root, "checkpoints"),
            run_dir=Path(root, "run"),
            checkpoint={"save_every_seconds": None, "staging_dir": str(STAGING_DIR), **checkpoint},
        )
    except SurefootError as error:
        say(error=type(error).__name__, message=str(error))
        return 0
    say(**_describe(model, optimizer, trail, session, schedule.last_epoch))
    deadline = time.monotonic() + 60
    while not Path(f"{out}.go").exists():
        assert time.monotonic() < deadline, "nobody said go"
        time.sleep(0.0005)
    faultpoints.plan(faults)
    for _ in session:
        here = (session.attempt, session.global_step + 1)
        if roll_back is not None and rank == 0 and here[1] == roll_back["at_step"]:
            _order(Path(root), here[0], roll_back)
            roll_back = None
        loss = session.model(*here)
        trail.steps.append(list(here))
        session.step(loss)
        say(attempt=session.attempt, step=session.global_step, trail=trail.steps, staged=_newest_staged(Path(root)))
    say(**_describe(model, optimizer, trail, session, schedule.last_epoch))
    return 0


def _describe(
    model: _Toy, optimizer: torch.optim.Optimizer, trail: _Trail, session: sdk.Session, num_updates: int
) -> dict[str, Any]:
    digests = {}
    for name, parameter in model.named_parameters():
        momentum = optimizer.state.get(parameter, {}).get("momentum_buffer")
        digests[f"p.{name}"] = digest(parameter.detach().numpy())
        digests[f"m.{name}"] = digest((torch.zeros_like(parameter) if momentum is None else momentum).detach().numpy())
    return {
        "attempt": session.attempt,
        "step": session.global_step,
        "trail": trail.steps,
        "digests": digests,
        "num_updates": num_updates,
        "num_forwards": int(model.num_forwards),
    }


def _newest_staged(root: Path) -> list[int]:
    """Return (attempt, step) of the newest snapshot that every rank has its part of; none: (0, 0)."""
    folder = StagingFolder(staging_folder_path(STAGING_DIR, JOB, root / "checkpoints"))
    return list(max((i for i, snapshot in folder.scan().items() if snapshot.complete), default=(0, 0)))


def _order(root: Path, attempt: int, roll_back: dict[str, int]) -> None:
    write_command(
        staging_folder_path(STAGING_DIR, JOB, root / "checkpoints"),
        RollBack(
            job=JOB, attempt=attempt, number=roll_back["number"], reason="drawn",
            to_attempt=roll_back["to_attempt"], to_step=roll_back["to_step"], lr_factor=1.0,
        ),
    )  # fmt: skip


def prune(*, root: str, keep_last: int, faults: str) -> int:
    """Carry out retention."""
    faultpoints.plan(faults)
    prune_module.prune(LocalStore(Path(root, "checkpoints", JOB)), RetentionSpec(keep_last=keep_last), job=JOB)
    return 0


def drain(*, arguments: list[str], faults: str) -> int:
    """Be the drain."""
    faultpoints.plan(faults)
    return drain_module.main(arguments)
