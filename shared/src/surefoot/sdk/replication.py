"""How the ranks come to one gradient: DistributedDataParallel, set up so that a resumed run is bit-equal to one that
never stopped, or FSDP2, which the script has applied itself.
"""

from __future__ import annotations

from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from surefoot.errors import UsageError
from surefoot.sdk.sharding import is_fsdp, is_sharded


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
    """Return the model wrapped in DDP where there are other ranks and the script has not made it a parallel one.

    Args:
        model: The script's model, plain, already wrapped, or sharded by `fully_shard`.
        world_size: Number of ranks.
        init_sync: Send rank 0's weights to the others; not needed when a checkpoint is loaded afterwards. A sharded
            model is the script's to initialise.

    Raises:
        UsageError: it is sharded in a way that is not data-parallel over all ranks.
    """
    if world_size == 1 or isinstance(model, DistributedDataParallel):
        return model
    if any(is_sharded(parameter) for parameter in model.parameters()):
        _check_data_parallel(model, world_size)
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
    """Let the ranks reduce gradients in the last micro-batch of a step only. Call before its forward."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = enabled
        return
    inner = unwrap(model)
    if is_fsdp(inner):
        inner.set_requires_gradient_sync(enabled)


def _check_data_parallel(model: nn.Module, world_size: int) -> None:
    """Refuse a sharded model whose gradients are not averaged over all ranks.

    A session gives every rank samples of its own; the ranks of a tensor-parallel group would have to get the same.

    Raises:
        UsageError: names the first parameter that is not data-parallel.
    """
    if not is_fsdp(unwrap(model)):
        raise UsageError("model", "has DTensor parameters, so fully_shard must have been applied to all of it")
    for name, parameter in model.named_parameters():
        if not is_sharded(parameter):
            if parameter.requires_grad:
                raise UsageError("model", f"parameter {name} is not sharded, so nobody would average its gradient")
            continue
        mesh, placements = parameter.device_mesh, parameter.placements
        is_hybrid = mesh.ndim == 2 and placements[0].is_replicate()
        if mesh.size() != world_size or not (mesh.ndim == 1 or is_hybrid):
            raise UsageError(
                "model",
                f"parameter {name} is placed as {placements} over {mesh.size()} of {world_size} ranks; FSDP2 and HSDP "
                "over all ranks are allowed",
            )
