"""The writer and its Celery worker as processes: killed, without a server, without a database, told to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from helpers.server import RealServer
from helpers.writer import Job, Stack, cleared, committed, events
from surefoot.bus.redis_bus import RedisBus
from surefoot.bus.streams import EVENTS
from surefoot.checkpoint.catalog import verify
from surefoot.checkpoint.ids import CheckpointId
from surefoot.events import CheckpointPromoted, CheckpointVerified
from surefoot.telemetry.health import HealthState

ID = CheckpointId(1, 10)


def is_verified(job: Job) -> bool:
    row = job.row(10)
    return row is not None and row.verified_at is not None


def is_stable(job: Job) -> bool:
    row = job.row(10)
    return row is not None and row.stable


def test_whoever_is_killed_in_the_middle_is_finished_by_the_next(job: Job, stack: Stack) -> None:
    job.commit(10)
    celery = stack.start_celery("verify.begun=kill")
    stack.publisher.publish_all([committed(10), cleared(30)])
    for point in ("row_written", "promotion_published"):
        assert stack.start_writer(f"writer.{point}=kill").wait(timeout=30) == -signal.SIGKILL
    stack.start_writer()
    assert celery.wait(timeout=30) == -signal.SIGKILL
    assert not is_verified(job)

    celery = stack.start_celery()
    stack.wait_until(lambda: is_stable(job) and is_verified(job), "promoted and verified")
    stack.wait_until(lambda: stack.bus.lag(EVENTS, "writer") == 0, "all is acknowledged")
    row = job.row(10)
    assert row is not None
    assert (row.verify_problem, row.verify_tries, len(job.rows())) == (None, 2, 1)
    stack.wait_until(lambda: len(events(stack.bus, CheckpointVerified)) == 1, "told once")
    # Killed after the event and before the row: told twice, and recognisable as the same.
    first, second = events(stack.bus, CheckpointPromoted)
    assert first.event_id == second.event_id
    assert stack.stop(celery) == 0


def test_without_server_and_database_both_wait_and_go_on(
    job: Job, tmp_path: Path, database_url: str, make_server: Callable[[], RealServer]
) -> None:
    server = make_server()
    server.stop()
    stack = Stack(tmp_path, database_url, server.url, RedisBus(server.url))
    folder = job.commit(10)
    shard = folder / "rank-00000.safetensors"
    shard.rename(folder / "aside")
    # Reading it fails at first: EISDIR. A link, so that one rename puts the shard back: never is it missing.
    shard.symlink_to(tmp_path, target_is_directory=True)
    job.database.close()
    database_file = Path(database_url.removeprefix("sqlite:///"))
    database_file.rename(tmp_path / "away")
    try:
        writer, celery = stack.start_writer(), stack.start_celery()
        stack.wait_for_health(HealthState.WAITING, "unable to open database")
        (tmp_path / "away").rename(database_file)
        stack.wait_for_health(HealthState.WAITING, f":{server.port}")
        server.start()
        stack.publisher.publish(committed(10))
        stack.wait_until(lambda: (row := job.row(10)) is not None and row.verify_tries > 0, "a failed try")
        (folder / "aside").rename(shard)
        stack.wait_until(lambda: is_verified(job), "tried again and verified")
        stack.wait_until(lambda: events(stack.bus, CheckpointVerified), "told")
        told = {event.event_id: event for event in events(stack.bus, CheckpointVerified)}  # at least once, by one id
        assert [event.problem for event in told.values()] == [None]
        stack.wait_for_health(HealthState.OK)
        assert (stack.stop(writer), stack.stop(celery)) == (0, 0)
        assert stack.log.read_text().count("waiting; nothing is lost meanwhile") == 1
        assert not list((stack.home / "run" / "health").iterdir())
    finally:
        stack.close()
        stack.bus.close()


def test_a_snapshot_without_a_drain_becomes_durable_before_the_writer_ends(job: Job, stack: Stack) -> None:
    ranks = job.ranks()
    assert ranks.save(10, persist=True)
    in_the_way = job.folder / "step-000000010-a0001"
    in_the_way.touch()  # the drain fails and tries again
    writer = stack.start_writer()
    drain_log = job.spec.job_run_dir / "logs" / "drain.log"
    stack.wait_until(lambda: drain_log.exists() and "failed 1 times" in drain_log.read_text(), "a drain at work")
    writer.send_signal(signal.SIGTERM)
    stack.wait_until(lambda: "failed 3 times" in drain_log.read_text(), "it goes on")
    assert writer.poll() is None

    in_the_way.unlink()
    assert writer.wait(timeout=30) == 0
    verify(job.store, ID)
    ranks.check_committed(job.store, 10)
    stack.wait_until(lambda: not job.staging_path.exists(), "the drain leaves nothing behind")
