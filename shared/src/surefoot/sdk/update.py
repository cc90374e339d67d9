"""What a step does to model, optimizer and schedule once its gradients are there."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from surefoot.sdk.sharding import is_sharded
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
        groups = _by_placement(self._parameters)
        norms = [_norm(parameters) for parameters in groups]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        if self._trained.max_grad_norm is not None:
            for parameters in groups:
                torch.nn.utils.clip_grads_with_norm_(parameters, self._trained.max_grad_norm, norm)
        return norm

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


def _by_placement(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group parameters whose gradients may be handed to torch in one call; the same groups on every rank.

    Without gradients there is one empty group, whose norm is 0.
    """
    groups: dict[tuple[object, ...], list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            key = (gradient.device_mesh, gradient.placements) if is_sharded(gradient) else ()
            groups.setdefault(key, []).append(parameter)
    return list(groups.values()) or [[]]


def _norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the L2 norm of the gradients as a plain tensor. Collective when they are sharded."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if is_sharded(norm) else norm
