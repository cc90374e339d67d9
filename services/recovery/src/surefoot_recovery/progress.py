"""Steps and answers: what was ordered has been done, has helped, or is given up."""

from __future__ import annotations

import math
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from surefoot.bus.base import Delivery
from surefoot.catalogue.models import Action, Incident
from surefoot.command_files import newest_if_too_low
from surefoot.events import AttemptStarted, CommandApplied, CommandRefused, StepCompleted
from surefoot.policy import PolicySpec, RungSpec
from surefoot_recovery.desk import Desk
from surefoot_recovery.jobs import JobView
from surefoot_recovery.lifecycle import ACTING, OPEN, RESUMED, move, note
from surefoot_recovery.lookups import (
    APPLIED,
    EXPIRED,
    FAILURE_KINDS,
    REFUSED,
    SENT,
    UNANSWERED,
    actions_of,
    open_incidents,
    policy_of,
    present_of,
    unanswered_actions,
)
from surefoot_recovery.orders import act, repeat
from surefoot_recovery.timing import recovery_seconds

PATIENCE_SECONDS = 2.0
"""What the detector says of a step that it was given is here by then."""

DEFAULT_WAIT_STEPS = RungSpec.model_fields["wait_steps"].default


class Progress:
    """Handles what the ranks say.

    Args:
        desk: What to work with.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def attempt_started(self, event: AttemptStarted, _: Delivery) -> None:
        """Note it. What it means for incidents shows with its first step."""
        self._desk.jobs[event.job].start(event)

    def step_completed(self, event: StepCompleted, delivery: Delivery) -> None:
        """Note it; for a job with something open look at what is due."""
        view = self._desk.jobs[event.job]
        is_first = (event.attempt or 0) > view.attempt or event.step <= (view.step or 0)
        view.attempt = max(view.attempt, event.attempt or 0)
        view.step = event.step
        if view.look_at_step is not None and (is_first or event.step >= view.look_at_step):
            may_go_on = view.overdue and self._was_patient(view, delivery)
            with self._desk.deciding(event.job) as session:
                view.overdue = False
                look_at_step = self._look(session, event, view, may_go_on)
            view.look_at_step = 0 if view.overdue else look_at_step

    def applied(self, event: CommandApplied, _: Delivery) -> None:
        """Note what the ranks did. It counts even for a command that had been given up."""
        with self._desk.deciding(event.job) as session:
            action = session.get(Action, event.number)
            if action is None or action.job != event.job or action.state == APPLIED:
                return
            self._close(action, APPLIED, "")
            action.new_attempt, action.applied_step, action.seconds = event.new_attempt, event.step, event.seconds

    def refused(self, event: CommandRefused, _: Delivery) -> None:
        """Note why, and decide anew about the incident that it was for.

        When only its number was too low, as after the database was lost, the same is ordered with a higher one.
        """
        view = self._desk.jobs[event.job]
        with self._desk.deciding(event.job) as session:
            action = session.get(Action, event.number)
            if action is None or action.job != event.job or action.state not in UNANSWERED:
                return
            self._close(action, REFUSED, event.reason)
            newest = newest_if_too_low(event.reason)
            if newest is not None and _is_still_wanted(session, action):
                present = present_of(session, event.job, view)
                repeat(session, action, present, newest, self._desk.clock())
            else:
                self._decide_anew(session, action, f"The ranks refused: {event.reason}", view)

    def _close(self, action: Action, state: str, problem: str) -> None:
        action.state, action.problem, action.closed_at = state, problem, self._desk.clock()

    def _decide_anew(self, session: Session, action: Action, why: str, view: JobView) -> None:
        incident = None if action.incident_id is None else session.get_one(Incident, action.incident_id)
        policy = policy_of(session, action.job)
        if incident is None or incident.state != ACTING or incident.kind in FAILURE_KINDS or policy is None:
            return
        # A command that was given up too early and done after all makes the ranks refuse the one that replaced it.
        if any(other.new_attempt and other.new_attempt > action.attempt for other in actions_of(session, incident)):
            return
        note(incident, why)
        act(session, incident, policy, present_of(session, action.job, view), self._desk.clock())

    def _was_patient(self, view: JobView, delivery: Delivery) -> bool:
        """Return whether "it has not healed" is what the detector thinks, and not its absence or its being behind."""
        now = self._desk.clock()
        if _as_numbers(self._desk.detector_position()) < _as_numbers(delivery.id):
            view.overdue_since = None
            return False
        view.overdue_since = view.overdue_since or now
        return (now - view.overdue_since).total_seconds() >= PATIENCE_SECONDS

    def _look(self, session: Session, event: StepCompleted, view: JobView, may_go_on: bool) -> float | None:
        """Do what is due at a step; return the step before which nothing else can be, None when nothing is open."""
        policy = policy_of(session, event.job)
        if policy is None:
            return None
        now = self._desk.clock()
        for action in unanswered_actions(session, event.job):
            why = _given_up(action, policy, event, now)
            if why is not None:
                self._close(action, EXPIRED, why)
                self._decide_anew(session, action, why, view)
        for incident in open_incidents(session, event.job):
            if self._look_at(session, incident, policy, event, view):
                view.overdue = True
                if may_go_on:
                    note(incident, f"Not healed {event.step - (incident.resumed_step or 0)} steps later.")
                    act(session, incident, policy, present_of(session, event.job, view), now)
                    view.overdue, view.overdue_since = False, None
        session.flush()
        if unanswered_actions(session, event.job):
            return 0
        incidents = open_incidents(session, event.job)
        return min((_next_look(session, incident, policy) for incident in incidents), default=None)

    def _look_at(
        self, session: Session, incident: Incident, policy: PolicySpec, event: StepCompleted, view: JobView
    ) -> bool:
        """Do what is due, but for going on to the next rung; return whether that is due."""
        now = self._desk.clock()
        ordered = actions_of(session, incident)
        newest = next((action for action in reversed(ordered) if action.state not in (EXPIRED, REFUSED)), None)
        if _is_done(incident, newest, event):
            _resume(incident, newest, event, view, now)
        elif incident.state == OPEN and ordered and newest is None:  # its job ended before the order reached it
            act(session, incident, policy, present_of(session, event.job, view), now)
        elif incident.state == RESUMED and incident.kind not in FAILURE_KINDS and newest is not None:
            waited = event.step - (incident.resumed_step or 0)
            is_later = (event.attempt or 0) >= (incident.resumed_attempt or 0)
            return is_later and waited >= _wait_steps(newest, policy)
        return False


def _as_numbers(entry_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in entry_id.split("-"))


def _is_still_wanted(session: Session, action: Action) -> bool:
    """Return whether an order that was refused is to be repeated: a person's, or one that its incident waits for."""
    if action.incident_id is None:
        return True
    return session.get_one(Incident, action.incident_id).state == ACTING


def _given_up(action: Action, policy: PolicySpec, event: StepCompleted, now: datetime) -> str | None:
    """Return why a command is not waited for any longer, None while it is."""
    if action.command is None:
        return None
    if (event.attempt or 0) > action.attempt:
        return f"Attempt {action.attempt} ended before the ranks did it."
    if action.state != SENT or action.sent_at is None:
        return None
    num_steps = event.step - (action.decided_step or 0)
    seconds = (now - action.sent_at).total_seconds()
    if num_steps < policy.answer_within_steps or seconds < policy.answer_within_seconds:
        return None
    return f"The ranks did not answer for {num_steps} steps and {seconds:.0f} s."


def _is_done(incident: Incident, newest: Action | None, event: StepCompleted) -> bool:
    """Return whether a step shows that what was ordered is done and training goes on."""
    attempt = event.attempt or 0
    if incident.kind in FAILURE_KINDS:
        return incident.state == ACTING and attempt > incident.attempt
    if incident.state not in (OPEN, ACTING):
        return False
    if newest is None or newest.state != APPLIED or newest.new_attempt is None:
        return False
    return attempt > newest.new_attempt or (
        attempt == newest.new_attempt and (newest.kind != "none" or event.step > (newest.applied_step or 0))
    )


def _resume(incident: Incident, action: Action | None, event: StepCompleted, view: JobView, now: datetime) -> None:
    seconds = recovery_seconds(incident.evidence, event)
    if incident.recovery_seconds is None:
        incident.recovery_seconds = seconds
    lost = _steps_lost(incident, action, event, view)
    incident.steps_lost = (incident.steps_lost or 0) + lost
    incident.resumed_attempt, incident.resumed_step = event.attempt, event.step
    text = f"Attempt {event.attempt} completed step {event.step}, {seconds:.3f} s after detection; {lost} steps lost."
    move(incident, RESUMED, text, now)
    if action is not None and action.kind == "restart" and action.state in UNANSWERED:
        action.state, action.new_attempt, action.seconds, action.closed_at = APPLIED, event.attempt, seconds, now


def _steps_lost(incident: Incident, action: Action | None, event: StepCompleted, view: JobView) -> int:
    if action is not None and action.kind == "none":
        return 0
    started = view.started.get(event.attempt or 0)
    from_step = started.from_step if started else event.step - 1
    reached = action.applied_step if action is not None and action.applied_step is not None else incident.detected_step
    return max(0, (reached or 0) - from_step)


def _wait_steps(action: Action, policy: PolicySpec) -> int:
    return next((rung.wait_steps for rung in policy.ladder if rung.name == action.rung), DEFAULT_WAIT_STEPS)


def _next_look(session: Session, incident: Incident, policy: PolicySpec) -> float:
    if incident.state == ACTING:
        return 0
    newest = session.scalar(
        select(Action)
        .where(Action.incident_id == incident.id, Action.state.not_in((EXPIRED, REFUSED)))
        .order_by(Action.id.desc())
        .limit(1)
    )
    if incident.state != RESUMED or incident.kind in FAILURE_KINDS or newest is None:
        return math.inf
    return (incident.resumed_step or 0) + _wait_steps(newest, policy)
