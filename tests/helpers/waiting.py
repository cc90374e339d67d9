"""Wait for something with a deadline, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], timeout_seconds: float, what: str, every_seconds: float = 0.01) -> T:
    """Return the first true value of the condition; fails when it has none in time."""
    deadline = time.monotonic() + timeout_seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_seconds} s: {what}"
        time.sleep(every_seconds)
    return value
