"""The form of a message as a stream entry: fields `m` (JSON), `s` (source), `n` (sequence)."""

from __future__ import annotations

from collections.abc import Mapping

from surefoot.bus.base import Delivery, Outgoing
from surefoot.events import Message, decode_message, encode_message


def encode_fields(item: Outgoing) -> dict[bytes, bytes]:
    """Return the fields of an entry."""
    return {
        b"m": encode_message(item.message).encode(),
        b"s": item.source.encode(),
        b"n": str(item.sequence).encode(),
    }


def decode_entry(entry_id: bytes, fields: Mapping[bytes, bytes] | None, times_delivered: int = 1) -> Delivery:
    """Return an entry as readers get it; never raises for what it contains.

    Args:
        entry_id: As the server gives it.
        fields: None or empty: the entry was trimmed while it was pending.
        times_delivered: How often the group's consumers got it, this time included.
    """
    name = entry_id.decode()
    if not fields:
        return Delivery(name, None, "", 0, times_delivered)
    raw = fields.get(b"m", b"")
    try:
        source, sequence = fields[b"s"].decode(), int(fields[b"n"])
    except (KeyError, ValueError) as error:
        return Delivery(name, None, "", 0, times_delivered, f"no valid source and sequence: {error!r}", raw)
    message, problem = _decode(raw)
    return Delivery(name, message, source, sequence, times_delivered, problem, raw)


def _decode(raw: bytes) -> tuple[Message | None, str | None]:
    try:
        return decode_message(raw), None
    except ValueError as error:
        return None, str(error)
