"""Findings as events, with a sentence for people."""

from __future__ import annotations

import math
from uuid import NAMESPACE_URL, uuid5

from surefoot.events import AnomalyCleared, AnomalyDetected, Event, StepsCleared
from surefoot_detector.findings import Cleared, Finding, Healed, Raised

_WHAT = {
    "nonfinite_loss": "the loss is not finite",
    "nonfinite_gradient": "the gradient is not finite",
    "zero_loss": "the loss is exactly 0",
    "spike": "the loss lies {score:.1f} standard deviations above its level",
    "tail": "the loss jumped and has not come back for three steps",
    "elevated": "the loss has been more than 8 % and 4 standard deviations too high for {num_steps} steps",
    "jump": "the loss rose by a factor of {rise:.1f}",
    "rise_in_warm_up": "the loss rose by a factor of {rise:.1f} while it was still warming up",
    "cusum": "the loss has drifted up, by a cumulative sum of {score:.0f} standard deviations",
    "slow_cusum": "the loss has crept up for {num_steps} steps",
    "mean": "the mean loss of 100 steps is {percent:.0f} % above the least it was",
    "lasting": "the loss has stayed out of its band for {num_steps} steps",
    "new_regime": "the loss has stayed out of its band for {num_steps} steps; its present level is taken as normal now",
    "new_gradient_regime": "the gradient norm has stayed raised for {num_steps} steps and the loss does not mind; "
    "its present level is taken as normal now",
    "loss_and_gradient": "loss and gradient norm left their bands together",
    "loss_with_gradient": "the gradient norm is {score:.1f} times its level and the loss rose with it",
    "loss_after_gradient": "the gradient norm stays raised and the loss follows",
    "gradient_spike": "the gradient norm is {score:.1f} times its level",
    "gradient_run": "the gradient norm is {score:.1f} times its level, for three steps or more",
    "gradient_drift": "the mean gradient norm has risen to {score:.0f} times the least it was",
}


def to_event(job: str, finding: Finding) -> Event:
    """Return the event of a finding. The same finding gives the same `event_id`, so that a repeat is known as one."""
    match finding:
        case Raised():
            return _detected(job, finding)
        case Healed():
            return AnomalyCleared(
                event_id=_id(job, "cleared", finding.raised_attempt, finding.kind, finding.onset_step, finding.at),
                job=job,
                attempt=finding.at.attempt,
                kind=finding.kind,
                onset_attempt=finding.raised_attempt,
                onset_step=finding.onset_step,
                step=finding.at.step,
                message=f"back in band at step {finding.at.step}: the loss is {finding.loss:.4g}"
                + _before(finding.loss_baseline, f"before step {finding.onset_step}"),
            )
        case Cleared():
            return StepsCleared(
                event_id=_id(job, "steps", finding.attempt, finding.through_step),
                job=job,
                attempt=finding.attempt,
                through_step=finding.through_step,
            )


def _detected(job: str, raised: Raised) -> AnomalyDetected:
    onset, at = raised.onset, raised.at
    return AnomalyDetected(
        event_id=_id(job, at.attempt, raised.kind, raised.severity, onset.step, raised.rule.startswith("new_")),
        job=job,
        attempt=at.attempt,
        kind=raised.kind,
        severity=raised.severity,
        onset_step=onset.step,
        onset_position=onset.position,
        step=at.step,
        position=at.position,
        rule=raised.rule,
        score=raised.score,
        loss=raised.loss,
        loss_baseline=raised.loss_baseline,
        grad_norm=raised.grad_norm,
        grad_norm_baseline=raised.grad_norm_baseline,
        message=_sentence(raised),
    )


def _sentence(raised: Raised) -> str:
    rise = raised.loss / raised.loss_baseline if raised.loss_baseline else math.nan
    what = _WHAT[raised.rule].format(
        score=raised.score,
        rise=rise,
        percent=100 * (math.exp(min(50.0, raised.score)) - 1),
        num_steps=raised.at.step - raised.onset.step + 1,
    )
    numbers = f"loss {raised.loss:.4g}{_before(raised.loss_baseline, 'before')}"
    if raised.grad_norm is not None:
        numbers += f", gradient norm {raised.grad_norm:.4g}{_before(raised.grad_norm_baseline, 'before')}"
    return f"{what}: {numbers}; since step {raised.onset.step}"


def _before(level: float | None, when: str) -> str:
    return "" if level is None else f" ({level:.4g} {when})"


def _id(*parts: object) -> str:
    return uuid5(NAMESPACE_URL, "surefoot:anomaly:" + ":".join(str(part) for part in parts)).hex
