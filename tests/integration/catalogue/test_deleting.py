"""Case C2: whoever orders a roll-back and whoever removes its target see each other, on both kinds of database."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy.orm import Session

from helpers.rows import NOW, checkpoint_row, job_row, started_attempt
from surefoot.catalogue.database import Database
from surefoot.catalogue.models import Action, Checkpoint
from surefoot.checkpoint.ids import CheckpointId
from surefoot_recovery.jobs import JobView
from surefoot_recovery.lookups import present_of, stable_on_lineage
from surefoot_writer.index import CheckpointIndex

TARGET = CheckpointId(1, 10)


@pytest.fixture
def jobs(catalogue: Database) -> Database:
    with catalogue.write() as session:
        session.add(job_row())
        session.flush()
        session.add_all([started_attempt(1), checkpoint_row(1, 10, stable=True), checkpoint_row(1, 20)])
    return catalogue


def order_roll_back(session: Session) -> bool:
    """Order one to the newest STABLE checkpoint as recovery does; False: there is none."""
    stable = stable_on_lineage(session, present_of(session, "demo", JobView()))
    if not stable:
        return False
    target = {"to_attempt": stable[0].attempt, "to_step": stable[0].step}
    given = {"job": "demo", "attempt": 1, "kind": "rollback", "reason": "test", "state": "PENDING", "created_at": NOW}
    session.add(Action(command=target, **given))
    return True


def state(jobs: Database) -> str:
    with jobs.read() as session:
        return session.get_one(Checkpoint, ("demo", *TARGET)).state


def test_c2_who_removes_waits_for_who_is_deciding(jobs: Database) -> None:
    marked: list[list[CheckpointId]] = []
    removing = threading.Thread(target=lambda: marked.append(CheckpointIndex(jobs).note_deleting("demo", [TARGET])))
    with jobs.write() as session:
        assert order_roll_back(session)
        session.flush()
        removing.start()
        removing.join(0.2)
        assert marked == []  # it waits
    removing.join(10)
    assert marked == [[]]
    assert state(jobs) == "COMMITTED"


def test_c2_who_decides_does_not_see_what_is_being_removed(jobs: Database) -> None:
    assert CheckpointIndex(jobs).note_deleting("demo", [TARGET, CheckpointId(1, 99)]) == [TARGET]
    with jobs.write() as session:
        assert not order_roll_back(session)
    assert state(jobs) == "DELETING"
    CheckpointIndex(jobs).note_kept("demo", TARGET)
    with jobs.write() as session:
        assert order_roll_back(session)


def test_c2_at_the_same_moment_one_of_both_has_its_way(jobs: Database) -> None:
    """Never both, and never neither."""
    outcomes = set()
    for _ in range(12):
        together = threading.Barrier(2)
        said: dict[str, bool] = {}

        def decide(together: threading.Barrier = together, said: dict[str, bool] = said) -> None:
            together.wait()
            with jobs.write() as session:
                said["ordered"] = order_roll_back(session)

        def remove(together: threading.Barrier = together, said: dict[str, bool] = said) -> None:
            together.wait()
            said["removing"] = CheckpointIndex(jobs).note_deleting("demo", [TARGET]) == [TARGET]

        threads = [threading.Thread(target=work) for work in (decide, remove)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert said["ordered"] != said["removing"]
        outcomes.add(said["ordered"])
        with jobs.write() as session:
            for action in session.query(Action):
                session.delete(action)
        CheckpointIndex(jobs).note_kept("demo", TARGET)
    assert outcomes
