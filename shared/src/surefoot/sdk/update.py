"""What a step does to model, optimizer and schedule once its gradients are there."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surefoot.sdk.trained import Trained


class Updater:
    """Backward, clipping and the update. Main thread of the rank only.

    Args:
        trained: What is trained.
    """

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self._parameters = [p for group in trained.optimizer.param_groups for p in group["params"]]

    def backward(self, loss: Tensor) -> None:
        """Add this loss's gradients to those of the step."""
        scaler = self._trained.grad_scaler
        (loss if scaler is None else scaler.scale(loss)).backward()

    def clip(self) -> Tensor:
        """Clip the step's gradients, and return their global L2 norm before that."""
        if self._trained.grad_scaler is not None:
            self._trained.grad_scaler.unscale_(self._trained.optimizer)
        maximum = self._trained.max_grad_norm
        return torch.nn.utils.clip_grad_norm_(self._parameters, math.inf if maximum is None else maximum)

    def update(self, lr_factor: float) -> float:
        """Step optimizer and schedule; return the first group's learning rate.

        Args:
            lr_factor: The learning rate is the schedule's times this.
        """
        trained = self._trained
        schedule_rates = [group["lr"] for group in trained.optimizer.param_groups]
        # The factor is on only while the optimizer steps: chained schedulers read the rate back, and would
        # otherwise apply it again at every step.
        for group in trained.optimizer.param_groups:
            group["lr"] = group["lr"] * lr_factor
        learning_rate = float(trained.optimizer.param_groups[0]["lr"])
        if trained.grad_scaler is None:
            trained.optimizer.step()
        else:
            trained.grad_scaler.step(trained.optimizer)
            trained.grad_scaler.update()
        for group, rate in zip(trained.optimizer.param_groups, schedule_rates, strict=True):
            group["lr"] = rate
        if trained.lr_scheduler is not None:
            trained.lr_scheduler.step()
        trained.optimizer.zero_grad(set_to_none=True)
        return learning_rate

    def skip(self, lr_factor: float) -> float:
        """Drop the gradients; return the learning rate that the update would have had."""
        if self._trained.grad_scaler is not None:
            self._trained.grad_scaler.update()
        self._trained.optimizer.zero_grad(set_to_none=True)
        return float(self._trained.optimizer.param_groups[0]["lr"]) * lr_factor
