"""What is decided goes out from here: decided in one transaction, sent after it, marked as sent after that.

Whatever a crash leaves in between is sent again: ranks ignore a command's number at or below the last one they
applied, and an IncidentChanged that comes twice says the same thing twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import datetime

import structlog
from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from surefoot import faultpoints
from surefoot.bus.publisher import Publisher
from surefoot.bus.streams import commands_stream
from surefoot.catalogue.database import Database
from surefoot.catalogue.models import Action, Incident
from surefoot.events import Command, IncidentChanged, IncidentState, decode_message
from surefoot_recovery.lookups import PENDING, SENT

log = structlog.get_logger(__name__)


class Outbox:
    """Sends commands, and tells of incidents. Not thread-safe.

    Args:
        database: Where actions and incidents are.
        publisher: To the bus.
        clock: Now, UTC.
    """

    def __init__(self, database: Database, publisher: Publisher, clock: Callable[[], datetime]) -> None:
        self._database, self._publisher, self._clock = database, publisher, clock
        self._dirty: set[str] | None = None  # None: nobody knows what the process before left

    def mark(self, job: str) -> None:
        """Say that something of a job may be decided and not sent; call it before the transaction."""
        if self._dirty is not None:
            self._dirty.add(job)

    def flush(self) -> None:
        """Send everything that is decided and not sent.

        Raises:
            Unavailable: the rest is sent by a later call.
        """
        if self._dirty is not None and not self._dirty:
            return
        actions, incidents = self._unsent()
        self._send(actions)
        self._announce(incidents)
        self._dirty = set()

    def _unsent(self) -> tuple[list[Action], list[tuple[Incident, str | None]]]:
        actions = select(Action).where(Action.state == PENDING, Action.command.is_not(None)).order_by(Action.id)
        untold = or_(Incident.announced_state.is_(None), Incident.announced_state != Incident.state)
        incidents = select(Incident).where(untold).order_by(Incident.id)
        if self._dirty is not None:
            actions = actions.where(Action.job.in_(self._dirty))
            incidents = incidents.where(Incident.job.in_(self._dirty))
        with self._database.read() as session:
            changed = [(incident, _newest_action(session, incident)) for incident in session.scalars(incidents)]
            return list(session.scalars(actions)), changed

    def _send(self, actions: Iterable[Action]) -> None:
        for action in actions:
            command = _command_of(action)
            faultpoints.reach("recovery.decided")
            self._publisher.publish(command, commands_stream(action.job))
            faultpoints.reach("recovery.published")
            with self._database.write() as session:
                row = session.get_one(Action, action.id)
                if row.state == PENDING:
                    row.state, row.sent_at = SENT, self._clock()
            log.info("command sent", job_id=action.job, attempt=action.attempt, number=action.id, action=action.kind,
                     reason=action.reason)  # fmt: skip

    def _announce(self, incidents: Iterable[tuple[Incident, str | None]]) -> None:
        for incident, action in incidents:
            self._publisher.publish(_changed(incident, action))
            with self._database.write() as session:
                session.get_one(Incident, incident.id).announced_state = incident.state
            log.info("incident changed", job_id=incident.job, attempt=incident.attempt, incident=incident.id,
                     kind=incident.kind, state=incident.state, action=action)  # fmt: skip


def _newest_action(session: Session, incident: Incident) -> str | None:
    newest = select(Action.kind).where(Action.incident_id == incident.id).order_by(Action.id.desc()).limit(1)
    return session.scalar(newest)


def _command_of(action: Action) -> Command:
    assert action.command is not None
    command = decode_message(json.dumps(action.command))
    assert isinstance(command, Command)
    return command


def _changed(incident: Incident, action: str | None) -> IncidentChanged:
    return IncidentChanged(
        job=incident.job,
        attempt=incident.attempt,
        incident_id=incident.id,
        kind=incident.kind,
        severity=incident.severity,
        state=IncidentState(incident.state),
        onset_step=incident.onset_step,
        action=action,
        reason=incident.outcome.splitlines()[-1] if incident.outcome else incident.cause,
        recovery_seconds=incident.recovery_seconds,
        steps_lost=incident.steps_lost,
    )
