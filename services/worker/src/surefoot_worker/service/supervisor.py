"""The worker's loop: which jobs it has by their leases, what becomes of them, and what the catalogue says of it."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import structlog
from sqlalchemy.orm import Session

from surefoot.catalogue.database import Database
from surefoot.checkpoint.attempts import AttemptRecord
from surefoot.checkpoint.locks import holder_pid
from surefoot.errors import BusUnavailable, CatalogueUnavailable, SurefootError, UsageError
from surefoot.events import JobState, JobStateChanged
from surefoot.spec import parse_spec
from surefoot_worker.service import runs
from surefoot_worker.service.attempt_watch import AttemptWatch
from surefoot_worker.service.job import SupervisedJob, Surroundings
from surefoot_worker.service.lease import LeaseWatch
from surefoot_worker.service.run_state import RunState
from surefoot_worker.settings import WorkerSettings

_TURN_SECONDS = 0.5
_POLL_SECONDS = 1.0
_PROGRESS_SECONDS = 2.0
_FORCED_SECONDS = 10.0
_NUM_FORCED = 2
"""A second SIGTERM, on which a launcher gives storage 5 s more, then SIGKILL."""
_DRAIN_SECONDS = 30.0
_TROUBLE_SECONDS = 10.0
"""A job that cannot be taken up for a reason that nobody expected is tried again after this."""
_RESTING = {"STOPPED": JobState.STOPPED, "PAUSED": JobState.PAUSED}

log = structlog.get_logger(__name__)


class StagingLeft(SurefootError):
    """Snapshots could not be written to storage in time; they stay in the folders that the message names."""


class Supervisor:
    """Takes jobs and supervises their launchers. Main thread only.

    Args:
        settings: Of the worker.
        database: The catalogue.
        surroundings: What jobs share.
        attempts: Watches attempt records.
    """

    def __init__(
        self, settings: WorkerSettings, database: Database, surroundings: Surroundings, attempts: AttemptWatch
    ) -> None:
        self._settings = settings
        self._me = settings.lease_name
        self._database = database
        self._around = surroundings
        self._attempts = attempts
        self._jobs: dict[str, SupervisedJob] = {}
        self._leases = LeaseWatch(settings.worker_lease_seconds)
        self._known_attempts: dict[str, set[int]] = {}
        self._saved: dict[str, tuple[object, ...]] = {}
        self._saved_at: dict[str, float] = {}
        self._polled_at = 0.0
        self._staging: set[Path] = set()
        self._not_before: dict[str, float] = {}

    def turn(self) -> None:
        """Wait for an event, half a second at most, and do what is due. Jobs first: they need no database.

        Raises:
            CatalogueUnavailable: jobs go on; what is to be written is kept.
            BusUnavailable: jobs go on; events wait in their files.
        """
        self._supervise(_TURN_SECONDS)
        if time.monotonic() - self._polled_at >= _POLL_SECONDS or any(map(self._is_news, self._jobs.values())):
            self._sync(take=True)
        if self._around.pump.problem is not None:
            raise BusUnavailable(self._around.pump.problem)

    def close(self) -> None:
        """Let all jobs save and stop, so that the next worker resumes them; give the leases back.

        Raises:
            StagingLeft: what is in memory could not be written to storage in time.
        """
        for job in self._jobs.values():
            _guarded(job, partial(job.ask, JobState.PENDING, "stopped with the worker"))
        self._until(lambda: not self._running(), self._settings.worker_stop_seconds)
        for _ in range(_NUM_FORCED):
            for job in self._running():
                _guarded(job, job.force)
            self._until(lambda: not self._running(), min(_FORCED_SECONDS, self._settings.worker_stop_seconds))
        self._try_to_sync()
        drains = [folder / "drain.lock" for folder in self._staging]
        self._until(lambda: all(holder_pid(lock) is None for lock in drains), _DRAIN_SECONDS)
        left = sorted(str(folder) for folder in self._staging if folder.exists())
        if left:
            raise StagingLeft(f"not yet on storage, and kept in memory: {', '.join(left)}; start the worker again")

    def _running(self) -> list[SupervisedJob]:
        return [job for job in self._jobs.values() if job.launcher is not None]

    def _until(self, condition: Callable[[], bool], limit_seconds: float) -> None:
        deadline = time.monotonic() + limit_seconds
        while not condition() and time.monotonic() < deadline:
            self._supervise(0.1)
            if time.monotonic() - self._polled_at >= _POLL_SECONDS:
                self._try_to_sync()

    def _try_to_sync(self) -> None:
        with suppress(CatalogueUnavailable):
            self._sync(take=False)

    def _supervise(self, timeout_seconds: float) -> None:
        now = time.monotonic()
        # Of one that is left alone for a while the launcher may have ended, which would wake us again and again.
        candidates = [job.launcher for job in self._jobs.values() if job.launcher and not job.is_waiting(now)]
        select.select([launcher for launcher in candidates if launcher.fileno() >= 0], [], [], timeout_seconds)
        now = time.monotonic()
        for job in self._jobs.values():
            job.turn(now)

    def _is_news(self, job: SupervisedJob) -> bool:
        saved = self._saved.get(job.spec.job)
        return saved is None or saved[0] is not job.run.state

    def _sync(self, *, take: bool) -> None:
        """Read what is wanted, write how things are."""
        self._polled_at = now = time.monotonic()
        try:
            with self._database.read() as session:
                wanted = {row.job: row for row in runs.unfinished(session)}
            self._leases.polled(now)
            self._obey(wanted)
            self._write(now)
            if take:
                self._take(wanted, now)
        except CatalogueUnavailable:
            self._leases.failed()
            raise

    def _obey(self, wanted: Mapping[str, runs.Wanted]) -> None:
        for name, job in self._jobs.items():
            row = wanted.get(name)
            if row is not None and row.desired_state in _RESTING:
                reason = f"{row.desired_state.lower()} on request"
                _guarded(job, partial(job.ask, _RESTING[row.desired_state], reason))
            elif row is not None and row.worker not in (self._me, None):
                _guarded(job, job.lose)

    def _save_all(
        self, due: Sequence[SupervisedJob], records: Mapping[str, Mapping[int, AttemptRecord]]
    ) -> dict[str, bool]:
        """Write jobs in one transaction, or each in its own where one of them cannot be written.

        Returns:
            By job that was written: whether this worker still has it.
        """
        try:
            with self._database.write() as session:
                return {job.spec.job: self._write_one(session, job, records[job.spec.job]) for job in due}
        except CatalogueUnavailable:
            raise
        except Exception:
            log.exception("a job cannot be written", job_id=", ".join(job.spec.job for job in due))
            if len(due) == 1:
                return {}
        parts = [self._save_all([job], records) for job in due]
        return {name: kept for part in parts for name, kept in part.items()}

    def _write(self, now: float) -> None:
        due = [job for job in self._jobs.values() if self._is_due(job, now)]
        if not due:
            return
        # Once: the watching thread may replace it at any moment.
        records = {job.spec.job: job.attempts.records for job in due}
        kept = self._save_all(due, records)
        for job in [job for job in due if job.spec.job in kept]:
            name = job.spec.job
            self._saved[name], self._saved_at[name] = _values(job.run), now
            self._known_attempts.setdefault(name, set()).update(records[name])
            if not kept[name]:
                _guarded(job, job.lose)
            if job.is_over:
                self._forget(job)

    def _write_one(self, session: Session, job: SupervisedJob, records: Mapping[int, AttemptRecord]) -> bool:
        known = self._known_attempts.get(job.spec.job, set())
        if records.keys() - known:
            runs.index_attempts(session, job.spec.job, records, known)
        return job.is_lost or runs.save(session, job.run, self._me, keep=not self._is_given_back(job))

    def _is_given_back(self, job: SupervisedJob) -> bool:
        """Tell whether anybody may take the job: not while this host's memory holds its newest snapshot."""
        return job.is_over and (job.run.state.is_final or not job.staging.exists())

    def _is_due(self, job: SupervisedJob, now: float) -> bool:
        age_seconds = now - self._saved_at.get(job.spec.job, 0.0)
        news = _values(job.run) != self._saved.get(job.spec.job)
        attempts = job.attempts.records.keys() - self._known_attempts.get(job.spec.job, set())
        renew = age_seconds >= self._settings.worker_lease_seconds / 3
        progress = news and age_seconds >= _PROGRESS_SECONDS
        return job.is_over or self._is_news(job) or bool(attempts) or renew or progress

    def _forget(self, job: SupervisedJob) -> None:
        name = job.spec.job
        self._attempts.remove(name)
        for kept in (self._jobs, self._known_attempts, self._saved, self._saved_at):
            kept.pop(name, None)

    def _take(self, wanted: Mapping[str, runs.Wanted], now: float) -> None:
        for row in wanted.values():
            if row.job in self._jobs or not self._may_take(row, now) or now < self._not_before.get(row.job, 0.0):
                continue
            try:
                self._take_or_settle(row)
            except CatalogueUnavailable:
                raise
            except Exception:  # the other jobs have no part in it
                log.exception("a job cannot be taken up", job_id=row.job)
                self._not_before[row.job] = now + _TROUBLE_SECONDS

    def _take_or_settle(self, row: runs.Wanted) -> None:
        if row.desired_state in _RESTING:
            if row.is_new or row.state is not _RESTING[row.desired_state]:
                self._settle(row, _RESTING[row.desired_state])
        elif len(self._jobs) < self._settings.worker_max_jobs:
            self._take_one(row)

    def _may_take(self, row: runs.Wanted, now: float) -> bool:
        if row.worker in (None, self._me):
            return True
        return self._leases.is_expired(row.job, row.worker, row.lease_version, now)

    def _take_one(self, row: runs.Wanted) -> None:
        with self._database.write() as session:
            taken = runs.take(session, row, self._me)
        if taken is None:
            return
        taken.run.on_change = self._say
        try:
            job = self._supervised(taken)
        except UsageError as error:
            self._finish(taken.run, JobState.FAILED, f"the spec cannot be used: {error}")
            return
        except Exception as error:  # the other jobs of this worker have no part in it
            log.exception("a job cannot be taken up", job_id=row.job)
            self._attempts.remove(row.job)
            self._finish(taken.run, JobState.FAILED, f"unexpected error of the worker, see its log: {error!r}")
            return
        self._staging.add(job.staging)
        self._jobs[row.job] = job
        job.turn(time.monotonic())

    def _supervised(self, taken: runs.Taken) -> SupervisedJob:
        spec = parse_spec(taken.spec).absolute()
        log.info("job taken", job_id=spec.job, state=taken.run.state)
        attempts = self._attempts.add(spec)
        return SupervisedJob(
            spec, taken.run, from_seed=taken.from_seed, attempts=attempts, surroundings=self._around
        )

    def _settle(self, row: runs.Wanted, state: JobState) -> None:
        """Put a job that does not run here into the state that is wanted of it."""
        with self._database.write() as session:
            taken = runs.take(session, row, self._me)
        if taken is not None:
            taken.run.on_change = self._say
            self._finish(taken.run, state, f"{state.lower()} before it was started")

    def _finish(self, run: RunState, state: JobState, reason: str) -> None:
        run.go(state, reason)
        with self._database.write() as session:
            runs.save(session, run, self._me, keep=False)

    def _say(self, run: RunState) -> None:
        log.info("job state", job_id=run.job, state=run.state, reason=run.reason)
        self._around.pump.say(
            JobStateChanged(job=run.job, attempt=run.attempt, state=run.state, reason=run.reason)
        )


def _guarded(job: SupervisedJob, action: Callable[[], None]) -> None:
    """Do something with one job; what goes wrong is no reason to leave the others alone."""
    try:
        action()
    except Exception:
        log.exception("an order to a job failed", job_id=job.spec.job)


def _values(run: RunState) -> tuple[object, ...]:
    return (run.state, run.reason, run.attempt, run.step, run.total_steps, run.world_size)
