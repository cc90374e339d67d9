"""Sends a service's own messages, numbered so that readers see what they missed and what came twice."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from uuid import uuid4

from surefoot.bus.base import Bus, Outgoing
from surefoot.bus.streams import EVENTS
from surefoot.errors import BusUnavailable
from surefoot.events import Message


class Publisher:
    """Sends messages as one source, `<service>:<unique>`. Thread-safe; sequences count per stream.

    Args:
        bus: Where to.
        service: Its name.
    """

    def __init__(self, bus: Bus, service: str) -> None:
        self.source = f"{service}:{uuid4().hex}"
        self._bus = bus
        self._lock = threading.Lock()
        self._next: dict[str, int] = {}
        self._failed: dict[str, tuple[str, ...]] = {}

    def publish(self, message: Message, stream: str = EVENTS) -> None:
        """Send one message; see `publish_all`."""
        self.publish_all([message], stream)

    def publish_all(self, messages: Sequence[Message], stream: str = EVENTS) -> None:
        """Send messages in order, all or none.

        Raises:
            BusUnavailable: it is not known whether they arrived. Sending the same again next is safe: readers drop
                what came twice.
        """
        with self._lock:
            first = self._next.get(stream, 1)
            event_ids = tuple(message.event_id for message in messages)
            failed = self._failed.pop(stream, None)
            if failed is not None and failed != event_ids:
                # They may have arrived after all: their numbers are used up, or these would be taken for them.
                first += len(failed)
            self._next[stream] = first
            items = [Outgoing(message, self.source, first + i) for i, message in enumerate(messages)]
            try:
                self._bus.publish(stream, items)
            except BusUnavailable:
                self._failed[stream] = event_ids
                raise
            self._next[stream] = first + len(messages)
