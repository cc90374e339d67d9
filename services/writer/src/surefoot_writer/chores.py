"""What the writer does beside messages, in a thread of its own: storage may take its time, the bus may not wait for it.

Everything here starts from what is so (files, rows, what was cleared) and not from what was said, so it can be cut off
anywhere and is taken up by the next round.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

from surefoot.catalogue.models import CheckpointState
from surefoot.checkpoint.ids import CheckpointId
from surefoot.errors import AttemptError, Unavailable
from surefoot.spec import JobSpec
from surefoot_writer.cleared import ClearedSteps
from surefoot_writer.drains import Drains
from surefoot_writer.index import CheckpointIndex, without_row
from surefoot_writer.jobs import KnownJobs, store_of
from surefoot_writer.orders import Orders
from surefoot_writer.promotion import Promoter
from surefoot_writer.retaining import Retainer
from surefoot_writer.survey import facts, survey

ROUND_SECONDS = 1.0
STUCK_SECONDS = 60.0
"""Storage that has not answered for so long is reported as an outage."""

log = structlog.get_logger(__name__)


class Chores:
    """One thread that keeps storage, rows and drains in step.

    Args:
        jobs: The jobs.
        index: The rows.
        cleared: What the detector said.
        promoter: Promotes.
        retainer: Decides what goes.
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
        retainer: Retainer,
        drains: Drains,
        verifications: Orders,
        rescan_seconds: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._jobs, self._index, self._cleared = jobs, index, cleared
        self._promoter, self._retainer = promoter, retainer
        self._drains, self._verifications = drains, verifications
        self._rescan_seconds = rescan_seconds
        self._monotonic = monotonic
        self._next_rescan = 0.0
        self._to_retain: set[str] = set()
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

    def retain_soon(self, job: str) -> None:
        """Have the next round now, and decide in it which checkpoints of the job go. Any thread."""
        self._to_retain.add(job)
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
        """Start missing drains, promote what is due, decide what goes and, now and then, compare storage with rows."""
        # First, and also while the database is away: what is in memory shall become durable.
        self._drains.ensure(self._jobs.specs().values())
        specs = self._jobs.refresh()
        rescans = self._monotonic() >= self._next_rescan
        if rescans:  # before it: who asks for one meanwhile gets another
            self._next_rescan = self._monotonic() + self._rescan_seconds
        for job, spec in specs.items():
            self.beat()
            try:
                has_trash = self._rescan(spec) if rescans else False
                has_promoted = self._promote(spec)
                if rescans or has_promoted or job in self._to_retain:
                    self._to_retain.discard(job)  # before it: who asks for it meanwhile gets another
                    self._retainer.retain(spec, store_of(spec), has_trash=has_trash)
            except (OSError, AttemptError) as error:  # one job's storage; the others may be well
                self._tell(job, str(error))
            else:
                self._tell(job, None)

    def _rescan(self, spec: JobSpec) -> bool:
        """Make the rows what storage says; return whether a removal was cut off there."""
        store = store_of(spec)
        found = survey(store)
        if found is None:
            return False
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
            if id_ in found.committed and found.committed[id_].stable and not row.stable and row.verify_problem is None:
                self._promoter.finish(spec.job, store, id_)
        return found.has_trash

    def _promote(self, spec: JobSpec) -> bool:
        """Promote what is due; return whether anything was."""
        cleared = self._cleared.newest(spec.job)
        if cleared is None:
            return False
        waiting = [
            id_
            for id_, row in self._index.rows(spec.job).items()
            if row.state == CheckpointState.COMMITTED
            and not row.stable
            and row.verify_problem is None
            and row.nonfinite_tensor is None
        ]
        promoted = self._promoter.promote_due(
            spec.job,
            store_of(spec),
            waiting,
            cleared=cleared,
            probation_steps=spec.policy.probation_steps,
            on_piece=self.beat,
        )
        return bool(promoted)

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
