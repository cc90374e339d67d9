"""One thread that carries everything out of all jobs: events and output to the bus, output to the log."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog

from surefoot.bus.base import Bus, Outgoing
from surefoot.bus.publisher import Publisher
from surefoot.bus.streams import logs_stream
from surefoot.checkpoint.staging_folder import staging_folder_path
from surefoot.errors import BusUnavailable
from surefoot.events import Message, RankFailed, RankHung, StepCompleted
from surefoot.spec import JobSpec
from surefoot_worker.service.forwarder import EventForwarder
from surefoot_worker.service.rank_output import RankOutput
from surefoot_worker.service.state_files import Forwarded, read_state, write_state

_TAIL_SECONDS = 0.05
_OUTPUT_SECONDS = 0.2
_IDLE_SECONDS = 0.25
_SAVE_SECONDS = 1.0
_FORWARDS_PER_TURN = 4
_RETRY_SECONDS = 0.5
_MOST_WAITING_LINES = 2000
_FLUSH_SECONDS = 5.0
_TROUBLE_SECONDS = 5.0
"""A job whose turn failed for no known reason is left alone for so long; the others do not wait for it."""

_OWN = ""
"""In place of a job's name: the worker's own messages."""

log = structlog.get_logger(__name__)


class Feed:
    """What one job sends out. Of the pump's thread, `end` and `resume` apart.

    Args:
        spec: The job, with absolute paths.
        bus: Where to.
        lines_per_second: Bound of the output's rate.
    """

    def __init__(self, spec: JobSpec, bus: Bus, lines_per_second: float) -> None:
        self.job = spec.job
        self._bus = bus
        self._state_file = spec.job_run_dir / "forwarded.json"
        self._staging = staging_folder_path(spec.checkpoint.staging_dir, spec.job, spec.storage)
        done = read_state(self._state_file, Forwarded)
        self._step: StepCompleted | None = None
        self._events = EventForwarder(spec.job, spec.events_path, bus, done.events, self._note)
        self._output = RankOutput(spec, self._staging, lines_per_second, done.output)
        self._lines: deque[Outgoing] = deque(maxlen=_MOST_WAITING_LINES)
        self._looked_at = self._saved_at = 0.0
        self._saved: object = None
        self._is_running = True
        self._is_sweep_due = False
        self._is_caught_up = False

    def end(self) -> None:
        """Say that the job's launcher has ended. Any thread."""
        self._is_running, self._is_sweep_due = False, True

    def resume(self) -> None:
        """Say that a new launcher starts. Any thread."""
        self._is_running = True

    @property
    def is_busy(self) -> bool:
        """Whether a launcher is there, or its last words are still to be read."""
        return self._is_running or self._is_sweep_due

    def is_done(self) -> bool:
        """Tell whether nothing more will come: everything is sent, and no drain has anything left to save."""
        return not (self.is_busy or self._lines or self._staging.exists() or self._events.forward())

    @property
    def is_caught_up(self) -> bool:
        """Whether the last turn found nothing more to send."""
        return self._is_caught_up

    def turn(self, now: float) -> None:
        """Send what is new.

        Raises:
            BusUnavailable: it is sent later; of the output the newest 2,000 lines.
            OSError: run_dir cannot be read or written.
        """
        if now - self._looked_at >= _OUTPUT_SECONDS or self._is_sweep_due:
            self._looked_at = now
            last, self._is_sweep_due = self._is_sweep_due, False
            self._collect(now, last=last)
        try:
            if self._lines:
                self._bus.publish(logs_stream(self.job), list(self._lines))
                self._lines.clear()
            for _ in range(_FORWARDS_PER_TURN):
                self._is_caught_up = not self._events.forward()
                if self._is_caught_up:
                    break
        finally:
            self.save(now)

    def _collect(self, now: float, *, last: bool) -> None:
        for line, source, number in self._output.collect(now, last=last):
            log.info(line.text, stream=line.stream, **self._place(line.attempt, line.rank, line.step))
            self._lines.append(Outgoing(line, source, number))

    def _note(self, message: Message) -> None:
        """Keep what log lines tell of the step, and log what ended a rank."""
        if isinstance(message, StepCompleted):
            self._step = message
        elif isinstance(message, RankFailed):
            error = message.traceback or message.error_message or f"exit code {message.exit_code}"
            place = self._place(message.attempt, message.rank, message.step)
            log.error("rank failed", pid=message.pid, exit_code=message.exit_code, error=error, **place)
        elif isinstance(message, RankHung):
            error = f"no progress in phase {message.phase} for {message.seconds:.0f} s; stacks: {message.stack_file}"
            place = self._place(message.attempt, message.rank, message.step)
            log.error("rank hung", pid=message.pid, error=error, **place)

    def _place(self, attempt: int | None, rank: int | None, step: int | None) -> dict[str, Any]:
        """Return where in training a line belongs, as far as known: epoch and batch are those of the last step."""
        place: dict[str, Any] = {"job_id": self.job, "attempt": attempt, "rank": rank, "step": step}
        last = self._step
        if last is not None and last.attempt == attempt and step is not None and abs(last.step - step) <= 1:
            place |= {"epoch": last.epoch, "batch_index": last.position}
        return {key: value for key, value in place.items() if value is not None}

    def save(self, now: float, *, at_once: bool = False) -> None:
        """Remember how far everything is, once a second at most."""
        if not at_once and now - self._saved_at < _SAVE_SECONDS:
            return
        self._saved_at = now
        state = Forwarded(events=self._events.position, output=self._output.position)
        if state != self._saved and self._state_file.parent.exists():
            write_state(self._state_file, state)
            self._saved = state


class Pump:
    """Runs the feeds of all jobs, and sends the worker's own messages, on a thread of its own.

    Args:
        bus: Where to.
        lines_per_second: Bound of each job's output.
    """

    def __init__(self, bus: Bus, lines_per_second: float) -> None:
        self._bus = bus
        self._lines_per_second = lines_per_second
        self._publisher = Publisher(bus, "worker")
        self._own: deque[Message] = deque()
        self._feeds: dict[str, Feed] = {}
        self._guard = threading.Lock()
        self._stop = threading.Event()
        self._problem: str | None = None
        self._not_before: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="pump", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def begin(self, spec: JobSpec) -> None:
        """Carry on what a job sends, before its launcher is started. Any thread."""
        with self._guard:
            feed = self._feeds.get(spec.job)
            if feed is None:
                self._feeds[spec.job] = Feed(spec, self._bus, self._lines_per_second)
            else:
                feed.resume()

    def end(self, job: str) -> None:
        """Say that a job's launcher has ended: what is left is sent, then the job is forgotten. Any thread."""
        with self._guard:
            if job in self._feeds:
                self._feeds[job].end()

    def say(self, message: Message) -> None:
        """Send one of the worker's own messages, as soon as the bus answers. Any thread."""
        self._own.append(message)

    @property
    def problem(self) -> str | None:
        """Why the bus does not answer; None when it does. Any thread."""
        return self._problem

    def close(self) -> None:
        """Send what is left, for 5 seconds at most, and end the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._round()
            delay = _TAIL_SECONDS if any(feed.is_busy for feed in list(self._feeds.values())) else _IDLE_SECONDS
            self._stop.wait(_RETRY_SECONDS if self._problem else delay)
        deadline = time.monotonic() + _FLUSH_SECONDS
        while not (self._round() and self._is_all_sent()) and time.monotonic() < deadline:
            threading.Event().wait(_TAIL_SECONDS)
        for feed in self._feeds.values():
            self._guarded(feed.job, partial(feed.save, 0.0, at_once=True))

    def _round(self) -> bool:
        """Let everybody have a turn; True when the bus answered everybody."""
        now = time.monotonic()
        good = now < self._not_before.get(_OWN, 0.0) or self._guarded(_OWN, self._send_own)
        for feed in list(self._feeds.values()):
            if now >= self._not_before.get(feed.job, 0.0):
                good = self._guarded(feed.job, partial(self._turn, feed, now)) and good
        if good and self._problem is not None:
            log.info("the bus answers again")
            self._problem = None
        return good

    def _is_all_sent(self) -> bool:
        return not self._own and all(feed.is_caught_up for feed in self._feeds.values())

    def _turn(self, feed: Feed, now: float) -> None:
        feed.turn(now)
        if feed.is_done():
            feed.save(now, at_once=True)
            with self._guard:
                if not feed.is_busy:
                    del self._feeds[feed.job]
                    self._not_before.pop(feed.job, None)

    def _send_own(self) -> None:
        while self._own:
            self._publisher.publish(self._own[0])
            self._own.popleft()

    def _guarded(self, job: str, action: Callable[[], None]) -> bool:
        try:
            action()
        except BusUnavailable as error:
            if self._problem is None:
                log.warning("events wait in their files", error=str(error))
            self._problem = str(error)
            return False
        except Exception:
            log.exception("a job's events or output cannot be carried on", job_id=job)
            self._not_before[job] = time.monotonic() + _TROUBLE_SECONDS
        return True

