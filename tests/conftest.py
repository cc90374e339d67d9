from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.jobs import Job
from surefoot.processes import kill_job_processes


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Make jobs whose processes and staging memory are gone when the test ends, however it ends."""
    made: list[Job] = []

    def make(name: str = "case", **options: Any) -> Job:
        job = Job(tmp_path / name, name, **options)
        made.append(job)
        return job

    yield make
    for job in made:
        kill_job_processes(job.staging.name)
        shutil.rmtree(job.staging, ignore_errors=True)
