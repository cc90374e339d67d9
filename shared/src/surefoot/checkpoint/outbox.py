"""Events on their way to a sink that may fail for a while."""

from __future__ import annotations

import logging
from collections import deque

from surefoot.events import Event, EventSink

_MAX_PENDING_EVENTS = 1000

_log = logging.getLogger("surefoot.drain")


class Outbox:
    """A sink that keeps what the sink behind it does not take, the newest 1000. One thread."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._pending: deque[Event] = deque(maxlen=_MAX_PENDING_EVENTS)

    def emit(self, event: Event) -> None:
        """Hand the event over now, or later; never fails."""
        # A buffer must become free even when there is no room for the event, which is only a wake-up.
        self._pending.append(event)
        self.flush()

    def flush(self) -> None:
        """Hand over what is waiting, in order, as far as the sink takes it."""
        while self._pending:
            try:
                self._sink.emit(self._pending[0])
            except OSError as error:
                _log.warning("%d events are waiting: %s", len(self._pending), error)
                return
            self._pending.popleft()
