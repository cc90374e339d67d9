"""Takes messages of a group one by one to their handlers: each effect first, then the acknowledgement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import structlog

from surefoot.bus.base import Delivery, GroupReader
from surefoot.errors import Unavailable
from surefoot.events import Message

Handler = Callable[[Any, Delivery], None]
"""Takes a message of its type. Must be idempotent: a crash before the acknowledgement means a second call."""

BATCH_SIZE = 100
MAX_DELIVERIES = 3
"""A message that made its handler fail so often goes to the dead letters."""

log = structlog.get_logger(__name__)


class Sequences:
    """Highest sequence per source: tells what came twice and what was lost. Not thread-safe.

    Args:
        seen: What is known already.
    """

    def __init__(self, seen: Mapping[str, int] | None = None) -> None:
        self._highest = dict(seen or {})

    def num_missing_before(self, source: str, sequence: int) -> int | None:
        """Return how many messages of the source were left out before this one; None: it is known already."""
        missing = sequence - self._highest.get(source, 0) - 1
        return missing if missing >= 0 else None

    def note(self, source: str, sequence: int) -> None:
        """Take the sequence as known."""
        self._highest[source] = max(sequence, self._highest.get(source, 0))


class Consumer:
    """The loop body of a service that lives on a consumer group. Not thread-safe.

    Args:
        reader: Of the group.
        handlers: By exact type. A type without a handler is acknowledged.
        on_lost: Called with the source and the number of its messages that will never come, before the next one of
            that source is handled.

    Attributes:
        num_handled: Messages whose handler returned.
        num_repeated: Came again although done already; acknowledged unhandled.
        num_lost: Trimmed before they were read, by the gaps in the sequences.
        num_unknown: Of types that this version does not know.
        num_empty: Entries that were trimmed while they were pending.
        num_buried: Gone to the dead letters.
    """

    def __init__(
        self,
        reader: GroupReader,
        handlers: Mapping[type[Message], Handler],
        on_lost: Callable[[str, int], None] | None = None,
    ) -> None:
        self._reader, self._handlers, self._on_lost = reader, handlers, on_lost
        self._sequences: Sequences | None = None
        self._outage_deliveries: dict[str, int] = {}
        self._batch_size = BATCH_SIZE
        self.num_handled = self.num_repeated = self.num_lost = 0
        self.num_unknown = self.num_empty = self.num_buried = 0

    def turn(self, block_seconds: float = 1.0) -> None:
        """Read what is there, handle it in order, acknowledge it. Waits `block_seconds` at most for something to come.

        Raises:
            Unavailable: by the bus or a handler. That message and those after it are given again by a later turn.
        """
        if self._sequences is None:
            self._sequences = Sequences(self._reader.seen())
        deliveries = self._reader.read(self._batch_size, block_seconds)
        finished: list[Delivery] = []
        try:
            for delivery in deliveries:
                if not self._take(delivery, self._sequences):
                    break
                finished.append(delivery)
        finally:
            # After a failure only the one that failed is given again, so that it alone is counted as tried.
            self._batch_size = BATCH_SIZE if len(finished) == len(deliveries) else 1
            self._reader.done(finished)

    def _take(self, delivery: Delivery, sequences: Sequences) -> bool:
        """Bring one message to its end; False: it is to be tried again, before anything else."""
        if delivery.source:
            num_missing = sequences.num_missing_before(delivery.source, delivery.sequence)
            if num_missing is None:
                self.num_repeated += 1
                return True
            if num_missing:
                self._tell_lost(delivery, num_missing, sequences)
        if not self._handle(delivery):
            return False
        self._outage_deliveries.pop(delivery.id, None)
        if delivery.source:
            sequences.note(delivery.source, delivery.sequence)
        return True

    def _tell_lost(self, delivery: Delivery, num_missing: int, sequences: Sequences) -> None:
        if self._on_lost is not None:
            self._on_lost(delivery.source, num_missing)
        self.num_lost += num_missing
        log.warning("messages were lost", source=delivery.source, num_lost=num_missing)
        # Told once, even when the message that showed it has to be tried again.
        sequences.note(delivery.source, delivery.sequence - 1)

    def _handle(self, delivery: Delivery) -> bool:
        if delivery.problem is not None:
            self._bury(delivery, delivery.problem)
        elif delivery.message is None:
            self.num_unknown += bool(delivery.raw)
            self.num_empty += not delivery.raw
        elif (handler := self._handlers.get(type(delivery.message))) is not None:
            return self._call(handler, delivery.message, delivery)
        return True

    def _call(self, handler: Handler, message: Message, delivery: Delivery) -> bool:
        try:
            handler(message, delivery)
        except Unavailable:
            # Not the message's fault, so it must not use up its deliveries.
            self._outage_deliveries[delivery.id] = self._outage_deliveries.get(delivery.id, 0) + 1
            raise
        except Exception as error:
            num_tries = delivery.times_delivered - self._outage_deliveries.get(delivery.id, 0)
            log.exception("a handler failed", job_id=message.job, type=message.type, entry=delivery.id, tries=num_tries)
            if num_tries < MAX_DELIVERIES:
                return False
            self._bury(delivery, f"{type(error).__name__}: {error}")
            return True
        self.num_handled += 1
        return True

    def _bury(self, delivery: Delivery, problem: str) -> None:
        self._reader.bury(delivery, problem)
        self.num_buried += 1
        log.error("put among the dead letters", entry=delivery.id, problem=problem)
