"""State after a restart: what the group had done before is read again from the stream, without saying anything."""

from __future__ import annotations

from surefoot.bus.base import Bus, Delivery, GroupReader
from surefoot.bus.streams import EVENTS
from surefoot.events import AttemptStarted, StepCompleted
from surefoot_detector.watch import Watch

REPLAY_COUNT = 500
"""Entries per turn: a turn must stay short, or the service looks stuck."""


class Replay:
    """Reads the stream from its beginning to the newest entry that the group was given. The loop's thread only.

    Entries that were given but not done are left to the group: what they show has not been said yet.

    Args:
        bus: Where the stream is.
        reader: Of the detector's group.
        watch: Takes the steps.

    Attributes:
        is_over: Whether all was read.
    """

    def __init__(self, bus: Bus, reader: GroupReader, watch: Watch) -> None:
        self._bus, self._reader, self._watch = bus, reader, watch
        self._until: tuple[int, int] | None = None
        self._done: dict[str, int] = {}
        self._after = "0"
        self.is_over = False

    def turn(self) -> None:
        """Read some more.

        Raises:
            Unavailable: by the bus; call it again.
        """
        if self._until is None:
            self._done = self._reader.seen()
            self._until = _order(self._reader.last_delivered_id())
        deliveries = self._bus.read(EVENTS, self._after, REPLAY_COUNT, 0.0)
        for delivery in deliveries:
            if _order(delivery.id) > self._until:
                break
            self._take(delivery)
            self._after = delivery.id
        else:
            self.is_over = not deliveries
            return
        self.is_over = True

    def _take(self, delivery: Delivery) -> None:
        if delivery.sequence > self._done.get(delivery.source, 0):
            return
        message = delivery.message
        if isinstance(message, AttemptStarted):
            self._watch.start_attempt(message, delivery.source)
        elif isinstance(message, StepCompleted):
            self._watch.step(message, delivery.source, quietly=True)


def _order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number or 0)
