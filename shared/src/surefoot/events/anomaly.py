"""What the detector says. It judges numbers of steps; silence is the launcher's to judge."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from surefoot.events.base import Event


class AnomalyKind(StrEnum):
    """What is wrong with the numbers."""

    NONFINITE = "nonfinite"
    SPIKE = "spike"
    DIVERGENCE = "divergence"
    EXPLODING_GRADIENT = "exploding_gradient"


class Severity(StrEnum):
    """What an anomaly is worth."""

    NOTICE = "notice"
    """Written down."""
    WARNING = "warning"
    """Shown; most heal alone."""
    CRITICAL = "critical"
    """Starts the recovery ladder."""


class AnomalyDetected(Event):
    """The loss or the gradient norm left its band. One per kind, severity and alarm; `event_id` is deterministic."""

    type: ClassVar[str] = "AnomalyDetected"

    kind: AnomalyKind
    severity: Severity
    onset_step: int
    """First step of the excursion: what came before is not suspected."""
    onset_position: int | None = None
    """Batch position of that step."""
    step: int
    """The step whose numbers decided it."""
    position: int | None = None
    """Batch position of that step."""
    rule: str
    """Name of the rule that decided."""
    score: float | None = None
    """How far out, in the rule's own measure (z, ratio, CUSUM)."""
    loss: float
    """Raw loss at `step`, NaN and Inf included."""
    loss_baseline: float | None = None
    """Level of the loss before the onset."""
    grad_norm: float | None = None
    """Raw gradient norm at `step`."""
    grad_norm_baseline: float | None = None
    """Level of the gradient norm before the onset."""
    message: str
    """One sentence with the numbers, for people."""


class AnomalyCleared(Event):
    """The loss is back in its band."""

    type: ClassVar[str] = "AnomalyCleared"

    kind: AnomalyKind
    onset_attempt: int
    """Attempt in which the anomaly began; differs from `attempt` after a roll-back."""
    onset_step: int
    step: int
    """The step at which it was back in band."""
    message: str


class StepsCleared(Event):
    """No step of this attempt up to `through_step` is suspected of anything: what checkpoints are promoted by."""

    type: ClassVar[str] = "StepsCleared"
    lifecycle: ClassVar[bool] = False

    through_step: int
