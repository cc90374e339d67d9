"""What one rank shares with the rest of its host and with the job: pages, events, the drain, the newest attempt."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from surefoot.checkpoint.attempts import AttemptLog, AttemptRecord
from surefoot.checkpoint.drain_start import start_drain
from surefoot.checkpoint.locks import LockedFile, holder_pid
from surefoot.checkpoint.retention import drain_prunes
from surefoot.checkpoint.staging_folder import StagingFolder
from surefoot.checkpoint.store import LocalStore
from surefoot.errors import Superseded, UsageError
from surefoot.events import AttemptStarted, Event, JsonlSink, TimelineMark
from surefoot.progress import Control, ControlPage, Phase, ProgressPage, control_path, progress_path
from surefoot.sdk.collectives import ControlGroup
from surefoot.sdk.reporting import Reporter
from surefoot.sdk.settings import SessionSettings


class Host:
    """This rank's handles; opened by `attach`, closed by the session.

    Args:
        settings: The job's settings.
        group: The ranks.
        folder: The job's staging folder, with the session lock held by this process.

    Raises:
        UsageError: another process on this machine is rank 0 of this job.
    """

    def __init__(self, settings: SessionSettings, group: ControlGroup, folder: StagingFolder) -> None:
        self.settings = settings
        self.group = group
        self.folder = folder
        # As torchrun and our launcher say it; a process of its own is the only one here.
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", group.world_size))
        self._lock = _take_rank_0_lock(folder.path / "rank-0.lock") if group.rank == 0 else None
        self.store = LocalStore(job_folder(settings))
        self.page = ProgressPage.create(progress_path(folder.path, group.rank))
        self.page.write(attempt=0, step=0, start_step=-1, phase=Phase.START)
        # A page without a launcher is a left-over: under plain torchrun nobody asks for anything.
        launched = holder_pid(folder.path / "launcher.lock") is not None
        self._control = ControlPage.open(control_path(folder.path)) if launched else None
        self._attempt = 0
        self._drain_pid = 0
        self._drain_guard = threading.Lock()
        self._superseded_by: AttemptRecord | None = None
        self._attempts = AttemptLog(self.store)  # of the background thread alone
        self._reporter: Reporter | None = None
        if group.rank == 0:
            self._reporter = Reporter(JsonlSink(settings.spec.events_path), every_second=self._watch)

    def report(self, event: Event) -> None:
        """Queue an event; ranks other than 0 stay silent. Never blocks."""
        if self._reporter is not None:
            self._reporter.report(event)

    def flush(self, timeout_seconds: float = 1.0) -> None:
        """Wait a moment until what was reported is in the file. Never on the step path."""
        if self._reporter is not None:
            self._reporter.flush(timeout_seconds)

    @property
    def num_dropped_events(self) -> int:
        """Events given up so far because nobody took them."""
        return 0 if self._reporter is None else self._reporter.num_dropped

    def read_control(self) -> Control:
        """Return what the launcher asks for: a memory read."""
        return Control() if self._control is None else self._control.read()

    def begin_attempt(self, record: AttemptRecord) -> None:
        """Note the attempt that this process trains in, and say so on the progress page.

        Once at the start, and again for each attempt that a command begins in process.
        """
        # The start of a process ends with its first batch: one that ends before has ignored what was loaded.
        phase = Phase.STEP if self._attempt else Phase.START
        self._attempt = record.attempt
        start_step = record.starts_from.step
        self.page.write(attempt=record.attempt, step=start_step, start_step=start_step, phase=phase)

    def _watch(self) -> None:
        """Look after what may go wrong beside training, once a second on the background thread."""
        self.ensure_drain()
        newest = self._attempts.newest()
        if newest is not None and 0 < self._attempt < newest.attempt:
            self._superseded_by = newest

    def check_not_superseded(self) -> None:
        """Stop this attempt when somebody has claimed a newer one (looked for once a second in the background).

        Raises:
            Superseded: names the newer attempt.
        """
        newer = self._superseded_by
        # Compared here, on the thread that claims: the watch may have met the record of our own next attempt before
        # `begin_attempt` said that it is ours.
        if newer is not None and newer.attempt > self._attempt:
            raise Superseded(
                f"attempt {newer.attempt} was started on {newer.host} at {newer.started_at:%Y-%m-%d %H:%M:%S} UTC; "
                f"attempt {self._attempt} ends here so that only one of them trains"
            )

    def report_start(
        self, record: AttemptRecord, total_steps: int | None, marks: tuple[TimelineMark, ...]
    ) -> None:
        """Report the attempt. Rank 0; a process's first one after its first step, with the moments of the start."""
        self.report(
            AttemptStarted(
                job=self.settings.spec.job,
                attempt=record.attempt,
                rank=0,
                world_size=record.world_size,
                from_attempt=record.starts_from.attempt,
                from_step=record.starts_from.step,
                source=record.starts_from.source,
                cause=record.cause,
                lr_factor=record.lr_factor,
                skip_windows=record.skip_windows,
                total_steps=total_steps,
                timeline=marks,
            )
        )

    def ensure_drain(self) -> None:
        """Start the drain when nobody drains this job's staging folder. Does something on local rank 0 only.

        It outlives this process: what is staged becomes durable even when every rank is killed. Where somebody removed
        the folder there is nothing to drain, and a drain would end as soon as it began.
        """
        if self.local_rank != 0 or holder_pid(self.folder.path / "drain.lock") is not None:
            return
        if not self.folder.path.exists():
            return
        with self._drain_guard:
            if _is_child_running(self._drain_pid):
                return  # it has not come to its lock yet
            self._drain_pid = start_drain(self.settings.spec, self.folder.path, prune=drain_prunes(os.environ))

    def close(self) -> None:
        """Hand over the last events and let go of the session lock. Idempotent."""
        if self._reporter is not None:
            self._reporter.close()
        if self._lock is not None:
            self._lock.close()
        self.folder.release_session()


def _take_rank_0_lock(path: Path) -> LockedFile:
    """Be the only rank 0 of the job on this machine: a second start by mistake must not end the first."""
    lock = LockedFile.open(path, create=True)
    owner = lock.try_own()
    if owner is not None:
        raise UsageError("job", f"is already being trained on this machine, by process {owner}")
    return lock


def _is_child_running(pid: int) -> bool:
    try:
        return pid != 0 and os.waitpid(pid, os.WNOHANG) == (0, 0)
    except ChildProcessError:  # ended and taken note of already
        return False


def job_folder(settings: SessionSettings) -> Path:
    """Return the folder of the job's checkpoints and attempts."""
    return settings.spec.storage / settings.spec.job
