"""The consumer: effects before acknowledgements, repeats dropped, losses told, failures tried again in order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from helpers.bus_cases import line, outgoing
from surefoot.bus.base import Delivery
from surefoot.bus.consumer import MAX_DELIVERIES, Consumer
from surefoot.bus.streams import EVENTS
from surefoot.errors import BusUnavailable, CatalogueUnavailable
from surefoot.events import LogLine, StepsCleared
from surefoot.testing.bus import MemoryBus


class Handled:
    """A handler that keeps what it got and can be told to fail."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.failures: dict[str, list[Exception]] = {}

    def __call__(self, event: LogLine, delivery: Delivery) -> None:
        if self.failures.get(event.text):
            raise self.failures[event.text].pop(0)
        self.texts.append(event.text)


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus()


@pytest.fixture
def handled() -> Handled:
    return Handled()


@pytest.fixture
def make_consumer(bus: MemoryBus, handled: Handled) -> Callable[[], Consumer]:
    return lambda: Consumer(bus.group(EVENTS, "g", "c"), {LogLine: handled})


def dead(bus: MemoryBus) -> list[Delivery]:
    return bus.read(EVENTS + ":dead", "0", 100, 0)


def test_handles_in_order_then_acknowledges(
    bus: MemoryBus, handled: Handled, make_consumer: Callable[[], Consumer]
) -> None:
    bus.publish(EVENTS, outgoing("a", "b"))
    consumer = make_consumer()
    consumer.turn(0)
    assert (handled.texts, consumer.num_handled, bus.lag(EVENTS, "g")) == (["a", "b"], 2, 0)
    consumer.turn(0)
    assert handled.texts == ["a", "b"]


def test_a_repeat_is_acknowledged_unhandled_also_after_a_restart(
    bus: MemoryBus, handled: Handled, make_consumer: Callable[[], Consumer]
) -> None:
    bus.publish(EVENTS, outgoing("a", "b"))
    make_consumer().turn(0)
    bus.publish(EVENTS, outgoing("a", "b", "c"))
    restarted = make_consumer()
    restarted.turn(0)
    assert handled.texts == ["a", "b", "c"]
    assert (restarted.num_repeated, restarted.num_lost, bus.lag(EVENTS, "g")) == (2, 0, 0)


def test_a_repeat_within_one_batch_is_seen(
    bus: MemoryBus, handled: Handled, make_consumer: Callable[[], Consumer]
) -> None:
    bus.publish(EVENTS, [*outgoing("a"), *outgoing("a"), *outgoing("b", first=2)])
    make_consumer().turn(0)
    assert handled.texts == ["a", "b"]


def test_a_gap_is_told_before_the_next_message_is_handled(bus: MemoryBus) -> None:
    story: list[object] = []
    consumer = Consumer(
        bus.group(EVENTS, "g", "c"),
        {LogLine: lambda event, delivery: story.append(event.text)},
        lambda source, count: story.append((source, count)),
    )
    bus.publish(EVENTS, [*outgoing("a"), *outgoing("d", first=4), *outgoing("x", source="other", first=3)])
    consumer.turn(0)
    assert story == ["a", ("s", 2), "d", ("other", 2), "x"]
    assert consumer.num_lost == 4


def test_a_gap_is_told_once_although_its_message_fails(bus: MemoryBus, handled: Handled) -> None:
    told: list[int] = []
    consumer = Consumer(bus.group(EVENTS, "g", "c"), {LogLine: handled}, lambda source, count: told.append(count))
    handled.failures["b"] = [RuntimeError("no"), CatalogueUnavailable("away")]
    bus.publish(EVENTS, outgoing("b", first=2))
    consumer.turn(0)
    with pytest.raises(CatalogueUnavailable):
        consumer.turn(0)
    consumer.turn(0)
    assert (told, consumer.num_lost, handled.texts) == ([1], 1, ["b"])


def test_unknown_unhandled_and_empty_are_acknowledged(
    bus: MemoryBus, handled: Handled, make_consumer: Callable[[], Consumer]
) -> None:
    bus.append(EVENTS, {b"m": b'{"type": "FromTheFuture"}', b"s": b"s", b"n": b"1"})
    bus.publish(EVENTS, outgoing("pending", first=2))
    bus.group(EVENTS, "g", "c").read(10, 0)
    bus.trim(EVENTS, 1)
    bus.trim(EVENTS, 0)
    consumer = make_consumer()
    consumer.turn(0)
    assert (consumer.num_empty, bus.lag(EVENTS, "g")) == (2, 0)
    bus.append(EVENTS, {b"m": b'{"type": "FromTheFuture"}', b"s": b"t", b"n": b"1"})
    bus.publish(EVENTS, [outgoing("x", source="t", first=2)[0]._replace(message=StepsCleared(job="j", through_step=1))])
    bus.publish(EVENTS, outgoing("y", source="t", first=3))
    consumer.turn(0)
    assert (consumer.num_unknown, consumer.num_lost, handled.texts, bus.lag(EVENTS, "g")) == (1, 0, ["y"], 0)


def test_an_invalid_message_is_buried_and_leaves_no_gap(
    bus: MemoryBus, handled: Handled, make_consumer: Callable[[], Consumer]
) -> None:
    bus.append(EVENTS, {b"m": b'{"type": "LogLine", "job": "j"}', b"s": b"s", b"n": b"1"})
    bus.publish(EVENTS, outgoing("b", first=2))
    consumer = make_consumer()
    consumer.turn(0)
    assert (handled.texts, consumer.num_buried, consumer.num_lost) == (["b"], 1, 0)
    assert [delivery.raw for delivery in dead(bus)] == [b'{"type": "LogLine", "job": "j"}']
    assert bus.lag(EVENTS, "g") == 0


def test_an_outage_in_a_handler_acknowledges_nothing_from_there_on(
    bus: MemoryBus, handled: Handled, make_consumer: Callable[[], Consumer]
) -> None:
    handled.failures["b"] = [CatalogueUnavailable("away")] * 7
    bus.publish(EVENTS, outgoing("a", "b", "c"))
    consumer = make_consumer()
    for _ in range(7):
        with pytest.raises(CatalogueUnavailable):
            consumer.turn(0)
    assert (handled.texts, bus.lag(EVENTS, "g")) == (["a"], 2)
    while bus.lag(EVENTS, "g"):
        consumer.turn(0)
    assert handled.texts == ["a", "b", "c"]


def test_an_outage_uses_up_no_tries(bus: MemoryBus, handled: Handled, make_consumer: Callable[[], Consumer]) -> None:
    handled.failures["a"] = [*[CatalogueUnavailable("away")] * 7, RuntimeError("odd")]
    bus.publish(EVENTS, outgoing("a"))
    consumer = make_consumer()
    for _ in range(7):
        with pytest.raises(CatalogueUnavailable):
            consumer.turn(0)
    consumer.turn(0)
    consumer.turn(0)
    assert (handled.texts, consumer.num_buried) == (["a"], 0)


def test_a_failure_is_tried_again_before_what_follows(
    bus: MemoryBus, handled: Handled, make_consumer: Callable[[], Consumer]
) -> None:
    handled.failures["b"] = [RuntimeError("odd")] * (MAX_DELIVERIES - 1)
    bus.publish(EVENTS, outgoing("a", "b", "c"))
    consumer = make_consumer()
    for _ in range(MAX_DELIVERIES + 1):
        consumer.turn(0)
    assert (handled.texts, consumer.num_buried, bus.lag(EVENTS, "g")) == (["a", "b", "c"], 0, 0)


def test_what_always_fails_is_buried_and_the_next_is_not_counted_with_it(
    bus: MemoryBus, handled: Handled, make_consumer: Callable[[], Consumer]
) -> None:
    handled.failures = {"a": [RuntimeError("bad a")] * 9, "b": [RuntimeError("bad b")]}
    bus.publish(EVENTS, outgoing("a", "b", "c"))
    consumer = make_consumer()
    for _ in range(6):
        consumer.turn(0)
    assert (handled.texts, consumer.num_buried, bus.lag(EVENTS, "g")) == (["b", "c"], 1, 0)
    assert len(handled.failures["a"]) == 9 - MAX_DELIVERIES


def test_tries_are_counted_over_restarts(
    bus: MemoryBus, handled: Handled, make_consumer: Callable[[], Consumer]
) -> None:
    handled.failures["a"] = [RuntimeError("bad")] * 9
    bus.publish(EVENTS, outgoing("a", "b"))
    for _ in range(MAX_DELIVERIES):
        make_consumer().turn(0)
    make_consumer().turn(0)
    assert handled.texts == ["b"]
    assert len(dead(bus)) == 1


def test_a_lost_acknowledgement_repeats_no_effect(
    bus: MemoryBus, handled: Handled, make_consumer: Callable[[], Consumer]
) -> None:
    def fail_to_acknowledge(event: LogLine, delivery: Delivery) -> None:
        handled(event, delivery)
        bus.available = False

    consumer = Consumer(bus.group(EVENTS, "g", "c"), {LogLine: fail_to_acknowledge})
    bus.publish(EVENTS, outgoing("a"))
    with pytest.raises(BusUnavailable):
        consumer.turn(0)
    bus.available = True
    consumer.turn(0)
    assert (handled.texts, bus.lag(EVENTS, "g")) == (["a"], 0)


def test_the_type_is_matched_exactly(bus: MemoryBus) -> None:
    got: list[str] = []
    consumer = Consumer(
        bus.group(EVENTS, "g", "c"),
        {LogLine: lambda e, d: got.append("log"), StepsCleared: lambda e, d: got.append("cleared")},
    )
    bus.publish(EVENTS, [outgoing("x")[0]._replace(message=line("x"))])
    consumer.turn(0)
    assert got == ["log"]
