"""The launcher's events. Losing one must never cost the job: what a file system refuses is counted, no more."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from surefoot import timeline
from surefoot.events import (
    Event,
    EventSink,
    JobFinished,
    JobState,
    RankFailed,
    RankHung,
    RanksRestarted,
    TimelineMark,
)
from surefoot_worker.launcher.failure import Failure
from surefoot_worker.launcher.stacks import SavedStacks
from surefoot_worker.launcher.starter import StartMethod

log = logging.getLogger("surefoot.launcher")


class Reports:
    """Makes and sends the launcher's events.

    Args:
        job: Name of the job.
        sink: Where they go.
    """

    def __init__(self, job: str, sink: EventSink) -> None:
        self.num_lost = 0
        self._job = job
        self._sink = sink
        self._attempt: int | None = None

    def rank_failed(self, failure: Failure) -> None:
        """Report the rank that failed first. `detected_seconds` is the timeline's `detect`."""
        self._attempt = failure.attempt or self._attempt
        detected = dict(timeline.marks()).get("detect", 0.0)
        self._emit(
            RankFailed(
                job=self._job,
                attempt=self._attempt,
                rank=failure.rank,
                pid=failure.pid,
                exit_code=failure.exit_code,
                step=failure.step,
                error_type=failure.error_type,
                error_message=failure.error_message,
                traceback=failure.report.traceback if failure.report else None,
                detected_seconds=detected,
            )
        )

    def rank_hung(self, failure: Failure, stacks: SavedStacks) -> None:
        """Report the rank that the others waited for. `monotonic_seconds` is when it was detected."""
        hang = failure.hang
        assert hang is not None
        self._attempt = failure.attempt or self._attempt
        self._emit(
            RankHung(
                job=self._job,
                attempt=self._attempt,
                rank=failure.rank,
                monotonic_seconds=dict(timeline.marks()).get("detect", 0.0),
                pid=failure.pid,
                phase=hang.phase,
                step=hang.progress.step,
                seconds=round(hang.seconds, 3),
                limit_seconds=hang.limit_seconds,
                stack_file=None if stacks.problem else str(stacks.path),
                stack_problem=stacks.problem,
            )
        )

    def ranks_started(self, restart: int, pids: Mapping[int, int], method: StartMethod) -> None:
        """Report a new set of ranks; `attempt` is the one that ended, since the next is not claimed yet."""
        self._emit(
            RanksRestarted(
                job=self._job,
                attempt=self._attempt,
                restart=restart,
                world_size=len(pids),
                start_method=method.name,
                start_method_reason=method.reason,
                pids=tuple(pids[rank] for rank in sorted(pids)),
                timeline=tuple(TimelineMark(name=n, monotonic_seconds=s) for n, s in timeline.marks()),
            )
        )

    def job_finished(self, state: JobState, reason: str, restarts: int) -> None:
        """Report the end."""
        self._emit(JobFinished(job=self._job, attempt=self._attempt, state=state, reason=reason, restarts=restarts))

    def _emit(self, event: Event) -> None:
        try:
            self._sink.emit(event)
        except OSError as error:
            self.num_lost += 1
            if self.num_lost == 1:
                log.warning("event %s is lost, and any later one while this lasts: %s", event.type, error)
