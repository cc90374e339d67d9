"""What became of incidents and commands."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from surefoot.events.base import Event


class IncidentState(StrEnum):
    """OPEN -> ACTING -> RESUMED -> HEALED, or ESCALATED from any but HEALED; recovery owns the transitions."""

    OPEN = "OPEN"
    """Seen; nothing was ordered (yet)."""
    ACTING = "ACTING"
    """A command is on its way, or ranks are being restarted."""
    RESUMED = "RESUMED"
    """The next optimizer step is done: recovery seconds end here."""
    HEALED = "HEALED"
    """The loss is back in band."""
    ESCALATED = "ESCALATED"
    """The ladder is used up, or the fault cannot be retried: a person is needed."""


class IncidentChanged(Event):
    """An incident was opened or went on to another state."""

    type: ClassVar[str] = "IncidentChanged"

    incident_id: int
    kind: str
    """An AnomalyKind, `rank_failure` or `hang`."""
    severity: str
    state: IncidentState
    onset_step: int | None = None
    action: str | None = None
    """What was ordered, e.g. `rollback`, or None."""
    reason: str
    recovery_seconds: float | None = None
    """From detection to the next completed optimizer step of all ranks."""
    steps_lost: int | None = None


class CommandApplied(Event):
    """All ranks did what a command says. `attempt` is the attempt that it was for."""

    type: ClassVar[str] = "CommandApplied"

    number: int
    command: str
    """Its type, e.g. `RollBack`."""
    step: int
    """The step at whose end it was applied."""
    new_attempt: int | None = None
    """The attempt that it began, if it began one."""
    seconds: float
    """From when the ranks saw it until it was done."""


class CommandRefused(Event):
    """The ranks did nothing."""

    type: ClassVar[str] = "CommandRefused"

    number: int
    command: str
    step: int
    reason: str
