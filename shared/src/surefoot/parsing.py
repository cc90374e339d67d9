"""JSON from files that anybody may have written."""

from __future__ import annotations

import json
from typing import Any


def parse_json(data: str | bytes | bytearray) -> Any:
    """Return what a JSON text holds.

    Raises:
        ValueError: it is not JSON, or nested so deeply that Python's parser gives up, which is no error of ours.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
