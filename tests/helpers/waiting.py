"""Wait for something with a deadline, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], timeout_seconds: float, what: str, every_seconds: float = 0.01) -> T:
    """Return the first true value of the condition; fails when it has none in time.

    The last look begins after the deadline: when this process stood still for that long, what its last look saw may be
    as old as that.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        is_last = time.monotonic() >= deadline
        if value := condition():
            return value
        assert not is_last, f"not within {timeout_seconds} s: {what}"
        time.sleep(every_seconds)
