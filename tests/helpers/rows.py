"""Rows of the catalogue for tests: what matters is given, the rest is filled in."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from surefoot.catalogue.models import Attempt, Checkpoint, Job

NOW = datetime(2026, 12, 1, 12, 0, tzinfo=UTC)


def job_row(name: str = "demo", **fields: Any) -> Job:
    given = {"spec": {"job": name, "entrypoint": "train.py"}, "desired_state": "RUNNING"}
    return Job(**({"name": name, "created_at": NOW, "updated_at": NOW} | given | fields))


def started_attempt(attempt: int, from_attempt: int = 0, from_step: int = 0, **fields: Any) -> Attempt:
    source = "COMMITTED" if from_attempt else "SEED"
    given = {"job": "demo", "attempt": attempt, "from_attempt": from_attempt, "from_step": from_step, "source": source}
    filled = {"cause": "start", "lr_factor": 1.0, "skip_windows": [], "world_size": 2, "host": "h", "started_at": NOW}
    return Attempt(**(given | filled | fields))


def checkpoint_row(attempt: int, step: int, **fields: Any) -> Checkpoint:
    given = {"job": "demo", "attempt": attempt, "step": step, "state": "COMMITTED", "stable": False}
    filled = {"num_bytes": 1, "world_size": 2, "path": "/nowhere", "committed_at": NOW}
    return Checkpoint(**(given | filled | fields))
