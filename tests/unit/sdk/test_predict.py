from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from surefoot.sdk.state import TrainingState


def described(tensors):
    return [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]


def model_with(optimizer_class):
    torch.manual_seed(0)
    if optimizer_class is torch.optim.Muon:  # takes matrices only
        return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 3, bias=False))
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3).bfloat16().float(), nn.Linear(3, 3))
    model[3].bias.requires_grad_(False)
    return model


def step(model, optimizer):
    dtype = next(model.parameters()).dtype
    model(torch.sin(torch.arange(20.0)).view(5, 4).to(dtype)).pow(2).mean().backward()
    optimizer.step()


WITH_DEFAULTS = [
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
]  # fmt: skip
CASES = [
    *((name, {}, torch.float32) for name in WITH_DEFAULTS),
    *((name, {}, torch.bfloat16) for name in ("Adafactor", "AdamW", "Muon")),
    ("SGD", {"lr": 0.1}, torch.float32),
    ("SGD", {"lr": 0.1, "momentum": 0.9}, torch.bfloat16),
    ("RMSprop", {"momentum": 0.9, "centered": True}, torch.float32),
    ("AdamW", {"amsgrad": True}, torch.float32),
    ("AdamW", {"fused": True}, torch.float32),
    ("AdamW", {"foreach": True, "maximize": True}, torch.bfloat16),
    ("AdamW", {"lr": torch.tensor(0.1)}, torch.float32),
]


@pytest.mark.parametrize(("name", "options", "dtype"), CASES)
def test_what_an_optimizer_will_keep_is_known_before_its_first_step(name, options, dtype):
    """Names, dtypes, shapes and their order, for every optimizer of torch; nothing is changed by asking."""
    optimizer_class = getattr(torch.optim, name)
    model = model_with(optimizer_class).to(dtype)
    optimizer = optimizer_class(model.parameters(), **options)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 9)  # puts a `step` of its own on the optimizer
    hooked = []
    optimizer.register_step_post_hook(lambda *_: hooked.append(1))
    state = TrainingState(model, optimizer, {"lr_scheduler": scheduler})
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    foreseen = state.foresee()
    after = model.state_dict(), optimizer.state_dict(), scheduler.state_dict()
    assert str(after) == str(before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert hooked == []
    step(model, optimizer)
    captured, _ = state.capture()
    assert described(foreseen) == described(captured)
    assert described(state.foresee()) == described(captured)


def test_groups_are_told_apart():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    groups = [{"params": model[0].parameters(), "momentum": 0.9}, {"params": model[1].parameters(), "momentum": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    state = TrainingState(model, optimizer, {})
    assert [name for name in state.foresee() if name.startswith("optimizer.")] == [
        "optimizer.momentum_buffer.0.weight",
        "optimizer.momentum_buffer.0.bias",
    ]


class Own(torch.optim.Optimizer):
    """A user's own, with an optimizer inside that must not be stepped, and a look at values if asked for."""

    def __init__(self, params, *, inner=None, looks=False):
        super().__init__(params, {"lr": 0.1})
        self.inner = inner
        self.looks = looks
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.num_steps += 1
        if self.inner is not None:
            self.inner.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.looks and parameter.grad.norm().item() > 1:
                    continue
                self.state[parameter].setdefault("half", torch.zeros_like(parameter, dtype=torch.float16))


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, ["half"]),
        ({"looks": True}, ["step", "exp_avg", "exp_avg_sq"]),
        ({"inner": True}, ["step", "exp_avg", "exp_avg_sq"]),
    ],
    ids=["shapes alone", "looks at values", "holds another optimizer"],
)
def test_an_own_optimizer_is_tried_where_that_is_safe_and_else_guessed(options, keys):
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = Own(model.parameters(), **(options | ({"inner": inner} if "inner" in options else {})))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    weight = model.weight.detach().clone()
    foreseen = TrainingState(model, optimizer, {}).foresee()
    assert [name.split(".")[1] for name in foreseen if name.endswith(".weight") and "optimizer" in name] == keys
    assert torch.equal(model.weight, weight)
    assert optimizer.num_steps == 0
    assert not optimizer.state


def test_asking_costs_by_the_kinds_of_parameters_not_by_their_number(monkeypatch):
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(50)))
    optimizer = torch.optim.AdamW(model.parameters())
    made = []
    new = torch.optim.AdamW._init_group
    monkeypatch.setattr(torch.optim.AdamW, "_init_group", lambda *a, **k: made.append(1) or new(*a, **k))
    assert len(TrainingState(model, optimizer, {}).foresee()) == 4 * 100
    assert len(made) == 2
