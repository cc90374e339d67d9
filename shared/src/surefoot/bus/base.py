"""What a bus is. `RedisBus` is real, `surefoot.testing.bus.MemoryBus` is in memory; one suite tests both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from surefoot.events import Message


class Outgoing(NamedTuple):
    """A message with where it comes from.

    Attributes:
        message: What is sent.
        source: Who sends it: `<service>:<unique per process>`, or `job:<name>:<id of its event file>`.
        sequence: Counts up by one per source, from 1: readers see by it what was lost and what came twice.
    """

    message: Message
    source: str
    sequence: int


class Delivery(NamedTuple):
    """A message as a reader gets it.

    Attributes:
        id: Of the stream entry; `ms-n`, rising.
        message: What was sent; None: the entry is empty (trimmed while it was pending) or of an unknown type.
        source: See Outgoing; "" when the entry is empty.
        sequence: See Outgoing; 0 when the entry is empty.
        times_delivered: 1 the first time.
        problem: Why a known type could not be decoded; None when all is well.
        raw: The entry as it came, for the dead letter.
    """

    id: str
    message: Message | None
    source: str
    sequence: int
    times_delivered: int = 1
    problem: str | None = None
    raw: bytes = b""


class GroupReader(Protocol):
    """One consumer of a consumer group. Not thread-safe. Every method raises BusUnavailable when nobody answers."""

    def read(self, count: int, block_seconds: float) -> list[Delivery]:
        """Return own pending entries first, then those that dead consumers left, then new ones; waits for new ones."""

    def done(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledge, and remember the highest sequence per source for the group."""

    def bury(self, delivery: Delivery, problem: str) -> None:
        """Put the entry into `<stream>:dead` with the problem, and acknowledge it: one transaction."""

    def seen(self) -> dict[str, int]:
        """Return the highest sequence that this group has done, by source."""

    def last_delivered_id(self) -> str:
        """Return the id of the newest entry that was given to any consumer of the group; `0-0` at first."""


class Bus(Protocol):
    """Streams of messages. Thread-safe. Every method raises BusUnavailable when nobody answers."""

    def publish(self, stream: str, items: Sequence[Outgoing]) -> None:
        """Append in order, in one round trip; trims to the stream's retention. At least once: may repeat on error."""

    def read(self, stream: str, after: str, count: int, block_seconds: float) -> list[Delivery]:
        """Return entries after an id, without a group: `0` from the beginning, `$` only what comes from now on."""

    def group(self, stream: str, group: str, consumer: str) -> GroupReader:
        """Return a reader; the group begins at the beginning of the stream."""

    def lag(self, stream: str, group: str) -> int:
        """Return how many entries the group has not done yet, counted and not taken from the server's own `lag`."""

    def close(self) -> None:
        """Let go of the connections."""
