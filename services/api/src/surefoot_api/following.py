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
from typing import NamedTuple

import anyio
import anyio.to_thread
import structlog
from starlette.responses import StreamingResponse
from starlette.types import Message as ASGIMessage
from starlette.types import Receive, Scope, Send

from surefoot.bus.redis_bus import RedisBus
from surefoot.errors import BusUnavailable
from surefoot_api.entries import Entry, frame, may_be_of, read_entries
from surefoot_api.problems import RETRY_AFTER_SECONDS, ProblemError

HEARTBEAT_SECONDS = 10.0
BLOCK_SECONDS = 1.0
"""How long one read waits for entries; also how soon a stream ends when the service stops."""
RETRY_SECONDS = 1.0
COUNT = 100
"""Entries per read. Small: the clients take turns."""
NUM_WORKING = 2
UNREAD_SECONDS = 30.0
"""A client that takes nothing for so long loses its place to others."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Subscription:
    """What a client follows.

    Attributes:
        stream: Of the bus.
        after: Id of the last entry that the client has; `0`: from the beginning.
        job: Whose messages it gets.
        follow: Go on as entries come; without it the answer ends with what is there.
    """

    stream: str
    after: str
    job: str
    follow: bool


class _Batch(NamedTuple):
    """What one read gave.

    Attributes:
        entries: Those that may be of the job.
        cursor: Where to go on.
        is_full: There may be more at once.
    """

    entries: list[Entry]
    cursor: str
    is_full: bool


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


class _Stream(StreamingResponse):
    """An answer that gives its place back when it is over, however that comes: also before its first byte."""

    def __init__(self, frames: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(frames, headers=headers, media_type="text/event-stream")
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: ASGIMessage) -> None:
            with anyio.fail_after(UNREAD_SECONDS):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except TimeoutError:
            log.info("a client that follows does not read, and is let go", path=scope["path"])
        finally:
            self._on_end()


class Follower:
    """Serves streams of the bus to HTTP clients. Its methods: the event loop only.

    Args:
        bus: To read from.
        stopping: Ends every stream within `BLOCK_SECONDS`.
        max_streams: How many clients may follow at a time.
    """

    def __init__(self, bus: RedisBus, stopping: threading.Event, max_streams: int) -> None:
        self._bus = bus
        self._stopping = stopping
        self._max_streams = max_streams
        self.num_streams = 0
        """Clients that follow now."""
        # Apart from the threads of all other requests, which must not wait for those who follow.
        self._waiting = anyio.CapacityLimiter(max_streams)
        # What costs time of the processor: the event loop must not wait for many threads.
        self._working = anyio.CapacityLimiter(NUM_WORKING)

    async def serve(self, subscription: Subscription) -> StreamingResponse:
        """Return the answer to a client.

        Raises:
            ProblemError: too many clients follow already.
            BusUnavailable: the bus does not answer; once the stream has begun that only makes it wait.
        """
        self._take_place()
        try:
            first = await self._read(subscription, subscription.after, self._waiting, 0.0)
        except BaseException:
            self._give_place_back()
            raise
        return _Stream(self._frames(subscription, first), self._give_place_back)

    def _take_place(self) -> None:
        """Count the client before anything is awaited for it: many come at once."""
        if self.num_streams >= self._max_streams:
            raise ProblemError(
                503,
                "too_many_streams",
                f"{self.num_streams} clients follow already; SUREFOOT_API_MAX_STREAMS allows no more",
                {"Retry-After": str(RETRY_AFTER_SECONDS)},
            )
        self.num_streams += 1

    def _give_place_back(self) -> None:
        self.num_streams -= 1

    async def _frames(self, subscription: Subscription, first: _Batch) -> AsyncIterator[bytes]:
        batch, sent_seconds = first, 0.0
        while not self._stopping.is_set():
            text = await self._text(batch, subscription.job)
            if text or time.monotonic() - sent_seconds > HEARTBEAT_SECONDS:
                sent_seconds = time.monotonic()
                # An id without data is no event, and still where the client goes on from.
                yield (text or f": alive\nid: {batch.cursor}\n\n").encode()
            if not subscription.follow and not batch.is_full:
                return
            batch = await self._next(subscription, batch)

    async def _text(self, batch: _Batch, job: str) -> str:
        if not batch.entries:
            return ""
        return await anyio.to_thread.run_sync(
            lambda: "".join(frame(entry, job) for entry in batch.entries), limiter=self._working
        )

    async def _next(self, subscription: Subscription, last: _Batch) -> _Batch:
        """Return the next batch. Clients that are behind take turns, so that those who are not get theirs in time."""
        try:
            if last.is_full or not subscription.follow:
                return await self._read(subscription, last.cursor, self._working, 0.0)
            return await self._read(subscription, last.cursor, self._waiting, BLOCK_SECONDS)
        except BusUnavailable:
            await anyio.to_thread.run_sync(self._stopping.wait, RETRY_SECONDS, limiter=self._waiting)
            return last._replace(entries=[])

    async def _read(
        self, subscription: Subscription, after: str, limiter: anyio.CapacityLimiter, block_seconds: float
    ) -> _Batch:
        def read() -> _Batch:
            found = read_entries(self._bus, subscription.stream, after, COUNT, block_seconds)
            may_be = may_be_of(subscription.job)
            cursor = found[-1].id if found else after
            return _Batch([entry for entry in found if may_be(entry.raw)], cursor, len(found) == COUNT)

        return await anyio.to_thread.run_sync(read, limiter=limiter)
