"""One job that this worker has: its launcher from start to end, and again where that may be. Main thread only."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog

from surefoot.bus.base import Bus
from surefoot.checkpoint.attempts import RESTART_CAUSE_PREFIX, AttemptLog
from surefoot.checkpoint.locks import holder_pid
from surefoot.checkpoint.staging_folder import staging_folder_path
from surefoot.checkpoint.store import LocalStore
from surefoot.errors import EXIT_OK, EXIT_PREEMPTED, AttemptError
from surefoot.events import JobState, decode_message
from surefoot.spec import JobSpec
from surefoot_worker.handlers import EVENTS
from surefoot_worker.launcher import policy
from surefoot_worker.launcher.failure import signal_name
from surefoot_worker.launcher.records import restart_history
from surefoot_worker.service.attempt_watch import WatchedAttempts, look
from surefoot_worker.service.commands import CommandCourier
from surefoot_worker.service.launcher_process import LauncherProcess
from surefoot_worker.service.lines import LineTail
from surefoot_worker.service.pump import Pump
from surefoot_worker.service.run_state import RunState
from surefoot_worker.service.states import HAS_LAUNCHER, may_follow

_AGAIN_SECONDS = 0.5
_MOST_DEATHS_WITHOUT_ATTEMPT = 3
_MOST_TROUBLES = 3
_LONGEST_TROUBLE_SECONDS = 5.0
_SUPERSEDED_GRACE_SECONDS = 2.0
_READS_PER_TURN = 4
"""256 KiB each: a job that writes faster must not hold up the others."""
_READS_AT_END = 4096
_IS_STEP = b'"type":"StepCompleted"'

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Surroundings:
    """What every job of a worker shares.

    Attributes:
        bus: For commands.
        pump: Carries events and output out.
        command: What a launcher is started with.
    """

    bus: Bus
    pump: Pump
    command: Sequence[str]


class SupervisedJob:
    """A job whose lease this worker holds.

    Args:
        spec: The job, with absolute paths.
        run: How it fares.
        from_seed: Start over although the job has progress, until an attempt of this generation exists.
        attempts: Its attempt records, watched.
        surroundings: See there.
    """

    def __init__(
        self, spec: JobSpec, run: RunState, *, from_seed: bool, attempts: WatchedAttempts, surroundings: Surroundings
    ) -> None:
        self.spec = spec
        self.run = run
        self.attempts = attempts
        self.staging = staging_folder_path(spec.checkpoint.staging_dir, spec.job, spec.storage)
        self.launcher: LauncherProcess | None = None
        self.is_lost = False
        self._from_seed = from_seed
        self._around = surroundings
        self._events = LineTail(spec.events_path)
        self._courier: CommandCourier | None = None
        self._wish: tuple[JobState, str] | None = None
        self._is_forced = False
        self._launch_at: float | None = 0.0
        self._num_deaths = 0
        self._superseded_at: float | None = None
        self._num_troubles = 0
        self._not_before = 0.0
        self._cause = self._take_up()

    @property
    def is_over(self) -> bool:
        """Whether no launcher runs and none will be started."""
        return self.launcher is None and self._launch_at is None

    def is_waiting(self, now: float) -> bool:
        """Tell whether the job is left alone for a while, after an error that nobody expected."""
        return now < self._not_before

    def turn(self, now: float) -> None:
        """Do what is due: take note of events, of the launcher's end, start one.

        An error that nobody expected concerns this job alone. It is logged, and the turn comes again a little later;
        a job without a living launcher has failed after three in succession, one that trains goes on.
        """
        if self.is_waiting(now):
            return
        try:
            self._turn(now)
        except Exception as error:
            log.exception("a job's turn failed", job_id=self.spec.job)
            self._num_troubles += 1
            self._not_before = now + min(_LONGEST_TROUBLE_SECONDS, _AGAIN_SECONDS * 2**self._num_troubles)
            if self.launcher is None and self._launch_at is None:
                self._launch_at = now
            if self._num_troubles >= _MOST_TROUBLES and (self.launcher is None or self.launcher.poll() is not None):
                self._give_up(error)
        else:
            self._num_troubles = 0

    def _give_up(self, error: Exception) -> None:
        self.launcher = self._launch_at = None
        if self._courier is not None:
            self._courier.close()
        if not self.is_lost:
            self.run.go_if_allowed(JobState.FAILED, f"unexpected error of the worker, see its log: {error!r}")
        self._around.pump.end(self.spec.job)

    def _turn(self, now: float) -> None:
        if self.launcher is not None:
            self._take_commands()
            self._observe()
            self._give_way(now)
            self._obey()
            code = self.launcher.poll()
            if code is not None:
                self._ended(code, now)
        if self._launch_at is not None and now >= self._launch_at:
            self._launch(now)

    def ask(self, state: JobState, reason: str) -> None:
        """Ask the launcher to save and stop, once; the job is in `state` when it has."""
        if self._wish is not None:
            return
        self._wish = (state, reason)
        self._launch_at = None
        if self.launcher is None:
            self._settle(state, reason)
            return
        self.run.go_if_allowed(JobState.STOPPING, reason)
        self.launcher.send(signal.SIGTERM)

    def force(self) -> None:
        """Do not wait for storage any longer: what is not saved stays in staging memory."""
        if self.launcher is not None:
            self.launcher.send(signal.SIGKILL if self._is_forced else signal.SIGTERM)
        self._is_forced = True

    def lose(self) -> None:
        """Take note that another worker has the lease: stop, and say nothing more about the job."""
        if not self.is_lost:
            log.error("the lease is lost; the job is stopped here", job_id=self.spec.job)
            self.is_lost = True
            self.ask(JobState.PENDING, "another worker has the job")

    def _take_up(self) -> str:
        """Return the cause of the first start, judged by what an earlier worker left."""
        run = self.run
        before = run.state
        if before in HAS_LAUNCHER and may_follow(before, JobState.RECOVERING):
            run.recovering_from = run.attempt or 0
            run.go(JobState.RECOVERING, "taken over after its worker was lost")
            return f"{RESTART_CAUSE_PREFIX}the worker was lost"
        if before is not JobState.PENDING:
            run.go(JobState.PENDING, "taken up again")
        return "resumed by the worker" if run.started_at else "submitted"

    def _launch(self, now: float) -> None:
        holder = holder_pid(self.staging / "launcher.lock")
        if holder is not None:
            self.run.reason = f"waits for process {holder}, which runs this job already"
            self._launch_at = now + _AGAIN_SECONDS
            return
        self._launch_at = self._courier = None
        self.run.started_at = self.run.started_at or datetime.now(UTC)
        if self.run.state is JobState.PENDING:
            self.run.go(JobState.STARTING, self._cause)
        self._around.pump.begin(self.spec)
        self._events.skip_to_end()
        self.run.end_reason = ""
        try:
            self.launcher = LauncherProcess(
                self.spec, cause=self._cause, from_seed=self._is_from_seed(), command=self._around.command
            )
        except (OSError, AttemptError) as error:
            self._settle(JobState.FAILED, f"no launcher can be started: {error}")
            return
        log.info("launcher started", job_id=self.spec.job, pid=self.launcher.pid, cause=self._cause)
        self._take_commands()

    def _take_commands(self) -> None:
        if self._courier is None:
            self._courier = CommandCourier(self.spec, self.staging, self._around.bus, lambda: self.run.attempt)

    def _is_from_seed(self) -> bool:
        if not self._from_seed:
            return False
        newest = AttemptLog(LocalStore(self.spec.storage / self.spec.job)).newest()
        return newest is None or self.run.started_at is None or newest.started_at < self.run.started_at

    def _observe(self, most_reads: int = _READS_PER_TURN) -> None:
        for _ in range(most_reads):
            lines = self._events.read()
            if not lines:
                return
            steps = [line for line in lines if _IS_STEP in line]
            for line in lines:
                if _IS_STEP not in line or line is steps[-1]:
                    self._handle(line)

    def _handle(self, line: bytes) -> None:
        try:
            message = decode_message(line)
        except ValueError:
            return
        handle = EVENTS.get(type(message)) if message is not None else None
        if handle is not None:
            handle(self.run, message)

    def _obey(self) -> None:
        """Save and stop when recovery has come to the end of its ladder: a person has to look."""
        order = None if self._courier is None else self._courier.stop_order
        if order is not None:
            self.ask(JobState.FAILED, f"stopped by recovery, with everything saved: {order.reason}")

    def _give_way(self, now: float) -> None:
        """End the ranks when another host has claimed a newer attempt and they have not ended by themselves."""
        if self.attempts.other_host is None or self.launcher is None:
            return
        if self._superseded_at is None:
            self._superseded_at = now
        elif now - self._superseded_at >= _SUPERSEDED_GRACE_SECONDS:
            self.launcher.send(signal.SIGKILL)

    def _ended(self, code: int, now: float) -> None:
        assert self.launcher is not None
        self._observe(most_reads=_READS_AT_END)
        with suppress(OSError, AttemptError):  # then the index lacks them until the job runs again
            look(self.attempts)
        explanation = self.launcher.explanation() if code > 0 else ""
        if self._courier is not None:
            self._courier.close()
            if self._courier.stop_order is not None:
                self._courier.acknowledge_stop()
        self.run.exit_code = code
        log.info("launcher ended", job_id=self.spec.job, exit_code=code)
        self._conclude(code, explanation, now)
        self.launcher = None  # last: what failed on the way here comes again

    def _conclude(self, code: int, explanation: str, now: float) -> None:
        """Settle what becomes of the job after its launcher."""
        if code == EXIT_OK:
            self._settle(JobState.SUCCEEDED, self.run.end_reason or "every rank finished")
        elif self._wish is not None and (code == EXIT_PREEMPTED or code < 0 or self._is_forced):
            state, reason = self._wish
            left = "" if code == EXIT_PREEMPTED else f"; the last snapshot may still be in {self.staging}"
            self._settle(state, reason + left)
        elif code == EXIT_PREEMPTED:
            self._settle(JobState.STOPPED, "stopped by a signal to its launcher")
        elif self.attempts.other_host is not None:
            self._settle(JobState.FAILED, f"a newer attempt was started on {self.attempts.other_host}")
        elif code > 0:
            self._settle(JobState.FAILED, self.run.end_reason or explanation)
        else:
            self._start_again(f"the launcher was killed by {signal_name(-code)}", now)

    def _start_again(self, problem: str, now: float) -> None:
        """Start another launcher, from the same budget as any restart of ranks: attempt records are counted."""
        newest = max(self.attempts.records, default=0)
        self._num_deaths = self._num_deaths + 1 if newest <= self.run.recovering_from else 1
        self.run.recovering_from = max(newest, self.run.attempt or 0)
        limits = self.spec.restart
        try:
            log_of_attempts = AttemptLog(LocalStore(self.spec.storage / self.spec.job))
            history = restart_history(log_of_attempts, limits.window_seconds)
        except (OSError, AttemptError) as error:
            self._settle(JobState.FAILED, f"{problem}; the restart budget is not known: {error}")
            return
        verdict = policy.spend(history, now=time.time(), **limits.model_dump())
        if not verdict.restart:
            self._settle(JobState.FAILED, f"{problem}; not restarted: {verdict.reason}")
        elif self._num_deaths > _MOST_DEATHS_WITHOUT_ATTEMPT:
            self._settle(JobState.FAILED, f"{problem}, {self._num_deaths} times before an attempt began")
        else:
            self._cause = f"{RESTART_CAUSE_PREFIX}{problem}"
            self.run.go_if_allowed(JobState.RECOVERING, problem)
            self._launch_at = now + _AGAIN_SECONDS * (self._num_deaths - 1)

    def _settle(self, state: JobState, reason: str) -> None:
        if not self.is_lost:
            self.run.go(state, reason)
        self._around.pump.end(self.spec.job)
