"""What a session trains and how far it is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

NUM_LOSSES = 20
"""The loss of a checkpoint is the mean over so many steps: that of one step says little."""


@dataclass
class Counters:
    """How far training is. Every checkpoint carries it, so it goes on where the state does.

    Attributes:
        step: Global batches drawn; drives the data.
        updates: Optimizer updates taken; drives the schedule. Less than `step` when updates were skipped.
        trained_seconds: Time spent in steps by all attempts, that of steps gone back over included.
        losses: Finite training losses of the last steps on the lineage, oldest first.
    """

    step: int = 0
    updates: int = 0
    trained_seconds: float = 0.0
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_LOSSES))

    @classmethod
    def from_scalars(cls, scalars: Mapping[str, Any]) -> Counters:
        """Return what `to_scalars` gave; of older checkpoints step and updates are all there is."""
        losses = deque(scalars.get("losses", ()), maxlen=NUM_LOSSES)
        return cls(scalars["step"], scalars["updates"], scalars.get("trained_seconds", 0.0), losses)

    def to_scalars(self) -> dict[str, Any]:
        """Return it for the scalars of a checkpoint, with `loss`, the mean by which checkpoints are compared."""
        mean = math.fsum(self.losses) / len(self.losses) if self.losses else None
        return {
            "step": self.step,
            "updates": self.updates,
            "trained_seconds": self.trained_seconds,
            "losses": list(self.losses),
            "loss": mean,
        }

    def complete_step(self, *, updated: bool, seconds: float, loss: float) -> None:
        """Count one more step.

        Args:
            updated: The optimizer took its update.
            seconds: It took so long, on the slowest rank.
            loss: Mean over the global batch; one that is not finite is left out.
        """
        self.step += 1
        self.updates += updated
        self.trained_seconds += seconds
        if math.isfinite(loss):
            self.losses.append(loss)

    def went_on_from(self, before: Counters) -> None:
        """Take over what a command that began an attempt in this process does not change.

        Args:
            before: What counted until then. Time is never untrained; losses are those that led to the step.
        """
        self.trained_seconds = max(self.trained_seconds, before.trained_seconds)
        if self.step == before.step:
            self.losses = before.losses


@dataclass(frozen=True)
class Trained:
    """What the session trains, as `attach` got it.

    Attributes:
        model: What the loop must call: wrapped in DDP where there are other ranks and it is not sharded.
        optimizer: Steps once per global batch.
        lr_scheduler: Steps after each update; None: constant learning rate.
        grad_scaler: For fp16 autocast; None otherwise.
        max_grad_norm: Gradients are clipped to this global L2 norm; None: not clipped.
        total_steps: The loop ends after this step; None: it goes on until something stops it.
        tokens_per_sample: For throughput; None: not known.
        about: What does not change, for the scalars of every checkpoint.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: Any
    grad_scaler: Any
    max_grad_norm: float | None
    total_steps: int | None
    tokens_per_sample: int | None
    about: Mapping[str, Any] = field(default_factory=dict)
