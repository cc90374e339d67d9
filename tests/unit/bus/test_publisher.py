"""The publisher's numbers: no gaps, none used for two messages, the same for a message that is sent again."""

from __future__ import annotations

import threading

import pytest

from helpers.bus_cases import line
from surefoot.bus.base import Outgoing
from surefoot.bus.publisher import Publisher
from surefoot.bus.streams import EVENTS, commands_stream
from surefoot.errors import BusUnavailable
from surefoot.testing.bus import MemoryBus


class HalfDeafBus(MemoryBus):
    """Takes what is published and then says that nobody answered."""

    deaf = False

    def publish(self, stream: str, items: list[Outgoing]) -> None:  # type: ignore[override]
        super().publish(stream, items)
        if self.deaf:
            raise BusUnavailable("the answer was lost")


def numbers(bus: MemoryBus, stream: str = EVENTS) -> list[tuple[str, int]]:
    return [(d.message.text, d.sequence) for d in bus.read(stream, "0", 100, 0)]  # type: ignore[union-attr]


def test_counts_from_one_per_stream() -> None:
    bus = MemoryBus()
    publisher = Publisher(bus, "api")
    publisher.publish(line("a"))
    publisher.publish(line("b"), commands_stream("j"))
    publisher.publish_all([line("c"), line("d")])
    publisher.publish_all([])
    assert numbers(bus) == [("a", 1), ("c", 2), ("d", 3)]
    assert numbers(bus, commands_stream("j")) == [("b", 1)]
    assert publisher.source.startswith("api:")
    assert publisher.source != Publisher(bus, "api").source


def test_sending_again_uses_the_same_number() -> None:
    bus = HalfDeafBus()
    publisher = Publisher(bus, "api")
    message = line("a")
    bus.deaf = True
    for _ in range(2):
        with pytest.raises(BusUnavailable):
            publisher.publish(message)
    bus.deaf = False
    publisher.publish(message)
    publisher.publish(line("b"))
    assert numbers(bus) == [("a", 1), ("a", 1), ("a", 1), ("b", 2)]


def test_a_number_is_never_given_to_a_second_message() -> None:
    bus = HalfDeafBus()
    publisher = Publisher(bus, "api")
    first = line("a")
    bus.deaf = True
    with pytest.raises(BusUnavailable):
        publisher.publish(first)
    bus.deaf = False
    publisher.publish(line("b"))
    publisher.publish(first)
    assert numbers(bus) == [("a", 1), ("b", 2), ("a", 3)]


def test_threads_share_one_sequence_without_gaps() -> None:
    bus = MemoryBus()
    publisher = Publisher(bus, "api")
    threads = [threading.Thread(target=lambda: [publisher.publish(line("x")) for _ in range(25)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sequence for _, sequence in numbers(bus)] == list(range(1, 101))
