from __future__ import annotations

import json

from surefoot.events import anomaly, checkpoint, commands, logs, recovery, training
from surefoot.events.base import Event, Message

MESSAGE_TYPES: dict[str, type[Message]] = {
    cls.type: cls
    for module in (anomaly, checkpoint, commands, logs, recovery, training)
    for cls in vars(module).values()
    if isinstance(cls, type) and issubclass(cls, Message) and "type" in vars(cls)
}
EVENT_TYPES: dict[str, type[Event]] = {
    name: cls for name, cls in MESSAGE_TYPES.items() if issubclass(cls, Event)
}


def encode_message(message: Message) -> str:
    """Return one line of JSON that names the message's type."""
    return json.dumps({"type": message.type} | json.loads(message.model_dump_json()), separators=(",", ":"))


def decode_message(line: str | bytes) -> Message | None:
    """Return the message of one line of JSON.

    Returns:
        None for a type that this version does not know.

    Raises:
        ValueError: not JSON, or a known type with invalid fields (pydantic's ValidationError is one).
    """
    data = json.loads(line)
    if not isinstance(data, dict) or not isinstance(data.get("type"), str):
        raise ValueError("a message is a JSON object with a string `type`")
    cls = MESSAGE_TYPES.get(data["type"])
    return None if cls is None else cls.model_validate(data)
