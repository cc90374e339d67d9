"""Case R8: a script that overwrites what was loaded fails before its first step; what overwrites nothing does not."""

from __future__ import annotations

import pytest
import torch

from helpers.in_process import Place, build, train
from surefoot.errors import UsageError
from surefoot.sdk.loaded import LoadedState
from surefoot.sdk.state import TrainingState


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    place = Place(tmp_path_factory.mktemp("loaded"))
    train(place.attach(build(), total_steps=3))
    yield place
    place.remove()


def set_data(built):
    built.model[0].weight.data = torch.randn(8, 6)


def write_through_data(built):
    built.model[0].weight.data.normal_()


def new_parameter(built):
    built.model[4].weight = torch.nn.Parameter(torch.randn(1, 8))


def load_other_optimizer(built):
    built.optimizer.load_state_dict(build().optimizer.state_dict())


def zero_moments(built):
    for values in built.optimizer.state.values():
        values["exp_avg"].data.zero_()


def restart_schedule(built):
    built.schedule.load_state_dict(build().schedule.state_dict())


OVERWRITTEN = {
    "load_state_dict": (lambda built: built.model.load_state_dict(build().model.state_dict()), "model"),
    "in-place init": (lambda built: torch.nn.init.zeros_(built.model[4].bias), "model"),
    "one element": (lambda built: built.model[0].weight[0].detach()[0].fill_(1.0), "model"),
    ".data =": (set_data, "model"),
    "through .data": (write_through_data, "model"),
    "a new parameter": (new_parameter, "model"),
    "reset_parameters": (lambda built: built.model[0].reset_parameters(), "model"),
    "another optimizer's state": (load_other_optimizer, "optimizer"),
    "moments through .data": (zero_moments, "optimizer"),
    "state cleared": (lambda built: built.optimizer.state.clear(), "optimizer"),
    "a schedule from the start": (restart_schedule, "lr_scheduler"),
    "a schedule stepped": (lambda built: built.schedule.step(), "lr_scheduler"),
}


@pytest.fixture
def loaded():
    """A job's objects after three steps, as a checkpoint of step 3 would fill them."""
    built = build()
    for _ in range(3):
        built.model(torch.sin(torch.arange(24.0)).view(4, 6)).pow(2).mean().backward()
        built.optimizer.step()
        built.schedule.step()
        built.optimizer.zero_grad()
    return built, LoadedState(TrainingState(built.model, built.optimizer, {"lr_scheduler": built.schedule}), 3)


@pytest.mark.parametrize("how", OVERWRITTEN)
def test_r8_overwriting_what_was_loaded_is_refused(loaded, how):
    built, state = loaded
    overwrite, key = OVERWRITTEN[how]
    overwrite(built)
    with pytest.raises(UsageError, match="after attach had loaded step 3") as raised:
        state.check()
    assert raised.value.key == key
    assert "--from-seed" in raised.value.problem


def test_r8_it_is_refused_before_the_first_step(trained):
    built = build()
    session = trained.attach(built, total_steps=9)
    built.model.load_state_dict(build().model.state_dict())
    with pytest.raises(UsageError, match=r"model: 0\.weight of the checkpoint was overwritten"):
        next(iter(session))
    assert session.global_step == 3
    session._host.close()


def evaluate(built):
    built.model.eval()
    with torch.no_grad():
        built.model(torch.randn(4, 6))
    built.model.train()


def warm_up(built):
    built.model(torch.randn(4, 6)).sum().backward()
    built.optimizer.zero_grad()


def other_rate(built):
    for group in built.optimizer.param_groups:
        group["weight_decay"] = 0.3


def test_what_overwrites_nothing_is_allowed(trained):
    built = build()
    session = trained.attach(built, total_steps=9)
    evaluate(built)
    warm_up(built)
    other_rate(built)
    next(iter(session))
    assert session.global_step == 3
    session._host.close()


def test_at_the_start_of_a_job_a_script_may_still_initialise(tmp_path):
    place = Place(tmp_path)
    built = build()
    session = place.attach(built, total_steps=2)
    built.model[0].reset_parameters()
    train(session)
    assert session.global_step == 2
    place.remove()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_values_are_compared_as_bits(dtype):
    """NaN equals itself; layouts in memory and empty tensors make no difference."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.full((40,), float("nan"), dtype=dtype))
    model.image = torch.nn.Parameter(torch.rand(2, 4, 3, 3, dtype=dtype).to(memory_format=torch.channels_last))
    model.empty = torch.nn.Parameter(torch.empty(0, 4, dtype=dtype))
    loaded = LoadedState(TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), {}), 7)
    loaded.check()
    model.image.data[1, 3, 2, 2] += 1.0
    loaded.check()  # one value of many, written past all counting, may be missed; most of them are not
    model.image.data.add_(1.0)
    with pytest.raises(UsageError, match="image of the checkpoint was overwritten after attach had loaded step 7"):
        loaded.check()
