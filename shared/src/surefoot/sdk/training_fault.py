"""Faults inside the update, for tests and the demo: where no guard of ours looks any more."""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch

from surefoot.sdk.data.order import MicroBatch
from surefoot.testing.faults import TRAINING_FAULT_ENVIRONMENT_KEY, parse_training_fault


class _Session(Protocol):
    @property
    def micro_batch(self) -> MicroBatch:
        """The batch in hand."""


def install_fault(session: _Session, optimizer: torch.optim.Optimizer) -> None:
    """Plan the fault that the environment variable `SUREFOOT_TRAINING_FAULT` asks for; without it do nothing.

    A blow-up multiplies the gradients in a pre-hook of the optimizer's step: after clipping, after the ranks agreed
    that all is finite. It comes with its batch, whatever the attempt: a roll-back that does not leave the batch out
    meets it again.

    Raises:
        UsageError: the variable is not a sentence such as `blow_up(factor=1e4).at(step=190)`.
    """
    text = os.environ.get(TRAINING_FAULT_ENVIRONMENT_KEY)
    if not text:
        return
    fault = parse_training_fault(text)

    def blow_up(*_: Any) -> None:
        if session.micro_batch.position != fault.position:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(fault.factor)

    optimizer.register_step_pre_hook(blow_up)
