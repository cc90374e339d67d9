"""An error that nobody expected concerns one job: the worker and its other jobs go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from helpers.waiting import wait_until
from surefoot.bus.streams import EVENTS
from surefoot.events import JobState
from surefoot.testing.bus import MemoryBus
from surefoot_worker.service import job, pump, runs, supervisor
from surefoot_worker.service.job import SupervisedJob
from surefoot_worker.service.pump import Feed, Pump

MakeWorker = Callable[..., Any]


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as entries:
        yield entries


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_AGAIN_SECONDS", 0.02)
    monkeypatch.setattr(supervisor, "_TROUBLE_SECONDS", 0.05)
    monkeypatch.setattr(pump, "_TROUBLE_SECONDS", 0.05)


def failing_for(name: str, original: Callable[..., Any], times: int, job_of: Callable[..., str]) -> Callable[..., Any]:
    """Return a function that fails so many times where it is about one job."""
    left = [times]

    def replacement(*args: Any, **keywords: Any) -> Any:
        if job_of(*args) == name and left[0]:
            left[0] -= 1
            raise RuntimeError("nobody expected this")
        return original(*args, **keywords)

    return replacement


def errors(logs: list[Any]) -> list[Any]:
    return [entry for entry in logs if entry["log_level"] == "error" and entry.get("exc_info")]


def test_files_of_a_wrong_shape_stop_no_job(make_worker: MakeWorker, catalogue: Any) -> None:
    contents = {"a": '{"events": null}', "b": '{"events":["x",1]}', "c": '{"output":[]}', "d": "[]"}
    for name, content in contents.items():
        catalogue.submit(name, "run" if name == "a" else "short")
        folder = catalogue.folder / "run" / name
        folder.mkdir(parents=True)
        (folder / "forwarded.json").write_text(content)
        (folder / "delivered.json").write_text('{"after": "garbage"}')
    worker = make_worker(MemoryBus())
    for name in "bcd":
        worker.until_state(name, JobState.SUCCEEDED)
    worker.until_state("a", JobState.RUNNING)


@pytest.mark.parametrize(("times", "end"), [(1, JobState.SUCCEEDED), (99, JobState.FAILED)])
def test_a_start_that_fails(
    make_worker: MakeWorker, catalogue: Any, monkeypatch: pytest.MonkeyPatch, logs: list[Any], times: int, end: JobState
) -> None:
    begin = failing_for("bad", Pump.begin, times, lambda self, spec: spec.job)
    monkeypatch.setattr(Pump, "begin", begin)
    worker = make_worker(MemoryBus())
    catalogue.submit("bad", "short")
    catalogue.submit("good", "short")
    worker.until_state("bad", end)
    worker.until_state("good", JobState.SUCCEEDED)
    assert [entry["job_id"] for entry in errors(logs)] == ["bad"] * min(times, 3)
    if end is JobState.FAILED:
        assert "nobody expected this" in catalogue.run("bad").reason
        assert catalogue.run("bad").worker is None


@pytest.mark.parametrize("method", ["_observe", "_conclude"])
@pytest.mark.parametrize(("times", "end"), [(2, JobState.SUCCEEDED), (9999, JobState.FAILED)])
def test_a_turn_that_fails_while_a_launcher_runs(
    make_worker: MakeWorker, catalogue: Any, monkeypatch: pytest.MonkeyPatch, method: str, times: int, end: JobState
) -> None:
    failing = failing_for("bad", getattr(SupervisedJob, method), times, lambda self, *_: self.spec.job)
    monkeypatch.setattr(SupervisedJob, method, failing)
    worker = make_worker(MemoryBus())
    catalogue.submit("bad", "short")
    catalogue.submit("good", "short")
    worker.until_state("good", JobState.SUCCEEDED)
    worker.until_state("bad", end)
    assert len(catalogue.attempts("bad")) == 1, "it is not started again"


def test_a_job_that_trains_is_stopped_although_its_turns_fail(
    make_worker: MakeWorker, catalogue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker(MemoryBus())
    catalogue.submit("bad", "run")
    worker.until_state("bad", JobState.RUNNING)
    monkeypatch.setattr(SupervisedJob, "_obey", failing_for("bad", SupervisedJob._obey, 9999, lambda self: "bad"))
    catalogue.change("bad", desired_state="STOPPED")
    worker.until_state("bad", JobState.FAILED)


def test_what_cannot_be_taken_up_or_written(
    make_worker: MakeWorker, catalogue: Any, monkeypatch: pytest.MonkeyPatch, logs: list[Any]
) -> None:
    monkeypatch.setattr(runs, "take", failing_for("late", runs.take, 2, lambda _, row, me: row.job))
    monkeypatch.setattr(SupervisedJob, "_take_up", failing_for("bad", SupervisedJob._take_up, 1, lambda j: j.spec.job))
    monkeypatch.setattr(runs, "save", failing_for("slow", runs.save, 2, lambda _, run, me: run.job))
    worker = make_worker(MemoryBus())
    for name in ("bad", "late", "slow", "good"):
        catalogue.submit(name, "short")
    worker.until_state("bad", JobState.FAILED)
    for name in ("late", "slow", "good"):
        worker.until_state(name, JobState.SUCCEEDED)
    assert any(entry["job_id"] == "slow" for entry in errors(logs))


def test_a_feed_that_fails_holds_up_no_other(
    make_worker: MakeWorker, catalogue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pump, "_TROUBLE_SECONDS", 60.0)
    monkeypatch.setattr(pump, "_FLUSH_SECONDS", 0.2)
    monkeypatch.setattr(Feed, "turn", failing_for("bad", Feed.turn, 9999, lambda self, now: self.job))
    bus = MemoryBus()
    worker = make_worker(bus)
    catalogue.submit("bad", "short")
    catalogue.submit("good", "short")
    for name in ("bad", "good"):
        worker.until_state(name, JobState.SUCCEEDED)
    wait_until(
        lambda: any(delivery.source.startswith("job:good:") for delivery in bus.read(EVENTS, "0", 1000, 0.0)),
        5, "the other's events",
    )  # fmt: skip
