"""Output of the ranks, line by line."""

from __future__ import annotations

from typing import ClassVar, Literal

from surefoot.events.base import Event


class LogLine(Event):
    """One line that a rank wrote."""

    type: ClassVar[str] = "LogLine"
    lifecycle: ClassVar[bool] = False

    stream: Literal["stdout", "stderr"]
    text: str
    step: int | None = None
    """Last step that the rank had completed when the line was read."""
