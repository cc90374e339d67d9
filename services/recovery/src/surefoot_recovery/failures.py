"""Ranks that died or hang, and the end of the job. The launcher restarts by itself; this keeps the record."""

from __future__ import annotations

import json
import signal
from datetime import datetime
from typing import Any

import structlog
from sqlalchemy import and_, or_, select
from sqlalchemy.orm import Session

from surefoot.bus.base import Delivery
from surefoot.catalogue.models import Action, Incident
from surefoot.events import IncidentState, JobFinished, JobState, RankFailed, RankHung, Severity
from surefoot_recovery.desk import Desk
from surefoot_recovery.lifecycle import ACTING, ESCALATED, HEALED, OPEN, move, note
from surefoot_recovery.lookups import (
    APPLIED,
    EXPIRED,
    FAILURE_KINDS,
    UNANSWERED,
    open_incidents,
    policy_of,
    present_of,
    recent_incidents,
    unanswered_actions,
)
from surefoot_recovery.orders import new_action

log = structlog.get_logger(__name__)


class Failures:
    """Handles what the launcher says.

    Args:
        desk: What to work with.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def rank_failed(self, event: RankFailed, _: Delivery) -> None:
        """Open an incident, or add to the one that is not over the failure yet."""
        self._record(event, "rank_failure", _failure_text(event), event.step)

    def rank_hung(self, event: RankHung, _: Delivery) -> None:
        """Open an incident; the kill that follows becomes part of it."""
        text = (
            f"Rank {event.rank} (pid {event.pid}) made no progress in phase {event.phase} for {event.seconds:.1f} s "
            f"(limit {event.limit_seconds:.1f} s) after step {event.step}."
        )
        self._record(event, "hang", text, event.step)

    def job_finished(self, event: JobFinished, _: Delivery) -> None:
        """Close what is open: nothing more will happen to it by itself.

        When it was recovery that ordered the end, a person decides whether the job goes on: nothing that was open
        before may then be acted on again, or the first step of the next attempt would end in the next stop.
        """
        self._desk.jobs[event.job].is_over = True
        now = self._desk.clock()
        with self._desk.deciding(event.job) as session:
            stops = _obeyed_stops(session, event)
            for action in unanswered_actions(session, event.job):
                action.state, action.problem, action.closed_at = EXPIRED, f"The job ended: {event.reason}", now
            for stop in stops:
                stop.state, stop.problem, stop.closed_at = APPLIED, "", now
            for incident in open_incidents(session, event.job):
                if _first(incident)["ts"] > event.model_dump(mode="json")["ts"]:
                    continue
                if stops:
                    move(incident, ESCALATED, f"Recovery stopped the job: {stops[-1].reason}", now)
                else:
                    _close(incident, event, now)

    def _record(self, event: RankFailed | RankHung, kind: str, text: str, step: int | None) -> None:
        view, now = self._desk.jobs[event.job], self._desk.clock()
        with self._desk.deciding(event.job) as session:
            if policy_of(session, event.job) is None:
                log.warning("a failure in a job that the catalogue does not know", job_id=event.job)
                return
            incidents = [i for i in recent_incidents(session, event.job, now) if i.kind in FAILURE_KINDS]
            if any(event.event_id in _event_ids(incident) for incident in incidents):
                return
            evidence = dict(json.loads(event.model_dump_json()))
            same = next((incident for incident in incidents if incident.state == ACTING), None)
            if same is not None:
                same.evidence = same.evidence | {"failures": [*same.evidence["failures"], evidence]}
                note(same, text)
                return
            present = present_of(session, event.job, view, step or 0)
            attempt = event.attempt or present.attempt
            incident = Incident(
                job=event.job,
                event_id=event.event_id,
                attempt=attempt,
                kind=kind,
                severity=Severity.CRITICAL,
                state=OPEN,
                onset_step=present.step if step is None else step,
                detected_step=present.step,
                cause=text,
                evidence={"failures": [evidence]},
                outcome="",
                opened_at=now,
            )
            session.add(incident)
            session.flush()
            reason = "The launcher starts the ranks again, within the restart budget."
            new_action(session, present, "restart", reason, now, incident_id=incident.id, attempt=attempt)
            move(incident, ACTING, reason, now)


def _event_ids(incident: Incident) -> set[str]:
    return {failure["event_id"] for failure in incident.evidence["failures"]}


def _first(incident: Incident) -> dict[str, Any]:
    events: list[dict[str, Any]] = incident.evidence.get("failures") or incident.evidence["anomalies"]
    return events[0]


def _obeyed_stops(session: Session, event: JobFinished) -> list[Action]:
    """Return the orders to stop that the end of a job answers, oldest first; also one that had been given up."""
    given_up = and_(Action.state == EXPIRED, Action.attempt == event.attempt)
    is_answered = or_(Action.state.in_(UNANSWERED), given_up)
    query = select(Action).where(Action.job == event.job, Action.kind == "stop", is_answered)
    return list(session.scalars(query.order_by(Action.id)))


def _close(incident: Incident, event: JobFinished, now: datetime) -> None:
    """Take an incident as far as the end of its job allows.

    A job that was stopped goes on later, and with it what the weights carry, and what only waits to be HEALED.
    """
    text = f"The job ended {event.state}: {event.reason}"
    is_failure = incident.kind in FAILURE_KINDS
    match IncidentState(incident.state), event.state:
        case IncidentState.ACTING, JobState.FAILED:
            move(incident, ESCALATED, text, now)
        case IncidentState.ACTING, _:
            move(incident, OPEN, text, now)
        case IncidentState.RESUMED, JobState.SUCCEEDED if is_failure:
            move(incident, HEALED, text, now)
        case _:
            note(incident, text)
    if event.state is not JobState.STOPPED or (is_failure and incident.state == OPEN):
        incident.closed_at = incident.closed_at or now


def _failure_text(event: RankFailed) -> str:
    how = f"exited with {event.exit_code}"
    if event.exit_code < 0:
        how = f"was ended by {_signal_name(-event.exit_code)}"
    after = "" if event.step is None else f" after step {event.step}"
    what = "" if event.error_type is None else f": {event.error_type}: {event.error_message or ''}".rstrip(": ")
    return f"Rank {event.rank} (pid {event.pid}) {how}{after}{what}."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
