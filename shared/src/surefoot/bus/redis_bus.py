"""The bus on a Redis-compatible server (Redis >= 6.2, Valkey): streams and consumer groups.

Wire form of an entry: `m` the message as JSON, `s` its source, `n` its sequence. The highest sequence that a group
has done, by source, is the hash `<stream>:seen:<group>`, written in one transaction with the acknowledgement.
Source for the behaviour relied on: redis.io, the commands XADD, XREADGROUP, XAUTOCLAIM, XTRIM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from surefoot.bus.base import Delivery, GroupReader, Outgoing
from surefoot.bus.redis_group import RedisGroupReader
from surefoot.bus.streams import stream_of
from surefoot.bus.wire import decode_entry, encode_fields
from surefoot.errors import BusUnavailable

ANSWER_SECONDS = 4.0
"""A server that says nothing for so long does not answer. Below `health.STALE_SECONDS`, so that health can say so."""
LONGEST_BLOCK_SECONDS = 2.0
"""Longer waits return empty after this: a blocked read must end before `ANSWER_SECONDS`."""
TRIM_EVERY_SECONDS = 1.0

_COUNT_CHUNK = 1000
_OUTAGES = (redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError, redis.OutOfMemoryError, OSError)
_OUTAGE_PREFIXES = ("MISCONF", "LOADING", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "NOREPLICAS", "OOM", "EXECABORT")
"""Error answers of a server that cannot serve now and may later."""

T = TypeVar("T")


class RedisBus:
    """A `Bus` on a Redis-compatible server. Thread-safe; connects when first used, and again by itself.

    Args:
        url: `redis://host:port/database`.
        answer_seconds: After this long without an answer the server counts as away.
    """

    def __init__(self, url: str, *, answer_seconds: float = ANSWER_SECONDS) -> None:
        # Any: redis-py's annotations differ between its versions 5 and 8, and mix in the asynchronous client's.
        # RESP2 gives the same shapes in all of them. No retries: those who call know better when to try again.
        self._redis: Any = redis.Redis.from_url(
            url,
            protocol=2,
            socket_timeout=answer_seconds,
            socket_connect_timeout=answer_seconds,
            retry=Retry(NoBackoff(), 0),
        )
        keywords = self._redis.connection_pool.connection_kwargs
        self._where = f"{keywords.get('host', 'localhost')}:{keywords.get('port', 6379)}"
        self._block_limit_seconds = min(LONGEST_BLOCK_SECONDS, answer_seconds / 2)
        self._trimmed: dict[str, float] = {}

    def publish(self, stream: str, items: Sequence[Outgoing]) -> None:
        """Append in order; see `Bus`. All or none: one transaction."""
        if not items:
            return
        with self._redis.pipeline(transaction=True) as pipe:
            for item in items:
                pipe.xadd(stream, encode_fields(item))
            self._trim(pipe, stream)
            self.call(pipe.execute)

    def read(self, stream: str, after: str, count: int, block_seconds: float) -> list[Delivery]:
        """Return entries after an id; see `Bus`. `$` with an empty answer: what comes between two calls is missed."""
        entries = self.read_raw(stream, after, count, block_seconds)
        return [decode_entry(entry_id, fields) for entry_id, fields in entries]

    def read_raw(
        self, stream: str, after: str, count: int, block_seconds: float
    ) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Return what `read` does, not decoded: (id, fields as `bus.wire` names them).

        Raises:
            BusUnavailable: nobody answers.
        """
        answer = self.call(
            lambda: self._redis.xread({stream: after}, count=count, block=self.block_milliseconds(block_seconds))
        )
        return [entry for _, entries in answer or [] for entry in entries]

    def group(self, stream: str, group: str, consumer: str) -> GroupReader:
        """Return a reader; see `Bus`. The group is made with its first use."""
        return RedisGroupReader(self, self._redis, stream, group, consumer)

    def lag(self, stream: str, group: str) -> int:
        """Count what the group has not done; see `Bus`. Reads the ids of all of it: not for every turn of a loop."""
        info = self.group_info(stream, group)
        after = info["last-delivered-id"].decode() if info else "0-0"
        num_not_done = info["pending"] if info else 0
        while entries := self._entries_after(stream, after):
            num_not_done += len(entries)
            after = entries[-1][0].decode()
        return num_not_done

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def group_info(self, stream: str, group: str) -> dict[str, Any] | None:
        """Return the group's row of XINFO GROUPS; None: there is no such stream or group.

        Raises:
            BusUnavailable: nobody answers.
        """
        try:
            rows = self.call(lambda: self._redis.xinfo_groups(stream))
        except redis.ResponseError as error:
            if "no such key" in str(error):
                return None
            raise
        return next((row for row in rows if row["name"] == group.encode()), None)

    def block_milliseconds(self, block_seconds: float) -> int | None:
        """Return the BLOCK argument; None: do not wait (0 would wait for ever)."""
        milliseconds = int(1000 * min(block_seconds, self._block_limit_seconds))
        return milliseconds if milliseconds > 0 else None

    def call(self, action: Callable[[], T]) -> T:
        """Call redis-py.

        Raises:
            BusUnavailable: nobody answers, or the answer is that it cannot serve now.
        """
        try:
            return action()
        except _OUTAGES as error:
            raise self._unavailable(error) from error
        except redis.ResponseError as error:
            if isinstance(error, redis.exceptions.ExecAbortError) or str(error).startswith(_OUTAGE_PREFIXES):
                raise self._unavailable(error) from error
            raise

    def _entries_after(self, stream: str, entry_id: str) -> list[Any]:
        return list(self.call(lambda: self._redis.xrange(stream, min=f"({entry_id}", count=_COUNT_CHUNK)))

    def _unavailable(self, error: Exception) -> BusUnavailable:
        return BusUnavailable(f"the Redis-compatible server at {self._where} does not answer: {error}")

    def _trim(self, pipe: Any, stream: str) -> None:
        """Trim by age, and by number only as a bound on memory; not with every entry."""
        if time.monotonic() - self._trimmed.get(stream, -TRIM_EVERY_SECONDS) < TRIM_EVERY_SECONDS:
            return
        self._trimmed[stream] = time.monotonic()
        row = stream_of(stream)
        oldest = int(1000 * (time.time() - row.retention_seconds))
        pipe.xtrim(stream, minid=oldest, approximate=True)
        pipe.xtrim(stream, maxlen=row.max_entries, approximate=True)
