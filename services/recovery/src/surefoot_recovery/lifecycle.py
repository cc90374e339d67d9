"""The states of an incident, and what an incident says of itself. The one place where `Incident.state` is set.

OPEN -> ACTING -> RESUMED -> HEALED, or ESCALATED from any but HEALED
"""

from __future__ import annotations

from datetime import datetime

from surefoot.catalogue.models import Incident
from surefoot.events import IncidentState

OPEN, ACTING, RESUMED = IncidentState.OPEN, IncidentState.ACTING, IncidentState.RESUMED
HEALED, ESCALATED = IncidentState.HEALED, IncidentState.ESCALATED

TRANSITIONS: dict[IncidentState, frozenset[IncidentState]] = {
    # RESUMED: training began again, from before the onset, by itself. HEALED: it was back in band by itself.
    OPEN: frozenset({ACTING, RESUMED, HEALED, ESCALATED}),
    # OPEN: the order came to nothing, and nothing else was ordered.
    ACTING: frozenset({RESUMED, OPEN, ESCALATED}),
    # ACTING: it came again, or did not heal in time.
    RESUMED: frozenset({HEALED, ACTING, ESCALATED}),
    HEALED: frozenset(),
    ESCALATED: frozenset(),
}


def move(incident: Incident, state: IncidentState, why: str, now: datetime) -> None:
    """Take an incident to another state; to the one that it is in: only note why.

    Raises:
        ValueError: there is no such transition.
    """
    present = IncidentState(incident.state)
    if state is not present and state not in TRANSITIONS[present]:
        raise ValueError(f"incident {incident.id} is {present} and cannot become {state}")
    incident.state = state
    note(incident, why)
    if state is RESUMED:
        incident.resumed_at = now
    if not TRANSITIONS[state]:
        incident.closed_at = now


def note(incident: Incident, sentence: str) -> None:
    """Add a sentence to what was done and how it ended."""
    incident.outcome = f"{incident.outcome}\n{sentence}".strip()
