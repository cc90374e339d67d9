"""What a session trains and how far it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Counters:
    """How far training is.

    Attributes:
        step: Global batches drawn; drives the data.
        updates: Optimizer updates taken; drives the schedule. Less than `step` when updates were skipped.
    """

    step: int = 0
    updates: int = 0


@dataclass(frozen=True)
class Trained:
    """What the session trains, as `attach` got it.

    Attributes:
        model: What the loop must call: wrapped in DDP where there are other ranks.
        optimizer: Steps once per global batch.
        lr_scheduler: Steps after each update; None: constant learning rate.
        grad_scaler: For fp16 autocast; None otherwise.
        max_grad_norm: Gradients are clipped to this global L2 norm; None: not clipped.
        total_steps: The loop ends after this step; None: it goes on until something stops it.
        tokens_per_sample: For throughput; None: not known.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: Any
    grad_scaler: Any
    max_grad_norm: float | None
    total_steps: int | None
    tokens_per_sample: int | None
