"""Mistakes in a user's script end the job at once, with the mistake named."""

from __future__ import annotations

import pytest

from helpers.stored import store_checkpoint
from surefoot.checkpoint.ids import CheckpointId
from surefoot.events import JobFinished, JobState

SCRIPT = """
import torch
from surefoot import sdk

model = torch.nn.Linear(1, 1)
session = sdk.attach(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1),
    dataset=torch.utils.data.TensorDataset(torch.arange(64.0)[:, None]),
    global_batch_size=4,
    total_steps=10,
)
for (batch,) in session:
    session.step(model(batch).pow(2).mean())
"""


def test_calling_the_plain_model_with_several_ranks_is_refused(make_job, tmp_path):
    """Its gradients would not be averaged: each rank would silently train a model of its own."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    job = make_job(entrypoint=str(script))
    job.run(expect=2)
    (finished,) = job.events(JobFinished)
    assert "session.model: was not called for this batch" in finished.reason
    assert finished.restarts == 0
    assert not job.staging.exists()


IGNORES = {
    "loops by itself": """
import torch
from surefoot import sdk
model = torch.nn.Linear(1, 1)
data = torch.utils.data.TensorDataset(torch.arange(64.0)[:, None])
optimizer = torch.optim.AdamW(model.parameters())
session = sdk.attach(model, optimizer, dataset=data, global_batch_size=4, total_steps=10)
for (batch,) in torch.utils.data.DataLoader(data, 4):
    optimizer.zero_grad()
    session.model(batch).pow(2).mean().backward()
    optimizer.step()
""",
    "loads its own weights": """
import torch
from surefoot import sdk
model = torch.nn.Linear(1, 1)
data = torch.utils.data.TensorDataset(torch.arange(64.0)[:, None])
start = {name: value.clone() for name, value in model.state_dict().items()}
optimizer = torch.optim.AdamW(model.parameters())
session = sdk.attach(model, optimizer, dataset=data, global_batch_size=4, total_steps=6 + 6 * (START > 0))
if START:
    model.load_state_dict(start)
for (batch,) in session:
    session.step(session.model(batch).pow(2).mean())
""",
}
REASONS = {
    "loops by itself": "loaded step 6 and ended without taking a batch from its session",
    "loads its own weights": "model: weight of the checkpoint was overwritten after attach had loaded step 6",
}


def test_r8_a_script_that_never_attaches_fails_loudly(make_job, tmp_path):
    """The job has a checkpoint of step 6, and every rank ends with status 0 without having asked for it."""
    script = tmp_path / "train.py"
    script.write_text("print('trained')\n")
    job = make_job(entrypoint=str(script))
    store_checkpoint(job.storage / job.name, CheckpointId(1, 6))
    job.run(expect=2)
    (finished,) = job.events(JobFinished)
    assert finished.state is JobState.FAILED
    assert "none called surefoot.sdk.attach although the job had progress" in finished.reason
    assert finished.restarts == 0
    assert job.committed() == [CheckpointId(1, 6)]


@pytest.mark.slow  # unit/launcher/test_policy has it without processes
def test_r8_a_script_that_never_attaches_may_begin_again(make_job, tmp_path):
    """With --from-seed, as the reason of the test above says."""
    script = tmp_path / "train.py"
    script.write_text("print('trained')\n")
    job = make_job(entrypoint=str(script))
    store_checkpoint(job.storage / job.name, CheckpointId(1, 6))
    job.run((), "--from-seed")
    assert job.events(JobFinished)[-1].state is JobState.SUCCEEDED


@pytest.mark.slow  # unit/sdk/test_loaded and unit/launcher/test_policy have the parts
@pytest.mark.parametrize("how", IGNORES)
def test_r8_a_script_that_ignores_what_was_loaded_fails_loudly(make_job, tmp_path, how):
    """The job has trained 6 steps. A script that does not go on from them is FAILED with the reason, and costs none."""
    script = tmp_path / "train.py"
    script.write_text("START = 0\n" + IGNORES["loads its own weights"])
    job = make_job(entrypoint=str(script))
    job.run()
    before = job.committed()
    assert before[-1].step == 6
    script.write_text("START = 6\n" + IGNORES[how])
    job.run(expect=2)
    finished = job.events(JobFinished)[-1]
    assert finished.state is JobState.FAILED
    assert REASONS[how] in finished.reason
    assert finished.restarts == 0
    assert job.committed() == before
