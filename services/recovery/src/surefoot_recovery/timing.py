"""How long it took, by the clock that can be trusted."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from surefoot.events import Severity, StepCompleted

SAME_CLOCK_SECONDS = 2.0
"""Monotonic clocks of one host and the time of day agree about a duration to within this; those of two hosts do not,
since a monotonic clock counts from when its host was started."""


def recovery_seconds(evidence: dict[str, Any], resumed: StepCompleted) -> float:
    """Return the seconds from the detection to the first step completed after it.

    Args:
        evidence: Of the incident: its `failures` or `anomalies`, as JSON. The first failure counts, or the first of
            the worst alarms, since recovery lets milder ones pass.
        resumed: That step.
    """
    events = evidence.get("failures") or evidence["anomalies"]
    order = [severity.value for severity in Severity]
    first = max(events, key=lambda event: order.index(event.get("severity", Severity.CRITICAL)))
    sent = float(first["monotonic_seconds"])
    detected: float = first.get("detected_seconds", sent)
    by_wall = (resumed.ts - datetime.fromisoformat(first["ts"])).total_seconds() + sent - detected
    by_clock = resumed.monotonic_seconds - detected
    return max(0.0, by_clock if abs(by_clock - by_wall) < SAME_CLOCK_SECONDS else by_wall)
