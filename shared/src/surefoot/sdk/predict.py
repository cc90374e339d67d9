"""What an optimizer is going to keep, found out before its first step.

Staging memory is allocated at the start of a job, when the optimizer has no state yet. So a stand-in of the optimizer
takes one step on tensors of the meta device, which have shapes and no memory: what it then keeps is what the optimizer
is going to keep. A wrong answer costs one new layout at the first snapshot, nothing else.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

_REFUSALS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError)
"""What an optimizer may raise that cannot do its step without values, or without what the stand-in lacks."""
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_FOR_VALUES = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}
"""Kernels of these kinds do not run on the meta device; without them the state is of the same names and shapes."""


def predict_state(
    optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[str, Tensor, dict[str, Any]]]
) -> dict[str, Tensor]:
    """Return the state tensors that the optimizer is going to have after its first step, on the meta device.

    The optimizer, its parameters and their gradients stay as they are. Parameters of one shape in one group have one
    kind of state, so the cost does not grow with the number of layers. Where the step cannot be tried, Adam's state is
    the guess, which is as much as the usual optimizers keep.

    Args:
        optimizer: As the script made it; wrappers that keep tensors elsewhere than in `state` are not looked into.
        parameters: Its parameters: name, tensor, group.

    Returns:
        By the names of a checkpoint, optimizer.<key>.<parameter>, in the order in which `TrainingState` finds them.
    """
    known: dict[tuple[Any, ...], dict[str, Tensor]] = {}
    predicted: dict[str, Tensor] = {}
    for name, parameter, group in parameters:
        if not parameter.requires_grad:
            continue
        mesh = getattr(parameter, "device_mesh", None), getattr(parameter, "placements", None)
        kind = (id(group), parameter.dtype, parameter.shape, parameter.stride(), mesh)
        if kind not in known:
            known[kind] = _state_of_one(optimizer, parameter, group)
        predicted |= {f"optimizer.{key}.{name}": value for key, value in known[kind].items()}
    return predicted


def _state_of_one(optimizer: torch.optim.Optimizer, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    meta = torch.empty_like(parameter, device="meta").requires_grad_()
    meta.grad = torch.empty_like(meta)
    try:
        stand_in = _stand_in(optimizer, {**group, "params": [meta]})
        completed = _step(stand_in)
    except _REFUSALS:
        return _like_adam(meta)
    state = {key: value for key, value in stand_in.state[meta].items() if isinstance(value, Tensor)}
    # torch's own make all of their state before they look at a value.
    if completed or (state and type(optimizer).__module__.startswith("torch.optim")):
        return state
    return _like_adam(meta)


def _step(stand_in: torch.optim.Optimizer) -> bool:
    """Let it step; False when it stopped half-way. Its hooks and torch's wrappers (profiler, dynamo) stay out."""
    step = inspect.unwrap(type(stand_in).step)
    try:
        with torch.no_grad():
            step(stand_in)
    except _REFUSALS:
        return False
    return True


def _stand_in(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return an optimizer of the same class over one group, which shares nothing that can change with the real one."""
    stand_in: torch.optim.Optimizer = object.__new__(type(optimizer))
    plain = {name: copy.deepcopy(value) for name, value in vars(optimizer).items() if _is_plain(value)}
    # Not among them: a `step` that a scheduler has put on the instance, other optimizers, the model.
    vars(stand_in).update(plain | {name: OrderedDict() for name in _HOOKS})
    options = {key: _copied(value) for key, value in group.items()}
    options |= {key: value for key, value in _FOR_VALUES.items() if key in options}
    stand_in.defaults = {key: value for key, value in options.items() if key != "params"}
    stand_in.state = defaultdict(dict)
    stand_in.param_groups = [options | {"params": group["params"]}]
    return stand_in


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value) if _is_plain(value) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(item) for item in [*value.keys(), *value.values()])
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def _like_adam(meta: Tensor) -> dict[str, Tensor]:
    moment = torch.empty_like(meta, requires_grad=False)
    return {"step": torch.empty((), device="meta"), "exp_avg": moment, "exp_avg_sq": moment}
