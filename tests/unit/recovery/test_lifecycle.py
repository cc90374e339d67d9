"""The states of an incident."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import product

import pytest

from surefoot.catalogue.models import Incident
from surefoot.events import IncidentState
from surefoot_recovery.lifecycle import TRANSITIONS, move

NOW = datetime(2026, 12, 1, tzinfo=UTC)


@pytest.mark.parametrize(("before", "after"), [*product(IncidentState, IncidentState)])
def test_only_what_is_in_the_table_happens(before: IncidentState, after: IncidentState) -> None:
    incident = Incident(id=1, state=before, outcome="")
    if after is not before and after not in TRANSITIONS[before]:
        with pytest.raises(ValueError, match=f"incident 1 is {before} and cannot become {after}"):
            move(incident, after, "why", NOW)
        return
    move(incident, after, "why", NOW)
    assert (incident.state, incident.outcome) == (after, "why")
    assert (incident.closed_at is not None) == (not TRANSITIONS[after])
    assert (incident.resumed_at is not None) == (after is IncidentState.RESUMED)


def test_escalated_can_be_reached_from_any_state_but_healed() -> None:
    reached = {state for state, following in TRANSITIONS.items() if IncidentState.ESCALATED in following}
    assert reached == set(IncidentState) - {IncidentState.HEALED, IncidentState.ESCALATED}
