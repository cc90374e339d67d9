"""All rules together on one point after the other."""

from __future__ import annotations

import math

from surefoot.events.anomaly import AnomalyKind, Severity
from surefoot_detector.rules.gradient import GradientRules
from surefoot_detector.rules.loss import INHERITED_WARM_UP_POINTS, WARM_UP_POINTS, WARNING_Z, LossRules
from surefoot_detector.rules.nonfinite import NonfiniteRules
from surefoot_detector.rules.schedule import Rewarm
from surefoot_detector.rules.signals import Numbers, Signal

REWARM_RULES = frozenset({"tail", "elevated", "cusum", "slow_cusum", "mean", "loss_after_gradient"})
"""What the loss may do when the learning rate is raised again on purpose."""

LOSS_SUSPICION = 5.0
GRADIENT_SUSPICION = 10.0
LONGEST_GRADIENT_SUSPICION_POINTS = 50
"""A gradient norm that has settled elsewhere is no reason to wait for ever."""

TOGETHER_POINTS = 2
TOGETHER_LOSS_RISE = 0.1
HARD_RATIO = 5.0
HARD_LOSS_Z = 2.5
HARD_LOSS_RISE = 0.1
LONG_LOSS_EVIDENCE = 7.0
LONG_GRADIENT_EVIDENCE = 40.0
JOINT_LOSS_Z = 3.0
JOINT_LOSS_RISE = 0.05
JOINT_GRADIENT_EVIDENCE = 18.0


class Judge:
    """Judges points in order. Attributes `loss` and `gradient` hold what is expected.

    Args:
        inherited: A judge of the same job whose estimate of the noise is taken over, and who is not used any more: the
            warm-up is then short.
    """

    def __init__(self, inherited: Judge | None = None) -> None:
        self.loss: LossRules = LossRules(inherited.loss if inherited else None)
        self.gradient: GradientRules = GradientRules(inherited.gradient if inherited else None)
        self.nonfinite = NonfiniteRules()
        self.rewarm = Rewarm()
        self._since_loss = self._since_gradient = TOGETHER_POINTS
        self._num_taken = 0
        self._warm_up_points = INHERITED_WARM_UP_POINTS if inherited else WARM_UP_POINTS
        self._x: float | None = None
        self._y: float | None = None

    def look(self, numbers: Numbers) -> list[Signal]:
        """Judge a point by what came before it; `take` is called next unless it is to be left out."""
        signals = self.nonfinite.look(numbers)
        if signals:
            self._x = self._y = None
            return signals
        if numbers.learning_rate:
            self.rewarm.take(numbers.learning_rate)
        self._x = math.log(numbers.loss) if numbers.loss > 0 else None
        self._y = math.log(numbers.grad_norm) if numbers.grad_norm else None
        signals = [] if self._x is None else self.loss.look(self._x)
        is_over = self._loss_is(WARNING_Z, TOGETHER_LOSS_RISE)
        self._since_loss = 0 if is_over else self._since_loss + 1
        if self._y is not None:
            signals += self.gradient.look(self._y)
            self._since_gradient = 0 if self.gradient.is_over else self._since_gradient + 1
            signals += self._together()
        return [_expected(signal) for signal in signals] if self.rewarm.active else signals

    def take(self) -> None:
        """Let the point just looked at move what is expected next."""
        self._num_taken += 1
        if self._x is not None:
            self.loss.take(self._x)
        self.take_gradient()

    def take_gradient(self) -> None:
        """Let only the gradient norm of the point move what is expected next."""
        if self._y is not None:
            self.gradient.take(self._y)

    def calm(self) -> None:
        """Forget what rules have counted: the excursion is over."""
        self.loss.calm()
        self.gradient.calm()
        self._since_loss = self._since_gradient = TOGETHER_POINTS

    @property
    def in_warm_up(self) -> bool:
        """Whether there is too little to judge by."""
        return self._num_taken < self._warm_up_points

    @property
    def num_suspect_points(self) -> int:
        """How many of the last points may turn out to belong to an excursion; 0: none is suspected."""
        loss, norm = self.loss.cusum, self.gradient.cusum
        num_points = loss.num_points if loss.total > LOSS_SUSPICION else 0
        if norm.total > GRADIENT_SUSPICION and norm.num_points <= LONGEST_GRADIENT_SUSPICION_POINTS:
            num_points = max(num_points, norm.num_points)
        return num_points

    def _together(self) -> list[Signal]:
        if max(self._since_loss, self._since_gradient) < TOGETHER_POINTS:
            ago = max(self._since_loss, self._since_gradient)
            return [Signal(AnomalyKind.SPIKE, Severity.CRITICAL, "loss_and_gradient", self.loss.z, ago + 1)]
        if self.gradient.is_over and self.gradient.ratio > HARD_RATIO and self._loss_is(HARD_LOSS_Z, HARD_LOSS_RISE):
            return [Signal(AnomalyKind.SPIKE, Severity.CRITICAL, "loss_with_gradient", self.gradient.ratio)]
        signal = self._loss_after_gradient()
        return [signal] if signal else []

    def _loss_after_gradient(self) -> Signal | None:
        """A bad update shows in the gradient norm first: it stays raised, and the loss of a noisy job follows."""
        norm, loss = self.gradient.cusum, self.loss.gentle_cusum
        if norm.total < JOINT_GRADIENT_EVIDENCE or self.loss.in_warm_up:
            return None
        follows = loss.total > LONG_LOSS_EVIDENCE and norm.total > LONG_GRADIENT_EVIDENCE
        follows = follows and self.loss.mean_rise > JOINT_LOSS_RISE
        if not (follows or self._loss_is(JOINT_LOSS_Z, JOINT_LOSS_RISE)):
            return None
        num_points = max(norm.num_points, self.loss.cusum.num_points)
        return Signal(AnomalyKind.DIVERGENCE, Severity.CRITICAL, "loss_after_gradient", norm.total, num_points)

    def _loss_is(self, z: float, rise: float) -> bool:
        return not self.loss.in_warm_up and self.loss.z > z and self.loss.rise > rise


def _expected(signal: Signal) -> Signal:
    """A rise that a raised learning rate explains is shown and not acted on."""
    return signal._replace(severity=Severity.WARNING) if signal.rule in REWARM_RULES else signal
