"""A bus in memory that keeps the promises of the real one; one suite tests both."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from surefoot.bus.base import Delivery, Outgoing
from surefoot.bus.streams import CLAIM_IDLE_SECONDS, DEAD_SUFFIX, stream_of
from surefoot.bus.wire import decode_entry, encode_fields
from surefoot.errors import BusUnavailable

EntryId = tuple[int, int]


@dataclass
class _Pending:
    consumer: str
    times_delivered: int
    delivered_seconds: float


@dataclass
class _Group:
    last: EntryId = (0, 0)
    pending: dict[EntryId, _Pending] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)


@dataclass
class _Stream:
    entries: dict[EntryId, dict[bytes, bytes]] = field(default_factory=dict)
    newest: EntryId = (0, 0)
    groups: dict[str, _Group] = field(default_factory=dict)


class MemoryBus:
    """A `Bus` within one process. Thread-safe.

    Args:
        clock: Seconds, for ids, ages and idle times.

    Attributes:
        available: False: every call raises BusUnavailable, as when the server is away.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.available = True
        self._clock = clock
        self._changed = threading.Condition()
        self._streams: dict[str, _Stream] = {}

    def publish(self, stream: str, items: Sequence[Outgoing]) -> None:
        """Append in order; see `Bus`."""
        for item in items:
            self.append(stream, encode_fields(item))

    def append(self, stream: str, fields: dict[bytes, bytes]) -> str:
        """Append an entry of any form, and return its id."""
        with self._changed:
            row = self._use(stream)
            row.newest = max((int(1000 * self._clock()), 0), (row.newest[0], row.newest[1] + 1))
            row.entries[row.newest] = fields
            limits = stream_of(stream)
            oldest = (int(1000 * (self._clock() - limits.retention_seconds)), 0)
            while row.entries and (len(row.entries) > limits.max_entries or next(iter(row.entries)) < oldest):
                del row.entries[next(iter(row.entries))]
            self._changed.notify_all()
            return _text(row.newest)

    def read(self, stream: str, after: str, count: int, block_seconds: float) -> list[Delivery]:
        """Return entries after an id; see `Bus`."""
        with self._changed:
            start = self._use(stream).newest if after == "$" else _parse(after)
            self._wait(lambda: self._use(stream).newest > start, block_seconds)
            found = [entry for entry in self._use(stream).entries.items() if entry[0] > start][:count]
            return [decode_entry(_text(entry_id).encode(), fields) for entry_id, fields in found]

    def group(self, stream: str, group: str, consumer: str) -> MemoryGroupReader:
        """Return a reader; see `Bus`."""
        return MemoryGroupReader(self, stream, group, consumer)

    def lag(self, stream: str, group: str) -> int:
        """Count what the group has not done; see `Bus`."""
        with self._changed:
            row = self._use(stream)
            state = row.groups.get(group, _Group())
            return len(state.pending) + sum(entry_id > state.last for entry_id in row.entries)

    def trim(self, stream: str, num_entries: int) -> None:
        """Keep only the newest entries; what is pending stays pending, empty."""
        with self._changed:
            entries = self._use(stream).entries
            while len(entries) > num_entries:
                del entries[next(iter(entries))]

    def flush(self) -> None:
        """Forget everything, groups included."""
        with self._changed:
            self._streams.clear()

    def close(self) -> None:
        """Do nothing: there are no connections."""

    def _use(self, stream: str) -> _Stream:
        if not self.available:
            raise BusUnavailable("the bus in memory was told not to answer")
        return self._streams.setdefault(stream, _Stream())

    def _wait(self, ready: Callable[[], bool], block_seconds: float) -> None:
        if block_seconds > 0:
            self._changed.wait_for(ready, block_seconds)


class MemoryGroupReader:
    """A `GroupReader` of a `MemoryBus`."""

    def __init__(self, bus: MemoryBus, stream: str, group: str, consumer: str) -> None:
        self._bus, self._stream, self._group, self._consumer = bus, stream, group, consumer

    def read(self, count: int, block_seconds: float) -> list[Delivery]:
        """Return own pending entries, then those of dead consumers, then new ones; see `GroupReader`."""
        bus = self._bus
        with bus._changed:
            self._claim()
            own = sorted(key for key, row in self._state().pending.items() if row.consumer == self._consumer)[:count]
            if not own:
                bus._wait(lambda: bus._use(self._stream).newest > self._state().last, block_seconds)
                own = self._take_new(count)
            return [self._deliver(entry_id) for entry_id in own]

    def done(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledge and remember the sequences; see `GroupReader`."""
        with self._bus._changed:
            state = self._state()
            for delivery in deliveries:
                state.pending.pop(_parse(delivery.id), None)
                if delivery.source:
                    state.seen[delivery.source] = max(delivery.sequence, state.seen.get(delivery.source, 0))

    def bury(self, delivery: Delivery, problem: str) -> None:
        """Move to the dead letters and acknowledge; see `GroupReader`."""
        fields = {"s": delivery.source, "n": delivery.sequence, "id": delivery.id, "group": self._group}
        encoded = {key.encode(): str(value).encode() for key, value in (fields | {"problem": problem}).items()}
        with self._bus._changed:
            self._bus.append(self._stream + DEAD_SUFFIX, {b"m": delivery.raw} | encoded)
            self.done([delivery])

    def seen(self) -> dict[str, int]:
        """Return the highest sequence done, by source; see `GroupReader`."""
        with self._bus._changed:
            return dict(self._state().seen)

    def last_delivered_id(self) -> str:
        """Return the id of the newest entry given out; see `GroupReader`."""
        with self._bus._changed:
            return _text(self._state().last)

    def _state(self) -> _Group:
        return self._bus._use(self._stream).groups.setdefault(self._group, _Group())

    def _claim(self) -> None:
        idle_since = self._bus._clock() - CLAIM_IDLE_SECONDS
        for row in self._state().pending.values():
            if row.delivered_seconds <= idle_since:
                row.consumer = self._consumer

    def _take_new(self, count: int) -> list[EntryId]:
        state = self._state()
        new = [entry_id for entry_id in self._bus._use(self._stream).entries if entry_id > state.last][:count]
        for entry_id in new:
            state.pending[entry_id] = _Pending(self._consumer, 0, 0.0)
            state.last = entry_id
        return new

    def _deliver(self, entry_id: EntryId) -> Delivery:
        row = self._state().pending[entry_id]
        row.times_delivered += 1
        row.delivered_seconds = self._bus._clock()
        fields = self._bus._use(self._stream).entries.get(entry_id)
        return decode_entry(_text(entry_id).encode(), fields, row.times_delivered)


def _text(entry_id: EntryId) -> str:
    return f"{entry_id[0]}-{entry_id[1]}"


def _parse(text: str) -> EntryId:
    milliseconds, _, number = text.partition("-")
    return int(milliseconds), int(number or 0)
