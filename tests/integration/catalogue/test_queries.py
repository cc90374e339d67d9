from __future__ import annotations

import pytest

from helpers.rows import NOW, checkpoint_row, job_row, started_attempt
from surefoot.catalogue.database import Database
from surefoot.catalogue.queries import attempt_records, attempt_row, newest_attempt, stable_checkpoint
from surefoot.checkpoint.attempts import AttemptRecord, SkipWindow, Source, StartsFrom
from surefoot.errors import AttemptError


@pytest.fixture
def jobs(catalogue: Database) -> Database:
    """Attempt 2 went on from step 100 of attempt 1; attempt 1 had been at 200."""
    with catalogue.write() as session:
        session.add_all([job_row(), job_row("other")])
        session.flush()
        session.add_all([started_attempt(1), started_attempt(2, 1, 100, skip_windows=[[90, 101]])])
        session.add(started_attempt(7, job="other"))
        session.add_all(checkpoint_row(1, step, stable=step != 150) for step in (50, 100, 150, 200))
        session.add(checkpoint_row(2, 150, stable=True))
        session.add(checkpoint_row(2, 160, stable=True, state="QUARANTINED"))
        session.add(checkpoint_row(7, 120, stable=True, job="other"))
    return catalogue


def test_attempt_records_are_those_that_lineage_takes(jobs: Database) -> None:
    with jobs.read() as session:
        records = attempt_records(session, "demo")

    assert list(records) == [1, 2]
    assert records[1].starts_from.source is Source.SEED
    assert records[2].starts_from.checkpoint_id == (1, 100)
    assert records[2].skip_windows == (SkipWindow(start=90, stop=101),)


def test_an_attempt_record_is_read_back_as_it_was_written(jobs: Database) -> None:
    given = AttemptRecord(
        attempt=3,
        starts_from=StartsFrom(attempt=2, step=150, source=Source.COMMITTED),
        lr_factor=0.5,
        lr_hold_steps=50,
        lr_rewarm_steps=20,
        lr_from_step=150,
        command=12,
        skip_windows=(SkipWindow(start=1, stop=2), SkipWindow(start=5, stop=9)),
        cause="rolled back",
        world_size=4,
        host="node-7",
        started_at=NOW,
    )
    with jobs.write() as session:
        session.add(attempt_row("demo", given))

    with jobs.read() as session:
        assert attempt_records(session, "demo")[3] == given


def test_the_newest_attempt(jobs: Database) -> None:
    with jobs.read() as session:
        newest = newest_attempt(session, "demo")
        assert newest is not None
        assert newest.attempt == 2
        assert newest_attempt(session, "nobody") is None


@pytest.mark.parametrize(
    ("attempt", "at_most_step", "expected"),
    [
        (2, 1000, (2, 150)),  # not the quarantined one
        (2, 149, (1, 100)),  # not (1, 150) nor (1, 200): attempt 2 went on from 100
        (2, 99, (1, 50)),
        (2, 49, None),
        (1, 1000, (1, 200)),
    ],
)
def test_the_newest_stable_checkpoint_on_the_lineage(
    jobs: Database, attempt: int, at_most_step: int, expected: tuple[int, int] | None
) -> None:
    with jobs.read() as session:
        found = stable_checkpoint(session, "demo", attempt, at_most_step)

    assert (None if found is None else (found.attempt, found.step)) == expected


def test_without_the_record_of_the_attempt_the_lineage_is_not_known(jobs: Database) -> None:
    with jobs.read() as session, pytest.raises(AttemptError, match="attempt 3"):
        stable_checkpoint(session, "demo", 3, 1000)
