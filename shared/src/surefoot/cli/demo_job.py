"""The demo's job as any other process can see it, and the kill."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from surefoot.checkpoint.staging_folder import staging_folder_path
from surefoot.cli.tail import EventTail
from surefoot.errors import SurefootError
from surefoot.events import CheckpointCommitted, Event
from surefoot.processes import find_job_processes, kill_job_processes
from surefoot.progress import Progress, ProgressPage, progress_path
from surefoot.spec import JobSpec

DRAIN_SECONDS = 30.0
RECOVERY_LIMIT_SECONDS = 60.0
POLL_SECONDS = 0.05
FAST_POLL_SECONDS = 0.001
"""Only between the kill and the recovery: it is what the measurement is exact to."""


class KillError(SurefootError):
    """The kill could not be made or training did not go on after it; the message says why."""


@dataclass(frozen=True)
class Kill:
    """What one SIGKILL cost.

    Attributes:
        pid: The process killed.
        rank: Its rank.
        attempt: The attempt it ended.
        step: The furthest step that any rank had completed then.
        restart_step: The step that the next attempt started from.
        recovery_seconds: From the kill until every rank had completed a step of the next attempt.
    """

    pid: int
    rank: int
    attempt: int
    step: int
    restart_step: int
    recovery_seconds: float

    @property
    def steps_lost(self) -> int:
        """Steps that had to be done again."""
        return max(0, self.step - self.restart_step)


class DemoJob:
    """What can be seen of a job on its own host. Make it before the job starts.

    Args:
        spec: Of the job.
        end_reason: Asked while waiting: why the job has ended, None while it has not.
    """

    def __init__(self, spec: JobSpec, end_reason: Callable[[], str | None]) -> None:
        self.spec = spec
        self.end_reason = end_reason
        self.staging_folder = staging_folder_path(spec.checkpoint.staging_dir, spec.job, spec.storage.absolute())
        self.events = EventTail(spec.events_path)

    def progress(self) -> list[Progress]:
        """Return where each rank is; fewer than all ranks while they start."""
        pages = [self._page(rank) for rank in range(self.spec.nproc_per_node)]
        return [page for page in pages if page is not None]

    def _page(self, rank: int) -> Progress | None:
        try:
            page = ProgressPage.open(progress_path(self.staging_folder, rank))
        except OSError:
            return None
        try:
            return page.read()
        finally:
            page.close()

    def sweep(self) -> list[str]:
        """End and remove what is left of an ended job; return what that was. The drain gets time to finish first."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while self.staging_folder.exists() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        leftovers = [f"process {pid}" for pid in find_job_processes(self.staging_folder.name)]
        if self.staging_folder.exists():
            leftovers.append(str(self.staging_folder))
        kill_job_processes(self.staging_folder.name)
        shutil.rmtree(self.staging_folder, ignore_errors=True)
        return leftovers


def kill_rank_on_the_way(job: DemoJob, rank: int, *, at_step: int, say: Callable[[str], None]) -> Kill:
    """Kill a rank once `at_step` is done and a checkpoint is durable, and time the recovery.

    Raises:
        KillError: the job ended too early, or did not go on after the kill.
    """
    victim = _wait_for_the_moment(job, rank, at_step)
    before = max(page.step for page in job.progress())
    say(f"SIGKILL to rank {rank} (pid {victim.pid}) at step {victim.step}")
    killed_at = time.monotonic()
    try:
        os.kill(victim.pid, signal.SIGKILL)
    except ProcessLookupError:
        raise KillError(f"rank {rank} (pid {victim.pid}) had ended before the kill") from None
    before = max([before, *(page.step for page in job.progress() if page.attempt == victim.attempt)])
    restart_step = _wait_for_recovery(job, victim.attempt, killed_at)
    seconds = time.monotonic() - killed_at
    kill = Kill(victim.pid, rank, victim.attempt, before, restart_step, seconds)
    say(f"all ranks completed a step again {seconds:.3f} s after the kill; {kill.steps_lost} steps lost")
    return kill


def _wait_for_the_moment(job: DemoJob, rank: int, at_step: int) -> Progress:
    events: list[Event] = []
    while (ended := job.end_reason()) is None:
        events += job.events.poll()
        durable = any(isinstance(event, CheckpointCommitted) for event in events)
        pages = job.progress()
        if durable and len(pages) == job.spec.nproc_per_node and min(page.step for page in pages) >= at_step:
            return pages[rank]
        time.sleep(POLL_SECONDS)
    raise KillError(f"the job ended ({ended}) before step {at_step} and a durable checkpoint")


def _wait_for_recovery(job: DemoJob, old_attempt: int, killed_at: float) -> int:
    """Poll until every rank completed a step of a newer attempt; return the step that it started from."""
    while time.monotonic() - killed_at < RECOVERY_LIMIT_SECONDS:
        pages = job.progress()
        if len(pages) == job.spec.nproc_per_node and all(_completed_a_step(page, old_attempt) for page in pages):
            return min(page.start_step for page in pages)
        time.sleep(FAST_POLL_SECONDS)
    ended = job.end_reason()
    if ended is not None:
        raise KillError(f"the job ended ({ended}) after the kill")
    raise KillError(f"training did not go on within {RECOVERY_LIMIT_SECONDS:.0f} s of the kill")


def _completed_a_step(page: Progress, old_attempt: int) -> bool:
    return page.attempt > old_attempt and page.start_step >= 0 and page.step > page.start_step
