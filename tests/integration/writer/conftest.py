from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.writer import Job, Stack
from surefoot.bus.redis_bus import RedisBus
from surefoot.catalogue.database import Database


@pytest.fixture
def job(tmp_path: Path, database: Database) -> Iterator[Job]:
    """A submitted job with one attempt; probation 20."""
    made = Job(tmp_path, database)
    yield made
    made.close()


@pytest.fixture
def stack(tmp_path: Path, database_url: str, bus_url: str, bus: RedisBus) -> Iterator[Stack]:
    """The writer and its Celery worker as processes."""
    made = Stack(tmp_path, database_url, bus_url, bus)
    yield made
    made.close()
