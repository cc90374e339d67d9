from __future__ import annotations

import json

from surefoot.events import checkpoint, training
from surefoot.events.base import Event

EVENT_TYPES: dict[str, type[Event]] = {
    cls.type: cls
    for module in (checkpoint, training)
    for cls in vars(module).values()
    if isinstance(cls, type) and issubclass(cls, Event) and cls is not Event
}


def encode_event(event: Event) -> str:
    """Return one line of JSON that names the event's type."""
    return json.dumps({"type": event.type} | json.loads(event.model_dump_json()), separators=(",", ":"))


def decode_event(line: str | bytes) -> Event | None:
    """Return the event of one line of JSON.

    Returns:
        None for a type that this version does not know.

    Raises:
        ValueError: not JSON, or a known type with invalid fields (pydantic's ValidationError is one).
    """
    data = json.loads(line)
    if not isinstance(data, dict) or not isinstance(data.get("type"), str):
        raise ValueError("an event is a JSON object with a string `type`")
    cls = EVENT_TYPES.get(data["type"])
    return None if cls is None else cls.model_validate(data)
