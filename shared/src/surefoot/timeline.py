"""Named moments in the start of this process, so that a restart can be taken apart into its stages."""

from __future__ import annotations

import time

_marks: list[tuple[str, float]] = []


def mark(name: str) -> None:
    """Note the moment. Cheap: one clock read and one append. Any thread."""
    _marks.append((name, time.monotonic()))


def marks() -> tuple[tuple[str, float], ...]:
    """Return all marks so far as (name, CLOCK_MONOTONIC seconds), in order."""
    return tuple(_marks)


def reset() -> None:
    """Forget all marks (a forked child begins its own timeline)."""
    _marks.clear()
