"""All jobs at once: one detector each, and what is still to be said. One thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import structlog

from surefoot.events import AnomalyDetected, AttemptStarted, Event, Message, StepCompleted
from surefoot_detector.detector import Detector
from surefoot_detector.findings import Finding, Place
from surefoot_detector.reports import to_event
from surefoot_detector.rules.signals import Numbers

log = structlog.get_logger(__name__)


class Watch:
    """Follows every job that is heard of, up to a number of them.

    Args:
        publish: Sends events in order, all or none. May raise Unavailable; they are then sent with the next.
        max_jobs: The one silent for longest is forgotten beyond that.
    """

    def __init__(self, publish: Callable[[Sequence[Message]], None], max_jobs: int) -> None:
        self._publish = publish
        self._max_jobs = max_jobs
        self._followed: OrderedDict[str, _Followed] = OrderedDict()
        # A step that came again after an outage finds nothing new: what it found the first time waits here.
        self._unsent: list[Event] = []

    def start_attempt(self, message: AttemptStarted, source: str) -> None:
        """An attempt of a job began."""
        followed = self._of(message.job)
        attempt = message.attempt or 0
        if attempt <= followed.detector.attempt and source != followed.source:
            # Another event file and no later attempt: the job was begun anew under the same name.
            followed = self._followed[message.job] = _Followed()
        followed.source = source
        followed.detector.start_attempt(attempt, message.from_step)

    def step(self, message: StepCompleted, source: str, *, quietly: bool = False) -> None:
        """A step of a job was completed.

        Args:
            message: Its numbers.
            source: Who says so.
            quietly: What it shows was said before; only remember it.
        """
        followed = self._of(message.job)
        followed.source = followed.source or source
        place = Place(message.attempt or 0, message.step, message.position)
        applied = message.applied and not message.nonfinite_ranks
        numbers = Numbers(message.loss, message.grad_norm, message.learning_rate, applied)
        findings = followed.detector.feed(place, numbers)
        if not quietly:
            self._report(message.job, findings)

    def lose(self, source: str, num_lost: int) -> None:
        """Messages of a source were lost. `job:<name>:<file id>` are those that tell of steps."""
        kind, _, rest = source.partition(":")
        job = rest.rpartition(":")[0]
        if kind == "job" and job in self._followed:
            log.warning("steps were lost; nothing is cleared until the loss is known again", job_id=job, lost=num_lost)
            self._followed[job].detector.lose_events()

    def send(self) -> None:
        """Send what was found.

        Raises:
            Unavailable: nothing was sent; call it again.
        """
        if self._unsent:
            self._publish(self._unsent)
            self._unsent = []

    def _of(self, job: str) -> _Followed:
        followed = self._followed.get(job)
        if followed is None:
            followed = self._followed[job] = _Followed()
            if len(self._followed) > self._max_jobs:
                forgotten, _ = self._followed.popitem(last=False)
                log.info("forgotten, to make room", job_id=forgotten)
        self._followed.move_to_end(job)
        return followed

    def _report(self, job: str, findings: list[Finding]) -> None:
        for finding in findings:
            event = to_event(job, finding)
            self._unsent.append(event)
            if isinstance(event, AnomalyDetected):
                log.warning(
                    event.message,
                    job_id=job,
                    attempt=event.attempt,
                    step=event.step,
                    batch_index=event.position,
                    kind=event.kind,
                    severity=event.severity,
                    rule=event.rule,
                )


class _Followed:
    """A job: its detector, and the event file that tells of it."""

    def __init__(self) -> None:
        self.detector = Detector()
        self.source = ""
