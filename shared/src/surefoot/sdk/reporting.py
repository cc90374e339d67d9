"""Getting events out of the training process without ever making it wait."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import structlog

from surefoot.events import Event, EventSink

log = structlog.get_logger(__name__)


class Reporter:
    """A bounded queue and a background thread that hands its events to a sink.

    `report` never blocks. When the queue is full the oldest StepCompleted gives way and is counted; lifecycle
    events are never dropped. A sink that fails is tried again with the next event; its events are counted as
    dropped when they are not lifecycle events.

    Args:
        sink: Where events go; only the background thread calls it.
        capacity: Most events kept in the queue.
        every_second: Called about once a second on the background thread (the watch for a newer attempt).
    """

    def __init__(
        self, sink: EventSink, *, capacity: int = 4096, every_second: Callable[[], None] = lambda: None
    ) -> None:
        self._sink = sink
        self._capacity = capacity
        self._every_second = every_second
        self._queue: deque[Event] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._sending = False
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="surefoot-reporter", daemon=True)
        self._thread.start()

    def report(self, event: Event) -> None:
        """Queue an event. Any thread; returns at once."""
        with self._changed:
            if len(self._queue) >= self._capacity:
                self._drop_one()
            self._queue.append(event)
            self._changed.notify_all()

    def _drop_one(self) -> None:
        for index, event in enumerate(self._queue):
            if not event.lifecycle:
                del self._queue[index]
                self.num_dropped += 1
                return

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything queued so far was handed over; False when the time is up first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._sending, timeout_seconds)

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Hand over what is queued, then end the thread. Further events are refused."""
        self.flush(timeout_seconds)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        next_watch = time.monotonic() + 1.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._closing, timeout=1.0)
                if self._closing and not self._queue:
                    return
                event = self._queue.popleft() if self._queue else None
                self._sending = event is not None
            try:
                if event is not None:
                    self._sink.emit(event)
                    event = None  # handed over: a watch that fails is no reason to send or count it again
                if time.monotonic() >= next_watch:
                    next_watch = time.monotonic() + 1.0
                    self._every_second()
            except Exception:  # a background thread must outlive whatever its sink does
                log.exception("event not delivered", event_type=event.type if event else None)
                self._keep_or_count(event)
            with self._changed:
                self._sending = False
                self._changed.notify_all()

    def _keep_or_count(self, event: Event | None) -> None:
        with self._changed:
            if event is None:
                return
            if self._closing or not event.lifecycle:
                self.num_dropped += 1
                return
            self._queue.appendleft(event)
            # Wait for the next event or a second before trying again, so that a dead sink costs no CPU.
            self._changed.wait(1.0)
