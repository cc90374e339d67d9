"""Where the tensors of a checkpoint go in a model and its optimizer: into the memory that is there, where it fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.sdk.sharding import DTYPES, is_sharded
from surefoot.sdk.stored import StoredTensors, Wanted

OptimizerValues = dict[Tensor, dict[str, Any]]
"""Parameter -> key -> value: what `torch.optim.Optimizer.state` is."""


def want_model(model: nn.Module, aliases: Mapping[str, str], wanted: Wanted, *, in_place: bool) -> dict[str, Tensor]:
    """Want the tensors of a model's state_dict.

    Args:
        model: The plain module.
        aliases: Stored name of each tied tensor -> name of what it is tied to.
        wanted: Told what goes where.
        in_place: In its parameters and buffers themselves; else in memory of their own, for `load_state_dict`.

    Returns:
        The tensors by the names of the state_dict.
    """
    values: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        stored_name = f"model.{name}"
        if isinstance(value, Tensor) and stored_name not in aliases:
            values[name] = wanted.into(stored_name, value) if in_place else wanted.like(stored_name, value)
    return values | {
        alias.removeprefix("model."): values[stored_name.removeprefix("model.")]
        for alias, stored_name in aliases.items()
        if stored_name.removeprefix("model.") in values  # a buffer that is not persistent may be tied too
    }


def loads_its_own_way(model: nn.Module) -> bool:
    """Return whether some module of the model does more in `load_state_dict` than fill its parameters and buffers.

    torch's own modules and wrappers only bring older formats up to date, which no checkpoint of ours has.
    """
    live = {id(value) for value in chain(model.parameters(), model.buffers())}
    if any(id(value) not in live for value in model.state_dict(keep_vars=True).values()):
        return True
    hooks = [
        hook
        for module in model.modules()
        for hook in chain(module._load_state_dict_pre_hooks.values(), module._load_state_dict_post_hooks.values())
    ]
    methods = [
        getattr(type(module), name)
        for module in model.modules()
        for name in ("load_state_dict", "_load_from_state_dict")
    ]
    return any(not str(getattr(code, "__module__", "")).startswith("torch.") for code in (*hooks, *methods))


def want_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[tuple[str, Tensor, dict[str, Any]]],
    stored: StoredTensors,
    wanted: Wanted,
) -> OptimizerValues:
    """Want the optimizer's state tensors: in those that it has, else in new ones such as it would make itself.

    A roll-back finds all of them there; new memory costs several times a copy into it.

    Args:
        optimizer: Its state is read, not changed.
        parameters: Name, parameter and group of all its parameters.
        stored: The checkpoint; its names are optimizer.<key>.<parameter>.
        wanted: Told what goes where.
    """
    keys: dict[str, list[str]] = {}
    for stored_name in stored.tensors:
        if stored_name.startswith("optimizer."):
            _, key, name = stored_name.split(".", 2)
            keys.setdefault(name, []).append(key)
    values: OptimizerValues = {}
    for name, parameter, group in parameters:
        present = optimizer.state.get(parameter, {})
        values[parameter] = {}
        for key in keys.get(name, ()):
            stored_name = f"optimizer.{key}.{name}"
            tensor = stored.tensors[stored_name]
            template = _new_value(key, parameter, group, tensor.shape, DTYPES[tensor.dtype])
            ours = present.get(key)
            fits = isinstance(ours, Tensor) and _kind(ours) == _kind(template)
            values[parameter][key] = wanted.into(stored_name, ours if fits else template)
    return values


def _new_value(
    key: str, parameter: Tensor, group: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Make memory for one value where torch's Optimizer.load_state_dict would put it."""
    if key == "step":
        # Adam's: kept in host memory unless the kernel needs it beside the parameter, and never sharded.
        on_device = group.get("fused") or group.get("capturable")
        return torch.empty(shape, dtype=dtype, device=parameter.device if on_device else "cpu")
    if shape == parameter.shape:
        # The same strides (channels_last, say) and the same sharding as the parameter's.
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=parameter.device)


def _kind(tensor: Tensor) -> tuple[object, ...]:
    placed = (tensor.device_mesh, tensor.placements) if is_sharded(tensor) else None
    return tensor.dtype, tensor.shape, tensor.device, placed
