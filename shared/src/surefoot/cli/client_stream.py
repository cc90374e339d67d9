"""Following a job over the api: a background thread reads the streams, and comes back where it was when they break."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, suppress

import httpx

from surefoot.cli.client import ApiClient, ApiUnreachable
from surefoot.errors import SurefootError
from surefoot.events import Event, LogLine, Message, RankFailed, decode_message

RETRY_SECONDS = 0.5
LONGEST_OUTAGE_SECONDS = 60.0
"""Nobody has answered for so long: give up."""
MAX_WAITING = 100_000
"""Messages that nobody has taken; older ones give way."""


class JobStream:
    """Messages of one stream of a job, oldest first. Made, polled and closed by one thread.

    Args:
        client: Of the api.
        job: Name of the job.
        what: `events` or `logs`.
        after: Stream id to begin after; `0`: everything there is.
        follow: Go on as they come; without it the stream ends with what is there.

    Raises:
        ApiRefused: there is no such job.
        ApiUnreachable: nobody answers.
    """

    def __init__(self, client: ApiClient, job: str, what: str, *, after: str = "0", follow: bool = True) -> None:
        self.problem: SurefootError | None = None
        """Why it was given up."""
        self._client, self._path, self._follow = client, ("jobs", job, what), follow
        self._params = {"after": after, "follow": str(follow).lower()}
        self._last_id: str | None = None
        self._messages: deque[Message] = deque(maxlen=MAX_WAITING)
        self._news, self._closing, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._response = self._open()
        self._thread = threading.Thread(target=self._run, name=f"surefoot-{what}", daemon=True)
        self._thread.start()

    def poll(self) -> list[Message]:
        """Return what came since the last call; never waits."""
        self._news.clear()
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self._messages.popleft())
        return taken

    def settle(self, quiet_seconds: float = 0.3, limit_seconds: float = 2.0) -> None:
        """Wait until nothing has come for a moment."""
        deadline = time.monotonic() + limit_seconds
        num_before = -1
        while len(self._messages) != num_before and time.monotonic() < deadline and not self._ended.is_set():
            num_before = len(self._messages)
            self._ended.wait(quiet_seconds)

    def __iter__(self) -> Iterator[Message]:
        """Yield messages until the stream ends.

        Raises:
            SurefootError: it was given up.
        """
        while True:
            ended = self._ended.is_set()
            yield from self.poll()
            if ended:
                break
            self._news.wait(1.0)
        if self.problem is not None:
            raise self.problem

    def close(self) -> None:
        """Stop reading."""
        self._closing.set()
        # Closing a response does not wake up the thread that reads it.
        with suppress(OSError, KeyError):
            self._response.extensions["network_stream"].get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self._thread.join(5.0)

    def _open(self) -> httpx.Response:
        return self._client.stream(*self._path, params=self._params, last_event_id=self._last_id)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                with suppress(httpx.TransportError, httpx.StreamError, OSError):
                    self._read()
                    if not self._follow:
                        return
                self._reopen()
        except SurefootError as error:
            self.problem = error
        finally:
            self._ended.set()
            self._news.set()

    def _read(self) -> None:
        with closing(self._response) as response:
            data = ""
            for line in response.iter_lines():
                name, _, value = line.partition(": ")
                if name == "data":
                    data = value
                elif name == "id":
                    self._last_id = value
                elif not line and data:
                    self._take(data)
                    data = ""

    def _take(self, data: str) -> None:
        message = decode_message(data)
        if message is not None:
            self._messages.append(message)
            self._news.set()

    def _reopen(self) -> None:
        deadline = time.monotonic() + LONGEST_OUTAGE_SECONDS
        while not self._closing.wait(RETRY_SECONDS):
            try:
                self._response = self._open()
            except ApiUnreachable:
                if time.monotonic() > deadline:
                    raise
            else:
                return


class ApiSource:
    """What a view shows, from the api (see `surefoot.cli.view.Source`)."""

    def __init__(self, client: ApiClient, job: str, after: str) -> None:
        self._events = JobStream(client, job, "events", after=after)
        self._logs = JobStream(client, job, "logs", after=after)
        # The sender's monotonic clock says nothing on another machine; its wall clock does.
        self._monotonic_minus_wall_seconds = time.monotonic() - time.time()

    def events(self) -> list[Event]:
        """Return what came; see `Source`."""
        return [self._on_own_clock(message) for message in self._events.poll() if isinstance(message, Event)]

    def lines(self) -> list[tuple[int, str]]:
        """Return what came; see `Source`."""
        return [(line.rank or 0, line.text) for line in self._logs.poll() if isinstance(line, LogLine)]

    def settle(self) -> None:
        """Wait until what was still on its way is here."""
        self._events.settle()
        self._logs.settle()

    def close(self) -> None:
        """Stop reading."""
        self._events.close()
        self._logs.close()

    def _on_own_clock(self, event: Event) -> Event:
        now = event.ts.timestamp() + self._monotonic_minus_wall_seconds
        update = {"monotonic_seconds": now}
        if isinstance(event, RankFailed):
            update["detected_seconds"] = event.detected_seconds + now - event.monotonic_seconds
        return event.model_copy(update=update)
