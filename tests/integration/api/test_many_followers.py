"""Many clients that follow at once, or do not read: they get what they are due, and the api lives."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import anyio
import httpx
import pytest

from helpers.api import Api, serving
from helpers.sse import reading
from helpers.waiting import wait_until
from surefoot.bus.publisher import Publisher
from surefoot.bus.redis_bus import RedisBus
from surefoot.bus.streams import EVENTS
from surefoot.catalogue.database import Database
from surefoot.errors import SurefootError
from surefoot.events import DataPrepared
from surefoot.listening import listen
from surefoot_api import entries, following, server
from surefoot_api.following import Follower, Subscription
from surefoot_api.problems import ProblemError
from surefoot_api.server import Server
from surefoot_api.settings import ApiSettings


def events(number: int, job: str, size: int = 0) -> list[DataPrepared]:
    return [DataPrepared(job=job, stage=str(n), detail="x" * size, seconds=0.0) for n in range(number)]


@contextmanager
def unread(api: Api, count: int) -> Iterator[list[socket.socket]]:
    """Ask to follow so many times at once, and read nothing."""
    port = int(api.url.rsplit(":", 1)[1])
    request = f"GET /api/v1/jobs/j/events HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(count)]
        for client in clients:
            client.sendall(request)
        yield clients


def test_two_hundred_clients_that_do_not_read(settings: ApiSettings, database: Database, bus: RedisBus) -> None:
    publisher = Publisher(bus, "test")
    for job in ("other", "j", "other"):
        publisher.publish_all(events(1000, job, size=300))
    with serving(settings, database, bus) as api:
        api.add_job("j")
        with unread(api, 200) as clients:
            wait_until(lambda: api.follower.num_streams == settings.api_max_streams, 10, "all places are taken")
            slowest = 0.0
            for _ in range(10):
                began = time.monotonic()
                assert api.client.get("/healthz").status_code == 200
                slowest = max(slowest, time.monotonic() - began)
                assert api.follower.num_streams <= settings.api_max_streams
            assert slowest < 2.0
            answer = api.client.get("/api/v1/jobs/j/events")
            assert (answer.status_code, answer.json()["error_code"]) == (503, "too_many_streams")
            assert answer.headers["Retry-After"] == "2"
            starts = []
            for client in clients:
                client.settimeout(20)
                starts.append(client.recv(12))
            assert starts.count(b"HTTP/1.1 200") == settings.api_max_streams
            assert starts.count(b"HTTP/1.1 503") == 200 - settings.api_max_streams
        wait_until(lambda: api.follower.num_streams == 0, 10, "all places are free")
        with reading(f"{api.url}/api/v1/jobs/j/events", follow="false") as reader:
            assert reader.ended.wait(10)
            assert len(reader.stages) == 1000


def test_a_client_that_takes_nothing_loses_its_place(
    settings: ApiSettings, database: Database, bus: RedisBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "UNREAD_SECONDS", 0.3)
    Publisher(bus, "test").publish_all(events(400, "j", size=40_000))  # more than sockets buffer
    with serving(settings, database, bus) as api:
        api.add_job("j")
        with unread(api, 1):
            wait_until(lambda: api.follower.num_streams == 1, 5, "it follows")
            wait_until(lambda: api.follower.num_streams == 0, 10, "its place is free")


def test_places_are_counted_at_entry_and_given_back(bus: RedisBus, monkeypatch: pytest.MonkeyPatch) -> None:
    follower = Follower(bus, threading.Event(), 2)
    subscription = Subscription(EVENTS, "0", "j", follow=False)

    async def asked(outcomes: list[object]) -> None:
        try:
            outcomes.append(await follower.serve(subscription))
        except (ProblemError, OSError) as error:
            outcomes.append(error)

    async def all_at_once() -> list[object]:
        outcomes: list[object] = []
        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(asked, outcomes)
        return outcomes

    outcomes = anyio.run(all_at_once)
    assert sum(isinstance(outcome, following.StreamingResponse) for outcome in outcomes) == 2
    assert follower.num_streams == 2

    def failing(*_: object) -> None:
        raise OSError

    follower = Follower(bus, threading.Event(), 2)
    monkeypatch.setattr(following, "read_entries", failing)
    assert all(isinstance(outcome, Exception) for outcome in anyio.run(all_at_once))
    assert follower.num_streams == 0


def test_what_is_for_others_is_not_decoded(
    api: Api, bus: RedisBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []
    original = entries.decode_message
    monkeypatch.setattr(entries, "decode_message", lambda raw: decoded.append(raw) or original(raw))
    api.add_job("j")
    for job in ("other", "j.x", "jj", "j"):
        Publisher(bus, "test").publish_all(events(30, job))
    bus._redis.xadd(EVENTS, {b"m": b'{"type":"DataPrepared","job" : "j","bad":1}', b"s": b"x", b"n": b"1"})
    bus._redis.xadd(EVENTS, {b"m": b'"job":"j"', b"s": b"x", b"n": b"2"})
    bus._redis.xadd(EVENTS, {b"x": b"1"})
    with reading(f"{api.url}/api/v1/jobs/j/events", follow="false") as reader:
        assert reader.ended.wait(10)
    assert len(reader.stages) == 30
    assert len(decoded) == 32


class Watched:
    def __init__(self) -> None:
        self.free, self.busy = threading.Event(), threading.Event()

    async def __call__(self, scope: dict, receive: object, send: object) -> None:
        """Answer nothing; hold up the event loop when asked to."""
        if scope["path"] == "/hold":
            self.busy.set()
            self.free.wait(30)
        await anyio.sleep(30)


def test_a_busy_server_is_left_alone_and_a_stuck_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(server, "MAX_STUCK_SECONDS", 0.8)
    monkeypatch.setattr(server, "GRACE_SECONDS", 1.0)
    app = Watched()
    running = Server(app, listen("127.0.0.1", 0, "SUREFOOT_API"))
    try:
        for _ in range(6):
            running.check()  # nothing is answered for more than a second, and the loop comes round
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{running.port}/hold", timeout=0.3)
        assert app.busy.wait(5)

        def is_given_up() -> bool:
            try:
                running.check()
            except SurefootError:
                return True
            return False

        began = time.monotonic()
        wait_until(is_given_up, 10, "a stuck loop is noticed")
        assert time.monotonic() - began > 0.4
    finally:
        app.free.set()
        running.stop()
