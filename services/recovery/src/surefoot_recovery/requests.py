"""What people ask for through the API becomes a command, or is refused with the reason. One action per operation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

from surefoot.bus.base import Delivery
from surefoot.catalogue.models import Action, Checkpoint, CheckpointState, Run
from surefoot.checkpoint.ids import CheckpointId
from surefoot.events import (
    JobState,
    Request,
    RollBack,
    RollBackRequested,
    SaveCheckpoint,
    SaveRequested,
    SetLearningRate,
    SetLearningRateRequested,
)
from surefoot_recovery.desk import Desk
from surefoot_recovery.ladder import LearningRate
from surefoot_recovery.lookups import (
    REFUSED,
    Present,
    policy_of,
    present_of,
    stable_on_lineage,
    unanswered_actions,
)
from surefoot_recovery.orders import new_action, order

NOT_TRAINING = (JobState.PENDING, JobState.PAUSED, JobState.STOPPING)
BEGIN_AN_ATTEMPT = ("rollback", "set_lr")

Plan = Callable[[Session, Any, Present], tuple[str, dict[str, Any]]]
"""Returns why, for people, and the fields of the command. Raises Refusal."""

log = structlog.get_logger(__name__)


class Refusal(Exception):
    """Why a request cannot be granted."""


class Requests:
    """Handles what the API passes on.

    Args:
        desk: What to work with.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def roll_back(self, request: RollBackRequested, _: Delivery) -> None:
        """Order a roll-back to the checkpoint named, or to the newest STABLE one."""
        self._answer(request, "rollback", RollBack, _plan_roll_back)

    def set_learning_rate(self, request: SetLearningRateRequested, _: Delivery) -> None:
        """Order another learning rate."""
        self._answer(request, "set_lr", SetLearningRate, _plan_learning_rate)

    def save(self, request: SaveRequested, _: Delivery) -> None:
        """Order a checkpoint."""
        self._answer(request, "save", SaveCheckpoint, lambda *_: ("a checkpoint now", {}))

    def _answer(self, request: Request, kind: str, command: Callable[..., Any], plan: Plan) -> None:
        view, now = self._desk.jobs[request.job], self._desk.clock()
        with self._desk.deciding(request.job) as session:
            if policy_of(session, request.job) is None:
                log.warning("a request for a job that the catalogue does not know", job_id=request.job)
                return
            asked_before = select(Action.id).where(Action.operation_id == request.operation_id)
            if session.scalar(asked_before) is not None:
                return
            run = session.get(Run, request.job)
            present = present_of(session, request.job, view, (run.step if run else None) or 0)
            of: dict[str, Any] = {"operation_id": request.operation_id}
            try:
                _check(session, request, kind, present, run)
                reason, fields = plan(session, request, present)
            except Refusal as refusal:
                of |= {"state": REFUSED, "problem": str(refusal), "closed_at": now}
                new_action(session, present, kind, f"{request.actor} asked for it", now, **of)
                log.info("request refused", job_id=request.job, operation=request.operation_id, problem=str(refusal))
                return
            action = new_action(session, present, kind, f"{request.actor}: {reason}", now, **of)
            order(action, command, **fields)


def _check(session: Session, request: Request, kind: str, present: Present, run: Run | None) -> None:
    """Refuse what no command could do now."""
    state = JobState.PENDING if run is None else JobState(run.state)
    if state.is_final or state in NOT_TRAINING:
        raise Refusal(f"the job is {state}, it does not train")
    if present.attempt == 0:
        raise Refusal("the job has not begun its first attempt")
    if request.attempt is not None and request.attempt != present.attempt:
        raise Refusal(f"it was asked for attempt {request.attempt}, and attempt {present.attempt} is the newest")
    on_its_way = [a for a in unanswered_actions(session, request.job) if a.kind in BEGIN_AN_ATTEMPT]
    if kind in BEGIN_AN_ATTEMPT and on_its_way:
        raise Refusal(f"command {on_its_way[0].id} ({on_its_way[0].kind}) is not answered yet")


def _plan_roll_back(session: Session, request: RollBackRequested, present: Present) -> tuple[str, dict[str, Any]]:
    rate = present.rate() if request.lr_factor is None else LearningRate(_valid_factor(request.lr_factor))
    target, name = _target(session, request, present)
    fields = {"to_attempt": target.attempt, "to_step": target.step} | _rate_fields(rate)
    return f"back to step {target.step} of attempt {target.attempt}, {name}; {rate}", fields


def _target(session: Session, request: RollBackRequested, present: Present) -> tuple[CheckpointId, str]:
    if request.to_step is None:
        stable = stable_on_lineage(session, present)
        if not stable:
            raise Refusal(f"no checkpoint that attempt {present.attempt} came from is STABLE yet")
        return stable[0], "the newest STABLE checkpoint"
    query = select(Checkpoint).where(Checkpoint.job == request.job, Checkpoint.step == request.to_step)
    if request.to_attempt is not None:
        query = query.where(Checkpoint.attempt == request.to_attempt)
    rows = list(session.scalars(query.order_by(Checkpoint.attempt.desc()).with_for_update(read=True)))
    of = "" if request.to_attempt is None else f" of attempt {request.to_attempt}"
    if not rows:
        raise Refusal(f"no checkpoint of step {request.to_step}{of} is known")
    lineage = [row for row in rows if present.is_on_lineage(row.attempt, row.step)]
    if not lineage:
        raise Refusal(f"attempt {present.attempt} did not come from step {request.to_step}{of}")
    if lineage[0].state != CheckpointState.COMMITTED:
        raise Refusal(f"the checkpoint of step {request.to_step}{of} is {lineage[0].state}")
    return CheckpointId(lineage[0].attempt, lineage[0].step), "as asked"


def _plan_learning_rate(_: Session, request: SetLearningRateRequested, __: Present) -> tuple[str, dict[str, Any]]:
    if (request.lr_hold_steps or 0) < 0 or request.lr_rewarm_steps < 0:
        raise Refusal("lr_hold_steps and lr_rewarm_steps must not be negative")
    rate = LearningRate(_valid_factor(request.lr_factor), request.lr_hold_steps, request.lr_rewarm_steps)
    return str(rate), _rate_fields(rate)


def _valid_factor(factor: float) -> float:
    if not (math.isfinite(factor) and factor > 0):
        raise Refusal(f"lr_factor must be a positive number (got {factor})")
    return factor


def _rate_fields(rate: LearningRate) -> dict[str, Any]:
    return {"lr_factor": rate.factor, "lr_hold_steps": rate.hold_steps, "lr_rewarm_steps": rate.rewarm_steps}
