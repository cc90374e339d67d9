"""What the detector finds: plain data. `reports` turns it into events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from surefoot.events.anomaly import AnomalyKind, Severity


class Place(NamedTuple):
    """A step, as the lineage knows it.

    Attributes:
        attempt: That made it.
        step: Its number.
        position: Its batch position; None where the sender does not say.
    """

    attempt: int
    step: int
    position: int | None


@dataclass(frozen=True, slots=True)
class Raised:
    """Something is wrong: once per kind and severity of an alarm.

    Attributes:
        kind: What.
        severity: How bad.
        onset: First step of the excursion.
        at: The step that decided it.
        rule: Name of the rule.
        score: In the rule's own measure.
        loss: At `at`.
        loss_baseline: Level before the onset.
        grad_norm: At `at`.
        grad_norm_baseline: Level before the onset.
    """

    kind: AnomalyKind
    severity: Severity
    onset: Place
    at: Place
    rule: str
    score: float
    loss: float
    loss_baseline: float | None
    grad_norm: float | None
    grad_norm_baseline: float | None


@dataclass(frozen=True, slots=True)
class Healed:
    """The loss is back in the band that it had left: once for everything that was raised.

    Attributes:
        kind: As it was raised.
        raised_attempt: The attempt that was on when it was raised.
        onset_step: As it was raised.
        at: The step that decided that it is over.
        loss: At `at`.
        loss_baseline: Level before the onset.
    """

    kind: AnomalyKind
    raised_attempt: int
    onset_step: int
    at: Place
    loss: float
    loss_baseline: float | None


@dataclass(frozen=True, slots=True)
class Cleared:
    """No step of the attempt up to this one is suspected of anything."""

    attempt: int
    through_step: int


Finding = Raised | Healed | Cleared
