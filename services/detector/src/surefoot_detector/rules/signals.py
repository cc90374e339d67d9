"""What a rule looks at, and what it says about it."""

from __future__ import annotations

from typing import NamedTuple

from surefoot.events.anomaly import AnomalyKind, Severity


class Numbers(NamedTuple):
    """What the rules look at.

    Attributes:
        loss: Mean over all ranks, in the job's own unit.
        grad_norm: Before clipping; None where it is not known.
        learning_rate: None where it is not known.
        applied: Whether the update was taken.
    """

    loss: float
    grad_norm: float | None = None
    learning_rate: float | None = None
    applied: bool = True


class Signal(NamedTuple):
    """One rule that is broken at the current point.

    Attributes:
        kind: What is wrong.
        severity: What it is worth.
        rule: Name of the rule; part of the event.
        score: How far out, in the rule's own measure.
        num_points: How many points the excursion has lasted, this one included, as far as the rule can tell.
    """

    kind: AnomalyKind
    severity: Severity
    rule: str
    score: float
    num_points: int = 1
