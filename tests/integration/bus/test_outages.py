"""Cases B1 and B4: a real server that trims, restarts, pauses and forgets, under a consumer that must not care."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.bus_cases import outgoing, texts
from helpers.processes import started_script
from helpers.server import RealServer
from helpers.waiting import wait_until
from surefoot.bus.base import Delivery
from surefoot.bus.consumer import Consumer
from surefoot.bus.publisher import Publisher
from surefoot.bus.redis_bus import RedisBus
from surefoot.bus.streams import EVENTS
from surefoot.errors import BusUnavailable
from surefoot.events import LogLine
from surefoot.telemetry.health import HealthState, read_health

SERVICE = """
import sys
from pathlib import Path

from surefoot.bus.consumer import Consumer
from surefoot.bus.redis_bus import RedisBus
from surefoot.bus.streams import EVENTS
from surefoot.events import LogLine
from surefoot.runtime import run_service
from surefoot.settings import CommonSettings

def build(runtime):
    bus = runtime.on_exit.enter_context(__import__("contextlib").closing(RedisBus(settings.redis_url)))
    output = Path(sys.argv[1]).open("a", buffering=1)
    runtime.on_exit.enter_context(output)
    handle = lambda event, delivery: output.write(event.text + "\\n")
    consumer = Consumer(bus.group(EVENTS, "g", "c"), {LogLine: handle})
    return lambda: consumer.turn(0.2)

settings = CommonSettings()
sys.exit(run_service("sample", settings, build))
"""


@pytest.fixture
def server(make_server: Callable[[], RealServer]) -> RealServer:
    return make_server()


@pytest.fixture
def own_bus(server: RealServer) -> Iterator[RedisBus]:
    bus = RedisBus(server.url, answer_seconds=1.0)
    yield bus
    bus.close()


def publish_until_taken(publisher: Publisher, text: str) -> None:
    message = LogLine(job="j", stream="stdout", text=text)

    def published() -> bool:
        try:
            publisher.publish(message)
        except BusUnavailable:
            return False
        return True

    wait_until(published, 20, "the bus takes a message")


def test_b1_trimmed_while_the_consumer_is_down(bus: RedisBus, bus_url: str) -> None:
    """B1: trimmed to 100 while the consumer is down, 1,000 sent: no crash, 900 counted as lost, by sequence."""
    lost: list[tuple[str, int]] = []
    handled: list[str] = []

    def make() -> Consumer:
        return Consumer(
            bus.group(EVENTS, "g", "c"),
            {LogLine: lambda event, delivery: handled.append(event.text)},
            lambda source, count: lost.append((source, count)),
        )

    bus.publish(EVENTS, outgoing("first", source="rank-0"))
    make().turn(0)
    assert len(bus.group(EVENTS, "g", "c").read(10, 0)) == 0
    bus.publish(EVENTS, outgoing(*["x"] * 500, source="rank-0", first=2))
    # It died with 100 messages read and none acknowledged: these will be empty.
    assert len(bus.group(EVENTS, "g", "c").read(100, 0)) == 100
    bus.publish(EVENTS, outgoing(*["x"] * 500, source="rank-0", first=502))
    bus._redis.xtrim(EVENTS, maxlen=100, approximate=False)
    consumer = make()
    wait_until(lambda: consumer.turn(0) or bus.lag(EVENTS, "g") == 0, 10, "everything is done")
    assert (lost, consumer.num_lost) == ([("rank-0", 900)], 900)
    assert (len(handled), consumer.num_handled, consumer.num_buried) == (101, 100, 0)


def test_b4_restarted_20_times(server: RealServer, own_bus: RedisBus, tmp_path: Path) -> None:
    """B4: 20 restarts, half of them kills: the consumer is alive and not deaf, health is not green meanwhile."""
    output, home = tmp_path / "out.txt", tmp_path / "home"
    environment = os.environ | {"SUREFOOT_REDIS_URL": server.url, "SUREFOOT_HOME": str(home)}

    def state() -> HealthState:
        return read_health(home / "run" / "health", "sample").state

    def lines() -> list[str]:
        return output.read_text().split() if output.exists() else []

    publisher = Publisher(own_bus, "test")
    with started_script(SERVICE, str(output), env=environment) as process:
        wait_until(lambda: state() is HealthState.OK, 20, "the service is well")
        for number in range(20):
            publish_until_taken(publisher, f"n{number}")
            wait_until(lambda n=number: f"n{n}" in lines(), 10, f"message {number} arrives")
            (server.kill if number % 2 else server.stop)()
            wait_until(lambda: state() is HealthState.WAITING, 10, "health says that the server is away")
            server.start()
        publish_until_taken(publisher, "last")
        wait_until(lambda: "last" in lines(), 10, "the last message arrives")
        wait_until(lambda: state() is HealthState.OK, 10, "health is green again")
        assert process.poll() is None
    # Within a second before a kill the server may forget that it was told of an acknowledgement, never a message here.
    assert sorted(set(lines())) == sorted([*(f"n{i}" for i in range(20)), "last"])


def test_a_paused_server_is_noticed_and_nothing_is_lost(server: RealServer, own_bus: RedisBus) -> None:
    own_bus.publish(EVENTS, outgoing("a"))
    reader = own_bus.group(EVENTS, "g", "c")
    server.pause()
    began = time.monotonic()
    with pytest.raises(BusUnavailable, match=f"127.0.0.1:{server.port}"):
        reader.read(10, 1.0)
    assert time.monotonic() - began < 2.0
    server.resume()
    # The server may have carried out the read whose answer nobody waited for.
    assert texts(reader.read(10, 0)) == ["a"]


def test_a_server_that_is_killed_while_a_reader_waits(server: RealServer, own_bus: RedisBus) -> None:
    reader = own_bus.group(EVENTS, "g", "c")
    reader.read(1, 0)
    timer = threading.Timer(0.1, server.kill)
    timer.start()
    with pytest.raises(BusUnavailable):
        wait_until(lambda: reader.read(1, 0.5), 5, "this ends with the server")
    timer.join()
    server.start()
    own_bus.publish(EVENTS, outgoing("a"))
    assert texts(reader.read(1, 1.0)) == ["a"]


def test_a_full_server_is_an_outage_and_keeps_the_order(server: RealServer, own_bus: RedisBus) -> None:
    publisher = Publisher(own_bus, "test")
    server.client.config_set("maxmemory", "1")
    messages = [LogLine(job="j", stream="stdout", text=text) for text in "abc"]
    with pytest.raises(BusUnavailable):
        publisher.publish_all(messages)
    server.client.config_set("maxmemory", "0")
    publisher.publish_all(messages)
    deliveries: list[Delivery] = own_bus.read(EVENTS, "0", 10, 0)
    assert (texts(deliveries), [d.sequence for d in deliveries]) == (list("abc"), [1, 2, 3])


def test_a_wrong_address_is_an_outage_with_the_address() -> None:
    bus = RedisBus("redis://127.0.0.1:1/0")
    with pytest.raises(BusUnavailable, match=r"127\.0\.0\.1:1 does not answer"):
        bus.publish(EVENTS, outgoing("a"))
    bus.close()
