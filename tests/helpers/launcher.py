"""Waiting for what a launcher and its ranks do, and for processes to be gone."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.jobs import Job
from helpers.waiting import wait_until
from surefoot.events import RanksRestarted
from surefoot.processes import JOB_KEY_ENVIRONMENT_KEY

RING = Path(__file__).parent / "ring.py"


def until(condition: Callable[[], bool], what: str, timeout_seconds: float = 30.0) -> float:
    """Wait for a condition and return the seconds it took."""
    began = time.monotonic()
    wait_until(condition, timeout_seconds, what, every_seconds=0.005)
    return time.monotonic() - began


@contextmanager
def started(job: Job) -> Iterator[subprocess.Popen[str]]:
    """Start a launcher that does not outlive the test."""
    with job.start() as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def output(job: Job, rank: int, stream: str = "out") -> str:
    path = job.folder / "run" / job.name / "logs" / f"rank-{rank:05d}.{stream}"
    return path.read_text() if path.exists() else ""


def until_trains(job: Job, start: int = 0) -> list[int]:
    """Wait until all ranks of the given start have done a step, and return their pids by rank."""
    line = f"first step of start {start}\n"
    until(lambda: all(line in output(job, rank) for rank in range(job.nproc)), f"start {start} trains")
    return list(next(event.pids for event in job.events(RanksRestarted) if event.restart == start))


def finish(process: subprocess.Popen[str], timeout_seconds: float = 30.0) -> tuple[int, str]:
    text, _ = process.communicate(timeout=timeout_seconds)
    return process.returncode, text


def processes_of(job: Job) -> list[str]:
    """Every process with the job's key in its environment, the drain included."""
    wanted = f"{JOB_KEY_ENVIRONMENT_KEY}={job.staging.name}".encode()
    found = []
    for pid in (path.name for path in Path("/proc").iterdir() if path.name.isdigit()):
        try:
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(f"{pid} {Path(f'/proc/{pid}/cmdline').read_bytes()[:80]!r}")
        except OSError:
            continue
    return found
