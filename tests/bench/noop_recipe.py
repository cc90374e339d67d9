"""The built-in recipe with a session that does nothing for the job: the floor that `bench.overhead` compares with.

    torchrun --nproc-per-node 2 noop_recipe.py STEPS_FILE

Same model, data, order, DDP, clipping, optimizer and schedule; no exchange, snapshot, checkpoint or event. Rank 0
appends CLOCK_MONOTONIC at the end of each step to STEPS_FILE.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from surefoot import sdk
from surefoot.sdk import rng
from surefoot.sdk.data.loader import Loader, dataset_length
from surefoot.sdk.data.order import DataOrder
from surefoot.sdk.replication import replicate, set_gradient_sync


class NoopSession:
    """Iterates and updates as a session does, and nothing else."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> None:
        self.rank, world_size = dist.get_rank(), dist.get_world_size()
        self.model = replicate(model, world_size, init_sync=True)
        self._optimizer = optimizer
        self._scheduler = options["lr_scheduler"]
        self._max_grad_norm = options["max_grad_norm"]
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        dataset = options["dataset"]
        self._loader = Loader(
            dataset,
            DataOrder(dataset_length(dataset), options["global_batch_size"], 0, shuffle=True),
            rank=self.rank,
            world_size=world_size,
            micro_batch_size=options["micro_batch_size"],
            start_step=0,
            total_steps=options["total_steps"],
            skip_windows=(),
            num_workers=options["num_workers"],
            collate_fn=None,
            pin_memory=False,
        )
        self._steps = Path(sys.argv[1]) if self.rank == 0 else None

    def __iter__(self) -> Iterator[Any]:
        for step, (micro_batch, batch) in enumerate(self._loader):
            self._micro_batch = micro_batch
            rng.reseed(0, step, self.rank, self._micro_batch.micro_index)
            set_gradient_sync(self.model, enabled=self._micro_batch.is_last)
            yield batch

    def step(self, loss: torch.Tensor) -> None:
        """Backward, clip, update; read loss and gradient norm, as any loop that logs them does."""
        (loss * self._micro_batch.weight).backward()
        if not self._micro_batch.is_last:
            return
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        torch.stack([loss.detach().double(), norm.double()]).tolist()
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._steps is not None:
            with self._steps.open("a") as file:
                file.write(f"{time.monotonic()}\n")


def attach(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> NoopSession:
    """Stand where `sdk.attach` stands."""
    dist.init_process_group("gloo")
    return NoopSession(model, optimizer, options)


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sdk.attach = attach  # type: ignore[assignment]
    runpy.run_module("surefoot_worker.recipe", run_name="__main__")
