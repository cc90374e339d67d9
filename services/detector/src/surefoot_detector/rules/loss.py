"""Rules about the loss, as x = ln loss: relative changes, whatever the unit of the loss."""

from __future__ import annotations

from surefoot.events.anomaly import AnomalyKind, Severity
from surefoot_detector.rules.band import Band
from surefoot_detector.rules.signals import Signal
from surefoot_detector.rules.windows import Cusum, Mean

WARM_UP_POINTS = 30
INHERITED_WARM_UP_POINTS = 9
"""Where the noise is known already: enough for a level."""
SCALE_FLOOR = 0.004
WARM_UP_SCALE = 0.05

WARNING_Z = 6.0
WARNING_RISE = 0.05
PEAK_RATIO = 1.15
PEAK_DECAY = 0.9995

RUN_POINTS = 3
RUN_Z = 4.0
RUN_RISE = 0.08

TAIL_POINTS = 3
TAIL_FIRST_Z = 8.0
TAIL_FIRST_RISE = 0.09
TAIL_SECOND_Z = 4.0
TAIL_THIRD_Z = 2.0
"""Single-batch outliers are gone at the next step or the one after it; what has a longer tail is none."""

JUMP_RISE = 0.9
JUMP_Z = 6.0
"""A small model on small batches may be that noisy."""
WARM_UP_RISE = 0.7
WARM_UP_Z = 5.0
FIRST_POINTS = 4
FIRST_RISE = 2.0
"""Of the first points nobody knows how noisy they are."""

CUSUM_ALLOWANCE = 1.0
GENTLE_ALLOWANCE = 0.5
CUSUM_LIMIT = 30.0
CUSUM_LARGEST_Z = 10.0
"""No single point, however far out, may reach the limit alone: single-batch outliers are the data."""

SLOW_SPAN = 200
SLOW_LIMIT = 40.0
SLOW_LARGEST_Z = 3.0

MEAN_SPAN = 100
MEAN_RISE = 0.1
MEAN_POINTS = 50
MEAN_Z = 0.6
"""In units of one point's noise: 6 deviations of a mean of 100. The least of many means lies low by some of them."""


class LossRules:
    """What is expected of the loss, and which rules the current point breaks.

    Attributes:
        band: Where it is expected.
        rise: ln(loss / level) of the current point.
        z: The same in units of the noise.
        cusum: Evidence that the last points lie above the band.
        gentle_cusum: The same with half the allowance; worth something only beside other evidence.
    """

    def __init__(self, inherited: LossRules | None = None) -> None:
        self.band: Band = Band(SCALE_FLOOR, inherited.band if inherited else None)
        self._warm_up_points = INHERITED_WARM_UP_POINTS if inherited else WARM_UP_POINTS
        self.rise = self.z = 0.0
        self._first: float | None = None
        self._run = 0
        self._tail = 0
        self._peak_z = 0.0
        self.cusum, self.gentle_cusum, self._slow_cusum = Cusum(), Cusum(), Cusum()
        self._slow, self._mean = Mean(SLOW_SPAN), Mean(MEAN_SPAN)
        self._least_mean: float | None = None
        self._num_above = 0

    @property
    def in_warm_up(self) -> bool:
        """Whether there is too little to judge by; only absolute rules hold."""
        return self.band.num_points < self._warm_up_points

    @property
    def level(self) -> float | None:
        """What is expected next, ln of the loss; None at the very beginning."""
        return self.band.level if self.band.num_points else None

    @property
    def noise(self) -> float:
        """Standard deviation of ln loss; in the warm-up, where it is not known, a generous one."""
        return max(self.band.scale, WARM_UP_SCALE) if self.in_warm_up else self.band.scale

    @property
    def mean_rise(self) -> float:
        """Mean rise since the loss began to lean upwards; 0 when it does not."""
        sums = self.gentle_cusum
        return (sums.total / sums.num_points + GENTLE_ALLOWANCE) * self.band.scale if sums.num_points else 0.0

    def look(self, x: float) -> list[Signal]:
        """Judge a point by what came before it; `take` is called next unless it is to be left out."""
        if self._first is None:
            self._first = x
        level = x if self.level is None else self.level
        self.rise = x - level
        self.z = self.rise / self.band.scale
        if self.in_warm_up:
            rise = x - min(self._first, level)
            least = WARM_UP_RISE if self.band.num_points >= FIRST_POINTS else FIRST_RISE
            is_over = rise > max(least, WARM_UP_Z * self.band.scale)
            return [_critical(AnomalyKind.SPIKE, "rise_in_warm_up", rise)] if is_over else []
        return [*self._spikes(), *self._drifts(x)]

    def take(self, x: float) -> None:
        """Let the point move what is expected next."""
        self.band.push(x)
        if self.in_warm_up:
            self._slow.push(x)
            self._mean.push(x)
            return
        # An outlier must not drag the means along.
        bounded = min(x, self.band.level + CUSUM_LARGEST_Z * self.band.scale)
        self._slow.push(bounded)
        self._mean.push(bounded)
        if self._mean.num_values >= MEAN_SPAN:
            least = self._mean.value if self._least_mean is None else self._least_mean
            self._least_mean = min(self._mean.value, least)

    def calm(self) -> None:
        """Forget sums and runs: the excursion that they counted is over."""
        self._least_mean = None
        self.cusum.clear()
        self.gentle_cusum.clear()
        self._slow_cusum.clear()
        self._run = self._num_above = 0

    def _spikes(self) -> list[Signal]:
        signals = []
        self._run = self._run + 1 if self.z > RUN_Z and self.rise > RUN_RISE else 0
        if self.z > max(WARNING_Z, PEAK_RATIO * self._peak_z) and self.rise > WARNING_RISE:
            signals.append(Signal(AnomalyKind.SPIKE, Severity.WARNING, "spike", self.z))
        if self._is_tail():
            signals.append(_critical(AnomalyKind.SPIKE, "tail", self.z, TAIL_POINTS))
        if self._run >= RUN_POINTS:
            signals.append(_critical(AnomalyKind.SPIKE, "elevated", self.z, self._run_began()))
        if self.rise > JUMP_RISE and self.z > JUMP_Z:
            signals.append(_critical(AnomalyKind.SPIKE, "jump", self.rise))
        self._peak_z = max(self._peak_z * PEAK_DECAY, min(self.z, 40.0))
        return signals

    def _run_began(self) -> int:
        """Return how many points ago a run began: those before it that leaned the same way belong to it."""
        leaning = self.cusum.num_points + 1
        return max(self._run, leaning) if leaning <= self._run + RUN_POINTS else self._run

    def _is_tail(self) -> bool:
        """Return whether a spike has been coming down for three points."""
        if self._tail and self.z > (TAIL_SECOND_Z, TAIL_THIRD_Z)[self._tail - 1]:
            self._tail += 1
        else:
            self._tail = 1 if self.z > TAIL_FIRST_Z and self.rise > TAIL_FIRST_RISE else 0
        if self._tail < TAIL_POINTS:
            return False
        self._tail = 0
        return True

    def _drifts(self, x: float) -> list[Signal]:
        signals = []
        scale = self.band.scale
        z = min(self.z, CUSUM_LARGEST_Z)
        self.cusum.push(z - CUSUM_ALLOWANCE)
        self.gentle_cusum.push(z - GENTLE_ALLOWANCE)
        if self.cusum.total > CUSUM_LIMIT:
            signals.append(_critical(AnomalyKind.DIVERGENCE, "cusum", self.cusum.total, self.cusum.num_points))
        residual = min(x - self._slow.value, SLOW_LARGEST_Z * scale)
        self._slow_cusum.push((residual - 0.5 * scale - 0.003) / scale)
        if self._slow_cusum.total > SLOW_LIMIT:
            num_points = self._slow_cusum.num_points
            signals.append(_critical(AnomalyKind.DIVERGENCE, "slow_cusum", self._slow_cusum.total, num_points))
        above = self._mean.value - self._least_mean if self._least_mean is not None else 0.0
        self._num_above = self._num_above + 1 if above > max(MEAN_RISE, MEAN_Z * scale) else 0
        if self._num_above >= MEAN_POINTS:
            signals.append(_critical(AnomalyKind.DIVERGENCE, "mean", above, self._num_above))
        return signals


def _critical(kind: AnomalyKind, rule: str, score: float, num_points: int = 1) -> Signal:
    return Signal(kind, Severity.CRITICAL, rule, score, num_points)
