"""How an operation fares: every combination of what the others may have written."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from helpers.rows import NOW, job_row
from surefoot.catalogue.models import Action, Operation, Run
from surefoot.events import JobState
from surefoot_api.operations import job_state, view
from surefoot_api.schemas import OperationState


def operation(kind: str, generation: int = 1) -> Operation:
    return Operation(
        id="a", job="demo", kind=kind, arguments={"generation": generation}, actor="anna", created_at=NOW
    )


def run(state: str, generation: int = 1) -> Run:
    return Run(job="demo", generation=generation, state=state, reason="why", updated_at=NOW)


def fate(kind: str, *, of_run: Run | None, action: Action | None = None, generation: int = 1, **job: Any) -> str:
    return view(operation(kind), action, job_row(generation=generation, **job), of_run).state


def test_a_run_of_an_earlier_generation_says_nothing() -> None:
    assert job_state(job_row(generation=2), run("FAILED", 1)) is JobState.PENDING
    assert job_state(job_row(generation=2), run("FAILED", 2)) is JobState.FAILED
    assert job_state(job_row(generation=1), None) is JobState.PENDING


@pytest.mark.parametrize(
    ("kind", "state", "expected"),
    [
        ("submit", None, "PENDING"),
        ("submit", "PENDING", "PENDING"),
        ("submit", "STARTING", "SUCCEEDED"),
        ("submit", "FAILED", "SUCCEEDED"),
        ("stop", None, "PENDING"),
        ("stop", "RUNNING", "RUNNING"),
        ("stop", "STOPPING", "RUNNING"),
        ("stop", "STOPPED", "SUCCEEDED"),
        ("stop", "SUCCEEDED", "SUCCEEDED"),
        ("stop", "FAILED", "SUCCEEDED"),
        ("rollback", "RUNNING", "PENDING"),
        ("rollback", "FAILED", "FAILED"),
    ],
)
def test_without_an_action_it_is_read_off_the_run(kind: str, state: str | None, expected: str) -> None:
    assert fate(kind, of_run=None if state is None else run(state)) == expected


def test_once_the_job_is_submitted_again_nothing_stays_open() -> None:
    for kind, state in itertools.product(("submit", "stop", "rollback"), JobState):
        assert fate(kind, of_run=run(state, 2), generation=2) in ("SUCCEEDED", "FAILED")


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("PENDING", "RUNNING"), ("SENT", "RUNNING"), ("APPLIED", "SUCCEEDED"), ("REFUSED", "FAILED"),
        ("EXPIRED", "FAILED"),
    ],
)  # fmt: skip
def test_what_recovery_made_of_it_counts_whatever_the_run_does(state: str, expected: str) -> None:
    action = Action(id=7, job="demo", attempt=1, kind="rollback", reason="r", problem="p", state=state, created_at=NOW)
    for of_run in (None, run("RUNNING"), run("FAILED")):
        shown = view(operation("rollback"), action, job_row(), of_run)
        assert (shown.state, shown.detail, shown.action_id) == (OperationState(expected), "p", 7)
