"""One excursion, from the first broken rule until the loss is back in the band that it had left."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from surefoot.events.anomaly import AnomalyKind, Severity
from surefoot_detector.findings import Place
from surefoot_detector.rules.signals import Numbers, Signal

IN_BAND_Z = 3.0
IN_BAND_RISE = 0.03
IN_BAND_RATIO = 3.0
IN_BAND_POINTS = 2
HEALED_EVIDENCE = 6.0
"""ln of the likelihood ratio "back at the baseline" to "as high as in the alarm" (Wald 1945): about 400 to 1."""
LEAST_ALARM_Z = 1.0
LARGEST_ALARM_Z = 10.0
LASTING_POINTS = 50
REGIME_POINTS = 400


@dataclass
class Alarm:
    """An excursion that has not ended. The baseline is that of its onset and does not move.

    Attributes:
        kind: Of the worst that was reported.
        onset: First step.
        loss_level: ln of the loss before the onset; None: there was none.
        loss_scale: Noise of that.
        gradient_level: ln of the gradient norm before the onset; None: not known.
        num_points: How long it has lasted.
        severity: Of the worst that was reported; None: nothing yet.
        reports: What was reported, as (kind, attempt, step of the onset), in order; of the alarm before it too when
            this one follows a roll-back.
    """

    kind: AnomalyKind
    onset: Place
    loss_level: float | None
    loss_scale: float
    gradient_level: float | None
    num_points: int = 0
    severity: Severity | None = None
    reports: list[tuple[AnomalyKind, int, int]] = field(default_factory=list)
    _kinds: set[AnomalyKind] = field(default_factory=set)
    _num_in_band: int = 0
    _evidence: float = 0.0
    _sum_z: float = 0.0

    def watch(self, numbers: Numbers, level: float | None) -> None:
        """Take in the next point.

        Args:
            numbers: Of the point.
            level: ln of the loss that would be expected now, when the ranks were rolled back; None else. The loss
                was higher there than at the onset.
        """
        usual = self.usual_z
        if not math.isfinite(numbers.loss):
            self.watch_nothing()
            return
        self.num_points += 1
        z, in_band = self._distance(numbers, level)
        self._sum_z += min(z, LARGEST_ALARM_Z)
        self._num_in_band = self._num_in_band + 1 if in_band else 0
        # Sequential test of two means of unit variance: 0 against what it has been in this alarm.
        self._evidence = max(0.0, self._evidence + usual * (usual / 2 - z)) if in_band else 0.0

    def watch_nothing(self) -> None:
        """Take in the next point, whose numbers are none."""
        self.num_points += 1
        self._num_in_band = 0

    def roll_back(self) -> None:
        """The ranks went back: what comes now is judged afresh against the same baseline."""
        self._num_in_band, self._evidence = 0, 0.0

    def begin_at(self, onset: Place, loss_level: float | None, gradient_level: float | None) -> None:
        """Move the onset back, when what was seen later shows that it began earlier."""
        if onset.step < self.onset.step:
            self.onset, self.loss_level, self.gradient_level = onset, loss_level, gradient_level

    def is_news(self, signal: Signal) -> bool:
        """Whether a signal says more than what was reported: worse, not finite, or lasting."""
        if self.severity is None or (signal.severity is Severity.CRITICAL) > (self.severity is Severity.CRITICAL):
            return True
        lasting = signal.rule == "lasting" or signal.kind is AnomalyKind.NONFINITE
        return lasting and signal.severity is self.severity and signal.kind not in self._kinds

    def reported(self, signal: Signal, attempt: int) -> None:
        """Note what was said, and during which attempt."""
        report = (signal.kind, attempt, self.onset.step)
        if report not in self.reports:
            self.reports.append(report)
        self.kind, self.severity = signal.kind, signal.severity
        self._kinds.add(signal.kind)

    @property
    def is_in_band(self) -> bool:
        """Whether the last point was."""
        return self._num_in_band > 0

    @property
    def is_over(self) -> bool:
        """Whether the loss is back in band for good."""
        if self._num_in_band < IN_BAND_POINTS:
            return False
        return self._evidence >= HEALED_EVIDENCE or self.usual_z <= LEAST_ALARM_Z

    @property
    def is_lasting(self) -> bool:
        """Whether the loss has stayed out of band for long."""
        return self.num_points >= LASTING_POINTS and not self.is_in_band

    @property
    def usual_z(self) -> float:
        """How far out it has been, on average."""
        return max(LEAST_ALARM_Z, min(LARGEST_ALARM_Z, self._sum_z / max(1, self.num_points)))

    def _distance(self, numbers: Numbers, level: float | None) -> tuple[float, bool]:
        z, in_band = 0.0, True
        levels = [value for value in (self.loss_level, level) if value is not None]
        if levels and numbers.loss > 0:
            rise = math.log(numbers.loss) - max(levels)
            z = rise / self.loss_scale
            in_band = z < IN_BAND_Z or rise < IN_BAND_RISE
        if self.kind is AnomalyKind.EXPLODING_GRADIENT and self.gradient_level is not None and numbers.grad_norm:
            in_band = in_band and math.log(numbers.grad_norm) - self.gradient_level < math.log(IN_BAND_RATIO)
        return z, in_band
