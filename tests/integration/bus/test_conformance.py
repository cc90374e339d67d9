"""What every bus promises: one suite, on the bus in memory and on each real server that this machine has."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.bus_cases import LogLines, MemoryHarness, RealHarness, outgoing, texts
from surefoot.bus.base import Bus
from surefoot.bus.streams import EVENTS, REQUESTS
from surefoot.embedded.server import LEAST_VERSION, bundled_server, server_on_path, version_of
from surefoot.errors import BusUnavailable

Harness = MemoryHarness | RealHarness


def _servers() -> dict[str, Path]:
    found = {"bundled": bundled_server(), "redis-server": server_on_path()}
    return {name: path for name, path in found.items() if path is not None and version_of(path) >= LEAST_VERSION}


@pytest.fixture(scope="module", params=["memory", *_servers()])
def shared_harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    if request.param == "memory":
        yield MemoryHarness()
        return
    harness = RealHarness(tmp_path_factory.mktemp("server"), [str(_servers()[request.param])])
    yield harness
    harness.close()


@pytest.fixture
def harness(shared_harness: Harness) -> Harness:
    shared_harness.reset()
    return shared_harness


@pytest.fixture
def bus(harness: Harness) -> Bus:
    return harness.bus


def test_what_is_published_is_read_in_order(bus: Bus) -> None:
    bus.publish(EVENTS, outgoing("a", "b"))
    bus.publish(EVENTS, outgoing("c", first=3))
    deliveries = bus.read(EVENTS, "0", 10, 0)
    assert texts(deliveries) == ["a", "b", "c"]
    assert [(d.source, d.sequence, d.times_delivered, d.problem) for d in deliveries] == [
        ("s", 1, 1, None), ("s", 2, 1, None), ("s", 3, 1, None),
    ]  # fmt: skip


def test_publishing_nothing_does_nothing(bus: Bus) -> None:
    bus.publish(EVENTS, [])
    assert bus.read(EVENTS, "0", 10, 0) == []


def test_streams_are_apart(bus: Bus) -> None:
    bus.publish(EVENTS, outgoing("a"))
    assert bus.read(REQUESTS, "0", 10, 0) == []


def test_plain_reading_goes_on_after_an_id(bus: Bus) -> None:
    bus.publish(EVENTS, outgoing("a", "b", "c"))
    first = bus.read(EVENTS, "0", 2, 0)
    assert texts(first) == ["a", "b"]
    assert texts(bus.read(EVENTS, first[-1].id, 2, 0)) == ["c"]
    assert bus.read(EVENTS, bus.read(EVENTS, "0", 3, 0)[-1].id, 2, 0) == []


@pytest.mark.parametrize("reading", ["plain", "group"])
def test_a_waiting_reader_is_woken(bus: Bus, reading: str) -> None:
    bus.publish(EVENTS, outgoing("old"))
    reader = bus.group(EVENTS, "g", "c")
    reader.done(reader.read(1, 0))
    timer = threading.Timer(0.1, lambda: bus.publish(EVENTS, outgoing("new", first=2)))
    timer.start()
    began = time.monotonic()
    # `$` is taken when the read begins, which must be before the timer fires.
    deliveries = bus.read(EVENTS, "$", 10, 2.0) if reading == "plain" else reader.read(10, 2.0)
    assert texts(deliveries) == ["new"]
    assert 0.05 < time.monotonic() - began < 1.5
    timer.join()


@pytest.mark.parametrize("block_seconds", [0.0, 0.05])
def test_reading_an_empty_stream_returns(bus: Bus, block_seconds: float) -> None:
    began = time.monotonic()
    assert bus.read(EVENTS, "0", 10, block_seconds) == []
    assert bus.group(EVENTS, "g", "c").read(10, block_seconds) == []
    assert time.monotonic() - began < 1.0


def test_a_group_begins_at_the_beginning(bus: Bus) -> None:
    bus.publish(EVENTS, outgoing("a", "b"))
    assert texts(bus.group(EVENTS, "late", "c").read(10, 0)) == ["a", "b"]


def test_groups_are_independent(bus: Bus) -> None:
    bus.publish(EVENTS, outgoing("a"))
    one, two = bus.group(EVENTS, "one", "c"), bus.group(EVENTS, "two", "c")
    one.done(one.read(10, 0))
    assert texts(two.read(10, 0)) == ["a"]
    assert one.read(10, 0) == []


def test_what_is_not_done_is_given_again_before_anything_new(bus: Bus) -> None:
    reader = bus.group(EVENTS, "g", "c")
    bus.publish(EVENTS, outgoing("a", "b"))
    first = reader.read(10, 0)
    reader.done(first[1:])
    bus.publish(EVENTS, outgoing("c", first=3))
    again = reader.read(10, 0)
    assert (texts(again), again[0].times_delivered) == (["a"], 2)
    assert reader.read(10, 0)[0].times_delivered == 3
    reader.done(again)
    new = reader.read(10, 0)
    assert (texts(new), new[0].times_delivered) == (["c"], 1)


def test_a_restarted_consumer_gets_its_own_first_and_in_order(bus: Bus) -> None:
    bus.publish(EVENTS, outgoing(*"abcde"))
    assert texts(bus.group(EVENTS, "g", "c").read(3, 0)) == ["a", "b", "c"]
    reader = bus.group(EVENTS, "g", "c")
    got: list[str] = []
    while deliveries := reader.read(2, 0):
        got += texts(deliveries)
        reader.done(deliveries)
    assert got == list("abcde")


def test_a_dead_consumers_entries_are_taken_over(harness: Harness) -> None:
    bus = harness.bus
    bus.publish(EVENTS, outgoing("a", "b"))
    assert texts(bus.group(EVENTS, "g", "dead").read(1, 0)) == ["a"]
    alive = bus.group(EVENTS, "g", "alive")
    first = alive.read(1, 0)
    assert texts(first) == ["b"]
    alive.done(first)
    assert alive.read(1, 0) == []
    harness.let_pending_age(EVENTS, "g", 61)
    taken = bus.group(EVENTS, "g", "alive").read(10, 0)
    assert (texts(taken), taken[0].times_delivered) == (["a"], 2)


def test_the_highest_sequence_is_remembered_per_source_and_group(bus: Bus) -> None:
    reader = bus.group(EVENTS, "g", "c")
    assert reader.seen() == {}
    bus.publish(EVENTS, [*outgoing("a", "b", source="x"), *outgoing("c", source="y", first=7)])
    reader.done(reader.read(2, 0))
    assert reader.seen() == {"x": 2}
    reader.done(reader.read(2, 0))
    reader.done([])
    assert bus.group(EVENTS, "g", "other").seen() == {"x": 2, "y": 7}
    assert bus.group(EVENTS, "other", "c").seen() == {}


def test_acknowledging_a_repeat_lowers_nothing(bus: Bus) -> None:
    bus.publish(EVENTS, [*outgoing("a", "b"), *outgoing("a")])
    reader = bus.group(EVENTS, "g", "c")
    for _ in range(3):
        reader.done(reader.read(1, 0))
    assert reader.seen() == {"s": 2}


def test_last_delivered_id(bus: Bus) -> None:
    reader = bus.group(EVENTS, "g", "c")
    assert reader.last_delivered_id() == "0-0"
    bus.publish(EVENTS, outgoing("a", "b"))
    assert reader.read(1, 0)[0].id == reader.last_delivered_id() == bus.read(EVENTS, "0", 1, 0)[0].id


def test_lag_counts_pending_and_new(bus: Bus) -> None:
    assert bus.lag(EVENTS, "g") == 0
    bus.publish(EVENTS, outgoing("a", "b", "c"))
    assert bus.lag(EVENTS, "g") == 3
    reader = bus.group(EVENTS, "g", "c")
    deliveries = reader.read(2, 0)
    assert bus.lag(EVENTS, "g") == 3
    reader.done(deliveries)
    assert bus.lag(EVENTS, "g") == 1


def test_lag_counts_beyond_one_chunk(bus: Bus) -> None:
    bus.publish(EVENTS, outgoing(*["x"] * 2345))
    assert bus.lag(EVENTS, "g") == 2345


def test_a_buried_entry_is_among_the_dead_and_not_given_again(harness: Harness) -> None:
    bus = harness.bus
    bus.publish(EVENTS, outgoing("a"))
    reader = bus.group(EVENTS, "g", "c")
    delivery = reader.read(1, 0)[0]
    reader.bury(delivery, "it does not work")
    assert reader.read(1, 0) == []
    assert reader.seen() == {"s": 1}
    dead = bus.read(EVENTS + ":dead", "0", 10, 0)
    assert (texts(dead), dead[0].raw, dead[0].source, dead[0].sequence) == (["a"], delivery.raw, "s", 1)
    assert harness.raw_entries(EVENTS + ":dead")[0] == {
        b"m": delivery.raw, b"s": b"s", b"n": b"1", b"id": delivery.id.encode(), b"group": b"g",
        b"problem": b"it does not work",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({b"m": b"no json", b"s": b"s", b"n": b"1"}, "Expecting value"),
        ({b"m": b'{"type": "StepCompleted", "job": "j"}', b"s": b"s", b"n": b"1"}, "Field required"),
        ({b"m": b"{}", b"n": b"1"}, "no valid source and sequence"),
        ({b"m": b"{}", b"s": b"s", b"n": b"one"}, "no valid source and sequence"),
        ({b"foreign": b"entry"}, "no valid source and sequence"),
    ],
)
def test_an_invalid_entry_has_its_problem(harness: Harness, fields: dict[bytes, bytes], problem: str) -> None:
    harness.append(EVENTS, fields)
    delivery = harness.bus.group(EVENTS, "g", "c").read(1, 0)[0]
    assert delivery.message is None
    assert problem in (delivery.problem or "")
    assert delivery.raw == fields.get(b"m", b"")


def test_an_unknown_type_is_no_problem(harness: Harness) -> None:
    raw = b'{"type": "FromTheFuture", "job": "j"}'
    harness.append(EVENTS, {b"m": raw, b"s": b"s", b"n": b"4"})
    delivery = harness.bus.read(EVENTS, "0", 1, 0)[0]
    assert delivery[1:] == (None, "s", 4, 1, None, raw)


def test_entries_trimmed_while_pending_come_empty_and_can_be_acknowledged(harness: Harness) -> None:
    bus = harness.bus
    bus.publish(EVENTS, outgoing("a", "b"))
    reader = bus.group(EVENTS, "g", "c")
    assert len(reader.read(2, 0)) == 2
    harness.trim(EVENTS, 1)
    empty, whole = reader.read(10, 0)
    assert (empty.message, empty.source, empty.problem, empty.raw) == (None, "", None, b"")
    assert texts([whole]) == ["b"]
    reader.done([empty, whole])
    assert bus.lag(EVENTS, "g") == 0
    assert reader.read(10, 0) == []
    assert reader.seen() == {"s": 2}


def test_a_dead_consumers_trimmed_entries_do_not_stay_pending(harness: Harness) -> None:
    bus = harness.bus
    bus.publish(EVENTS, outgoing("a", "b"))
    bus.group(EVENTS, "g", "dead").read(2, 0)
    harness.trim(EVENTS, 1)
    harness.let_pending_age(EVENTS, "g", 61)
    reader = bus.group(EVENTS, "g", "alive")
    deliveries = reader.read(10, 0)
    assert texts(deliveries[-1:]) == ["b"]
    reader.done(deliveries)
    assert bus.lag(EVENTS, "g") == 0


def test_old_entries_are_trimmed_by_age(harness: Harness) -> None:
    day_and_hour = 25 * 3600
    harness.append_old(EVENTS, day_and_hour, 300)
    harness.bus.publish(EVENTS, outgoing("new"))
    remaining = harness.bus.read(EVENTS, "0", 1000, 0)
    # Servers trim by whole nodes of about a hundred entries.
    assert texts(remaining[-1:]) == ["new"]
    assert len(remaining) <= 101


def test_a_flush_makes_nobody_deaf(harness: Harness) -> None:
    bus = harness.bus
    bus.publish(EVENTS, outgoing("a"))
    reader = bus.group(EVENTS, "g", "c")
    reader.done(reader.read(1, 0))
    harness.flush()
    assert reader.read(1, 0) == []
    bus.publish(EVENTS, outgoing("b", first=2))
    assert texts(reader.read(1, 1.0)) == ["b"]


def test_a_flush_while_waiting_makes_nobody_deaf(harness: Harness) -> None:
    bus = harness.bus
    bus.publish(EVENTS, outgoing("a"))
    reader = bus.group(EVENTS, "g", "c")
    reader.done(reader.read(1, 0))
    timers = [
        threading.Timer(0.05, harness.flush),
        threading.Timer(0.1, lambda: bus.publish(EVENTS, outgoing("b", first=2))),
    ]
    for timer in timers:
        timer.start()
    got = reader.read(1, 2.0) or reader.read(1, 2.0)
    for timer in timers:
        timer.join()
    assert texts(got) == ["b"]


@pytest.mark.parametrize(
    "call",
    [
        lambda bus: bus.publish(EVENTS, outgoing("a")),
        lambda bus: bus.read(EVENTS, "0", 1, 0),
        lambda bus: bus.lag(EVENTS, "g"),
        lambda bus: bus.group(EVENTS, "g", "c").read(1, 0),
        lambda bus: bus.group(EVENTS, "g", "c").seen(),
        lambda bus: bus.group(EVENTS, "g", "c").last_delivered_id(),
        lambda bus: bus.group(EVENTS, "g", "c").done(LogLines.deliveries("a")),
        lambda bus: bus.group(EVENTS, "g", "c").bury(LogLines.deliveries("a")[0], "no"),
    ],
    ids=["publish", "read", "lag", "group-read", "seen", "last-delivered", "done", "bury"],
)
def test_everything_says_when_nobody_answers(harness: Harness, call: Callable[[Bus], object]) -> None:
    harness.bus.publish(EVENTS, outgoing("before"))
    harness.go_away()
    try:
        with pytest.raises(BusUnavailable):
            call(harness.bus)
    finally:
        harness.come_back()
    assert "before" in texts(harness.bus.read(EVENTS, "0", 9, 0))


def test_a_reader_goes_on_where_it_was_after_an_outage(harness: Harness) -> None:
    bus = harness.bus
    bus.publish(EVENTS, outgoing("a", "b"))
    reader = bus.group(EVENTS, "g", "c")
    first = reader.read(1, 0)
    harness.go_away()
    with pytest.raises(BusUnavailable):
        reader.done(first)
    with pytest.raises(BusUnavailable):
        reader.read(1, 0)
    harness.come_back()
    again = reader.read(1, 0)
    assert texts(again) == ["a"]
    reader.done(again)
    assert texts(reader.read(10, 0)) == ["b"]


def test_many_threads_publish_and_nothing_is_lost(bus: Bus) -> None:
    def publish(source: str) -> None:
        for sequence in range(1, 51):
            bus.publish(EVENTS, outgoing("x", source=source, first=sequence))

    threads = [threading.Thread(target=publish, args=[str(number)]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sequences: dict[str, list[int]] = {}
    for delivery in bus.read(EVENTS, "0", 1000, 0):
        sequences.setdefault(delivery.source, []).append(delivery.sequence)
    assert sequences == {str(number): list(range(1, 51)) for number in range(4)}
