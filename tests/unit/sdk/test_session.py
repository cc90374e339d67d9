"""One process, real staging and a real drain."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from surefoot import sdk
from surefoot.checkpoint.staging_folder import staging_folder_path
from surefoot.errors import UsageError
from surefoot.events import StepCompleted, read_events


class Numbers:
    def __init__(self, length=64):
        self._length = length

    def __len__(self):
        return self._length

    def __getitem__(self, index):
        return torch.tensor([float(index)])


@pytest.fixture
def attach(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def make(**options):
        options = {"dataset": Numbers(), "global_batch_size": 4, "total_steps": 4, "lr_scheduler": scheduler} | options
        return sdk.attach(model, optimizer, job="unit", **options)

    yield make
    shutil.rmtree(staging_folder_path(Path("/dev/shm"), "unit", tmp_path / ".surefoot/checkpoints"), ignore_errors=True)


def events(kind=StepCompleted):
    found, _ = read_events(Path(".surefoot/run/unit/events.jsonl"))
    return [event for event in found if isinstance(event, kind)]


def test_a1_a_nan_loss_updates_nothing(attach):
    """The raw value is in the event; weights stay finite, the schedule stays, the samples count as consumed."""
    session = attach()
    weights = {}
    for batch in session:
        loss = session.model(batch / 64).pow(2).mean()
        session.step(loss * float("nan") if session.global_step == 1 else loss)
        weights[session.global_step] = session.model.weight.item()
    assert weights[2] == weights[1]
    assert weights[3] != weights[2]
    second = events()[1]
    assert second.loss != second.loss
    assert (second.applied, second.nonfinite_ranks, second.num_samples) == (False, (0,), 4)
    assert [event.updates for event in events()] == [1, 1, 2, 3]
    assert [event.learning_rate for event in events()] == [0.1, 0.05, 0.05, 0.025]


def test_micro_batches_add_up_to_the_whole_batch(attach):
    """Gradients of 4 micro-batches of one sample are those of one batch of four."""
    session = attach(micro_batch_size=1, total_steps=1)
    start = {name: p.detach().clone() for name, p in session.model.named_parameters()}
    seen = []
    for batch in session:
        seen.append(batch)
        session.step(session.model(batch).pow(2).mean())
    assert len(seen) == 4
    (event,) = events()
    model = nn.Linear(1, 1)
    model.load_state_dict(start)
    loss = model(torch.cat(seen)).pow(2).mean()
    loss.backward()
    assert event.loss == pytest.approx(loss.item(), rel=1e-6)
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    assert event.grad_norm == pytest.approx(norm, rel=1e-6)


def test_step_must_be_called_once_for_each_batch(attach):
    session = attach()
    with pytest.raises(UsageError, match="was not called for the last batch"):
        for _ in session:
            pass
    session.close()


def test_step_twice_is_refused(attach):
    session = attach()
    for batch in session:
        loss = session.model(batch).mean()
        session.step(loss)
        with pytest.raises(UsageError, match="once for each batch"):
            session.step(loss)


def test_leaving_the_loop_early_and_closing_keeps_the_last_step(attach, tmp_path):
    with attach(total_steps=100) as session:
        for batch in session:
            session.step(session.model(batch).mean())
            if session.global_step == 3:
                break
    assert [p.name for p in Path(".surefoot/checkpoints/unit").glob("step-*")] == ["step-000000003-a0001"]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"global_batch_size": 0}, "global_batch_size"),
        ({"micro_batch_size": 0}, "micro_batch_size"),
        ({"total_steps": 0}, "total_steps"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
        ({"dataset": []}, "dataset"),
        ({"dataset": iter([1])}, "dataset"),
        ({"num_workers": -1}, "num_workers"),
        ({"checkpoint": {"save_every_step": 3}}, "checkpoint.save_every_step"),
        ({"checkpoint": 5}, "checkpoint"),
        ({"extra_state": {"ema": object()}}, "extra_state.ema"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_arguments_name_the_key_and_write_nothing(attach, options, key):
    with pytest.raises(UsageError) as raised:
        attach(**options)
    assert raised.value.key == key
    assert not Path(".surefoot/checkpoints").exists()


def run(session):
    for batch in session:
        session.step(session.model(batch).pow(2).mean())


def test_a_second_trainer_of_a_job_is_refused_and_the_first_goes_on(attach):
    """Started twice by mistake: the second must not take the job away from the first."""
    first = attach()
    with pytest.raises(UsageError, match=f"job: is already being trained on this machine, by process {os.getpid()}"):
        attach()
    run(first)
    assert first.global_step == 4


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"global_batch_size": 8}, "global_batch_size"),
        ({"dataset": Numbers(65)}, "dataset"),
        ({"seed": 1}, "seed"),
        ({"shuffle": False}, "shuffle"),
        ({"extra_state": {"text": sdk.Constant("data", "other", "it changed")}}, "data"),
    ],
)
def test_what_would_silently_change_the_data_is_refused(attach, change, key):
    """A resume with other data, batch size or seed is no resume: refused by name, weights untouched."""
    usual = {"extra_state": {"text": sdk.Constant("data", "one", "it changed")}}
    run(attach(total_steps=2, **usual))
    with pytest.raises(UsageError, match="but this job was trained with") as raised:
        attach(**(usual | change))
    assert raised.value.key == key
    session = attach(**usual)
    assert session.global_step == 2
    run(session)
