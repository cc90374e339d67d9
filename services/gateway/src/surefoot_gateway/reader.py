"""Read the stream from its beginning, each message once, and hand it to its handler."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import structlog

from surefoot.bus.base import Bus, Delivery
from surefoot.bus.streams import EVENTS
from surefoot.errors import BusUnavailable
from surefoot.events import Message
from surefoot_gateway.board import Board
from surefoot_gateway.handlers import Handler
from surefoot_gateway.recent import Recent
from surefoot_gateway.table import OTHER, SERVICES

BATCH_MESSAGES = 500
GATHER_SECONDS = 0.2
"""Messages are taken a few times a second, not one by one: nobody looks more often."""
BLOCK_SECONDS = 1.0
MAX_SOURCES = 10_000
MAX_IDS = 20_000

log = structlog.get_logger(__name__)


class StreamReader:
    """Feeds the board. One thread.

    Delivery is at least once. A repeat of a sender shows in its sequence; the same fact from two processes of a
    service (the detector before and after a restart) shows in the id of the event.

    Args:
        bus: Where the stream is.
        board: What is fed.
        handlers: By message type.
        stopping: Ends a wait early.
    """

    def __init__(
        self, bus: Bus, board: Board, handlers: Mapping[type[Message], Handler], stopping: threading.Event
    ) -> None:
        self._bus = bus
        self._board = board
        self._handlers = handlers
        self._stopping = stopping
        self._after = "0"
        self._sequences = Recent[int](MAX_SOURCES)
        self._ids = Recent[None](MAX_IDS)
        self.turned_seconds = time.monotonic()

    def turn(self) -> None:
        """Take what is new; about a second at most when there is nothing.

        Raises:
            BusUnavailable: the server does not answer. Nothing is lost: the next call goes on where this one began.
        """
        self.turned_seconds = time.monotonic()
        try:
            deliveries = self._bus.read(EVENTS, self._after, BATCH_MESSAGES, BLOCK_SECONDS)
        except BusUnavailable as error:
            with self._board.lock:
                self._board.bus_problem = str(error)
            raise
        with self._board.lock:
            self._board.bus_problem = None
            for delivery in deliveries:
                self._take(delivery)
                self._after = delivery.id
            if len(deliveries) < BATCH_MESSAGES:
                self._board.caught_up = True
        if 0 < len(deliveries) < BATCH_MESSAGES:
            self._stopping.wait(GATHER_SECONDS)

    @property
    def silent_seconds(self) -> float:
        """Return how long the loop has not come round."""
        return time.monotonic() - self.turned_seconds

    def _take(self, delivery: Delivery) -> None:
        message = delivery.message
        if message is None and not delivery.source:
            self._ignore("invalid")
        elif not self._is_next(delivery):
            self._ignore("repeated")
        elif message is None:
            self._ignore("unknown" if delivery.problem is None else "invalid")
        elif message.lifecycle and message.event_id in self._ids:
            self._ignore("repeated")
        else:
            if message.lifecycle:
                self._ids.put(message.event_id, None)
            self._handle(message)

    def _is_next(self, delivery: Delivery) -> bool:
        """Return whether its sender had not sent it before; count it, and what is missing before it."""
        before = self._sequences.get(delivery.source)
        if before is not None and delivery.sequence <= before:
            return False
        self._sequences.put(delivery.source, delivery.sequence)
        service = _service_of(delivery.source)
        self._board.metrics.count("surefoot_messages_total", service=service)
        if before is not None and delivery.sequence > before + 1:
            missing = delivery.sequence - before - 1
            self._board.metrics.count("surefoot_messages_lost_total", missing, service=service)
        return True

    def _handle(self, message: Message) -> None:
        handler = self._handlers.get(type(message))
        try:
            job = self._board.job(message.job)
            job.view.revision += 1
            job.view.heard_at = message.ts.timestamp()
            if handler is not None:
                handler(job, message)
        except Exception:
            # One odd message must not end the page of all others, today and after each restart.
            log.exception("a message could not be counted", job_id=message.job, message_type=message.type)
            self._ignore("failed")

    def _ignore(self, outcome: str) -> None:
        self._board.metrics.count("surefoot_messages_ignored_total", outcome=outcome)


def _service_of(source: str) -> str:
    name = source.partition(":")[0]
    return name if name in SERVICES else OTHER
