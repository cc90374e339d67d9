"""Following events and logs over Server-Sent Events."""

from __future__ import annotations

import json
import time

import pytest

from helpers.api import Api, serving
from helpers.sse import reading
from helpers.waiting import wait_until
from surefoot.bus.publisher import Publisher
from surefoot.bus.redis_bus import RedisBus
from surefoot.bus.streams import logs_stream
from surefoot.catalogue.database import Database
from surefoot.events import DataPrepared, LogLine
from surefoot_api import following
from surefoot_api.settings import ApiSettings


def event(number: int, job: str = "j") -> DataPrepared:
    return DataPrepared(job=job, stage=str(number), detail="", seconds=0.0)


@pytest.fixture
def publisher(bus: RedisBus) -> Publisher:
    return Publisher(bus, "test")


def test_a_client_gets_what_is_there_then_what_comes_and_goes_on_where_it_was(api: Api, publisher: Publisher) -> None:
    api.add_job("j")
    url = f"{api.url}/api/v1/jobs/j/events"
    publisher.publish_all([event(1), event(99, job="other"), event(2)])
    with reading(url) as reader:
        assert reader.response.headers["Content-Type"].startswith("text/event-stream")
        wait_until(lambda: reader.stages == ["1", "2"], 5, "what is there")
        publisher.publish(event(3))
        began = time.monotonic()
        wait_until(lambda: reader.stages == ["1", "2", "3"], 5, "what comes")
        assert time.monotonic() - began < 1.0
        last = reader.frames[-1]
    assert last["event"] == "DataPrepared"
    publisher.publish(event(4))
    with reading(url, headers={"Last-Event-ID": last["id"]}, after="0") as reader:
        wait_until(lambda: reader.stages == ["4"], 5, "what was missed")


def test_without_follow_the_answer_ends(api: Api, publisher: Publisher) -> None:
    api.add_job("j")
    publisher.publish_all([event(number) for number in range(following.COUNT + 1)])
    with reading(f"{api.url}/api/v1/jobs/j/events", follow="false") as reader:
        assert reader.ended.wait(10)
        assert len(reader.stages) == following.COUNT + 1
    with reading(f"{api.url}/api/v1/jobs/j/events", follow="false", after="$") as reader:
        assert reader.ended.wait(10)
        assert reader.stages == []


def test_logs(api: Api, publisher: Publisher) -> None:
    api.add_job("j")
    publisher.publish(LogLine(job="j", rank=1, stream="stderr", text="a\nb\r\u2028c"), logs_stream("j"))
    with reading(f"{api.url}/api/v1/jobs/j/logs", follow="false") as reader:
        assert reader.ended.wait(10)
    assert json.loads(reader.frames[0]["data"])["text"] == "a\nb\r\u2028c"


def test_a_silent_stream_says_that_it_is_alive_and_where_it_is(
    api: Api, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "HEARTBEAT_SECONDS", 0.0)
    monkeypatch.setattr(following, "BLOCK_SECONDS", 0.05)
    api.add_job("j")
    publisher.publish(event(1, job="other"))
    with reading(f"{api.url}/api/v1/jobs/j/events") as reader:
        wait_until(lambda: len(reader.frames) > 2, 5, "heartbeats")
        assert "data" not in reader.frames[-1]
        assert reader.frames[-1]["id"] != "0", "what was for others is not read again"


def test_bad_ids_and_unknown_jobs(api: Api) -> None:
    api.add_job("j")
    url = "/api/v1/jobs/j/events"
    for bad in ("x", "-1", "1-", "18446744073709551616", "1-2-3", "٣"):
        answer = api.client.get(url, params={"after": bad})
        assert (answer.status_code, answer.json()["error_code"]) == (422, "invalid_event_id")
    assert api.client.get(url, headers={"Last-Event-ID": "$"}).status_code == 422
    assert api.client.get("/api/v1/jobs/nobody/events").status_code == 404
    assert api.client.get("/api/v1/jobs/nobody/logs").status_code == 404


def test_too_many_followers(settings: ApiSettings, database: Database, bus: RedisBus) -> None:
    settings.api_max_streams = 2
    with serving(settings, database, bus) as api:
        api.add_job("j")
        url = f"{api.url}/api/v1/jobs/j/events"
        with reading(url), reading(url) as second:
            answer = api.client.get(url)
            assert (answer.status_code, answer.json()["error_code"]) == (503, "too_many_streams")
            assert api.client.get("/api/v1/jobs/j").status_code == 200, "others are served"
            second.close()
            wait_until(
                lambda: api.client.get(url, params={"follow": "false"}).status_code == 200, 10, "a place is free again"
            )


def test_an_outage_of_the_bus_only_makes_it_wait(
    settings: ApiSettings, database: Database, make_server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "RETRY_SECONDS", 0.05)
    server = make_server()
    own = RedisBus(server.url)
    publisher = Publisher(own, "test")
    with serving(settings, database, own) as api:
        api.add_job("j")
        publisher.publish(event(1))
        with reading(f"{api.url}/api/v1/jobs/j/events") as reader:
            wait_until(lambda: reader.stages == ["1"], 5, "the first")
            server.stop()
            answer = api.client.get("/api/v1/jobs/j/events")
            assert (answer.status_code, answer.json()["error_code"]) == (503, "bus_unavailable")
            server.start()
            publisher.publish(event(2))
            wait_until(lambda: reader.stages == ["1", "2"], 10, "the second")
    own.close()
