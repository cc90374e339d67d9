"""Two buses under the same tests: how to age, trim, flush and lose each, and short messages to send."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from helpers.server import RealServer
from surefoot.bus.base import Delivery, Outgoing
from surefoot.bus.redis_bus import RedisBus
from surefoot.bus.wire import decode_entry, encode_fields
from surefoot.events import LogLine
from surefoot.testing.bus import MemoryBus


def line(text: str) -> LogLine:
    return LogLine(job="j", stream="stdout", text=text)


def outgoing(*lines: str, source: str = "s", first: int = 1) -> list[Outgoing]:
    return [Outgoing(line(text), source, first + i) for i, text in enumerate(lines)]


def texts(deliveries: Sequence[Delivery]) -> list[str]:
    return [d.message.text if isinstance(d.message, LogLine) else f"({d.problem})" for d in deliveries]


class LogLines:
    @staticmethod
    def deliveries(*lines: str) -> list[Delivery]:
        return [decode_entry(b"1-%d" % i, encode_fields(item)) for i, item in enumerate(outgoing(*lines), 1)]


class MemoryHarness:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._shift_seconds = 0.0
        self.bus = MemoryBus(clock=lambda: time.time() + self._shift_seconds)

    def append(self, stream: str, fields: dict[bytes, bytes]) -> None:
        self.bus.append(stream, fields)

    def append_old(self, stream: str, age_seconds: float, count: int) -> None:
        self._shift_seconds -= age_seconds
        self.bus.publish(stream, outgoing(*["old"] * count))
        self._shift_seconds += age_seconds

    def raw_entries(self, stream: str) -> list[dict[bytes, bytes]]:
        return list(self.bus._streams[stream].entries.values())

    def trim(self, stream: str, num_entries: int) -> None:
        self.bus.trim(stream, num_entries)

    def let_pending_age(self, stream: str, group: str, seconds: float) -> None:
        self._shift_seconds += seconds

    def flush(self) -> None:
        self.bus.flush()

    def go_away(self) -> None:
        self.bus.available = False

    def come_back(self) -> None:
        self.bus.available = True


class RealHarness:
    def __init__(self, directory: Path, command: list[str]) -> None:
        self.server = RealServer(directory, command).start()
        self.bus = RedisBus(self.server.url, answer_seconds=2.0)

    def reset(self) -> None:
        self.server.client.flushall()
        self.bus.close()
        self.bus = RedisBus(self.server.url)

    def append(self, stream: str, fields: dict[bytes, bytes]) -> None:
        self.server.client.xadd(stream, fields)

    def append_old(self, stream: str, age_seconds: float, count: int) -> None:
        oldest = int(1000 * (time.time() - age_seconds))
        for i, item in enumerate(outgoing(*["old"] * count)):
            self.server.client.xadd(stream, encode_fields(item), id=f"{oldest}-{i + 1}")

    def raw_entries(self, stream: str) -> list[dict[bytes, bytes]]:
        return [fields for _, fields in self.server.client.xrange(stream)]

    def trim(self, stream: str, num_entries: int) -> None:
        self.server.client.xtrim(stream, maxlen=num_entries, approximate=False)

    def let_pending_age(self, stream: str, group: str, seconds: float) -> None:
        """Pretend that what is pending was delivered long ago (XCLAIM IDLE), and to nobody new."""
        client = self.server.client
        for row in client.xpending_range(stream, group, "-", "+", 100):
            client.xclaim(
                stream, group, row["consumer"], 0, [row["message_id"]], idle=int(1000 * seconds), justid=True
            )

    def flush(self) -> None:
        self.server.client.flushall()

    def go_away(self) -> None:
        self.server.stop()

    def come_back(self) -> None:
        self.server.start()

    def close(self) -> None:
        self.bus.close()
        self.server.close()
