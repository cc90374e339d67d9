"""What becomes of a job: real processes as launchers, a real database, a bus in memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from helpers.waiting import wait_until
from surefoot.bus.base import Outgoing
from surefoot.bus.streams import EVENTS, commands_stream, logs_stream
from surefoot.catalogue.database import Database
from surefoot.checkpoint.attempts import AttemptLog, Source, StartsFrom
from surefoot.checkpoint.store import LocalStore
from surefoot.command_files import CommandFolder
from surefoot.errors import CatalogueUnavailable
from surefoot.events import JobState, JobStateChanged, LogLine, Message, RollBack, StopTraining
from surefoot.testing.bus import MemoryBus

MakeWorker = Callable[..., Any]
PENDING, STARTING, RUNNING, DEGRADED, RECOVERING, STOPPING, PAUSED, SUCCEEDED, STOPPED, FAILED = (
    JobState.PENDING, JobState.STARTING, JobState.RUNNING, JobState.DEGRADED, JobState.RECOVERING, JobState.STOPPING,
    JobState.PAUSED, JobState.SUCCEEDED, JobState.STOPPED, JobState.FAILED,
)  # fmt: skip


@pytest.fixture
def memory() -> MemoryBus:
    return MemoryBus()


def sent(bus: MemoryBus, stream: str = EVENTS) -> list[Any]:
    return [delivery.message for delivery in bus.read(stream, "0", 100_000, 0)]


def states(bus: MemoryBus) -> list[JobState]:
    return [message.state for message in sent(bus) if isinstance(message, JobStateChanged)]


def texts(bus: MemoryBus, job: str) -> list[str]:
    return [line.text for line in sent(bus, logs_stream(job)) if isinstance(line, LogLine)]


def test_a_job_runs_and_is_stopped(make_worker: MakeWorker, catalogue: Any, memory: MemoryBus) -> None:
    worker = make_worker(memory)
    catalogue.submit("one", "run")
    worker.until_state("one", RUNNING)
    run = catalogue.run("one")
    assert (run.worker, run.attempt, run.total_steps, run.world_size) == (worker.settings.lease_name, 1, 1000, 1)
    worker.until(lambda: (catalogue.run("one").step or 0) > run.step, "progress is written")
    worker.until(lambda: catalogue.attempts("one"), "the attempt is indexed")
    assert catalogue.attempts("one")[0].cause == "submitted"
    catalogue.change("one", desired_state="STOPPED")
    worker.until_state("one", STOPPED)
    run = catalogue.run("one")
    assert (run.worker, run.exit_code, run.reason) == (None, 75, "stopped on request")
    assert run.finished_at is not None
    worker.close()
    assert states(memory) == [STARTING, RUNNING, STOPPING, STOPPED]
    assert texts(memory, "one") == ["submitted", "attempt 1 runs"]
    lines = (catalogue.folder / "run/one/events.jsonl").read_text().count("\n")
    numbers = [d.sequence for d in memory.read(EVENTS, "0", 100_000, 0) if d.source.startswith("job:one:")]
    assert numbers == list(range(1, lines + 1))


def test_a_job_ends_and_is_submitted_again(make_worker: MakeWorker, catalogue: Any, memory: MemoryBus) -> None:
    worker = make_worker(memory)
    catalogue.submit("two", "short", from_seed=True)
    worker.until_state("two", SUCCEEDED)
    assert catalogue.run("two").exit_code == 0
    catalogue.change("two", generation=2)
    worker.until(lambda: (r := catalogue.run("two")).generation == 2 and r.state == SUCCEEDED, "it ran again")
    assert [row.from_step for row in catalogue.attempts("two")] == [0, 0]  # from the seed, as was asked both times
    wait_until(lambda: texts(memory, "two").count("no line break at the end") == 2, 5, "the last line came too")


@pytest.mark.parametrize(
    ("entrypoint", "code", "reason"),
    [("fails", 1, "rank 0 raised ValueError: bad luck"), ("refuses", 2, "nproc_per_node: too many")],
)
def test_a_failed_job_says_why(
    make_worker: MakeWorker, catalogue: Any, memory: MemoryBus, entrypoint: str, code: int, reason: str
) -> None:
    worker = make_worker(memory)
    catalogue.submit("three", entrypoint)
    worker.until_state("three", FAILED)
    run = catalogue.run("three")
    assert run.exit_code == code
    assert run.reason.startswith(reason)
    wait_until(lambda: states(memory)[-1:] == [FAILED], 5, "it is said on the bus")


def test_a_spec_of_another_version_fails(make_worker: MakeWorker, catalogue: Any, memory: MemoryBus) -> None:
    worker = make_worker(memory)
    catalogue.submit("four", "run", colour="red")
    worker.until_state("four", FAILED)
    assert "colour" in catalogue.run("four").reason


def test_a_killed_launcher_is_started_again_within_the_budget(
    make_worker: MakeWorker, catalogue: Any, memory: MemoryBus
) -> None:
    worker = make_worker(memory)
    catalogue.submit("five", "crashes")
    catalogue.submit("six", "crashes", restart={"max_restarts": 1})
    catalogue.submit("seven", "dies")
    worker.until(lambda: [row.attempt for row in catalogue.attempts("five")] == [1, 2, 3], "it is started again")
    worker.until_state("five", RUNNING)
    assert catalogue.attempts("five")[2].cause == "restart: the launcher was killed by SIGKILL"
    worker.until_state("six", FAILED)
    assert "restart.max_restarts" in catalogue.run("six").reason
    worker.until_state("seven", FAILED)
    assert "4 times before an attempt began" in catalogue.run("seven").reason


def test_a_job_that_cannot_save_is_degraded_until_it_can(
    make_worker: MakeWorker, catalogue: Any, memory: MemoryBus
) -> None:
    worker = make_worker(memory)
    catalogue.submit("full", "full")
    worker.until_state("full", DEGRADED)
    step = catalogue.run("full").step or 0
    worker.until(lambda: (catalogue.run("full").step or 0) > step + 5, "it trains on")
    assert catalogue.state("full") == DEGRADED
    (catalogue.folder / "run/full/freed").touch()
    worker.until_state("full", RUNNING)
    wait_until(lambda: states(memory) == [STARTING, RUNNING, DEGRADED, RUNNING], 5, "the changes are told")
    changes = [message for message in sent(memory) if isinstance(message, JobStateChanged)]
    assert "nobody can save since 6 s: storage fails to write a shard: ENOSPC: No space left" in changes[2].reason
    assert catalogue.run("full").reason == "storage takes writes again, after 6 s"


def test_pause_and_go_on(make_worker: MakeWorker, catalogue: Any, memory: MemoryBus) -> None:
    worker = make_worker(memory, max_jobs=1)
    catalogue.submit("eight", "run")
    catalogue.submit("nine", "run")
    worker.until_state("eight", RUNNING)
    assert catalogue.run("nine") is None  # no room
    catalogue.change("nine", desired_state="STOPPED")
    worker.until_state("nine", STOPPED)
    assert catalogue.run("nine").reason == "stopped before it was started"
    catalogue.change("eight", desired_state="PAUSED")
    worker.until_state("eight", PAUSED)
    catalogue.change("eight", desired_state="RUNNING")
    worker.until_state("eight", RUNNING)
    worker.until(lambda: len(catalogue.attempts("eight")) == 2, "the attempt is indexed")
    assert catalogue.attempts("eight")[1].cause == "resumed by the worker"


def test_commands_come_into_the_staging_folder(make_worker: MakeWorker, catalogue: Any, memory: MemoryBus) -> None:
    def roll_back(number: int) -> Message:
        return RollBack(job="ten", attempt=1, number=number, reason="test", to_attempt=1, to_step=1, lr_factor=0.5)

    worker = make_worker(memory)
    memory.publish(commands_stream("ten"), [Outgoing(roll_back(3), "recovery:1", 1)])  # before anybody is here
    catalogue.submit("ten", "run")
    worker.until_state("ten", RUNNING)
    (staging,) = worker.supervisor._staging
    folder = CommandFolder(staging, "ten")
    worker.until(lambda: folder.next_after(0) is not None, "the first command is there")
    memory.publish(commands_stream("ten"), [Outgoing(roll_back(4), "recovery:1", 2)])
    seconds = wait_until(lambda: folder.next_after(3) is not None, 5, "the second command is there")
    assert seconds
    assert folder.next_after(3) == roll_back(4).model_copy(
        update={name: getattr(folder.next_after(3), name) for name in ("event_id", "ts", "monotonic_seconds")}
    )


def test_an_order_to_stop_ends_the_job_once(make_worker: MakeWorker, catalogue: Any, memory: MemoryBus) -> None:
    """Recovery has come to the end of its ladder. Submitted again, the job is not stopped by the same order."""

    def stop(number: int, attempt: int) -> Outgoing:
        order = StopTraining(job="t", attempt=attempt, number=number, reason="it came back")
        return Outgoing(order, "recovery:1", number)

    worker = make_worker(memory)
    catalogue.submit("t", "run")
    worker.until_state("t", RUNNING)
    memory.publish(commands_stream("t"), [stop(1, 7), stop(2, 1)])  # the first one is for another attempt
    worker.until_state("t", FAILED)
    assert catalogue.run("t").reason == "stopped by recovery, with everything saved: it came back"
    assert catalogue.run("t").exit_code == 75
    catalogue.change("t", generation=2)
    worker.until(lambda: catalogue.run("t").generation == 2 and catalogue.run("t").state == RUNNING, "it runs again")
    step = catalogue.run("t").step or 0
    worker.until(lambda: (catalogue.run("t").step or 0) > step + 20, "it goes on")


def test_nothing_is_lost_while_the_bus_is_away(make_worker: MakeWorker, catalogue: Any, memory: MemoryBus) -> None:
    memory.available = False
    worker = make_worker(memory)
    catalogue.submit("eleven", "short")
    worker.until_state("eleven", SUCCEEDED)
    assert worker.outages
    memory.available = True
    wait_until(lambda: states(memory) == [STARTING, RUNNING, SUCCEEDED], 5, "states are sent")
    wait_until(lambda: [d.sequence for d in memory.read(EVENTS, "0", 1000, 0) if d.source.startswith("job:")]
               == [1, 2, 3, 4, 5, 6, 7], 5, "events are sent")  # fmt: skip
    assert texts(memory, "eleven")[-1] == "no line break at the end"


class Failing(Database):
    """A database that can be away."""

    is_away = False

    @contextmanager
    def read(self) -> Any:
        if self.is_away:
            raise CatalogueUnavailable("away")
        with super().read() as session:
            yield session

    @contextmanager
    def write(self) -> Any:
        if self.is_away:
            raise CatalogueUnavailable("away")
        with super().write() as session:
            yield session


def test_jobs_go_on_while_the_database_is_away(
    make_worker: MakeWorker, catalogue: Any, database_url: str, memory: MemoryBus
) -> None:
    catalogue.database = database = Failing(database_url)
    worker = make_worker(memory)
    catalogue.submit("twelve", "crashes")
    worker.until(lambda: STARTING in states(memory), "it is started")
    database.is_away = True
    worker.until(lambda: "attempt 3 runs" in texts(memory, "twelve"), "it is supervised")
    assert worker.outages
    database.is_away = False
    worker.until_state("twelve", RUNNING)
    worker.until(lambda: len(catalogue.attempts("twelve")) == 3, "attempts are indexed")
    catalogue.change("twelve", desired_state="STOPPED")
    worker.until_state("twelve", STOPPED)
    database.close()


def test_another_worker_takes_a_job_only_when_its_lease_has_expired(
    make_worker: MakeWorker, catalogue: Any, memory: MemoryBus
) -> None:
    first = make_worker(memory, identity="first", lease_seconds=2.0)
    second = make_worker(memory, identity="second", lease_seconds=2.0)
    catalogue.submit("thirteen", "run")
    first.until_state("thirteen", RUNNING)

    def owner() -> str:
        first.turn()
        return str(catalogue.run("thirteen").worker)

    second.until(lambda: owner() == "first" and catalogue.run("thirteen").lease_version > 6, "leases are renewed")
    second.until(lambda: catalogue.run("thirteen").worker == "second", "a silent worker loses its lease")
    assert [row.attempt for row in catalogue.attempts("thirteen")] == [1]  # its launcher still runs
    first.until(lambda: not first.supervisor._jobs, "the first one finds out and stops")
    second.until(lambda: len(catalogue.attempts("thirteen")) == 2, "the second one goes on")
    assert catalogue.attempts("thirteen")[1].cause == "restart: the worker was lost"


def test_a_newer_attempt_of_another_host_ends_the_ranks(
    make_worker: MakeWorker, catalogue: Any, memory: MemoryBus
) -> None:
    worker = make_worker(memory)
    catalogue.submit("fifteen", "run")
    worker.until_state("fifteen", RUNNING)
    worker.until(lambda: catalogue.attempts("fifteen"), "the attempt is indexed")
    AttemptLog(LocalStore(catalogue.folder / "checkpoints/fifteen")).claim(
        after=1, starts_from=StartsFrom(attempt=0, step=0, source=Source.SEED), cause="elsewhere", world_size=1,
        host="another-box", started_at=datetime.now(UTC),
    )  # fmt: skip
    began = time.monotonic()
    worker.until_state("fifteen", FAILED)
    assert time.monotonic() - began < 5
    assert catalogue.run("fifteen").reason == "a newer attempt was started on another-box"


def test_output_is_bounded_and_comes_once(make_worker: MakeWorker, catalogue: Any, memory: MemoryBus) -> None:
    worker = make_worker(memory, log_lines_per_second=4)
    catalogue.submit("fourteen", "run")
    worker.until_state("fourteen", RUNNING)
    output = Path(catalogue.folder / "run/fourteen/logs/rank-00000.out")
    with output.open("a") as file:
        file.write("".join(f"line {n}\n" for n in range(100)))
    wait_until(lambda: any("lines were left out here" in text for text in texts(memory, "fourteen")), 5, "it says so")
    found = texts(memory, "fourteen")
    assert found[2:4] == ["line 0", "line 1"]
    assert len(found) == len(set(found)) <= 30
    lines = [line for line in sent(memory, logs_stream("fourteen")) if line.text == "line 0"]
    assert lines[0].attempt == 1
    assert lines[0].step >= 1
