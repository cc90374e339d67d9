"""Noticing that a script overwrites what `attach` has just loaded.

A script written for training from the start may load or initialise its weights after `attach`. The job would then go
on at step N with a model of step 0, and nothing else would show it (case R8).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surefoot.errors import UsageError
from surefoot.sdk.sharding import local_part
from surefoot.sdk.state import TrainingState

_NUM_VALUES = 16
_SCALARS = ("optimizer", "lr_scheduler", "grad_scaler")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Look(NamedTuple):
    """What the state was like at some moment.

    Attributes:
        versions: Torch's count of changes in place, by the name of the tensor.
        values: A few evenly spread values of each, as bits (NaN equals NaN): writing through `.data` is not counted.
            Those of all tensors of a kind are in one tensor, in the order of `names`.
        names: For each kind the tensors' names, and how many values of each there are.
        scalars: What is no tensor.
    """

    versions: Mapping[str, int]
    values: Mapping[tuple[int, torch.device], Tensor]
    names: Mapping[tuple[int, torch.device], list[tuple[str, int]]]
    scalars: Mapping[str, Any]

    def value_of(self) -> dict[str, tuple[int, list[int]]]:
        """Return version and values by name; slow."""
        by_name = {}
        for kind, names in self.names.items():
            values = self.values[kind].tolist()
            for name, count in names:
                by_name[name] = (self.versions[name], values[:count])
                del values[:count]
        return by_name


class LoadedState:
    """What a session starts from, remembered until its first batch. Main thread of the rank only.

    Parameters, optimizer state, schedule and gradient scaler are looked at. Buffers are not: a forward pass made to
    warm up may change them. Learning rates and the like in parameter groups are the script's to change.

    Args:
        state: With everything loaded.
        step: The step that was loaded.
    """

    def __init__(self, state: TrainingState, step: int) -> None:
        self._state = state
        self._step = step
        self._before = self._look()

    def check(self) -> None:
        """Compare with what is there now; call it before the first forward pass.

        Raises:
            UsageError: something was overwritten; names it.
        """
        before, now = self._before, self._look()
        unchanged = before.versions == now.versions and before.names == now.names
        if not unchanged or not all(torch.equal(before.values[kind], now.values[kind]) for kind in before.values):
            ours, theirs = before.value_of(), now.value_of()
            changed = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
            kind, _, name = changed[0].partition(".")
            raise self._refusal(kind, f"{name} of the checkpoint was overwritten")
        for name, value in before.scalars.items():
            if now.scalars.get(name) != value:
                raise self._refusal(name, "the state of the checkpoint was overwritten")

    def _refusal(self, key: str, what: str) -> UsageError:
        return UsageError(
            key,
            f"{what} after attach had loaded step {self._step}; attach loads the newest checkpoint by itself: load or "
            "initialise before it, or not at all, or start over with --from-seed",
        )

    @torch.no_grad()
    def _look(self) -> _Look:
        tensors, scalars = self._state.capture()
        watched = {name: tensor for name, tensor in tensors.items() if self._state.changes_only_in_update(name)}
        names: dict[tuple[int, torch.device], list[tuple[str, int]]] = {}
        parts: dict[tuple[int, torch.device], list[Tensor]] = {}
        for name, tensor in watched.items():
            values = _some_values(local_part(tensor))
            kind = (tensor.itemsize, tensor.device)
            names.setdefault(kind, []).append((name, values.numel()))
            parts.setdefault(kind, []).append(values)
        return _Look(
            versions={name: 0 if t.is_inference() else t._version for name, t in watched.items()},
            values={kind: torch.cat(values) for kind, values in parts.items()},
            names=names,
            scalars={name: scalars[name] for name in _SCALARS if name in scalars},
        )


def _some_values(tensor: Tensor) -> Tensor:
    """Return a view of a few values, as integers of the same bits; of what does not lie in one piece a copy of all."""
    bits = tensor.view(_BITS[tensor.itemsize])
    if not bits.is_contiguous():
        bits = bits.reshape(-1)
    stride = max(1, bits.numel() // _NUM_VALUES)
    return bits.as_strided((-(-bits.numel() // stride),), (stride,))
