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

from helpers.shards import open_shards, plain_shards
from surefoot.checkpoint.layout import ShardLayout
from surefoot.errors import UsageError
from surefoot.sdk.loading import loads_its_own_way
from surefoot.sdk.state import TrainingState, flatten, unflatten
from surefoot.sdk.trained import Trained
from surefoot.sdk.update import Updater

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
    state = TrainingState(first[0], first[1], {"lr_scheduler": first[2]})
    tensors, data = state.capture()
    shards = plain_shards(state, tensors, world_size=2)
    text = json.dumps(data, allow_nan=False)
    train(*first, 5)

    torch.manual_seed(4)
    second = build(kind, optimizer_class, **options)
    TrainingState(second[0], second[1], {"lr_scheduler": second[2]}).restore(open_shards(shards), json.loads(text))
    for shard in shards:
        shard[:] = bytes(len(shard))  # nothing may alias what was stored
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
    layouts = [ShardLayout.parse(shard) for shard in plain_shards(state, tensors, 2)]
    assert [entry.name for layout in layouts for entry in layout.entries] == ["model.0.weight"]
    assert all(layout.aliases == {"model.1.weight": "model.0.weight"} for layout in layouts)


def test_buffers_are_always_rank_0s():
    """Each rank's BatchNorm buffers differ under DDP; rank 0's are broadcast before the next forward."""
    model = nn.BatchNorm1d(64)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), {})
    tensors, _ = state.capture()
    stored = [ShardLayout.parse(shard).by_name.keys() for shard in plain_shards(state, tensors, 3)]
    assert {"model.running_mean", "model.running_var", "model.num_batches_tracked"} <= stored[0]
    assert stored[1] | stored[2] <= {"model.weight", "model.bias"}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: nn.Linear(4, 3), r"bias is float32 \[3\] in the model and float32 \[2\] in the"),
        (lambda: nn.Linear(4, 2).bfloat16(), r"bias is bfloat16 \[2\] in the model and float32 \[2\] in the"),
        (lambda: nn.Sequential(nn.Linear(4, 2)), r"0.bias is float32 \[2\] in the model and absent in the"),
    ],
)
def test_another_model_is_refused_by_name(other, message):
    model = nn.Linear(4, 2)
    saved = captured(model, torch.optim.SGD(model.parameters(), lr=0.1))
    wrong = other()
    before = {name: value.clone() for name, value in wrong.state_dict().items()}
    with pytest.raises(UsageError, match=message):
        TrainingState(wrong, torch.optim.SGD(wrong.parameters(), lr=0.1), {}).restore(*saved)
    assert all(torch.equal(before[name], value) for name, value in wrong.state_dict().items())


def test_foreign_parameter_is_refused():
    with pytest.raises(UsageError, match="not the model's"):
        TrainingState(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), {})


def captured(model, optimizer, others=None):
    state = TrainingState(model, optimizer, others or {})
    tensors, data = state.capture()
    return open_shards(plain_shards(state, tensors)), json.loads(json.dumps(data, allow_nan=False))


def test_another_optimizer_is_refused():
    model = nn.Linear(4, 2)
    saved = captured(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(UsageError, match="optimizer: is SGD, the checkpoint was made with AdamW"):
        TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), {}).restore(*saved)


def test_swapped_parameter_groups_are_refused():
    """They would silently swap their learning rates."""
    model = nn.Linear(4, 2)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}]
    saved = captured(model, torch.optim.SGD(groups))
    with pytest.raises(UsageError, match="other parameter groups, or other parameters in them"):
        TrainingState(model, torch.optim.SGD(groups[::-1]), {}).restore(*saved)


@pytest.mark.parametrize(("kept", "now", "problem"), [(True, False, "not attached"), (False, True, "without it")])
def test_an_object_more_or_less_is_refused(kept, now, problem):
    """A dropped scheduler would silently freeze the learning rate."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = {"lr_scheduler": lr_scheduler.StepLR(optimizer, 1)}
    saved = captured(model, optimizer, scheduler if kept else {})
    with pytest.raises(UsageError, match=f"lr_scheduler: .*{problem}"):
        TrainingState(model, optimizer, scheduler if now else {}).restore(*saved)


def test_an_object_that_refuses_its_state_is_named():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = captured(model, optimizer, {"lr_scheduler": lr_scheduler.StepLR(optimizer, 1)})
    other = lr_scheduler.SequentialLR(optimizer, [lr_scheduler.StepLR(optimizer, 1)] * 2, [3])
    with pytest.raises(UsageError, match="lr_scheduler: SequentialLR does not take the state in the checkpoint"):
        TrainingState(model, optimizer, {"lr_scheduler": other}).restore(*saved)


class Ema:
    """Begins as the weights themselves, and becomes memory of its own later."""

    def __init__(self, model):
        self.shadow = dict(model.named_parameters())

    def update(self, model):
        parameters = dict(model.named_parameters())
        self.shadow = {name: 0.9 * self.shadow[name].detach() + 0.1 * p.detach() for name, p in parameters.items()}

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state_dict):
        self.shadow = state_dict["shadow"]


def test_equal_memory_is_no_tie():
    """An EMA that refers to the weights at the first snapshot is not stored as an alias of them for ever."""
    model = nn.Linear(4, 2)
    ema = Ema(model)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), {"ema": ema})
    first, _ = state.capture()
    assert state.aliases == {}
    assert "ema.shadow.weight" in first
    ema.update(model)
    with torch.no_grad():
        model.weight.add_(1.0)
    tensors, _ = state.capture()
    assert not torch.equal(tensors["ema.shadow.weight"], tensors["model.weight"])


def test_adam_needs_no_json_per_parameter():
    """The JSON of a snapshot must not grow with the number of parameters: its room in staging is limited."""
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(200)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    tensors, data = TrainingState(model, optimizer, {}).capture()
    assert len(tensors) == 4 * 400
    assert len(json.dumps(data)) < 2000


def test_a_parameter_group_added_later_is_captured():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW([model.weight], lr=0.1)
    state = TrainingState(model, optimizer, {})
    optimizer.add_param_group({"params": [model.bias]})
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    tensors, data = state.capture()
    assert "optimizer.exp_avg.bias" in tensors
    assert len(data["param_group_digests"]) == 2


class Peculiar(nn.Module):
    """Keeps its weight in another form than it stores, has state that is no tensor, and counts how often it loads."""

    def __init__(self):
        super().__init__()
        self.halves = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))])
        self.num_loads = 0
        self.register_load_state_dict_post_hook(self.count)

    @staticmethod
    def count(module, _):
        module.num_loads += 1

    def get_extra_state(self):
        return {"loads": self.num_loads}

    def set_extra_state(self, state):
        self.num_loads = state["loads"]

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "joined"] = torch.cat(list(self.halves)).detach()

    def _load_from_state_dict(self, state, prefix, *rest):
        with torch.no_grad():
            for half, value in zip(self.halves, state.pop(prefix + "joined").chunk(2), strict=True):
                half.copy_(value + 1)
        super()._load_from_state_dict(state, prefix, *rest)


def test_a_module_with_a_way_of_its_own_is_asked_to_load():
    first, second = Peculiar(), Peculiar()
    first.num_loads = 6
    with torch.no_grad():
        first.halves[1].fill_(5.0)
    saved = captured(first, torch.optim.SGD(first.parameters(), lr=0.1))
    TrainingState(second, torch.optim.SGD(second.parameters(), lr=0.1), {}).restore(*saved)
    assert second.num_loads == 7
    assert second.halves[1].tolist() == [5.0, 5.0], "children load after their parent"


def test_a_plain_model_is_not_copied_onto_itself():
    """It would cost as much as the load."""
    model, _, _ = build()
    assert not loads_its_own_way(model)
    assert not loads_its_own_way(nn.MultiheadAttention(4, 2))
    assert loads_its_own_way(Peculiar())


def test_an_average_stays_where_the_object_has_it():
    """The user's object gets its tensors of the kind that it gave: here not contiguous, elsewhere on a device."""
    model = nn.Linear(4, 2)
    shadow = Ema(model)
    shadow.shadow = {"weight": torch.randn(4, 2, dtype=torch.float64).T}
    saved = captured(model, torch.optim.SGD(model.parameters(), lr=0.1), {"ema": shadow})
    other = Ema(model)
    other.shadow = {"weight": torch.zeros(4, 2, dtype=torch.float64).T}
    TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), {"ema": other}).restore(*saved)
    assert torch.equal(other.shadow["weight"], shadow.shadow["weight"])
    assert other.shadow["weight"].stride() == shadow.shadow["weight"].stride()
    assert other.shadow["weight"].data_ptr() != shadow.shadow["weight"].data_ptr()


@pytest.mark.parametrize("maximum", [None, 0.5])
def test_clipping_is_torchs(maximum):
    model, optimizer, _ = build()
    model(torch.ones(5, 4)).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf if maximum is None else maximum)
    clipped = [p.grad.clone() for p in model.parameters()]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    trained = Trained(model, optimizer, None, None, maximum, None, None)
    assert torch.equal(Updater(trained).clip(), expected)
    assert all(torch.equal(p.grad, c) for p, c in zip(model.parameters(), clipped, strict=True))
