"""What the Celery worker is told to do, again where it was lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable


class Orders:
    """Gives orders of one kind; what was ordered a moment ago is not ordered again. Any thread.

    Args:
        send: Puts one into the queue; raises BusUnavailable.
        resend_seconds: One that has not ended for so long is ordered again.
        monotonic: CLOCK_MONOTONIC in seconds.
    """

    def __init__(
        self,
        send: Callable[..., None],
        resend_seconds: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._resend_seconds = resend_seconds
        self._monotonic = monotonic
        self._sent: dict[tuple[Hashable, ...], float] = {}
        self._lock = threading.Lock()

    def order(self, *what: Hashable) -> None:
        """Order one, unless that was done a while ago.

        Raises:
            BusUnavailable: the server does not answer.
        """
        with self._lock:
            now = self._monotonic()
            if now - self._sent.get(what, -self._resend_seconds) >= self._resend_seconds:
                self._send(*what)
                self._sent[what] = now

    def forget(self, *what: Hashable) -> None:
        """Take it as over: it has ended, or there is something new of its kind to do."""
        with self._lock:
            self._sent.pop(what, None)
