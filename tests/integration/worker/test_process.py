"""The worker as a process: signals to it, its death, a second one; and once with real launchers and ranks."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers import trainer
from helpers.waiting import wait_until
from surefoot.bus.redis_bus import RedisBus
from surefoot.bus.streams import EVENTS, logs_stream
from surefoot.checkpoint.catalog import list_committed
from surefoot.checkpoint.store import LocalStore
from surefoot.events import AttemptStarted, JobFinished, JobStateChanged, LogLine, StepCompleted

StartWorker = Callable[..., subprocess.Popen[str]]


def until_state(catalogue: Any, job: str, state: str, timeout_seconds: float = 40) -> None:
    wait_until(lambda: catalogue.state(job) == state, timeout_seconds, f"{job} is {state}", every_seconds=0.05)


def launchers(worker: subprocess.Popen[str]) -> list[int]:
    text = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text()
    return [int(pid) for pid in text.split()]


def log_of(folder: Path, number: int = 0) -> str:
    return (folder / f"worker-{number}.log").read_text()


@pytest.mark.timeout(150)
def test_death_and_end_of_the_worker(start_worker: StartWorker, catalogue: Any, tmp_path: Path) -> None:
    catalogue.submit("one", "run")
    worker = start_worker()
    until_state(catalogue, "one", "RUNNING")
    (launcher,) = launchers(worker)
    worker.kill()
    worker.wait()
    wait_until(lambda: not Path(f"/proc/{launcher}").exists() or "Z" in Path(f"/proc/{launcher}/stat").read_text(),
               2, "the launcher dies with it")  # fmt: skip
    assert catalogue.run("one").worker is not None

    worker = start_worker()
    wait_until(lambda: len(catalogue.attempts("one")) == 2, 40, "the next worker takes it back at once")
    assert catalogue.attempts("one")[1].cause == "restart: the worker was lost"
    until_state(catalogue, "one", "RUNNING")
    second = start_worker()
    assert second.wait(40) == 2
    assert f"already has a worker, process {worker.pid}" in log_of(tmp_path, 2)

    worker.send_signal(signal.SIGTERM)
    assert worker.wait(40) == 0
    run = catalogue.run("one")
    assert (run.state, run.worker, run.reason) == ("PENDING", None, "stopped with the worker")

    start_worker()
    wait_until(lambda: len(catalogue.attempts("one")) == 3, 40, "the next worker resumes it")
    assert catalogue.attempts("one")[2].cause == "resumed by the worker"


def test_what_cannot_be_saved_is_named(start_worker: StartWorker, catalogue: Any, tmp_path: Path) -> None:
    catalogue.submit("two", "deaf")
    worker = start_worker(stop_seconds="0.5")
    until_state(catalogue, "two", "RUNNING")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(30) == 1
    (staging,) = (tmp_path / "staging").glob("*/two-*")
    assert f"kept in memory: {staging}" in log_of(tmp_path)
    run = catalogue.run("two")
    assert run.state == "PENDING"
    assert run.worker is not None  # this host's memory holds its newest snapshot
    assert str(staging) in run.reason


@pytest.mark.slow  # chaos/test_services kills the worker of a real job
@pytest.mark.timeout(120)
def test_a_real_job_goes_on_after_the_worker_was_stopped(
    start_worker: StartWorker, catalogue: Any, bus: RedisBus, tmp_path: Path
) -> None:
    words = f"{trainer.__file__} --out {tmp_path / 'out'} --steps 60 --step-seconds 0.05"
    keys = {"nproc_per_node": 2, "seed": 11, "threads_per_rank": 1}
    spec = catalogue.spec("real", words, **keys) | {"checkpoint": {"save_every_seconds": None}}
    catalogue.submit("real", words, **keys, checkpoint=spec["checkpoint"])
    worker = start_worker("surefoot_worker")
    wait_until(lambda: (run := catalogue.run("real")) is not None and (run.step or 0) > 5, 40, "it trains")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(30) == 0, log_of(tmp_path)
    run = catalogue.run("real")
    assert (run.state, run.exit_code) == ("PENDING", 75)
    start_worker("surefoot_worker")
    until_state(catalogue, "real", "SUCCEEDED", 40)
    deliveries = wait_until(lambda: _finished(bus), 5, "all events are on the bus")
    numbers = [delivery.sequence for delivery in deliveries if delivery.source.startswith("job:real:")]
    assert numbers == list(range(1, len(numbers) + 1))
    messages = [delivery.message for delivery in deliveries]
    _, second = (message for message in messages if isinstance(message, AttemptStarted))
    assert second.from_step > 5
    assert {m.step for m in messages if isinstance(m, StepCompleted)} == set(range(1, 61))
    states = [m.state for m in messages if isinstance(m, JobStateChanged)]
    assert states[:4] == ["STARTING", "RUNNING", "STOPPING", "PENDING"]
    assert list_committed(LocalStore(tmp_path / "checkpoints/real"))[-1].step == 60
    assert [row.cause for row in catalogue.attempts("real")] == ["submitted", "resumed by the worker"]


def _finished(bus: RedisBus) -> list[Any]:
    found = bus.read(EVENTS, "0", 10_000, 0)
    return found if sum(isinstance(delivery.message, JobFinished) for delivery in found) == 2 else []


def test_output_is_on_the_bus_and_in_the_log(
    start_worker: StartWorker, catalogue: Any, bus: RedisBus, tmp_path: Path
) -> None:
    catalogue.submit("three", "short")
    start_worker()
    until_state(catalogue, "three", "SUCCEEDED")

    def lines() -> list[str]:
        found = (delivery.message for delivery in bus.read(logs_stream("three"), "0", 100, 0))
        return [line.text for line in found if isinstance(line, LogLine)]

    wait_until(lambda: len(lines()) == 3, 5, "the output is on the bus")
    assert lines() == ["submitted", "attempt 1 runs", "no line break at the end"]
    wait_until(lambda: '"event": "attempt 1 runs"' in log_of(tmp_path), 5, "the output is in the log")
    (line,) = (line for line in log_of(tmp_path).splitlines() if '"event": "attempt 1 runs"' in line)
    assert '"service": "worker", "job_id": "three"' in line
