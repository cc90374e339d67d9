"""Streams of the bus as Server-Sent Events (WHATWG HTML, 9.2): ids are those of the entries, so nobody misses any.

Each client has its own cursor and, while it waits, a thread; the server's own XREAD does the fanning out. A client
that comes back with Last-Event-ID goes on from there, also with another api process.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import anyio
import anyio.to_thread
from starlette.responses import StreamingResponse

from surefoot.bus.base import Bus, Delivery
from surefoot.errors import BusUnavailable
from surefoot.events import Message, encode_message
from surefoot_api.problems import RETRY_AFTER_SECONDS, ProblemError

HEARTBEAT_SECONDS = 10.0
BLOCK_SECONDS = 1.0
"""How long one read waits for entries; also how soon a stream ends when the service stops."""
RETRY_SECONDS = 1.0
COUNT = 500


@dataclass(frozen=True)
class Subscription:
    """What a client follows.

    Attributes:
        stream: Of the bus.
        after: Id of the last entry that the client has; `0`: from the beginning.
        wanted: Which messages it gets.
        follow: Go on as entries come; without it the answer ends with what is there.
    """

    stream: str
    after: str
    wanted: Callable[[Message], bool]
    follow: bool


def start_after(after: str, last_event_id: str | None) -> str:
    """Return the stream id to go on from.

    Args:
        after: What the URL says; `$`: only what comes from now on.
        last_event_id: What a client that comes back says; it knows better.

    Raises:
        ProblemError: neither is an id.
    """
    name, value = ("after", after) if last_event_id is None else ("Last-Event-ID", last_event_id)
    if value == "$" and last_event_id is None:
        # Two reads with `$` miss what comes between them; ids begin with the milliseconds since 1970.
        return f"{int(time.time() * 1000)}-0"
    match = re.fullmatch(r"(\d{1,20})(?:-(\d{1,20}))?", value, re.ASCII)
    if match is None or any(int(part) >= 2**64 for part in match.groups("0")):
        raise ProblemError(422, "invalid_event_id", f"{name}: {value!r} is not the id of an event (digits-digits)")
    return value


class Follower:
    """Serves streams of the bus to HTTP clients. Its methods: the event loop only.

    Args:
        bus: To read from.
        stopping: Ends every stream within `BLOCK_SECONDS`.
        max_streams: How many clients may follow at a time.
    """

    def __init__(self, bus: Bus, stopping: threading.Event, max_streams: int) -> None:
        self._bus = bus
        self._stopping = stopping
        self._max_streams = max_streams
        self.num_streams = 0
        """Clients that follow now."""
        # Apart from the threads of all other requests, which must not wait for those who follow.
        self._threads = anyio.CapacityLimiter(max_streams)

    async def serve(self, subscription: Subscription) -> StreamingResponse:
        """Return the answer to a client.

        Raises:
            ProblemError: too many clients follow already.
            BusUnavailable: the bus does not answer; once the stream has begun that only makes it wait.
        """
        if self.num_streams >= self._max_streams:
            raise ProblemError(
                503,
                "too_many_streams",
                f"{self.num_streams} clients follow already; SUREFOOT_API_MAX_STREAMS allows no more",
                {"Retry-After": str(RETRY_AFTER_SECONDS)},
            )
        first = await self._read(subscription.stream, subscription.after, 0.0)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._frames(subscription, first), headers=headers, media_type="text/event-stream")

    async def _frames(self, subscription: Subscription, first: list[Delivery]) -> AsyncIterator[bytes]:
        self.num_streams += 1
        try:
            cursor, batch, sent_seconds = subscription.after, first, 0.0
            while not self._stopping.is_set():
                cursor = batch[-1].id if batch else cursor
                text = "".join(_frame(delivery) for delivery in batch if _is_wanted(delivery, subscription))
                if text or time.monotonic() - sent_seconds > HEARTBEAT_SECONDS:
                    sent_seconds = time.monotonic()
                    # An id without data is no event, and still where the client goes on from.
                    yield (text or f": alive\nid: {cursor}\n\n").encode()
                if not subscription.follow and len(batch) < COUNT:
                    return
                batch = await self._next(subscription, cursor)
        finally:
            self.num_streams -= 1

    async def _next(self, subscription: Subscription, cursor: str) -> list[Delivery]:
        try:
            return await self._read(subscription.stream, cursor, BLOCK_SECONDS if subscription.follow else 0.0)
        except BusUnavailable:
            await anyio.to_thread.run_sync(self._stopping.wait, RETRY_SECONDS, limiter=self._threads)
            return []

    async def _read(self, stream: str, after: str, block_seconds: float) -> list[Delivery]:
        return await anyio.to_thread.run_sync(
            self._bus.read, stream, after, COUNT, block_seconds, limiter=self._threads
        )


def _is_wanted(delivery: Delivery, subscription: Subscription) -> bool:
    return delivery.message is not None and subscription.wanted(delivery.message)


def _frame(delivery: Delivery) -> str:
    assert delivery.message is not None
    return f"id: {delivery.id}\nevent: {delivery.message.type}\ndata: {encode_message(delivery.message)}\n\n"
