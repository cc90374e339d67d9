"""How a job ends, and the launcher's last act: the drain makes everything durable and takes the memory away."""

from __future__ import annotations

import logging
import os
import select
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from surefoot.checkpoint.drain_start import drain_log, start_drain
from surefoot.checkpoint.locks import holder_pid
from surefoot.checkpoint.retention import drain_prunes
from surefoot.checkpoint.staging_folder import StagingFolder
from surefoot.errors import EXIT_FAILED
from surefoot.events import JobState
from surefoot.spec import JobSpec
from surefoot_worker.launcher.signals import STOP_SIGNALS, SignalInbox

log = logging.getLogger("surefoot.launcher")

_LONG_WAIT_SECONDS = 5.0
_KILLED_WAIT_SECONDS = 5.0


class JobEnded(Exception):
    """The job is over, and not because every rank finished.

    Args:
        state: How it ended.
        reason: Why, for a person.
        exit_code: Of the launcher.
    """

    def __init__(self, state: JobState, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.state = state
        self.reason = reason
        self.exit_code = exit_code


@dataclass(frozen=True)
class Ending:
    """How the job ended.

    Args:
        state: For the event.
        reason: Why, for a person; a traceback may follow the first line.
        exit_code: Of the launcher.
        num_restarts: How often ranks were started again.
        num_stop_signals: How many signals to stop have been taken.
    """

    state: JobState
    reason: str
    exit_code: int
    num_restarts: int
    num_stop_signals: int

    def without_last_snapshot(self, folder: Path) -> Ending:
        """Return what it is when the last snapshot stays in the staging folder: a failure, whatever it was."""
        first, line_end, rest = self.reason.partition("\n")
        reason = f"{first}; the last snapshot is not durable, it stays in {folder}{line_end}{rest}"
        if self.state is JobState.FAILED:
            return replace(self, reason=reason)
        return replace(self, state=JobState.FAILED, reason=reason, exit_code=EXIT_FAILED)


class Patience:
    """How long to wait for storage: as long as it takes, and no more than seconds after a second signal to stop.

    Args:
        inbox: Signals to this process.
        num_stop_signals: How many have been taken from it before.
    """

    def __init__(self, inbox: SignalInbox, num_stop_signals: int) -> None:
        self._inbox = inbox
        self._num_stop_signals = num_stop_signals
        self._deadline: float | None = None
        self._warn_at: float | None = time.monotonic() + _LONG_WAIT_SECONDS
        self._heed([])

    def wait(self, fd: int) -> bool:
        """Wait for a descriptor to be readable; False when patience has come to its end before."""
        while True:
            moments = [moment for moment in (self._deadline, self._warn_at) if moment is not None]
            timeout = max(0.0, min(moments) - time.monotonic()) if moments else None
            if fd in select.select([fd, self._inbox.fileno()], [], [], timeout)[0]:
                return True
            if not self._heed(self._inbox.take()):
                return False

    def _heed(self, signals: list[int]) -> bool:
        now = time.monotonic()
        self._num_stop_signals += sum(number in STOP_SIGNALS for number in signals)
        if self._num_stop_signals >= 2 and self._deadline is None:
            self._deadline = now + _KILLED_WAIT_SECONDS
        if self._warn_at is not None and now >= self._warn_at:
            self._warn_at = None
            log.warning("waiting for the last snapshot to become durable; a second signal leaves it in memory")
        return self._num_stop_signals <= 2 and (self._deadline is None or now < self._deadline)


def let_go(folder: StagingFolder, spec: JobSpec, patience: Patience) -> bool:
    """Give the session back and wait until the staging folder is gone. All ranks must have ended.

    What the ranks staged and did not save becomes durable first, also after a failed job. While storage fails the
    drain tries again, and this waits.

    Returns:
        Whether everything is durable. Otherwise it stays in memory, for the drain and for the job's next start.
    """
    if not folder.path.exists():
        return True
    empty = not folder.buffers()
    folder.release_session()
    if empty:
        # No rank ever came to a snapshot, so no drain need be bothered.
        if folder.try_take_session():
            folder.remove()
            folder.release_session()
        return True
    folder.announce_end()
    return _wait_for_drain(folder, spec, patience)


def _wait_for_drain(folder: StagingFolder, spec: JobSpec, patience: Patience) -> bool:
    started = 0
    while folder.path.exists():
        pid = holder_pid(folder.path / "drain.lock")
        if pid is None:
            if started == 2:
                log.error("the drain ended and left %s as it is; see %s", folder.path, drain_log(spec))
                return False
            started += 1
            pid = _start_drain(folder, spec)
        if pid is None or not _wait_for_end(pid, patience):
            log.warning("the last snapshot stays in %s", folder.path)
            return False
    return True


def _start_drain(folder: StagingFolder, spec: JobSpec) -> int | None:
    for path in (drain_log(spec), Path(os.devnull)):
        try:
            return start_drain(spec, folder.path, prune=drain_prunes(os.environ), log=path)
        except OSError as error:  # with the first path most likely the log's fault
            log.warning("cannot start the drain with its log at %s: %s", path, error)
    return None


def _wait_for_end(pid: int, patience: Patience) -> bool:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ended = patience.wait(process)
    finally:
        os.close(process)
    if ended:
        with suppress(ChildProcessError):  # started by a rank
            os.waitpid(pid, os.WNOHANG)
    return ended
