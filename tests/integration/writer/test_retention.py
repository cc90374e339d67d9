"""Case C2 where services run the job: rows, commands and files together, cut off anywhere."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.rows import NOW
from helpers.staging import claim
from helpers.stored import f32
from helpers.waiting import wait_until
from helpers.writer import Job, Service, Stack, cleared, committed, events
from surefoot import faultpoints
from surefoot.bus.redis_bus import RedisBus
from surefoot.catalogue.database import Database
from surefoot.catalogue.models import Action
from surefoot.checkpoint import marks
from surefoot.checkpoint.catalog import list_committed, verify
from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.checkpoint.prune import has_trash
from surefoot.checkpoint.store import LocalStore
from surefoot.events import CheckpointPruned, CheckpointVerified


@pytest.fixture
def job(tmp_path: Path, database: Database) -> Iterator[Job]:
    """A submitted job with one attempt that keeps the last one only; probation 20."""
    made = Job(tmp_path, database, retention={"keep_last": 1})
    yield made
    faultpoints.plan("")
    made.close()


@pytest.fixture
def service(tmp_path: Path, database: Database, bus: RedisBus, job: Job) -> Service:
    return Service(tmp_path, database, bus)


def id_of(step: int, attempt: int = 1) -> CheckpointId:
    return CheckpointId(attempt, step)


def steps(job: Job) -> list[int]:
    return [id_.step for id_ in list_committed(job.store)]


def states(job: Job) -> dict[int, str]:
    return {id_.step: row.state for id_, row in job.rows().items()}


def save(job: Job, service: Service, *steps: int, attempt: int = 1) -> None:
    for step in steps:
        job.commit(step, attempt=attempt)
        service.take(committed(step, attempt))


def command(job: Job, step: int, state: str = "PENDING", attempt: int = 1) -> int:
    with job.database.write() as session:
        action = Action(
            job="demo", attempt=attempt, kind="rollback", command={"to_attempt": attempt, "to_step": step},
            reason="test", state=state, created_at=NOW,
        )  # fmt: skip
        session.add(action)
        session.flush()
        return action.id


def answer(job: Job, number: int, state: str) -> None:
    with job.database.write() as session:
        session.get_one(Action, number).state = state


def test_rows_are_taken_out_of_use_before_files_go_and_events_follow(job: Job, service: Service) -> None:
    save(job, service, 10, 20, 30)
    assert states(job) == {10: "COMMITTED", 20: "DELETING", 30: "COMMITTED"}  # the first waits for its probation
    assert steps(job) == [10, 20, 30]
    assert service.to_prune == ["demo"]

    service.prune_all()
    assert steps(job) == [10, 30]
    assert states(job) == {10: "COMMITTED", 30: "COMMITTED"}
    (event,) = service.events(CheckpointPruned)
    assert (event.attempt, event.step) == (1, 20)
    assert event.num_bytes > 0
    assert "not among the last 1" in event.reason
    service.take()
    assert service.to_prune == []


def test_what_became_stable_lets_the_next_go(job: Job, service: Service) -> None:
    save(job, service, 10, 20, 30)
    service.prune_all()
    service.take(cleared(30))
    save(job, service, 40)
    service.prune_all()
    assert steps(job) == [10, 30, 40]  # STABLE, the next in probation, the last
    service.take(cleared(50))
    save(job, service, 70)
    service.prune_all()
    assert steps(job) == [10, 30, 40, 70]
    assert [row.stable for row in job.rows().values()] == [True, True, False, False]
    service.take(cleared(90))
    service.prune_all()
    assert steps(job) == [40, 70]  # the two newest STABLE


def test_what_is_not_finite_waits_for_no_promotion(job: Job, service: Service) -> None:
    job.commit(10, {"weight": f32(1.0), "moment": f32(float("nan"))})
    service.take(committed(10))
    save(job, service, 20, 30)
    service.prune_all()
    service.take(cleared(30))
    row = job.row(10)
    assert row is not None
    assert row.nonfinite_tensor == "moment"
    service.prune_all()
    assert steps(job) == [30]


@pytest.mark.parametrize("state", ["PENDING", "SENT"])
def test_c2_the_target_of_a_roll_back_stays(job: Job, service: Service, state: str) -> None:
    """Case C2: a roll-back target is pinned, from the decision until the attempt that began there has a newer one."""
    save(job, service, 10, 20)
    service.take(cleared(30))
    save(job, service, 30)
    number = command(job, 30, state)
    save(job, service, 40)
    service.prune_all()
    assert steps(job) == [10, 20, 30, 40]  # STABLE, in probation, named, last

    claim(job.store, after=1, attempt=1, step=30)
    answer(job, number, "APPLIED")
    service.take()
    service.prune_all()
    assert steps(job) == [10, 20, 30]  # what it went back over is abandoned
    save(job, service, 35, 36, attempt=2)
    service.prune_all()
    assert steps(job) == [10, 20, 30, 36]  # STABLE, in probation, where the attempt began, last


def test_c2_a_command_that_was_not_obeyed_protects_nothing(job: Job, service: Service) -> None:
    save(job, service, 10)
    number = command(job, 20)
    save(job, service, 20, 30)
    service.prune_all()
    assert steps(job) == [10, 20, 30]
    answer(job, number, "REFUSED")
    service.take()
    service.prune_all()
    assert steps(job) == [10, 30]


def test_c2_with_the_remover_blocked_nothing_is_lost_and_then_the_rest_goes(job: Job, service: Service) -> None:
    """Case C2: keep = 1, saves go on while removals do not; the newest durable one is there at every moment."""
    for step in range(10, 70, 10):
        save(job, service, step)
        assert steps(job)[-1] == step
        assert states(job)[step] == "COMMITTED"
        verify(job.store, id_of(step))
    assert steps(job) == list(range(10, 70, 10))
    service.prune_all()
    assert steps(job) == [10, 60]


def test_a_pin_after_the_decision_keeps_it(job: Job, service: Service) -> None:
    save(job, service, 10, 20, 30)
    assert states(job)[20] == "DELETING"
    marks.pin(job.store, id_of(20), "look at it", "ada")
    service.prune_all()
    assert steps(job) == [10, 20, 30]
    assert states(job)[20] == "COMMITTED"
    service.take()
    row = job.row(20)
    assert row is not None
    assert row.pinned
    assert service.to_prune == []

    marks.unpin(job.store, id_of(20))
    service.take()
    row = job.row(20)
    assert row is not None
    assert (row.pinned, row.state) == (False, "DELETING")
    service.prune_all()
    assert steps(job) == [10, 30]


def test_pins_and_losses_are_found_on_storage(job: Job, service: Service) -> None:
    job.commit(10)
    marks.pin(job.store, id_of(10), "look at it", "ada")
    service.take()
    row = job.row(10)
    assert row is not None
    assert (row.pinned, row.loss) == (True, None)
    job.commit(20)
    service.take(committed(20).model_copy(update={"loss": 2.5}))
    row = job.row(20)
    assert row is not None
    assert row.loss == 2.5


def test_a_newest_one_that_was_found_damaged_lets_nothing_go(job: Job, service: Service) -> None:
    save(job, service, 10)
    service.take(cleared(30))
    folder = job.commit(20)
    (folder / "rank-00000.safetensors").write_bytes(b"rubbish")
    service.take(committed(20))
    service.verify_all()
    job.commit(30)
    (job.folder / folder_name(id_of(30)) / "rank-00000.safetensors").write_bytes(b"rubbish")
    service.take(committed(30))
    service.verify_all()
    service.prune_all()
    assert steps(job)[0] == 10


@pytest.mark.parametrize("point", ["prune.moved", "prune.deleted", "writer.pruned"])
def test_cut_off_anywhere_the_next_one_finishes(job: Job, service: Service, point: str) -> None:
    save(job, service, 10, 20, 30)
    faultpoints.plan(f"{point}=eio")
    with pytest.raises(OSError, match="fault point"):
        service.prune_all()
    assert 30 in steps(job)
    assert states(job)[20] == "DELETING"
    service.now += 600.0
    service.take()
    service.prune_all()
    assert steps(job) == [10, 30]
    assert not has_trash(job.store)
    service.take()
    assert states(job) == {10: "COMMITTED", 30: "COMMITTED"}
    assert len({event.event_id for event in service.events(CheckpointPruned)}) == 1


def test_a_writer_that_is_cut_off_before_it_ordered_the_removal_orders_it_later(job: Job, service: Service) -> None:
    save(job, service, 10, 20)
    faultpoints.plan("writer.deleting_marked=eio")
    save(job, service, 30)
    assert (states(job)[20], service.to_prune) == ("DELETING", [])
    service.take()
    service.prune_all()
    assert steps(job) == [10, 30]


def test_what_is_removed_while_it_is_verified_is_not_called_damaged(
    job: Job, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(job, service, 10, 20)

    def verify_late(store: LocalStore, checkpoint: CheckpointId) -> None:
        """Read it when another Celery worker has removed it."""
        if checkpoint.step == 20:
            save(job, service, 30)
            service.prune_all()
        verify(store, checkpoint)

    monkeypatch.setattr("surefoot_writer.verifying.verify", verify_late)
    service.verify_all()
    assert states(job) == {10: "COMMITTED", 30: "COMMITTED"}
    assert [event.step for event in service.events(CheckpointVerified)] == [10]


def test_a_commit_that_is_told_again_brings_nothing_back(job: Job, service: Service) -> None:
    save(job, service, 10, 20, 30)
    service.take(committed(20))
    assert states(job)[20] == "DELETING"


def test_what_somebody_else_removed_has_no_row(job: Job, service: Service) -> None:
    """By `surefoot checkpoints prune`, or by the drain of an earlier `surefoot run`."""
    save(job, service, 10, 20)
    job.store.delete(folder_name(id_of(10)))
    service.publisher.publish(CheckpointPruned(job="demo", attempt=1, step=10, num_bytes=1, reason="test"))
    service.consumer.turn(0.01)
    assert states(job) == {20: "COMMITTED"}


def test_what_another_was_cut_off_removing_is_finished(job: Job, service: Service) -> None:
    save(job, service, 10, 20)
    name = folder_name(id_of(20))
    job.commit(30)
    service.take()
    job.store.move(name, f"trash/{name}")
    service.to_prune.clear()
    service.now += 600.0
    service.take()
    service.prune_all()
    assert steps(job) == [10, 30]
    assert not has_trash(job.store)


def test_storage_without_its_attempt_records_loses_nothing(job: Job, service: Service) -> None:
    save(job, service, 10, 20, 30)
    job.folder.joinpath("attempts").rename(job.folder / "elsewhere")
    service.prune_all()
    assert steps(job) == [10, 20, 30]


@pytest.mark.slow  # the parts are cut off everywhere above, the processes are killed in test_processes
def test_the_processes_remove_killed_in_the_middle_or_not(job: Job, stack: Stack) -> None:
    for step in (10, 20, 30, 40):
        job.commit(step)
    celery = stack.start_celery("prune.moved=kill")
    stack.start_writer()
    stack.publisher.publish_all([committed(step) for step in (10, 20, 30, 40)])
    assert celery.wait(timeout=30) == -signal.SIGKILL
    assert 40 in steps(job)
    stack.start_celery()
    stack.wait_until(lambda: steps(job) == [10, 40] and not has_trash(job.store), "removed")
    stack.wait_until(lambda: states(job) == {10: "COMMITTED", 40: "COMMITTED"}, "rows")
    wait_until(lambda: {event.step for event in events(stack.bus, CheckpointPruned)} == {20, 30}, 10.0, "told")
