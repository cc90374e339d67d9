"""Torch's elastic agent with our own processes: a failure is seen at once, answered with SIGKILL, and judged.

`SimpleElasticAgent` is torch's base for agents; its run loop calls the four methods that are overridden here.
`LocalElasticAgent` is not used: it ends ranks with SIGTERM and up to 30 s of waiting, installs signal handlers,
polls, deletes log folders, and hands every return value through semaphores.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event as TorchEvent
from torch.distributed.elastic.events.api import EventSource

from surefoot import timeline
from surefoot.checkpoint.attempts import RESTART_CAUSE_PREFIX
from surefoot.errors import EXIT_FAILED, EXIT_PREEMPTED, EXIT_USAGE
from surefoot.events import JobState
from surefoot.progress import Phase, Progress
from surefoot_worker.launcher import failure as failures
from surefoot_worker.launcher import policy, sweep
from surefoot_worker.launcher.ending import JobEnded
from surefoot_worker.launcher.failure import Failure, RankExit
from surefoot_worker.launcher.hang import Hang, HangWatch
from surefoot_worker.launcher.pages import Pages
from surefoot_worker.launcher.ranks import RankProcesses, StartFailed
from surefoot_worker.launcher.reporting import Reports
from surefoot_worker.launcher.signals import SAVE_SIGNAL, STOP_SIGNALS, SignalInbox
from surefoot_worker.launcher.stacks import SavedStacks, save_stacks
from surefoot_worker.launcher.starter import RankStarter

UNLIMITED_RESTARTS = 2**31 - 1
"""For torch, which names nothing by the count any more; the budget is `policy`'s."""
_ECHO_SECONDS = 0.02
_LOOK_FOR_NODES_SECONDS = 1.0
_START_AGAIN_SECONDS = 0.025
_START_AGAIN_MAX_SECONDS = 2.0

log = logging.getLogger("surefoot.launcher")


class Agent(SimpleElasticAgent):
    """Runs the ranks of this node until they finish or may not be started again. Main thread only.

    Args:
        worker_spec: For torch: world size, rendezvous.
        starter: Makes processes.
        pages: What ranks say and are told through memory.
        inbox: Signals to this process.
        reports: Where events go.
        limits: `max_restarts` and `window_seconds` for the policy.
        cause: Why the ranks are started the first time.
        watch: Judges silence.
        logs: Folder for the stacks of ranks that hang.
        history: Restarts of earlier launchers in the window.
        from_seed: Asked at each start: are the ranks still to be told to start over?
    """

    def __init__(
        self,
        worker_spec: WorkerSpec,
        *,
        starter: RankStarter,
        pages: Pages,
        inbox: SignalInbox,
        reports: Reports,
        limits: dict[str, Any],
        cause: str,
        watch: HangWatch,
        logs: Path,
        history: policy.History,
        from_seed: Callable[[], bool],
    ) -> None:
        super().__init__(worker_spec)
        self.num_restarts = 0
        self.num_stop_signals = 0
        self._starter = starter
        self._pages = pages
        self._inbox = inbox
        self._reports = reports
        self._limits = limits
        self._watch = watch
        self._logs = logs
        self._stacks: SavedStacks | None = None
        self._history = history
        self._from_seed = from_seed
        self._ranks: RankProcesses | None = None
        self._cause = cause
        self._unreported: Failure | None = None
        self._start_problem: str | None = None
        self._num_failed_starts = 0
        self._ranks_dead_ticks = 0

    @property
    def stopping(self) -> bool:
        """Whether somebody asked for the end."""
        return self.num_stop_signals > 0

    def last_progress(self) -> dict[int, Progress | None]:
        """Return where each rank of the last start was when it ended; None for one that never attached."""
        return self._pages.progress(self._running().pids())

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks that the rendezvous gave us; torch calls it for the first and every later set.

        A start that fails is judged in `_monitor_workers`: the next one needs a new rendezvous as well.
        """
        timeline.mark("rendezvous")
        self._answer_requests()
        self._ranks = None
        try:
            self._ranks = self._starter.start(
                worker_group,
                restart=self.num_restarts,
                cause=self._cause,
                from_seed=self._from_seed(),
                give_up=self._inbox.is_stop_pending,
            )
        except StartFailed as error:
            self._start_problem = str(error)
            return {}
        self._num_failed_starts = 0
        self._watch.ranks_started()
        timeline.mark("forked")
        # Written only now: a slow disk under the event file must not hold up the ranks.
        self._report_failure()
        pids = self._ranks.pids()
        self._reports.ranks_started(self.num_restarts, pids, self._starter.method)
        self._sweep(pids)
        return {worker.local_rank: pids[worker.global_rank] for worker in worker_group.workers}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Wait until something happens and say what; torch starts the ranks again when it is FAILED.

        Raises:
            JobEnded: they may not be started again, or somebody asked for the end.
        """
        del worker_group
        if self._start_problem is not None:
            self._after_failed_start(self._start_problem)
            self._start_problem = None
            return RunResult(state=WorkerState.FAILED)
        ranks = self._running()
        ranks.wait([self._inbox.fileno()], _LOOK_FOR_NODES_SECONDS)
        codes = ranks.exit_codes()
        if any(codes.values()):
            timeline.reset()
            timeline.mark("detect")
            self._after_failure(self._first_failure(codes))
            return RunResult(state=WorkerState.FAILED)
        if len(codes) == len(ranks.pids()):
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(codes))
        self._answer_requests()
        hang = self._watch.look(self._pages.progress(ranks.pids()), codes, time.monotonic())
        if hang is not None:
            self._after_hang(hang)
            return RunResult(state=WorkerState.FAILED)
        return RunResult(state=WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """End the ranks; torch calls it before each new start, when a failure has already ended them."""
        del worker_group
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = 30) -> None:
        """End the ranks with SIGKILL whatever `death_sig` is: a rank busy in C would not see another signal."""
        del death_sig, timeout
        if self._ranks is not None:
            self._ranks.kill()

    def _construct_event(self, state: str, source: EventSource, *args: Any, **kwargs: Any) -> TorchEvent:
        """Make torch's own events cheap: nobody reads them, and each would resolve the host's name."""
        del args, kwargs
        return TorchEvent(state, source=source)

    def _running(self) -> RankProcesses:
        assert self._ranks is not None, "torch's loop monitors only what it has started"
        return self._ranks

    def _first_failure(self, codes: dict[int, int]) -> Failure:
        """Find out who failed first, and kill the others."""
        ranks = self._running()
        if all(code >= 0 for code in codes.values()):
            # An exception may be the echo of a death whose notice is still on its way.
            ranks.wait([], _ECHO_SECONDS)
            codes = ranks.exit_codes()
        pids = ranks.pids()
        ranks.kill()
        timeline.mark("killed")
        self._ranks_dead_ticks = sweep.now_ticks()
        # Reports of the ranks killed just now count too: a rank whose exit took long may have failed before the others.
        reports = {rank: failures.read_report(self._starter.failure_path(rank)) for rank in pids}
        exits = [RankExit(rank, code, reports[rank]) for rank, code in codes.items() if code]
        exits += [RankExit(r, report.exit_code, report) for r, report in reports.items() if report and r not in codes]
        first = failures.first_of(exits)
        first = self._left_early(first, codes, pids) or first
        attempt, step = self._pages.attempt_and_step(first.rank, pids)
        return Failure(first.rank, pids[first.rank], first.exit_code, attempt, step, first.report)

    def _left_early(self, echo: RankExit, codes: dict[int, int], pids: dict[int, int]) -> RankExit | None:
        """Return the rank that ended with status 0 without closing its session, where the other's failure shows it."""
        report = failures.left_early(echo.report) if echo.exit_code >= 0 and echo.report else None
        for rank, page in self._pages.progress(pids).items():
            if report and codes.get(rank) == 0 and page is not None and page.phase < Phase.CLOSE:
                return RankExit(rank, 0, report)
        return None

    def _after_hang(self, hang: Hang) -> None:
        """Save the stacks of all ranks, kill them, and judge the hang as any failure."""
        timeline.reset()
        timeline.mark("detect")
        ranks = self._running()
        pids = ranks.pids()
        failure = Failure(
            hang.rank, pids[hang.rank], -signal.SIGKILL, *self._pages.attempt_and_step(hang.rank, pids), hang=hang
        )
        log.error("%s; saving the stacks of all ranks", failure.summary())
        running = {rank: pid for rank, pid in pids.items() if rank not in ranks.exit_codes()}
        self._stacks = save_stacks(running, self._logs, failure.summary())
        timeline.mark("stacks_saved")
        ranks.kill()
        timeline.mark("killed")
        self._ranks_dead_ticks = sweep.now_ticks()
        self._after_failure(failure)

    def _after_failure(self, failure: Failure) -> None:
        self._unreported = failure
        self._cause = f"{RESTART_CAUSE_PREFIX}{failure.summary()}"
        verdict = policy.decide(failure, self._history, now=time.time(), **self._limits)
        self._history = verdict.history
        if not verdict.restart:
            self._report_failure()
            self._give_up(failure, verdict.reason)
        if self.stopping and not self._pages.any_attached(self._running().pids()):
            self._report_failure()
            raise JobEnded(JobState.STOPPED, f"stopped on request; {failure.summary()}", EXIT_PREEMPTED)
        self.num_restarts += 1
        log.warning("%s; starting the ranks again (restart %d)", failure.summary(), self.num_restarts)

    def _after_failed_start(self, problem: str) -> None:
        self._cause = f"{RESTART_CAUSE_PREFIX}the ranks could not be started: {problem}"
        self._ranks_dead_ticks = self._ranks_dead_ticks or sweep.now_ticks()
        verdict = policy.spend(self._history, now=time.time(), **self._limits)
        self._history = verdict.history
        try:
            self._answer_requests()  # nobody is there, so a wish to stop is fulfilled at once
            if self.stopping:
                raise JobEnded(JobState.STOPPED, f"stopped on request; {problem}", EXIT_PREEMPTED)
            if not verdict.restart:
                reason = f"the ranks could not be started: {problem}; not tried again: {verdict.reason}"
                raise JobEnded(JobState.FAILED, reason, EXIT_FAILED)
        except JobEnded:
            self._report_failure()
            raise
        self.num_restarts += 1
        self._num_failed_starts += 1
        log.warning("the ranks could not be started: %s; trying again (restart %d)", problem, self.num_restarts)
        if self._num_failed_starts > 1:  # the first may well have been an accident
            self._inbox.wait(min(_START_AGAIN_SECONDS * 2**self._num_failed_starts, _START_AGAIN_MAX_SECONDS))

    def _report_failure(self) -> None:
        if self._unreported is not None:
            if self._unreported.hang is not None and self._stacks is not None:
                self._reports.rank_hung(self._unreported, self._stacks)
            else:
                self._reports.rank_failed(self._unreported)
            self._unreported = None

    def _sweep(self, pids: dict[int, int]) -> None:
        """End what earlier ranks left behind. After the fork: looking at every process of the host takes a while."""
        if not self.num_restarts:
            return  # `launch` has swept before the first start
        keep = {*pids.values(), *self._starter.helper_pids()}
        for pid in sweep.kill_older(self._starter.job_key, than_ticks=self._ranks_dead_ticks, keep=keep):
            log.warning("killed process %d, left over from earlier ranks", pid)

    def _give_up(self, failure: Failure, why: str) -> NoReturn:
        reason = f"{failure.summary()}; not restarted: {why}"
        if failure.report is not None and failure.report.traceback:
            reason = f"{reason}\n{failure.report.traceback.rstrip()}"
        raise JobEnded(JobState.FAILED, reason, EXIT_USAGE if failure.exit_code == EXIT_USAGE else EXIT_FAILED)

    def _answer_requests(self) -> None:
        for number in self._inbox.take():
            if number == SAVE_SIGNAL:
                log.info("SIGUSR1: asking the ranks to save")
                self._pages.request_save()
            elif number in STOP_SIGNALS:
                self._stop(signal.Signals(number).name)

    def _stop(self, name: str) -> None:
        self.num_stop_signals += 1
        if self.num_stop_signals > 1:
            raise JobEnded(JobState.FAILED, f"killed: second {name} while stopping", EXIT_FAILED)
        log.info("%s: asking the ranks to save and stop", name)
        self._pages.request_stop()
        if self._ranks is None or not self._pages.any_attached(self._ranks.pids()):
            # Nobody is there who could read the request or has anything to save.
            raise JobEnded(JobState.STOPPED, f"stopped on request ({name})", EXIT_PREEMPTED)
