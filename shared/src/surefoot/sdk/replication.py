"""DistributedDataParallel, set up so that a resumed run is bit-equal to one that never stopped."""

from __future__ import annotations

from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def unwrap(model: nn.Module) -> nn.Module:
    """Return the plain module inside DDP and torch.compile wrappers."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def is_replicated(model: nn.Module) -> bool:
    """Return whether the model is a DDP wrapper."""
    return isinstance(model, DistributedDataParallel)


def replicate(model: nn.Module, world_size: int, *, init_sync: bool) -> nn.Module:
    """Return the model wrapped in DDP where there are other ranks and the script has not wrapped it.

    Args:
        model: The script's model, plain or already wrapped.
        world_size: Number of ranks.
        init_sync: Send rank 0's weights to the others; not needed when a checkpoint is loaded afterwards.
    """
    if world_size == 1 or isinstance(model, DistributedDataParallel):
        return model
    device = next(model.parameters()).device
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, init_sync=init_sync)


def rehearse(model: nn.Module, world_size: int) -> None:
    """Make DDP settle its gradient buckets before any state is loaded. Collective.

    After its first backward DDP rebuilds the buckets in the order the gradients arrived, so the first step after
    a restart would reduce in another order than the same step of a run that never stopped, and with three ranks
    or more the sums differ in the last bit (measured). Two passes of zero gradients, in an order that depends on
    the model alone, put every start into the same buckets. The user's forward is not run: no RNG is drawn and no
    BatchNorm buffer changes. Two ranks need none of it: a sum of two numbers has one order.

    With `static_graph=True` DDP counts the hooks of its first pass, so such a model is left alone.
    """
    if world_size < 3 or not isinstance(model, DistributedDataParallel) or model.static_graph:
        return
    module = model.module
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def zero_loss(_module: nn.Module) -> Tensor:
        # Autograd runs later operations first: the last parameter's gradient is ready first, as in a real backward.
        total = torch.zeros((), device=parameters[0].device)
        for parameter in parameters:
            total = total + parameter.flatten()[:1].float().sum() * 0.0
        return total

    had_forward = module.__dict__.get("forward")
    module.forward = MethodType(zero_loss, module)
    try:
        for _ in range(2):
            model().backward()
    finally:
        if had_forward is None:
            del module.forward
        else:
            module.forward = had_forward
    for parameter in module.parameters():
        parameter.grad = None


def set_gradient_sync(model: nn.Module, *, enabled: bool) -> None:
    """Switch DDP's all-reduce on for the last micro-batch of a step only. Call before its forward."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = enabled
