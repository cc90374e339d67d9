"""The job of the field cases: a tiny model on a dataset whose samples carry their own id.

Run as a script, under `surefoot run`, torchrun or plain python. Each rank appends one JSON line per micro-batch to
<out>/rank-N.jsonl: attempt, step, ids, loss, learning rate.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler

from surefoot import faultpoints, sdk
from surefoot.command_files import write_command
from surefoot.events import Command, decode_message


class Samples:
    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, object]:
        noise = float(torch.rand(())) + random.random() + float(np.random.rand())
        return {"id": index, "x": torch.sin(torch.arange(16) * (index + 1)) + 0.1 * noise}


def build_scheduler(kind: str, optimizer: torch.optim.Optimizer, steps: int) -> object:
    if kind == "warmup-cosine":
        warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=max(1, steps // 5))
        cosine = lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[max(1, steps // 5)])
    if kind == "cosine":
        return lr_scheduler.CosineAnnealingLR(optimizer, steps)
    if kind == "onecycle":
        return lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps + 1)
    if kind == "multistep":
        return lr_scheduler.MultiStepLR(optimizer, [steps // 3, steps // 2])
    return lr_scheduler.LambdaLR(optimizer, lambda update: 1.0 / (1 + update))


def give_orders(path: Path, attempt: int, step: int) -> None:
    """Write the commands that the file plans for this step, so that its exchange sees them (see test_roll_back)."""
    plan = json.loads(path.read_text())
    for entry in plan["orders"]:
        if [attempt, step] != entry["at"]:
            continue
        deadline = time.monotonic() + 30
        while not Path(plan["storage"], entry["wait_for"], "manifest.json").exists():
            assert time.monotonic() < deadline, f"{entry['wait_for']} did not become durable"
            time.sleep(0.002)
        command = decode_message(json.dumps(entry["command"]))
        assert isinstance(command, Command)
        write_command(Path(plan["staging"]), command)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--micro", type=int)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--scheduler", default="warmup-cosine")
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--raise-at", type=int)
    parser.add_argument("--fault", help="RANK:PLAN of surefoot.faultpoints, in the first start only")
    parser.add_argument("--orders", type=Path, help="JSON: commands that rank 0 finds in given steps")
    arguments = parser.parse_args()
    if arguments.fault and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        rank, _, plan = arguments.fault.partition(":")
        if rank == os.environ["RANK"]:
            faultpoints.plan(plan)
    torch.manual_seed(7)
    hidden = arguments.hidden
    model = nn.Sequential(
        nn.Linear(16, hidden), nn.BatchNorm1d(hidden), nn.Dropout(0.2), nn.ReLU(), nn.Linear(hidden, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = build_scheduler(arguments.scheduler, optimizer, arguments.steps)
    session = sdk.attach(
        model,
        optimizer,
        lr_scheduler=scheduler,
        dataset=Samples(arguments.samples),
        global_batch_size=arguments.batch,
        micro_batch_size=arguments.micro,
        num_workers=arguments.workers,
        max_grad_norm=1.0,
        total_steps=arguments.steps,
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = os.open(arguments.out / f"rank-{session.rank}.jsonl", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    for batch in session:
        if arguments.raise_at == session.global_step + 1:
            raise ValueError("the same bad luck again")
        rate = optimizer.param_groups[0]["lr"]
        step = session.global_step + 1
        loss = (session.model(batch["x"]) - batch["id"].float().sin()[:, None]).pow(2).mean()
        line = {
            "attempt": session.attempt,
            "step": step,
            "ids": session.micro_batch.indices.tolist(),
            "seen": batch["id"].tolist(),
            "loss": loss.item(),
            "lr": rate,
        }
        # Before the step: a rank may be killed right after it. Lines of steps that never ended are off the lineage.
        os.write(log, json.dumps(line).encode() + b"\n")
        if arguments.orders and session.rank == 0:
            give_orders(arguments.orders, session.attempt, step)
        session.step(loss)
        # Stands for a larger model: nothing waits for anything else here.
        time.sleep(arguments.step_seconds)


if __name__ == "__main__":
    main()
