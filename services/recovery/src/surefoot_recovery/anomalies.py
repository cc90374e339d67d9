"""Alarms of the detector become incidents; what is one trouble becomes one incident."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import structlog
from sqlalchemy.orm import Session

from surefoot.bus.base import Delivery
from surefoot.catalogue.models import Incident
from surefoot.events import AnomalyCleared, AnomalyDetected, Severity, StepsCleared
from surefoot_recovery.desk import Desk
from surefoot_recovery.lifecycle import HEALED, OPEN, RESUMED, move, note
from surefoot_recovery.lookups import (
    APPLIED,
    FAILURE_KINDS,
    actions_of,
    open_incidents,
    policy_of,
    present_of,
    recent_incidents,
)
from surefoot_recovery.orders import act

log = structlog.get_logger(__name__)


class Anomalies:
    """Handles what the detector says.

    Args:
        desk: What to work with.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def detected(self, event: AnomalyDetected, _: Delivery) -> None:
        """Open an incident, or add to the one that it is part of; act when the policy says so."""
        view, now = self._desk.jobs[event.job], self._desk.clock()
        view.attempt = max(view.attempt, event.attempt or 0)
        with self._desk.deciding(event.job) as session:
            policy = policy_of(session, event.job)
            if policy is None:
                log.warning("an anomaly of a job that the catalogue does not know", job_id=event.job)
                return
            present = present_of(session, event.job, view, event.step)
            incidents = recent_incidents(session, event.job, now)
            if any(event.event_id in _event_ids(incident) for incident in incidents):
                return  # delivered again; the outbox sends what was decided then
            incident = next((incident for incident in incidents if self._is_part(event, incident)), None)
            if incident is None:
                incident = _opened(session, event, present.attempt, now)
            else:
                _add(incident, event)
            if view.is_over:
                note(incident, "The job had ended when this was seen.")
                incident.closed_at = incident.closed_at or now
            elif _is_news(event, incident) and any(rung.fits(event.kind, event.severity) for rung in policy.ladder):
                act(session, incident, policy, present, now)

    def cleared(self, event: AnomalyCleared, _: Delivery) -> None:
        """Heal the incident once all its alarms are over; after a roll-back not before the onset is passed again."""
        if self._desk.jobs[event.job].look_at_step is None:
            return
        with self._desk.deciding(event.job) as session:
            for incident in open_incidents(session, event.job):
                if not (_clear(incident, event) and _may_heal(incident, event.attempt)):
                    continue
                if _went_back(session, incident) and event.step <= _last_suspect(incident):
                    _note_once(incident, f"Back in band at step {event.step}: {event.message}")
                else:
                    move(incident, HEALED, event.message, self._desk.clock())

    def steps_cleared(self, event: StepsCleared, _: Delivery) -> None:
        """Heal incidents whose onset the job has passed again without suspicion."""
        if self._desk.jobs[event.job].look_at_step is None:
            return
        with self._desk.deciding(event.job) as session:
            for incident in open_incidents(session, event.job):
                if not _may_heal(incident, event.attempt):
                    continue
                if event.through_step >= _free_step(incident):
                    text = f"No step up to {event.through_step} of attempt {event.attempt} is suspected of anything."
                    move(incident, HEALED, text, self._desk.clock())
                elif incident.resumed_step is not None:  # on its way to the onset: it is not waited for in vain
                    incident.resumed_step = max(incident.resumed_step, event.through_step)

    def _is_part(self, event: AnomalyDetected, incident: Incident) -> bool:
        """Return whether an alarm is about the trouble of an incident, as after a roll-back that did not help."""
        if incident.kind in FAILURE_KINDS or incident.state == HEALED:
            return False
        if incident.closed_at is None and incident.resumed_attempt is not None:
            return True
        if incident.closed_at is not None and event.attempt not in (incident.attempt, incident.resumed_attempt):
            return False
        newest = max(anomaly["step"] for anomaly in incident.evidence["anomalies"])
        return event.onset_step <= int(newest) + self._desk.merge_steps


def _event_ids(incident: Incident) -> set[str]:
    return {incident.event_id} | {anomaly["event_id"] for anomaly in incident.evidence.get("anomalies", ())}


def _evidence(event: AnomalyDetected) -> dict[str, Any]:
    return dict(json.loads(event.model_dump_json())) | {"cleared": False}


def _opened(session: Session, event: AnomalyDetected, attempt: int, now: datetime) -> Incident:
    incident = Incident(
        job=event.job,
        event_id=event.event_id,
        attempt=event.attempt or attempt,
        kind=event.kind,
        severity=event.severity,
        state=OPEN,
        onset_step=event.onset_step,
        detected_step=event.step,
        cause=event.message,
        evidence={"anomalies": [_evidence(event)]},
        outcome="",
        opened_at=now,
    )
    session.add(incident)
    session.flush()
    return incident


def _add(incident: Incident, event: AnomalyDetected) -> None:
    incident.evidence = incident.evidence | {"anomalies": [*incident.evidence["anomalies"], _evidence(event)]}
    order = [severity.value for severity in Severity]
    if order.index(event.severity) > order.index(incident.severity):
        incident.kind, incident.severity, incident.cause = event.kind, event.severity, event.message
        incident.onset_step = min(incident.onset_step, event.onset_step)


def _is_news(event: AnomalyDetected, incident: Incident) -> bool:
    """Return whether the alarm says anything that was not acted on yet."""
    if incident.state == RESUMED:  # a late alarm about what was left behind says nothing new
        return (event.attempt or 0) >= (incident.resumed_attempt or 0)
    return incident.state == OPEN


def _clear(incident: Incident, event: AnomalyCleared) -> bool:
    """Mark the alarms that are over; return whether all are, and one of them by this event."""
    what = {"kind": str(event.kind), "attempt": event.onset_attempt, "onset_step": event.onset_step}
    anomalies = incident.evidence.get("anomalies", [])
    over = [anomaly for anomaly in anomalies if all(anomaly[key] == value for key, value in what.items())]
    if not over:
        return False
    incident.evidence = incident.evidence | {
        "anomalies": [anomaly | {"cleared": True} if anomaly in over else anomaly for anomaly in anomalies]
    }
    return all(anomaly["cleared"] for anomaly in incident.evidence["anomalies"])


def _last_suspect(incident: Incident) -> int:
    """Return the step that an incident about an anomaly must get beyond: its newest onset, or where it resumed."""
    return max(incident.resumed_step or 0, *(int(anomaly["onset_step"]) for anomaly in incident.evidence["anomalies"]))


def _free_step(incident: Incident) -> int:
    """Return the step that must be free of suspicion: the first one after a failure, else the one after the onset."""
    return (incident.resumed_step or 0) if incident.kind in FAILURE_KINDS else _last_suspect(incident) + 1


def _went_back(session: Session, incident: Incident) -> bool:
    """Return whether training resumed from before the onset, so that the trouble may still be to come."""
    if incident.resumed_step is None:
        return False
    applied = [action.kind for action in actions_of(session, incident) if action.state == APPLIED]
    return applied[-1:] == ["rollback"] or incident.resumed_step <= incident.onset_step


def _note_once(incident: Incident, sentence: str) -> None:
    if sentence not in incident.outcome.splitlines():
        note(incident, sentence)


def _may_heal(incident: Incident, attempt: int | None) -> bool:
    """Return whether news of an attempt is news of what the incident came to."""
    if incident.state == RESUMED:
        return (attempt or 0) >= (incident.resumed_attempt or 0)
    return incident.state == OPEN and incident.kind not in FAILURE_KINDS and (attempt or 0) >= incident.attempt
