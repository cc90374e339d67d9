"""The demo's fault: what it does to a small Llama when nobody recovers, and what a roll-back makes of it."""

from __future__ import annotations

import statistics

import pytest
import torch

from helpers.in_process import JOB, Place
from surefoot import sdk
from surefoot.checkpoint.attempts import SkipWindow
from surefoot.errors import UsageError
from surefoot.events import RollBack, StepCompleted
from surefoot.spec import ModelSpec, RecipeSpec
from surefoot.testing.faults import TRAINING_FAULT_ENVIRONMENT_KEY, blow_up, parse_training_fault
from surefoot_worker.recipe.model import build_model, build_optimizer, build_scheduler

SEQUENCE = 32
RECIPE = RecipeSpec(
    model=ModelSpec(
        vocab_size=300, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    ),
    steps=300,
)
FAULT_STEP = 90


class Text:
    """A text that never changes: how much harm a blown-up update does depends on the very batch that it comes with."""

    def __init__(self):
        sentence = b"to be or not to be, that is the question: whether tis nobler in the mind to suffer the slings "
        self._bytes = 400 * (sentence + b"and arrows of outrageous fortune. ")

    def __len__(self):
        return len(self._bytes) // SEQUENCE

    def __getitem__(self, index):
        piece = bytearray(self._bytes[index * SEQUENCE : (index + 1) * SEQUENCE])
        tokens = torch.frombuffer(piece, dtype=torch.uint8).long()
        return {"input_ids": tokens, "labels": tokens}


@pytest.fixture
def place(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for matrices this small the others only wait
    made = Place(tmp_path)
    yield made
    made.remove()
    torch.set_num_threads(threads)


def attach(place, total_steps):
    model = build_model(RECIPE.model, 0, torch.device("cpu"))
    optimizer = build_optimizer(model, RECIPE)
    return sdk.attach(
        model,
        optimizer,
        lr_scheduler=build_scheduler(optimizer, RECIPE),
        dataset=Text(),
        global_batch_size=RECIPE.global_batch_size,
        max_grad_norm=RECIPE.max_grad_norm,
        total_steps=total_steps,
        job=JOB,
        storage=place.storage,
        run_dir=place.root / "run",
        checkpoint={"save_every_steps": 40, "save_every_seconds": None},
    )


def losses(place, attempt):
    return {e.step: e.loss for e in place.events(StepCompleted) if e.attempt == attempt}


def test_the_blow_up_raises_the_loss_by_half_a_nat_and_a_roll_back_undoes_it(place, monkeypatch):
    """Nobody recovers for 30 steps. The fault comes with its batch: the roll-back leaves that out."""
    monkeypatch.setenv(TRAINING_FAULT_ENVIRONMENT_KEY, str(blow_up(factor=1e4).at(step=FAULT_STEP)))
    session = attach(place, FAULT_STEP + 32)
    for batch in session:
        if (session.attempt, session.global_step) == (1, FAULT_STEP + 30):
            place.wait_committed(1, 80)
            window = SkipWindow(start=FAULT_STEP - 4, stop=FAULT_STEP + 1)
            place.order(RollBack, 1, to_attempt=1, to_step=80, lr_factor=0.5, skip_windows=(window,))
        session.step(session.model(**batch).loss)
    ours, healed = losses(place, 1), losses(place, 2)
    before = statistics.mean(ours[step] for step in range(FAULT_STEP - 9, FAULT_STEP + 1))
    after = statistics.mean(ours[step] for step in range(FAULT_STEP + 21, FAULT_STEP + 31))
    assert after - before > 0.5
    assert statistics.mean(healed[step] for step in range(FAULT_STEP + 21, FAULT_STEP + 31)) < before + 0.1


@pytest.mark.parametrize(
    "text",
    [
        "blow_up",
        "blow_up(factor=1e4)",
        "blow_up(factor=1e4).at(step=0)",
        "blow_up(factor=-1).at(step=3)",
        "blow_up(factor=1e999).at(step=3)",
        "blow_up(factor=1e).at(step=3)",
        "blow_up(1e4).at(190)",
        " blow_up(factor=1e4).at(step=190)",
        "blow_up(factor=1e4).at(step=190); kill()",
    ],
)
def test_a_sentence_that_is_none_is_refused_by_name(place, monkeypatch, text):
    with pytest.raises(UsageError) as raised:
        parse_training_fault(text)
    assert raised.value.key == TRAINING_FAULT_ENVIRONMENT_KEY
    monkeypatch.setenv(TRAINING_FAULT_ENVIRONMENT_KEY, text)
    with pytest.raises(UsageError):
        attach(place, 2)


def test_a_sentence_survives_the_environment():
    fault = blow_up(factor=1e4).at(step=190)
    assert parse_training_fault(str(fault)) == fault == parse_training_fault("blow_up(factor=1e4).at(step=190)")
    assert fault.position == 189
