"""What decisions need to know of the catalogue."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from surefoot.bus.streams import EVENTS, stream_of
from surefoot.catalogue.models import Action, ActionState, Checkpoint, CheckpointState, Incident, Run
from surefoot.catalogue.models import Job as JobRow
from surefoot.catalogue.queries import attempt_records
from surefoot.checkpoint.attempts import AttemptRecord
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.lineage import candidates, on_lineage
from surefoot.command_files import newest_if_too_low
from surefoot.errors import AttemptError
from surefoot.policy import PolicySpec
from surefoot_recovery.jobs import JobView
from surefoot_recovery.ladder import LearningRate, Situation, Use

PENDING, SENT, APPLIED, REFUSED, EXPIRED = ActionState
UNANSWERED = (PENDING, SENT)
FAILURE_KINDS = ("rank_failure", "hang")

NUM_TRIES_PER_RUNG = 2
"""An order that was refused or not answered is given once more, then the next rung is tried."""


def policy_of(session: Session, job: str) -> PolicySpec | None:
    """Return the policy that a job was submitted with; None: the catalogue does not know the job."""
    row = session.get(JobRow, job)
    return None if row is None else PolicySpec.model_validate(row.spec.get("policy", {}))


def open_incidents(session: Session, job: str) -> list[Incident]:
    """Return the incidents of a job that are not over, oldest first."""
    return list(
        session.scalars(select(Incident).where(Incident.job == job, Incident.closed_at.is_(None)).order_by(Incident.id))
    )


def recent_incidents(session: Session, job: str, now: datetime) -> list[Incident]:
    """Return the incidents of a job that an event may be about, newest first.

    Those that are over count too, as long as the stream may deliver their events again.
    """
    since = now - timedelta(seconds=2 * stream_of(EVENTS).retention_seconds)
    may_be = or_(Incident.closed_at.is_(None), Incident.opened_at > since)
    return list(session.scalars(select(Incident).where(Incident.job == job, may_be).order_by(Incident.id.desc())))


def unanswered_actions(session: Session, job: str) -> list[Action]:
    """Return what is decided or sent and not answered, oldest first."""
    return list(
        session.scalars(select(Action).where(Action.job == job, Action.state.in_(UNANSWERED)).order_by(Action.id))
    )


def actions_of(session: Session, incident: Incident) -> list[Action]:
    """Return the actions of an incident, oldest first."""
    return list(session.scalars(select(Action).where(Action.incident_id == incident.id).order_by(Action.id)))


@dataclass(frozen=True)
class Present:
    """The control state that a job trains under now.

    Attributes:
        job: Its name.
        attempt: The newest.
        step: Last completed step.
        records: Attempt records by number: those in the catalogue, and those that only events told of yet.
    """

    job: str
    attempt: int
    step: int
    records: dict[int, AttemptRecord]

    def is_on_lineage(self, attempt: int, step: int) -> bool:
        """Return whether a step is behind the present state; with a record missing: whether it is this attempt's."""
        try:
            return on_lineage(CheckpointId(attempt, step), self.attempt, self.records)
        except AttemptError:
            return attempt == self.attempt

    def rate(self) -> LearningRate:
        """Return the learning rate from the next step on, with what is left of its hold and its way back."""
        record = self.records.get(self.attempt)
        if record is None or record.lr_factor == 1.0:
            return LearningRate()
        if record.lr_hold_steps is None:
            return LearningRate(record.lr_factor)
        beyond = max(0, self.step - record.lr_from_step - record.lr_hold_steps)
        if beyond >= record.lr_rewarm_steps and beyond:
            return LearningRate()
        num_held = max(0, self.step - record.lr_from_step)
        return LearningRate(
            record.lr_factor_at(self.step),
            max(0, record.lr_hold_steps - num_held),
            record.lr_rewarm_steps - beyond,
        )


def present_of(session: Session, job: str, view: JobView, else_step: int = 0) -> Present:
    """Return the present control state.

    Args:
        session: To read with.
        job: Its name.
        view: What its events told.
        else_step: A completed step, for when no event has told of one.
    """
    records = view.records() | attempt_records(session, job)
    return Present(
        job, max(view.attempt, max(records, default=0)), else_step if view.step is None else view.step, records
    )


def stable_on_lineage(session: Session, present: Present) -> tuple[CheckpointId, ...]:
    """Return the STABLE checkpoints that the present state came from, newest first.

    In a write transaction: they then stay until it ends, so retention sees what it ordered before it removes one.
    """
    rows = session.execute(
        select(Checkpoint.attempt, Checkpoint.step)
        .where(Checkpoint.job == present.job, Checkpoint.stable, Checkpoint.state == CheckpointState.COMMITTED)
        .with_for_update(read=True)
    )
    try:
        return tuple(candidates([CheckpointId(*row) for row in rows], present.attempt, present.records))
    except AttemptError:  # the worker has not indexed a record yet
        return ()


def situation_of(session: Session, incident: Incident, present: Present, now: datetime) -> Situation:
    """Return what a decision about an incident depends on."""
    actions = actions_of(session, incident)
    rollbacks = [action for action in actions if action.kind == "rollback" and action.command]
    refused = {_target(action) for action in rollbacks if action.state == REFUSED and not _was_too_low(action)}
    applied = [_target(action) for action in rollbacks if action.state == APPLIED]
    stable = stable_on_lineage(session, present)
    return Situation(
        now=now,
        step=present.step,
        rate=present.rate(),
        uses=_uses(session, incident),
        tried=_tried(actions),
        stable=tuple(checkpoint for checkpoint in stable if checkpoint not in refused),
        went_back_to=applied[-1] if applied else None,
    )


def _target(action: Action) -> CheckpointId:
    assert action.command is not None
    return CheckpointId(action.command["to_attempt"], action.command["to_step"])


def _tried(actions: list[Action]) -> frozenset[str]:
    failed = [a.rung for a in actions if a.rung and a.state in (REFUSED, EXPIRED) and not _was_too_low(a)]
    worked = [action.rung for action in actions if action.rung and action.state not in (REFUSED, EXPIRED)]
    return frozenset(worked) | {rung for rung in failed if failed.count(rung) >= NUM_TRIES_PER_RUNG}


def _was_too_low(action: Action) -> bool:
    """Return whether the ranks refused a command for its number alone, so that it was as good as never given."""
    return action.state == REFUSED and newest_if_too_low(action.problem) is not None


def _uses(session: Session, incident: Incident) -> tuple[Use, ...]:
    """Return how often rungs were used for the job since a person submitted it last.

    An incident uses a rung once, however many commands that took, so those of the incident at hand are left out: what
    worked is not repeated in it (`_tried`), and what came to nothing must not be in its own way. A submission is where
    the run's generation first started (`Run.started_at`); restarts and resumptions by the worker do not move it.
    """
    run = session.get(Run, incident.job)
    of_others = [Action.job == incident.job, Action.rung.is_not(None), Action.incident_id != incident.id]
    if run is not None and run.started_at is not None:
        of_others.append(Action.created_at >= run.started_at)
    newest = select(Action.rung, func.max(Action.created_at), func.max(Action.decided_step)).where(*of_others)
    rows = session.execute(newest.group_by(Action.incident_id, Action.rung))
    return tuple(Use(rung, at, step) for rung, at, step in rows if rung is not None)
