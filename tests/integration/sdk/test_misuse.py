"""Mistakes in a user's script end the job at once, with the mistake named."""

from __future__ import annotations

from surefoot.events import JobFinished

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
