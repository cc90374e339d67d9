from __future__ import annotations

import fcntl
import os

import pytest

from helpers.jobs import Job


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job that nobody disturbed: 20 steps of 2 ranks (3 epochs take 18), saved at 10 and 20. To be read only.

    One for all processes of pytest-xdist: whoever comes first runs it.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    job = Job(root / "whole", "whole", trainer=["--steps", "20"], checkpoint={"save_every_steps": 10})
    with (root / "whole.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        has_run = root / "whole.has-run"
        if not has_run.exists():
            job.run()
            has_run.touch()
    return job
