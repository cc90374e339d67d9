"""Rules about the gradient norm before clipping, as y = ln norm."""

from __future__ import annotations

import math

from surefoot.events.anomaly import AnomalyKind, Severity
from surefoot_detector.rules.band import Band
from surefoot_detector.rules.signals import Signal
from surefoot_detector.rules.windows import Cusum, Mean

WARM_UP_POINTS = 30
INHERITED_WARM_UP_POINTS = 9
SCALE_FLOOR = 0.03
LARGEST_Z = 6.0

CUSUM_ALLOWANCE = 1.0

SPIKE_Z = 6.0
SPIKE_RATIO = 3.0
EXPLOSION_RATIO = 6.0
EXPLOSION_POINTS = 3

DRIFT_SPAN = 50
DRIFT_RATIO = 20.0
LEAST_MEAN_LEAK = 0.001
"""How far, per point, the least mean creeps up towards the mean: a healthy run may drift for ever."""


class GradientRules:
    """What is expected of the gradient norm, and which rules the current point breaks.

    Attributes:
        band: Where it is expected.
        ratio: norm / level of the current point.
        z: ln of that in units of the noise.
        is_over: Whether the point is a spike by itself.
        cusum: Evidence that the last points lie above the band.
    """

    def __init__(self, inherited: GradientRules | None = None) -> None:
        self.band: Band = Band(SCALE_FLOOR, inherited.band if inherited else None)
        self._warm_up_points = INHERITED_WARM_UP_POINTS if inherited else WARM_UP_POINTS
        self.ratio = 1.0
        self.z = 0.0
        self.is_over = False
        self.cusum = Cusum()
        self._run = 0
        self._mean = Mean(DRIFT_SPAN)
        self._least_mean: float | None = None

    @property
    def in_warm_up(self) -> bool:
        """Whether there is too little to judge by."""
        return self.band.num_points < self._warm_up_points

    @property
    def level(self) -> float | None:
        """What is expected next, ln of the norm; None at the very beginning."""
        return self.band.level if self.band.num_points else None

    def look(self, y: float) -> list[Signal]:
        """Judge a point by what came before it."""
        if self.in_warm_up:
            return []
        rise = y - self.band.level
        self.ratio, self.z = math.exp(min(rise, 700.0)), rise / self.band.scale
        self.is_over = self.z > SPIKE_Z and self.ratio > SPIKE_RATIO
        self.cusum.push(min(self.z, LARGEST_Z) - CUSUM_ALLOWANCE)
        self._run = self._run + 1 if self.ratio > EXPLOSION_RATIO and self.z > SPIKE_Z else 0
        signals = []
        if self.is_over:
            signals.append(Signal(AnomalyKind.EXPLODING_GRADIENT, Severity.WARNING, "gradient_spike", self.ratio))
        if self._run >= EXPLOSION_POINTS:
            signals.append(
                Signal(AnomalyKind.EXPLODING_GRADIENT, Severity.CRITICAL, "gradient_run", self.ratio, self._run)
            )
        return [*signals, *self._drift()]

    def take(self, y: float) -> None:
        """Let the point move what is expected next, by no more than an ordinary point could."""
        if not self.in_warm_up:
            y = min(y, self.band.level + LARGEST_Z * self.band.scale)
        self.band.push(y)
        self._mean.push(y)
        if self._mean.num_values >= DRIFT_SPAN:
            least = self._mean.value if self._least_mean is None else self._least_mean
            least += LEAST_MEAN_LEAK * (self._mean.value - least)
            self._least_mean = min(self._mean.value, least)

    def calm(self) -> None:
        """Forget runs: the excursion that they counted is over, and the present level is where drifts begin."""
        self._least_mean = None
        self._run = 0
        self.cusum.clear()

    def _drift(self) -> list[Signal]:
        if self._least_mean is None:
            return []
        ratio = math.exp(self._mean.value - self._least_mean)
        if ratio < DRIFT_RATIO:
            return []
        return [Signal(AnomalyKind.EXPLODING_GRADIENT, Severity.CRITICAL, "gradient_drift", ratio, DRIFT_SPAN)]
