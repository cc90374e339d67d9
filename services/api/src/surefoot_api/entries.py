"""Entries of streams as they came: most are for others than the client, and decoding is what costs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from surefoot.bus.redis_bus import RedisBus
from surefoot.events import decode_message, encode_message


class Entry(NamedTuple):
    """An entry of a stream.

    Attributes:
        id: Of the entry.
        raw: Its message, as JSON that nobody has looked at.
    """

    id: str
    raw: bytes


def read_entries(bus: RedisBus, stream: str, after: str, count: int, block_seconds: float) -> list[Entry]:
    """Return entries after an id, as `Bus.read` does, but not decoded. Any thread.

    Raises:
        BusUnavailable: nobody answers.
    """
    entries = bus.read_raw(stream, after, count, block_seconds)
    return [Entry(entry_id.decode(), fields.get(b"m", b"")) for entry_id, fields in entries]


def may_be_of(job: str) -> Callable[[bytes], object]:
    """Return a cheap check that a message passes if it is of the job; few others do."""
    return re.compile(rb'"job"\s*:\s*"' + re.escape(job.encode()) + b'"').search


def frame(entry: Entry, job: str) -> str:
    """Return the entry as a Server-Sent Event; empty if it is not of the job, or no message that is known."""
    try:
        message = decode_message(entry.raw)
    except ValueError:
        return ""
    if message is None or message.job != job:
        return ""
    return f"id: {entry.id}\nevent: {message.type}\ndata: {encode_message(message)}\n\n"
