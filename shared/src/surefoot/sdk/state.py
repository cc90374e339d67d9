"""What a checkpoint holds, as tensors by name and one JSON document, and how to put it back.

Tensors are `model.<name>`, `optimizer.<parameter name>.<key>` and `<object>.<path>` for the scheduler, the
gradient scaler and the user's own objects. Everything else is JSON with a few tagged values, because JSON knows
neither tuples, non-string keys nor NaN. Nothing is ever pickled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from surefoot.errors import UsageError
from surefoot.sdk.constant import Constant

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class Stateful(Protocol):
    """Anything with a state: schedulers, gradient scalers, EMAs, the user's own."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take the state back."""


def flatten(path: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return `value` as JSON-safe data; its tensors go into `tensors` under their path.

    Raises:
        UsageError: a value that is neither a tensor nor plain data; names its path.
    """
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {"$tensor": path}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, list):
        return [flatten(f"{path}.{i}", item, tensors) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [flatten(f"{path}.{i}", item, tensors) for i, item in enumerate(value)]}
    if isinstance(value, Mapping):
        kind = "$counter" if isinstance(value, Counter) else "$dict"
        items = [[key, flatten(f"{path}.{key}", item, tensors)] for key, item in value.items()]
        plain = kind == "$dict" and all(isinstance(key, str) and not key.startswith("$") for key in value)
        if not plain and not all(isinstance(key, str | int | float) for key in value):
            raise UsageError(path, "has keys that are not strings or numbers; a checkpoint cannot hold it")
        return dict(items) if plain else {kind: items}
    raise UsageError(
        path,
        f"is a {type(value).__name__}; a checkpoint holds tensors, numbers, strings, lists, tuples and dicts",
    )


def unflatten(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `flatten` took apart. Tensors are the given objects, not copies."""
    if isinstance(data, list):
        return [unflatten(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    tag, content = next(iter(data.items())) if len(data) == 1 else ("", None)
    if tag in _UNTAG:
        return _UNTAG[tag](content, tensors)
    return {key: unflatten(item, tensors) for key, item in data.items()}


def _unflatten_items(content: list[list[Any]], tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
    return {key: unflatten(item, tensors) for key, item in content}


_UNTAG: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "$tensor": lambda name, tensors: tensors[name],
    "$float": lambda text, _: float(text),
    "$tuple": lambda items, tensors: tuple(unflatten(item, tensors) for item in items),
    "$dict": _unflatten_items,
    "$counter": lambda items, tensors: Counter(_unflatten_items(items, tensors)),
}


class TrainingState:
    """All state of a job on this rank. Main thread of the rank only.

    Args:
        model: The plain module, not its DDP wrapper.
        optimizer: Its optimizer; its parameters must belong to the model.
        others: Named objects with a state: scheduler, gradient scaler, the user's own.

    Raises:
        UsageError: the optimizer has a parameter that is not the model's.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, others: Mapping[str, Stateful]
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._others = others
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._parameter_names = {f"model.{name}" for name, _ in model.named_parameters(remove_duplicate=False)}
        self._parameters: list[tuple[str, Tensor, dict[str, Any]]] = []
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise UsageError("optimizer", f"parameter group {index} has a tensor that is not the model's")
                self._parameters.append((names[id(parameter)], parameter, group))

    def is_replicated(self, name: str) -> bool:
        """Return whether a captured tensor is the same on every rank of a DDP job.

        Parameters and their optimizer state are. Buffers are not: each rank's BatchNorm sees its own samples, and DDP
        sends rank 0's to the others before the next forward, so rank 0's are the ones to keep.
        """
        return name.startswith("optimizer.") or name in self._parameter_names

    def capture(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the live tensors by name and the rest as JSON-safe data. Copies nothing."""
        tensors: dict[str, Tensor] = {}
        model = flatten("model", dict(self._model.state_dict(keep_vars=True)), tensors)
        scalars: dict[str, Any] = {
            # The tensors' names are known from the tensors; what is left is modules' extra state.
            "model": {name: item for name, item in model.items() if item != {"$tensor": f"model.{name}"}},
            "optimizer": {
                name: flatten(f"optimizer.{name}", dict(self._optimizer.state[parameter]), tensors)
                for name, parameter, _ in self._parameters
                if parameter in self._optimizer.state
            },
            "param_groups": [
                flatten(f"param_groups.{index}", _without_parameters(group), tensors)
                for index, group in enumerate(self._optimizer.param_groups)
            ],
        }
        for name, item in self._others.items():
            scalars[name] = flatten(name, item.state_dict(), tensors)
        return tensors, scalars

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Put a captured state back, in place; values are copied, never aliased.

        Args:
            tensors: Every stored tensor by name, CPU, possibly a view of a file.
            scalars: What `capture` returned beside them.

        Raises:
            UsageError: the checkpoint is not of this model, optimizer or set of objects; names what differs.
        """
        self._check_fits(tensors, scalars)
        for name, item in self._others.items():
            if isinstance(item, Constant):
                item.load_state_dict(unflatten(scalars[name], tensors))
        model = {
            name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")
        }
        self._model.load_state_dict(model | _cloned(unflatten(scalars["model"], tensors)))
        self._restore_optimizer(tensors, scalars)
        for name, item in self._others.items():
            if not isinstance(item, Constant):
                item.load_state_dict(_cloned(unflatten(scalars[name], tensors)))

    def _restore_optimizer(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        for name, parameter, group in self._parameters:
            saved = scalars["optimizer"].get(name)
            if saved is None:
                self._optimizer.state.pop(parameter, None)
                continue
            state = self._optimizer.state[parameter]
            for key, value in unflatten(saved, tensors).items():
                on_cpu = key == "step" and not (group.get("fused") or group.get("capturable"))
                state[key] = _optimizer_value(value, parameter, torch.device("cpu") if on_cpu else parameter.device)
        for group, saved in zip(self._optimizer.param_groups, scalars["param_groups"], strict=True):
            group.update(_cloned(unflatten(saved, tensors)))

    def _check_fits(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        wanted = {
            f"model.{name}": value.shape
            for name, value in self._model.state_dict(keep_vars=True).items()
            if isinstance(value, Tensor)
        }
        stored = {name: value.shape for name, value in tensors.items() if name.startswith("model.")}
        for name in sorted(wanted.keys() | stored.keys()):
            if wanted.get(name) != stored.get(name):
                raise UsageError(
                    "model",
                    f"does not match the checkpoint: {name.removeprefix('model.')} is {_shape(wanted.get(name))} "
                    f"in the model and {_shape(stored.get(name))} in the checkpoint",
                )
        groups, saved_groups = len(self._optimizer.param_groups), len(scalars["param_groups"])
        if groups != saved_groups:
            raise UsageError(
                "optimizer", f"has {groups} parameter groups, the checkpoint was made with {saved_groups}"
            )
        missing = [name for name in self._others if name not in scalars]
        if missing:
            raise UsageError(missing[0], "is attached to the session but the checkpoint was made without it")


def _optimizer_value(value: Any, parameter: Tensor, device: torch.device) -> Any:
    """Copy one optimizer value to where torch's Optimizer.load_state_dict would put it."""
    if not isinstance(value, Tensor):
        return _cloned(value)
    if value.shape == parameter.shape:
        # The same strides as the parameter (channels_last, say), as the optimizer itself would make it.
        return torch.empty_like(parameter, dtype=value.dtype, device=device).copy_(value)
    return value.to(device=device, copy=True)


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _cloned(value: Any) -> Any:
    """Copy the tensors inside nested data, so that nothing refers to the file they came from."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Counter):
        return value
    if isinstance(value, dict):
        return {key: _cloned(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cloned(item) for item in value)
    return value


def _shape(shape: torch.Size | None) -> str:
    return "absent" if shape is None else str(list(shape))
