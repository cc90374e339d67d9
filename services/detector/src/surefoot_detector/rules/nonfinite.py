"""Rules about numbers that are none. They need no baseline."""

from __future__ import annotations

import math

from surefoot.events.anomaly import AnomalyKind, Severity
from surefoot_detector.rules.signals import Numbers, Signal

LIMIT = 2.5
LOSS_WEIGHT = 1.0
GRADIENT_WEIGHT = 0.3
"""A loss scaler looks for its scale by running into infinite gradients now and then."""
FORGOTTEN_PER_POINT = 0.05


class NonfiniteRules:
    """One update that was skipped in the loop is a warning; again and again, or taken into the weights, is critical."""

    def __init__(self) -> None:
        self._weight = 0.0

    def look(self, numbers: Numbers) -> list[Signal]:
        """Judge a point; an empty list means that its numbers are numbers."""
        bad_loss = not math.isfinite(numbers.loss) or numbers.loss == 0.0
        bad_norm = numbers.grad_norm is not None and not math.isfinite(numbers.grad_norm)
        if not (bad_loss or bad_norm) and numbers.applied:
            self._weight = max(0.0, self._weight - FORGOTTEN_PER_POINT)
            return []
        self._weight += LOSS_WEIGHT if bad_loss else GRADIENT_WEIGHT
        rule = "nonfinite_loss" if bad_loss else "nonfinite_gradient"
        if bad_loss and math.isfinite(numbers.loss):
            rule = "zero_loss"
        if numbers.applied:
            return [Signal(AnomalyKind.NONFINITE, Severity.CRITICAL, rule, self._weight)]
        severity = Severity.CRITICAL if self._weight > LIMIT else Severity.WARNING
        return [Signal(AnomalyKind.NONFINITE, severity, rule, self._weight)]
