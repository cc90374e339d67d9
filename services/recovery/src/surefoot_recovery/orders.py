"""Turns decisions into rows: an action, whose id is the number of its command, and the incident's next state."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from surefoot.catalogue.models import Action, Incident
from surefoot.events import (
    AnomalyKind,
    Command,
    RollBack,
    SetLearningRate,
    Severity,
    StopTraining,
    decode_message,
    encode_message,
)
from surefoot.policy import PolicySpec, RungAction
from surefoot_recovery.ladder import Decision, Trouble, decide
from surefoot_recovery.lifecycle import ACTING, ESCALATED, OPEN, RESUMED, move, note
from surefoot_recovery.lookups import APPLIED, PENDING, Present, situation_of

KINDS = {
    RungAction.NONE: "none",
    RungAction.LR_CUT: "set_lr",
    RungAction.ROLLBACK: "rollback",
    RungAction.OLDER_CHECKPOINT: "rollback",
    RungAction.STOP: "stop",
}


def new_action(
    session: Session, present: Present, kind: str, reason: str, now: datetime, *, above: int = 0, **of: Any
) -> Action:
    """Add an action; it has its id on return.

    The id is above all ids, and above the number of every command that began an attempt: ranks ignore lower ones, and
    a database that was lost and made anew counts from 1 again.

    Args:
        session: A write transaction.
        present: What the job trains under.
        kind: See `Action.kind`.
        reason: For people.
        now: UTC.
        above: A number that the ranks are known to have had, too.
        of: Other columns: incident_id, operation_id, rung, state.
    """
    given = {"state": PENDING, "attempt": present.attempt, "decided_step": present.step}
    begun = (record.command for record in present.records.values())
    number = max(session.scalar(select(func.max(Action.id))) or 0, above, *begun) + 1
    action = Action(id=number, job=present.job, kind=kind, reason=reason, created_at=now, **(given | of))
    session.add(action)
    session.flush()
    return action


def order(action: Action, command: Callable[..., Command], **fields: Any) -> None:
    """Give an action its command: fenced by the action's attempt, numbered by its id."""
    message = command(job=action.job, attempt=action.attempt, number=action.id, reason=action.reason, **fields)
    action.command = json.loads(encode_message(message))


def repeat(session: Session, action: Action, present: Present, above: int, now: datetime) -> None:
    """Give an order once more that the ranks refused for its number alone, with one above `above`."""
    assert action.command is not None
    operation_id, action.operation_id = action.operation_id, None
    session.flush()  # an operation has one action at a time
    of: dict[str, Any] = {"incident_id": action.incident_id, "operation_id": operation_id, "rung": action.rung}
    again = new_action(session, present, action.kind, action.reason, now, above=above, attempt=action.attempt, **of)
    own = ("event_id", "ts", "monotonic_seconds")
    fields = {name: value for name, value in action.command.items() if name not in own}
    command = decode_message(json.dumps(fields | {"number": again.id}))
    assert command is not None
    again.command = json.loads(encode_message(command))


def trouble_of(incident: Incident) -> tuple[Trouble, int]:
    """Return what an incident is about now, its newest and worst alarm, and the attempt that saw it."""
    anomalies = incident.evidence["anomalies"]
    order_of = [severity.value for severity in Severity]
    worst = max(anomalies, key=lambda anomaly: (order_of.index(anomaly["severity"]), anomaly["attempt"] or 0))
    trouble = Trouble(
        kind=AnomalyKind(worst["kind"]),
        severity=Severity(worst["severity"]),
        onset_step=worst["onset_step"],
        onset_position=worst["onset_position"],
        step=worst["step"],
        position=worst["position"],
    )
    return trouble, worst["attempt"] or incident.attempt


def act(session: Session, incident: Incident, policy: PolicySpec, present: Present, now: datetime) -> None:
    """Decide what to do about an anomaly, and write it down. The incident is OPEN, ACTING or RESUMED.

    Args:
        session: A write transaction.
        incident: What it is about.
        policy: The job's.
        present: What the job trains under.
        now: UTC.
    """
    trouble, seen_in = trouble_of(incident)
    # What is RESUMED has left its onset behind on purpose.
    if incident.state != RESUMED and not present.is_on_lineage(seen_in, trouble.onset_step):
        _left_behind(incident, present, now)
        return
    decision = decide(policy, trouble, situation_of(session, incident, present, now))
    if decision is None or policy.mode != "act":
        _only_note(incident, policy, decision, now)
    elif decision.action is None:
        move(incident, ESCALATED, decision.reason, now)
    else:
        _write(session, incident, present, decision, now)


def _left_behind(incident: Incident, present: Present, now: datetime) -> None:
    """Training began again from before the onset, so there is nothing to undo; if it comes again, it is seen again."""
    move(incident, RESUMED, f"Attempt {present.attempt} began before the onset; nothing else was done.", now)
    incident.resumed_attempt, incident.resumed_step = present.attempt, present.step


def _only_note(incident: Incident, policy: PolicySpec, decision: Decision | None, now: datetime) -> None:
    text = "No rung of the policy is for it." if decision is None else f"policy.mode is {policy.mode}."
    if policy.mode == "advise" and decision is not None:
        text = f"Only advice (policy.mode): {decision.reason}"
    if incident.state == ACTING:
        move(incident, OPEN, text, now)
    elif text not in incident.outcome.splitlines():
        note(incident, text)


def _write(session: Session, incident: Incident, present: Present, decision: Decision, now: datetime) -> None:
    assert decision.action is not None
    what = decision.action
    columns: dict[str, Any] = {"incident_id": incident.id, "rung": decision.rung}
    action = new_action(session, present, KINDS[what], decision.reason, now, **columns)
    rate = {
        "lr_factor": decision.rate.factor,
        "lr_hold_steps": decision.rate.hold_steps,
        "lr_rewarm_steps": decision.rate.rewarm_steps,
    }
    if decision.target is not None:
        to = {"to_attempt": decision.target.attempt, "to_step": decision.target.step}
        order(action, RollBack, **to, **rate, skip_windows=(decision.skip,) if decision.skip else ())
    elif what is RungAction.LR_CUT:
        order(action, SetLearningRate, **rate)
    elif what is RungAction.STOP:
        order(action, StopTraining)
    else:
        action.state, action.new_attempt, action.applied_step = APPLIED, present.attempt, present.step
        action.closed_at = now
    move(incident, ESCALATED if what is RungAction.STOP else ACTING, decision.reason, now)
