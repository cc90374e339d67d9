"""The README's own-script example works as it stands, under every way of starting it that the README names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[3] / "README.md"
SETTING = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
dataset = torch.arange(64.0)[:, None]
"""


@pytest.fixture
def script(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    path = tmp_path / "readme_example.py"
    path.write_text(SETTING + example.replace("total_steps=10_000", "total_steps=6"))
    return path


@pytest.mark.slow  # test_misuse and test_preemption run scripts so, torchrun below runs this one
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_under_surefoot_run(make_job, script, start_method):
    job = make_job(entrypoint=str(script), spec={"start_method": start_method})
    job.run()
    assert job.committed()[-1].step == 6


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([sys.executable], marks=pytest.mark.slow),
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "20"],
    ],
    ids=["python", "torchrun"],
)
def test_without_our_launcher(script, tmp_path, command):
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    saved = [path.name for path in (tmp_path / ".surefoot/checkpoints/readme_example").glob("step-*")]
    assert saved == ["step-000000006-a0001"]
