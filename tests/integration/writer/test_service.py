"""The writer's parts on a real server, a real database and real files, with its thread called by hand."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from helpers.rows import NOW
from helpers.staging import claim
from helpers.stored import f32
from helpers.waiting import wait_until
from helpers.writer import Job, Service, cleared, committed, events
from surefoot.bus.redis_bus import RedisBus
from surefoot.catalogue.database import Database
from surefoot.catalogue.models import Job as JobRow
from surefoot.checkpoint.catalog import verify
from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.events import CheckpointPromoted, CheckpointQuarantined, CheckpointVerified
from surefoot_writer.drains import Drains
from surefoot_writer.index import CheckpointIndex
from surefoot_writer.verifying import ReadFailed


@pytest.fixture
def service(tmp_path: Path, database: Database, bus: RedisBus, job: Job) -> Service:
    return Service(tmp_path, database, bus)


def test_a_commit_makes_a_row_and_is_verified(job: Job, service: Service) -> None:
    folder = job.commit(10)
    service.take(event := committed(10))

    row = job.row(10)
    assert row is not None
    assert (row.state, row.stable, row.num_bytes, row.world_size) == ("COMMITTED", False, 8, 1)
    assert (row.path, row.committed_at, row.verified_at) == (str(folder), event.ts, None)
    assert service.ordered == [("demo", (1, 10))]

    service.verify_all()
    row = job.row(10)
    assert row is not None
    assert row.verified_at is not None
    assert (row.verify_problem, row.verify_tries) == (None, 1)
    (said,) = service.events(CheckpointVerified)
    assert (said.attempt, said.step, said.problem) == (1, 10, None)


def test_what_comes_twice_changes_nothing(job: Job, service: Service) -> None:
    job.commit(10)
    service.take(committed(10))
    service.verify_all()
    before = job.row(10)
    service.ordered.append(("demo", CheckpointId(1, 10)))  # as after a restart, which may order it once more
    service.take(committed(10))
    service.verify_all()

    after = job.row(10)
    assert before is not None
    assert after is not None
    assert (after.verified_at, after.committed_at, after.verify_tries) == (before.verified_at, before.committed_at, 1)
    assert len(service.events(CheckpointVerified)) == 1


def test_an_order_that_was_lost_is_given_again(job: Job, service: Service) -> None:
    job.commit(10)
    service.take(committed(10))
    service.take()
    assert len(service.ordered) == 1
    service.now += 600.0
    service.take()
    assert len(service.ordered) == 2


def test_three_tries_that_were_cut_short_are_enough(job: Job, service: Service) -> None:
    job.commit(10)
    service.take(committed(10))
    index = CheckpointIndex(job.database)
    assert [index.begin_verify("demo", CheckpointId(1, 10)) for _ in range(4)] == [True, True, True, False]
    row = job.row(10)
    assert row is not None
    assert (row.verified_at, row.verify_tries, row.verify_problem) == (None, 3, "given up: 3 tries were cut short")


def test_jobs_of_another_catalogue_are_not_ours(job: Job, service: Service) -> None:
    service.take(committed(10, job="stranger"))
    assert service.ordered == []
    assert service.consumer.num_buried == 0


def test_promotion_waits_for_probation_and_leaves_a_file_a_row_and_an_event(job: Job, service: Service) -> None:
    folder = job.commit(10)
    job.commit(20)
    service.take(committed(10), committed(20), cleared(29))
    assert not (folder / "stable.json").exists()

    service.take(cleared(30))
    mark = json.loads((folder / "stable.json").read_text())
    assert (mark["step"], mark["cleared_through_step"], mark["probation_steps"]) == (10, 30, 20)
    row, other = job.row(10), job.row(20)
    assert row is not None
    assert other is not None
    assert (row.stable, other.stable) == (True, False)
    assert row.promoted_at == datetime.fromisoformat(mark["promoted_at"])
    assert [(e.attempt, e.step, e.cleared_through_step) for e in service.events(CheckpointPromoted)] == [(1, 10, 30)]
    verify(job.store, CheckpointId(1, 10))  # the mark is no damage

    service.take(cleared(31), cleared(100))
    assert [event.step for event in service.events(CheckpointPromoted)] == [10, 20]


def test_a_checkpoint_that_is_late_is_promoted_by_what_was_cleared_before(
    job: Job, service: Service, tmp_path: Path, bus: RedisBus
) -> None:
    service.take(cleared(100))
    job.commit(10)
    restarted = Service(tmp_path, job.database, bus)
    restarted.take(committed(10))
    row = job.row(10)
    assert row is not None
    assert row.stable


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_never_promoted(job: Job, service: Service, bad: float) -> None:
    job.commit(10, {"weight": f32(1.0)}, {"moment": f32(0.0, bad)})
    job.commit(11)
    service.take(committed(10), committed(11), cleared(50))
    service.take(cleared(60))
    assert [event.step for event in service.events(CheckpointPromoted)] == [11]
    assert not (job.folder / folder_name(CheckpointId(1, 10)) / "stable.json").exists()


def test_what_was_left_behind_is_not_promoted(job: Job, service: Service) -> None:
    job.commit(10)
    job.commit(30)
    service.take(committed(10), committed(30))
    claim(job.store, after=1, attempt=1, step=10)
    job.commit(30, attempt=2)
    service.take(cleared(90, attempt=1), committed(30, attempt=2), cleared(90, attempt=2))
    assert [(event.attempt, event.step) for event in service.events(CheckpointPromoted)] == [(1, 10), (2, 30)]


def test_storage_is_the_truth(job: Job, service: Service, tmp_path: Path, bus: RedisBus) -> None:
    for step in (10, 20, 30):
        job.commit(step)
    service.take(cleared(35))
    assert sorted(job.rows()) == [(1, 10), (1, 20), (1, 30)]  # never heard of
    assert len(service.ordered) == 3
    assert [event.step for event in service.events(CheckpointPromoted)] == [10]

    shutil.rmtree(job.folder / folder_name(CheckpointId(1, 20)))
    (job.folder / "quarantine").mkdir()
    shutil.move(job.folder / folder_name(CheckpointId(1, 30)), job.folder / "quarantine")
    (job.folder / folder_name(CheckpointId(1, 40))).mkdir()  # no manifest: does not exist
    service.take()
    assert {id_: row.state for id_, row in job.rows().items()} == {(1, 10): "COMMITTED", (1, 30): "QUARANTINED"}


def test_the_index_can_be_made_anew_from_the_folders(job: Job, service: Service) -> None:
    folder = job.commit(10, {"x": f32(1.0, 2.0)}, {"y": f32(3.0)})
    service.take(cleared(35))
    service.verify_all()
    before = job.row(10)
    with job.database.write() as session:
        session.delete(session.merge(before))
    service.take()
    after = job.row(10)
    assert before is not None
    assert after is not None
    assert after.stable
    assert (after.promoted_at, after.world_size, after.path) == (before.promoted_at, 2, str(folder))
    assert after.num_bytes == before.num_bytes == sum(p.stat().st_size for p in folder.glob("*.safetensors"))


def test_storage_that_is_not_mounted_costs_no_rows(job: Job, service: Service) -> None:
    job.commit(10)
    service.take(committed(10))
    job.folder.rename(job.folder.with_name("away"))
    service.take()
    assert list(job.rows()) == [(1, 10)]


def test_damage_is_a_result_and_is_moved_to_quarantine_by_a_drain(job: Job, service: Service) -> None:
    folder = job.commit(10)
    service.take(committed(10))
    shard = folder / "rank-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    service.verify_all()
    row = job.row(10)
    assert row is not None
    assert row.verified_at is not None
    assert row.verify_problem is not None
    assert "checksum" in row.verify_problem

    service.take()  # CheckpointVerified with the problem is handled, and a drain is started for the report
    events_path = job.spec.events_path
    wait_until((job.folder / "quarantine" / folder.name).exists, 20.0, "quarantined")
    wait_until(lambda: events_path.exists() and "CheckpointQuarantined" in events_path.read_text(), 20.0, "told")
    wait_until(lambda: not job.staging_path.exists(), 20.0, "the drain leaves nothing behind")
    service.take()
    row = job.row(10)
    assert row is not None
    assert (row.state, row.stable) == ("QUARANTINED", False)


def test_a_damaged_checkpoint_is_not_promoted_and_not_stable_any_more(job: Job, service: Service) -> None:
    for step in (10, 11):
        job.commit(step)
    service.take(committed(10), committed(11), cleared(30))
    for step in (10, 11):
        (job.folder / folder_name(CheckpointId(1, step)) / "rank-00000.safetensors").write_bytes(b"rubbish")
    service.verify_all()
    rows = job.rows()
    assert [row.stable for row in rows.values()] == [False, False]
    assert [event.step for event in service.events(CheckpointPromoted)] == [10]


def test_damage_that_the_promotion_finds_is_not_promoted(job: Job, service: Service) -> None:
    folder = job.commit(10)
    (folder / "rank-00000.safetensors").write_bytes(b"rubbish")
    service.take(committed(10), cleared(100))
    row = job.row(10)
    assert row is not None
    assert (row.stable, row.verified_at is None) == (False, False)
    assert not (folder / "stable.json").exists()


def test_a_quarantined_checkpoint_can_be_written_again(job: Job, service: Service) -> None:
    job.commit(10)
    service.take(committed(10))
    shutil.move(job.folder / folder_name(CheckpointId(1, 10)), job.folder / "quarantine" / "x")
    service.take(
        CheckpointQuarantined(job="demo", attempt=1, step=10, file="rank-00000.json", reason="bad", moved_to="q")
    )
    service.ordered.clear()
    job.commit(10)
    service.take(committed(10))
    row = job.row(10)
    assert row is not None
    assert (row.state, row.verify_problem, row.verify_tries) == ("COMMITTED", None, 0)
    assert service.ordered == [("demo", (1, 10))]


def test_an_io_error_says_nothing_about_the_checkpoint(job: Job, service: Service) -> None:
    folder = job.commit(10)
    shard = folder / "rank-00000.safetensors"
    shard.rename(folder / "aside")
    shard.mkdir()  # reading fails: EISDIR
    service.take(committed(10))
    orders = list(service.ordered)
    for _ in range(2):
        with pytest.raises(ReadFailed):
            service.verify_all()
        service.ordered = list(orders)
    service.verify_all()
    row = job.row(10)
    assert row is not None
    assert (row.state, row.verified_at, row.verify_tries) == ("COMMITTED", None, 3)
    assert row.verify_problem is not None
    assert "could not be read in 3 tries" in row.verify_problem
    assert service.events(CheckpointVerified) == []
    service.take()
    assert service.ordered == []  # not a fourth time
    assert not job.staging_path.exists()  # and no report


def test_a_drain_that_cannot_finish_is_named_and_not_waited_for_for_ever(job: Job) -> None:
    assert job.ranks().save(10, persist=True)
    in_the_way = job.folder / "step-000000010-a0001"
    in_the_way.touch()
    drains = Drains(0.0)
    assert drains.wait_until_idle([job.spec], 0.3) == [job.staging_path]

    in_the_way.unlink()  # the drain that was started meanwhile lives on and finishes
    job.staging.announce_end()
    wait_until(lambda: drains.wait_until_idle([job.spec], 1.0) == [], 20.0, "idle")
    wait_until(lambda: not job.staging_path.exists(), 20.0, "drained")
    verify(job.store, CheckpointId(1, 10))


def test_a_folder_without_a_drain_gets_one_after_a_moment_and_only_one(job: Job) -> None:
    job.ranks()
    times = iter((0.0, 1.9, 2.0, 10.0, 20.0))
    drains = Drains(2.0, lambda: next(times))
    log = job.spec.job_run_dir / "logs" / "drain.log"
    for _ in range(2):
        drains.ensure([job.spec])
        assert not log.exists()
    drains.ensure([job.spec])
    wait_until(lambda: "draining" in log.read_text(), 20.0, "a drain at work")
    for _ in range(2):
        drains.ensure([job.spec])
    job.staging.announce_end()
    wait_until(lambda: not job.staging_path.exists(), 20.0, "the drain leaves nothing behind")
    assert "another drain" not in log.read_text()


def test_a_spec_that_cannot_be_understood_stops_no_other_job(job: Job, service: Service) -> None:
    with job.database.write() as session:
        session.add(
            JobRow(name="odd", spec={"job": "odd", "newer": 1}, desired_state="RUNNING", created_at=NOW, updated_at=NOW)
        )
    job.commit(10)
    service.take(committed(10, job="odd"), committed(10))
    assert list(job.rows()) == [(1, 10)]


def test_a_changed_spec_is_read_again(job: Job, service: Service) -> None:
    job.commit(10)
    service.take(committed(10), cleared(15))
    with job.database.write() as session:
        row = session.get_one(JobRow, "demo")
        row.spec = row.spec | {"policy": {"probation_steps": 5}}
        row.updated_at = datetime.now(UTC)
    service.take()
    assert [event.step for event in events(service.bus, CheckpointPromoted)] == [10]


def test_a_promotion_cut_off_after_its_file_is_finished(job: Job, service: Service) -> None:
    folder = job.commit(10)
    service.take(committed(10), cleared(30))
    with job.database.write() as session:
        row = session.merge(job.row(10))
        row.stable, row.promoted_at = False, None
    service.take()
    row = job.row(10)
    assert row is not None
    assert row.stable
    first, second = service.events(CheckpointPromoted)
    assert first.event_id == second.event_id
    assert folder.joinpath("stable.json").exists()
