"""One consumer of a consumer group on a Redis-compatible server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import redis

from surefoot.bus.base import Delivery
from surefoot.bus.streams import CLAIM_IDLE_SECONDS, DEAD_SUFFIX, stream_of
from surefoot.bus.wire import decode_entry
from surefoot.errors import BusUnavailable

if TYPE_CHECKING:
    from surefoot.bus.redis_bus import RedisBus

CLAIM_EVERY_SECONDS = 10.0

_NO_GROUP_PREFIXES = ("NOGROUP", "UNBLOCKED")
"""Answers after a flush, without and with a read that was waiting."""
_RAISE_SEQUENCES = """
for i = 1, #ARGV, 2 do
    local known = tonumber(redis.call('HGET', KEYS[1], ARGV[i]) or '0')
    if tonumber(ARGV[i + 1]) > known then redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
end
"""
"""A repeat that is acknowledged must not lower what is known."""
_ALL = "0"
_NEW = ">"

T = TypeVar("T")


class RedisGroupReader:
    """A `GroupReader`. Not thread-safe.

    Args:
        bus: Whose errors and limits hold.
        client: Its redis-py client.
        stream: Read from its beginning when the group is new.
        group: Made when it is not there.
        consumer: The same name after a restart, so that what was pending is given again at once and in order.
    """

    def __init__(self, bus: RedisBus, client: Any, stream: str, group: str, consumer: str) -> None:
        self._bus, self._redis = bus, client
        self._stream, self._group, self._consumer = stream, group, consumer
        self._seen_key = f"{stream}:seen:{group}"
        self._outstanding: set[str] = set()
        self._own_backlog = True
        self._claim_next = -CLAIM_EVERY_SECONDS

    def read(self, count: int, block_seconds: float) -> list[Delivery]:
        """Return own pending entries, then those of dead consumers, then new ones; see `GroupReader`."""
        try:
            deliveries = self._with_group(lambda: self._read(count, block_seconds))
        except BusUnavailable:
            # The answer may have been lost on its way: what it gave is pending now.
            self._own_backlog = True
            raise
        self._outstanding.update(delivery.id for delivery in deliveries)
        return deliveries

    def done(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledge and remember the sequences in one transaction; see `GroupReader`."""
        if not deliveries:
            return
        with self._redis.pipeline(transaction=True) as pipe:
            self._acknowledge(pipe, deliveries)
            self._bus.call(pipe.execute)
        self._outstanding.difference_update(delivery.id for delivery in deliveries)

    def bury(self, delivery: Delivery, problem: str) -> None:
        """Move to the dead letters and acknowledge in one transaction; see `GroupReader`."""
        dead = self._stream + DEAD_SUFFIX
        fields = {
            "m": delivery.raw, "s": delivery.source, "n": delivery.sequence,
            "id": delivery.id, "group": self._group, "problem": problem,
        }  # fmt: skip
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.xadd(dead, fields, maxlen=stream_of(dead).max_entries, approximate=True)
            self._acknowledge(pipe, [delivery])
            self._bus.call(pipe.execute)
        self._outstanding.discard(delivery.id)

    def seen(self) -> dict[str, int]:
        """Return the highest sequence done, by source; see `GroupReader`."""
        answer = self._bus.call(lambda: self._redis.hgetall(self._seen_key))
        return {source.decode(): int(sequence) for source, sequence in answer.items()}

    def last_delivered_id(self) -> str:
        """Return the id of the newest entry given out; see `GroupReader`."""
        info = self._bus.group_info(self._stream, self._group)
        return info["last-delivered-id"].decode() if info else "0-0"

    def _read(self, count: int, block_seconds: float) -> list[Delivery]:
        if time.monotonic() >= self._claim_next:
            self._claim(count)
        if self._own_backlog or self._outstanding:
            deliveries = self._read_own(count)
            self._own_backlog = len(deliveries) == count
            if deliveries:
                return deliveries
            self._outstanding.clear()
        entries = self._read_group(_NEW, count, self._bus.block_milliseconds(block_seconds))
        return [decode_entry(entry_id, fields) for entry_id, fields in entries]

    def _read_own(self, count: int) -> list[Delivery]:
        """Read what this consumer was given and has not done, oldest first; a server counts this as a delivery."""
        entries = self._read_group(_ALL, count, None)
        if not entries:
            return []
        first, last = entries[0][0], entries[-1][0]
        pending = self._bus.call(
            lambda: self._redis.xpending_range(self._stream, self._group, first, last, len(entries), self._consumer)
        )
        times = {row["message_id"]: row["times_delivered"] for row in pending}
        return [decode_entry(entry_id, fields, times.get(entry_id, 1)) for entry_id, fields in entries]

    def _read_group(self, after: str, count: int, block: int | None) -> list[Any]:
        answer = self._bus.call(
            lambda: self._redis.xreadgroup(
                self._group, self._consumer, {self._stream: after}, count=count, block=block
            )
        )
        return list(answer[0][1]) if answer else []

    def _claim(self, count: int) -> None:
        """Make what dead consumers left our own; it is then read as own backlog.

        JUSTID leaves the number of deliveries alone. Redis 6.2 hands over entries that were trimmed meanwhile, later
        versions drop them; either way they are told by a gap in the sequence.
        """
        idle_milliseconds = int(1000 * CLAIM_IDLE_SECONDS)
        claimed = self._bus.call(
            lambda: self._redis.xautoclaim(
                self._stream, self._group, self._consumer, idle_milliseconds, count=count, justid=True
            )
        )
        if claimed:
            self._own_backlog = True
        else:
            self._claim_next = time.monotonic() + CLAIM_EVERY_SECONDS

    def _with_group(self, action: Callable[[], T]) -> T:
        """Do something that needs the group, which is made, once, when it is not there."""
        try:
            return action()
        except redis.ResponseError as error:
            if not str(error).startswith(_NO_GROUP_PREFIXES):
                raise
        self._create_group()
        try:
            return action()
        except redis.ResponseError as error:
            if str(error).startswith(_NO_GROUP_PREFIXES):
                raise BusUnavailable(f"the group {self._group} of {self._stream} vanishes: {error}") from error
            raise

    def _create_group(self) -> None:
        try:
            self._bus.call(lambda: self._redis.xgroup_create(self._stream, self._group, id="0", mkstream=True))
        except redis.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):  # somebody else was quicker
                raise

    def _acknowledge(self, pipe: Any, deliveries: Sequence[Delivery]) -> None:
        pipe.xack(self._stream, self._group, *(delivery.id for delivery in deliveries))
        highest: dict[str, int] = {}
        for delivery in deliveries:
            if delivery.source:
                highest[delivery.source] = max(delivery.sequence, highest.get(delivery.source, 0))
        if highest:
            pipe.eval(_RAISE_SEQUENCES, 1, self._seen_key, *chain.from_iterable(highest.items()))
