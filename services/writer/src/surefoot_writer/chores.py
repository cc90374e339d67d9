"""What the writer does beside messages, in a thread of its own: storage may take its time, the bus may not wait for it.

Everything here starts from what is so (files, rows, what was cleared) and not from what was said, so it can be cut off
anywhere and is taken up by the next round.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

from surefoot.checkpoint.ids import CheckpointId
from surefoot.errors import AttemptError, Unavailable
from surefoot.spec import JobSpec
from surefoot_writer.cleared import ClearedSteps
from surefoot_writer.drains import Drains
from surefoot_writer.index import CheckpointIndex, CheckpointState, without_row
from surefoot_writer.jobs import KnownJobs, store_of
from surefoot_writer.promotion import Promoter
from surefoot_writer.survey import facts, survey

ROUND_SECONDS = 1.0
STUCK_SECONDS = 60.0
"""Storage that has not answered for so long is reported as an outage."""

log = structlog.get_logger(__name__)


class Verifications:
    """Orders verifications, again when one was lost. Any thread.

    Args:
        send: Puts one into the queue; raises BusUnavailable.
        resend_seconds: One that has not ended for so long is ordered again.
        monotonic: CLOCK_MONOTONIC in seconds.
    """

    def __init__(
        self,
        send: Callable[[str, CheckpointId], None],
        resend_seconds: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._resend_seconds = resend_seconds
        self._monotonic = monotonic
        self._sent: dict[tuple[str, CheckpointId], float] = {}
        self._lock = threading.Lock()

    def order(self, job: str, checkpoint: CheckpointId) -> None:
        """Order one, unless that was done a while ago."""
        with self._lock:
            now = self._monotonic()
            if now - self._sent.get((job, checkpoint), -self._resend_seconds) >= self._resend_seconds:
                self._send(job, checkpoint)
                self._sent[job, checkpoint] = now

    def forget(self, job: str, checkpoint: CheckpointId) -> None:
        """Take it as over: it has ended, or there is a new one to verify."""
        with self._lock:
            self._sent.pop((job, checkpoint), None)


class Chores:
    """One thread that keeps storage, rows and drains in step.

    Args:
        jobs: The jobs.
        index: The rows.
        cleared: What the detector said.
        promoter: Promotes.
        drains: Of this machine.
        verifications: Where to order them.
        rescan_seconds: How often storage is compared with the rows.
        monotonic: CLOCK_MONOTONIC in seconds.
    """

    def __init__(
        self,
        *,
        jobs: KnownJobs,
        index: CheckpointIndex,
        cleared: ClearedSteps,
        promoter: Promoter,
        drains: Drains,
        verifications: Verifications,
        rescan_seconds: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._jobs, self._index, self._cleared = jobs, index, cleared
        self._promoter, self._drains, self._verifications = promoter, drains, verifications
        self._rescan_seconds = rescan_seconds
        self._monotonic = monotonic
        self._next_rescan = 0.0
        self._reported: dict[tuple[str, CheckpointId], float] = {}
        self._problems: dict[str, str] = {}
        self._beaten = monotonic()
        self._wake = threading.Event()

    def run(self, stopping: threading.Event) -> None:
        """Run rounds until `stopping` is set; see `wake`."""
        while not stopping.is_set():
            self._beaten = self._monotonic()
            try:
                self.round()
            except Unavailable as error:
                self._tell("", str(error))
            except Exception:
                log.exception("a round of chores failed")
            else:
                self._tell("", None)
            self._wake.wait(ROUND_SECONDS)
            self._wake.clear()

    def wake(self) -> None:
        """Have the next round now. Any thread."""
        self._wake.set()

    def rescan_soon(self) -> None:
        """Have the next round now, and compare storage with the rows in it. Any thread."""
        self._next_rescan = 0.0
        self._wake.set()

    def beat(self) -> None:
        """Say that a long piece of work goes on."""
        self._beaten = self._monotonic()

    def check(self) -> None:
        """Return while the thread is well.

        Raises:
            Unavailable: it has been stuck for a minute, which only storage can bring about.
        """
        if self._monotonic() - self._beaten > STUCK_SECONDS:
            raise Unavailable(f"storage has not answered for {STUCK_SECONDS:.0f} s")

    def round(self) -> None:
        """Start missing drains, promote what is due and, now and then, compare storage with the rows."""
        # First, and also while the database is away: what is in memory shall become durable.
        self._drains.ensure(self._jobs.specs().values())
        specs = self._jobs.refresh()
        rescans = self._monotonic() >= self._next_rescan
        if rescans:  # before it: who asks for one meanwhile gets another
            self._next_rescan = self._monotonic() + self._rescan_seconds
        for job, spec in specs.items():
            self.beat()
            try:
                if rescans:
                    self._rescan(spec)
                self._promote(spec)
            except (OSError, AttemptError) as error:  # one job's storage; the others may be well
                self._tell(job, str(error))
            else:
                self._tell(job, None)

    def _rescan(self, spec: JobSpec) -> None:
        store = store_of(spec)
        found = survey(store)
        if found is None:
            return
        rows = self._index.rows(spec.job)
        self._index.reconcile(spec, found, {id_: facts(store, id_) for id_ in without_row(rows, found)})
        rows = self._index.rows(spec.job)
        for id_, row in rows.items():
            if row.state != CheckpointState.COMMITTED:
                continue
            if row.verified_at is None and row.verify_problem is None:
                self._verifications.order(spec.job, id_)
            elif row.verified_at is not None and row.verify_problem is not None:
                self.report_damage(spec, id_, row.verify_problem)
            if found.stable_by_committed.get(id_) and not row.stable and row.verify_problem is None:
                self._promoter.finish(spec.job, store, id_)

    def _promote(self, spec: JobSpec) -> None:
        cleared = self._cleared.newest(spec.job)
        if cleared is None:
            return
        waiting = [
            id_
            for id_, row in self._index.rows(spec.job).items()
            if row.state == CheckpointState.COMMITTED and not row.stable and row.verify_problem is None
        ]
        self._promoter.promote_due(
            spec.job,
            store_of(spec),
            waiting,
            cleared=cleared,
            probation_steps=spec.policy.probation_steps,
            on_piece=self.beat,
        )

    def report_damage(self, spec: JobSpec, checkpoint: CheckpointId, problem: str) -> None:
        """Have a damaged checkpoint quarantined; at most once a rescan."""
        now = self._monotonic()
        if now - self._reported.get((spec.job, checkpoint), -self._rescan_seconds) >= self._rescan_seconds:
            self._reported[spec.job, checkpoint] = now
            self._drains.report_damage(spec, checkpoint, problem)

    def _tell(self, job: str, problem: str | None) -> None:
        """Log a problem when it begins or changes, and when it is over."""
        before = self._problems.pop(job, None)
        if problem is not None:
            self._problems[job] = problem
        if problem != before:
            if problem is None:
                log.info("chores go on", job_id=job or None)
            else:
                log.warning("chores wait", job_id=job or None, error=problem)
