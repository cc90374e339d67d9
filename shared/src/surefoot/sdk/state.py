"""What a checkpoint holds, as tensors by name and one JSON document, and how to put it back.

Tensors are `model.<name>`, `optimizer.<key>.<parameter name>` and `<object>.<path>` for the scheduler, the gradient
scaler and the user's own objects. Everything else is JSON with a few tagged values, because JSON knows
neither tuples, non-string keys nor NaN. Nothing is ever pickled.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from surefoot.checkpoint.regions import StoredTensor
from surefoot.errors import UsageError
from surefoot.sdk.constant import Constant
from surefoot.sdk.loading import loads_its_own_way, want_model, want_optimizer
from surefoot.sdk.predict import predict_state
from surefoot.sdk.sharding import DTYPES, is_sharded
from surefoot.sdk.stored import StoredTensors, Wanted


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
        tensors[path] = _bare(value)
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
        self.aliases = _tied_names(model)
        """Name of each tied tensor -> name under which it is stored. Ties of the module itself: equal memory elsewhere
        may be a coincidence that does not last."""
        self._parameter_names = {f"model.{name}" for name, _ in model.named_parameters()}
        self._parameters: list[tuple[str, Tensor, dict[str, Any]]] = []
        self._group_digests: list[str] = []
        self._index_parameters()

    def _index_parameters(self) -> None:
        """Find the names of the optimizer's parameters; again when a group or a parameter was added."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        self._parameters.clear()
        self._group_digests.clear()
        for index, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise UsageError("optimizer", f"parameter group {index} has a tensor that is not the model's")
                self._parameters.append((names[id(parameter)], parameter, group))
            in_group = json.dumps([names[id(parameter)] for parameter in group["params"]])
            self._group_digests.append(hashlib.blake2b(in_group.encode(), digest_size=8).hexdigest())

    def is_replicated(self, name: str) -> bool:
        """Return whether a captured plain tensor is the same on every rank.

        Parameters and their optimizer state are. Buffers are not: each rank's BatchNorm sees its own samples, and DDP
        sends rank 0's to the others before the next forward, so rank 0's are the ones to keep.
        """
        return name.startswith("optimizer.") or name in self._parameter_names

    def capture(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the live tensors by name, tied ones once, and the rest as JSON-safe data. Copies nothing.

        Tensors are named model.<name>, optimizer.<key>.<parameter> and <object>.<path>.
        """
        if sum(len(group["params"]) for group in self._optimizer.param_groups) != len(self._parameters):
            self._index_parameters()
        tensors: dict[str, Tensor] = {}
        extra: dict[str, Any] = {}
        for name, value in self._model.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                extra[name] = flatten(f"model_extra.{name}", value, tensors)
            elif f"model.{name}" not in self.aliases:
                tensors[f"model.{name}"] = _bare(value)
        scalars: dict[str, Any] = {
            "model": extra,
            "optimizer": self._capture_optimizer(tensors),
            "optimizer_class": type(self._optimizer).__name__,
            "param_groups": [
                flatten(f"param_groups.{index}", _without_parameters(group), tensors)
                for index, group in enumerate(self._optimizer.param_groups)
            ],
            "param_group_digests": self._group_digests,
        }
        for name, item in self._others.items():
            scalars[name] = flatten(name, item.state_dict(), tensors)
        return tensors, scalars

    def foresee(self) -> dict[str, Tensor]:
        """Return what `capture` is going to find after the first update; state that is not there yet is on meta."""
        tensors, _ = self.capture()
        if any(self._optimizer.state.values()):
            return tensors
        model = {name: tensor for name, tensor in tensors.items() if name.startswith("model")}
        return model | predict_state(self._optimizer, self._parameters) | tensors  # in the order of `capture`

    def changes_only_in_update(self, name: str) -> bool:
        """Return whether a captured tensor stays as it is from the end of a step to the next optimizer step."""
        return name.startswith("optimizer.") or name in self._parameter_names

    def _capture_optimizer(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Add the optimizer's tensors, and return what of its state is not simply a tensor, by parameter."""
        rest: dict[str, Any] = {}
        for name, parameter, _ in self._parameters:
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{key}.{name}"] = _bare(value)
                else:
                    rest.setdefault(name, {})[key] = flatten(f"optimizer_extra.{key}.{name}", value, tensors)
        return rest

    def check(self, stored: StoredTensors, scalars: Mapping[str, Any]) -> None:
        """Compare a checkpoint with what it is to be loaded into; changes nothing. Arguments as of `restore`.

        Raises:
            UsageError: the checkpoint is not of this model, optimizer or set of objects; names what differs.
        """
        check_fits(self._expected_model(), self._others, self._expected_scalars(), stored.tensors, scalars)

    @torch.no_grad()
    def restore(self, stored: StoredTensors, scalars: Mapping[str, Any]) -> None:
        """Put a captured state back, in place; values are copied, never aliased.

        Args:
            stored: The tensors, however they are divided; each rank takes its own parts.
            scalars: What `capture` returned beside them.

        Raises:
            UsageError: the checkpoint is not of this model, optimizer or set of objects; names what differs. Nothing
                was changed, unless it was an object of the user's that refused its state.
            OSError, CheckpointError: it cannot be read after all. The state is in pieces: load another one.
        """
        self.check(stored, scalars)
        wanted = Wanted(stored)
        own_way = bool(scalars["model"]) or loads_its_own_way(self._model)
        model: dict[str, Any] = dict(want_model(self._model, self.aliases, wanted, in_place=not own_way))
        model |= unflatten(scalars["model"], wanted.all_like({}))
        optimizer = want_optimizer(self._optimizer, self._parameters, stored, wanted)
        for name, parameter, _ in self._parameters:
            optimizer[parameter] |= unflatten(scalars["optimizer"].get(name, {}), wanted.all_like({}))
        groups = [self._want_group(index, group, wanted) for index, group in enumerate(scalars["param_groups"])]
        others = {
            name: self._want_other(name, item, scalars[name], stored, wanted)
            for name, item in self._others.items()
            if not isinstance(item, Constant)
        }
        wanted.fill()
        if own_way:
            _load_into("model", self._model, model)
        for parameter, values in optimizer.items():
            self._optimizer.state[parameter] = values
            if not values:
                del self._optimizer.state[parameter]
        for group, saved in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(saved)
        for name, state in others.items():
            _load_into(name, self._others[name], state)

    def _want_group(self, index: int, saved: dict[str, Any], wanted: Wanted) -> dict[str, Any]:
        now: dict[str, Tensor] = {}
        flatten(f"param_groups.{index}", _without_parameters(self._optimizer.param_groups[index]), now)
        group: dict[str, Any] = unflatten(saved, wanted.all_like(now))
        return group

    @staticmethod
    def _want_other(name: str, item: Stateful, saved: Any, stored: StoredTensors, wanted: Wanted) -> dict[str, Any]:
        now: dict[str, Tensor] = {}
        if any(stored_name.startswith(f"{name}.") for stored_name in stored.tensors):
            flatten(name, item.state_dict(), now)  # tells the device and the sharding of its tensors
        state: dict[str, Any] = unflatten(saved, wanted.all_like(now))
        return state

    def _expected_model(self) -> dict[str, Tensor]:
        state = self._model.state_dict(keep_vars=True)
        return {f"model.{name}": value for name, value in state.items() if isinstance(value, Tensor)}

    def _expected_scalars(self) -> dict[str, Any]:
        return {"optimizer_class": type(self._optimizer).__name__, "param_group_digests": self._group_digests}


_OWN_SCALARS = {"model", "optimizer", "optimizer_class", "param_groups", "param_group_digests"}


def check_fits(
    model: Mapping[str, Tensor],
    others: Mapping[str, Stateful],
    expected: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    scalars: Mapping[str, Any],
) -> None:
    """Compare a checkpoint with what it is to be loaded into, before anything is changed.

    Args:
        model: The model's tensors by stored name.
        others: The attached objects.
        expected: The optimizer's class and the digests of its groups' parameter names.
        tensors: Of the checkpoint.
        scalars: Of the checkpoint.

    Raises:
        UsageError: names the first difference.
    """
    stored = {name: value for name, value in tensors.items() if name.startswith("model.")}
    for name in sorted(model.keys() | stored.keys()):
        ours, theirs = _described(model.get(name)), _described_stored(stored.get(name))
        if ours != theirs:
            raise UsageError(
                "model",
                f"does not match the checkpoint: {name.removeprefix('model.')} is {ours} in the model and {theirs} "
                "in the checkpoint",
            )
    ours, theirs = expected["optimizer_class"], scalars["optimizer_class"]
    if ours != theirs:
        raise UsageError("optimizer", f"is {ours}, the checkpoint was made with {theirs}")
    if expected["param_group_digests"] != scalars["param_group_digests"]:
        raise UsageError("optimizer", "has other parameter groups, or other parameters in them, than the checkpoint")
    missing = [f"{name}: is attached, but the checkpoint was made without it" for name in others if name not in scalars]
    surplus = scalars.keys() - _OWN_SCALARS - others.keys()
    missing += [f"{name}: is in the checkpoint, but not attached" for name in sorted(surplus)]
    if missing:
        name, _, problem = missing[0].partition(": ")
        raise UsageError(name, problem)
    for name, item in others.items():
        if isinstance(item, Constant):
            item.load_state_dict(scalars[name])


def _tied_names(model: torch.nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    everything = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, value in everything:
        stored = first.setdefault(id(value), name)
        if stored != name:
            tied[f"model.{name}"] = f"model.{stored}"
    return tied


def _load_into(name: str, item: Stateful, state: dict[str, Any]) -> None:
    try:
        item.load_state_dict(state)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        problem = f"{type(item).__name__} does not take the state in the checkpoint: {type(error).__name__}: {error}"
        raise UsageError(name, problem) from error


def _described(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _described_stored(tensor: StoredTensor | None) -> str:
    if tensor is None:
        return "absent"
    return f"{str(DTYPES[tensor.dtype]).removeprefix('torch.')} {list(tensor.shape)}"


def _bare(tensor: Tensor) -> Tensor:
    # Detaching a DTensor costs 30 us, at each of hundreds of tensors in each step, for a wrapper that nobody looks at.
    return tensor if is_sharded(tensor) else tensor.detach()


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
