from __future__ import annotations

import json
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from surefoot.errors import UsageError
from surefoot.sdk.snapshot import plan_shard
from surefoot.sdk.state import TrainingState, flatten, unflatten

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
plain = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
)


def same(a, b):
    if isinstance(a, float) and isinstance(b, float):
        return math.copysign(1, a) == math.copysign(1, b) and (a == b or (math.isnan(a) and math.isnan(b)))
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return a == b


@given(plain)
def test_plain_data_survives_json(value):
    tensors = {}
    data = json.loads(json.dumps(flatten("x", value, tensors), allow_nan=False))
    restored = unflatten(data, tensors)
    # NaN's sign is not data.
    assert same(restored, value) or "nan" in repr(value)


@pytest.mark.parametrize("value", [Counter({30: 1, 60: 2}), {1: "a"}, {"$tensor": 1}, {"$float": "x"}, {}, ()])
def test_awkward_mappings_survive(value):
    restored = unflatten(json.loads(json.dumps(flatten("x", value, {}))), {})
    assert restored == value
    assert type(restored) is type(value)


def test_what_is_no_data_is_refused_by_name():
    with pytest.raises(UsageError, match=r"scheduler\.hook: is a function"):
        flatten("scheduler", {"hook": lambda: 0}, {})


def build(kind="cosine", optimizer_class=torch.optim.AdamW, **options):
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
    scheduler = {
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, 9),
        "multistep": lambda: lr_scheduler.MultiStepLR(optimizer, [2, 4]),
        "plateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer),
    }[kind]()
    return model, optimizer, scheduler


def train(model, optimizer, scheduler, steps):
    for step in range(steps):
        loss = model(torch.sin(torch.arange(20.0).view(5, 4) + step)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss.item()) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adafactor, {}),
    ],
)
@pytest.mark.parametrize("kind", ["cosine", "multistep", "plateau"])
def test_restored_training_goes_on_bit_equal(kind, optimizer_class, options):
    torch.manual_seed(3)
    first = build(kind, optimizer_class, **options)
    train(*first, 5)
    tensors, data = TrainingState(first[0], first[1], {"lr_scheduler": first[2]}).capture()
    stored = {name: tensor.clone() for name, tensor in tensors.items()}
    text = json.dumps(data, allow_nan=False)
    train(*first, 5)

    torch.manual_seed(4)
    second = build(kind, optimizer_class, **options)
    TrainingState(second[0], second[1], {"lr_scheduler": second[2]}).restore(stored, json.loads(text))
    for tensor in stored.values():
        tensor.zero_()  # nothing may alias what was stored
    train(*second, 5)
    for name, value in first[0].state_dict().items():
        assert torch.equal(value, second[0].state_dict()[name]), name
    assert first[1].param_groups[0]["lr"] == second[1].param_groups[0]["lr"]


def test_tied_weights_are_stored_once():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainingState(model, optimizer, {})
    tensors, _ = state.capture()
    layouts = [plan_shard(tensors, state.is_replicated, rank, 2) for rank in range(2)]
    assert [entry.name for layout in layouts for entry in layout.entries] == ["model.0.weight"]
    assert all(layout.aliases == {"model.1.weight": "model.0.weight"} for layout in layouts)


def test_buffers_are_always_rank_0s():
    """Each rank's BatchNorm buffers differ under DDP; rank 0's are broadcast before the next forward."""
    model = nn.BatchNorm1d(64)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), {})
    tensors, _ = state.capture()
    stored = [plan_shard(tensors, state.is_replicated, rank, 3).by_name.keys() for rank in range(3)]
    assert {"model.running_mean", "model.running_var", "model.num_batches_tracked"} <= stored[0]
    assert stored[1] | stored[2] <= {"model.weight", "model.bias"}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: nn.Linear(4, 3), r"bias is \[3\] in the model and \[2\] in the checkpoint"),
        (lambda: nn.Sequential(nn.Linear(4, 2)), r"0.bias is \[2\] in the model and absent in the checkpoint"),
    ],
)
def test_another_model_is_refused_by_name(other, message):
    model = nn.Linear(4, 2)
    tensors, data = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), {}).capture()
    wrong = other()
    before = {name: value.clone() for name, value in wrong.state_dict().items()}
    with pytest.raises(UsageError, match=message):
        TrainingState(wrong, torch.optim.SGD(wrong.parameters(), lr=0.1), {}).restore(tensors, data)
    assert all(torch.equal(before[name], value) for name, value in wrong.state_dict().items())


def test_foreign_parameter_is_refused():
    with pytest.raises(UsageError, match="not the model's"):
        TrainingState(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), {})
