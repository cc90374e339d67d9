"""The numbers of one job's steps in, findings out. Pure: no clock, no files, no bus."""

from __future__ import annotations

import math
from collections.abc import Iterable

from surefoot.events.anomaly import AnomalyKind, Severity
from surefoot_detector.alarm import REGIME_POINTS, Alarm
from surefoot_detector.findings import Cleared, Finding, Healed, Place, Raised
from surefoot_detector.history import History, Point
from surefoot_detector.rules.judge import Judge
from surefoot_detector.rules.loss import WARM_UP_POINTS
from surefoot_detector.rules.signals import Numbers, Signal

CLEARED_EVERY_STEPS = 5
CONFIRM_POINTS = 30
"""After steps that nobody saw: so many must lie in band before those count as harmless."""
REGIME_KEPT_POINTS = 128
EARLIER_POINTS = 50
"""So far back a worse signal may move the onset of an alarm that is on."""
NEW_REGIMES = ("new_regime", "new_gradient_regime")
_RANK = {Severity.NOTICE: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}


class Detector:
    """Follows one job along its lineage. One thread at a time.

    Attributes:
        attempt: The newest attempt that was heard of; points of older ones are ignored.
        alarm: The excursion that is going on; None when all is well.
    """

    def __init__(self) -> None:
        self.attempt = 0
        self.alarm: Alarm | None = None
        self._judge = Judge()
        self._history = History()
        self._last: Place | None = None
        self._first_step: int | None = None
        self._step_interval: int | None = None
        self._num_unconfirmed = 0
        self._rolled_back = False
        self._throttle = Throttle()

    def start_attempt(self, attempt: int, from_step: int) -> None:
        """Go back to the step that the attempt starts from; what came after it is no longer on the lineage.

        Args:
            attempt: Its number.
            from_step: The last step that is in the state it begins with; 0 for the seed.
        """
        if attempt <= self.attempt:
            return
        self.attempt = attempt
        self._throttle.start_attempt()
        if self._last is not None and self._last.step > from_step:
            self._last = Place(attempt, from_step, None)
            self._history.drop_after(from_step)
            self._rebuild(from_step)
        if self.alarm is not None and from_step < self.alarm.onset.step:
            self._rolled_back = True
            self.alarm.roll_back()

    def lose_events(self) -> None:
        """Something was lost on the way here: no step counts as cleared until enough have been seen again."""
        self._num_unconfirmed = CONFIRM_POINTS

    def feed(self, place: Place, numbers: Numbers) -> list[Finding]:
        """Judge the next step. Steps of an older attempt and steps already seen are ignored.

        Returns:
            What was found, in order; at most one `Cleared`, the last.
        """
        if place.attempt > self.attempt:
            # Its AttemptStarted was lost. It begins where its first step says.
            self.start_attempt(place.attempt, place.step - 1)
            self.lose_events()
        if place.attempt < self.attempt or (self._last is not None and place.step <= self._last.step):
            return []
        self._look_for_gap(place)
        signals = self._judge.look(numbers)
        ordinary = not signals and (self.alarm is None or self._rolled_back)
        self._remember(place, numbers, ordinary)
        findings: list[Finding] = []
        if self.alarm is not None:
            signals = self._watch(self.alarm, numbers, signals)
        if signals:
            findings += self._report(signals)
        elif self.alarm is not None and self.alarm.is_over:
            findings += self._heal(self.alarm)
        if ordinary:
            self._judge.take()
        elif self.alarm is not None and self.alarm.kind is not AnomalyKind.EXPLODING_GRADIENT:
            # Gradient norms often settle elsewhere after the loss has come back.
            self._judge.take_gradient()
        return findings + self._cleared(place)

    def _look_for_gap(self, place: Place) -> None:
        if self._first_step is None:
            self._first_step = place.step
        if self._last is not None:
            interval = place.step - self._last.step
            if self._step_interval is not None and interval > self._step_interval:
                self.lose_events()
            self._step_interval = interval
        self._last = place

    def _remember(self, place: Place, numbers: Numbers, ordinary: bool) -> None:
        levels = {"loss_level": self._judge.loss.level, "grad_norm_level": self._judge.gradient.level}
        self._history.add(place, numbers, ordinary=ordinary, **levels)

    def _watch(self, alarm: Alarm, numbers: Numbers, signals: list[Signal]) -> list[Signal]:
        """Follow the alarm; return what still holds, and what is wrong because of how long it lasts."""
        if any(signal.kind is AnomalyKind.NONFINITE for signal in signals):
            alarm.watch_nothing()
            return signals
        alarm.watch(numbers, self._judge.loss.level if self._rolled_back else None)
        if alarm.is_in_band:
            # The sums of the slow rules take long to fall; what they summed up is over.
            return [signal for signal in signals if signal.kind is AnomalyKind.EXPLODING_GRADIENT]
        if self._rolled_back or not alarm.is_lasting:
            return signals
        if alarm.kind is AnomalyKind.EXPLODING_GRADIENT and not any(s.kind is not alarm.kind for s in signals):
            # The loss does not mind: gradient norms of healthy runs settle elsewhere now and then.
            return [Signal(alarm.kind, Severity.WARNING, "new_gradient_regime", alarm.usual_z, alarm.num_points)]
        expected = self._judge.rewarm.active and alarm.severity is Severity.WARNING
        if alarm.num_points < REGIME_POINTS and not expected:
            return [Signal(AnomalyKind.DIVERGENCE, Severity.CRITICAL, "lasting", alarm.usual_z, alarm.num_points)]
        return [Signal(AnomalyKind.DIVERGENCE, Severity.WARNING, "new_regime", alarm.usual_z, alarm.num_points)]

    def _report(self, signals: list[Signal]) -> list[Finding]:
        worst = max(signals, key=lambda signal: (_RANK[signal.severity], signal.num_points))
        if worst.rule in NEW_REGIMES:
            return self._accept_regime(worst)
        alarm = self.alarm
        if self._rolled_back and worst.severity is Severity.WARNING:
            # Noise after a roll-back: the alarm that led to it is what people wait to see healed.
            return []
        if alarm is None or self._rolled_back:
            earlier = [] if alarm is None else alarm.reports
            alarm = self.alarm = self._open(worst)
            alarm.reports += earlier
            self._rolled_back = False
        if not alarm.is_news(worst):
            return []
        if worst.rule != "lasting" and worst.num_points <= EARLIER_POINTS:
            begin = self._history.back(worst.num_points)
            alarm.begin_at(begin.place, begin.loss_level, begin.grad_norm_level)
        alarm.reported(worst, self.attempt)
        return [*self._throttle.stop(alarm.onset), self._raised(alarm, worst)]

    def _open(self, signal: Signal) -> Alarm:
        begin = self._history.back(signal.num_points)
        alarm = Alarm(signal.kind, begin.place, begin.loss_level, self._judge.loss.noise, begin.grad_norm_level)
        alarm.watch(self._history.back(1).numbers, None)
        return alarm

    def _raised(self, alarm: Alarm, signal: Signal) -> Raised:
        now = self._history.back(1)
        return Raised(
            kind=signal.kind,
            severity=signal.severity,
            onset=alarm.onset,
            at=now.place,
            rule=signal.rule,
            score=signal.score,
            loss=now.numbers.loss,
            loss_baseline=_exp(alarm.loss_level),
            grad_norm=now.numbers.grad_norm,
            grad_norm_baseline=_exp(alarm.gradient_level),
        )

    def _heal(self, alarm: Alarm) -> list[Finding]:
        now = self._history.back(1)
        self._end_alarm()
        baseline = _exp(alarm.loss_level)
        return [
            Healed(kind, attempt, onset_step, now.place, now.numbers.loss, baseline)
            for kind, attempt, onset_step in alarm.reports
        ]

    def _accept_regime(self, signal: Signal) -> list[Finding]:
        """Take the new level for the baseline: nobody did anything about it for hundreds of steps."""
        assert self.alarm is not None
        raised = self._raised(self.alarm, signal)
        points = list(self._history)[-REGIME_KEPT_POINTS:]
        self._judge = rebuilt(points, inherited=self._judge)
        self._judge.calm()
        self._end_alarm()
        return [raised]

    def _end_alarm(self) -> None:
        if self.alarm is not None and self.alarm.severity is Severity.CRITICAL:
            self._judge.calm()
        self.alarm, self._rolled_back = None, False

    def _rebuild(self, from_step: int) -> None:
        warm = self._first_step is not None and from_step - self._first_step >= WARM_UP_POINTS
        points = [point for point in self._history if point.ordinary]
        self._judge = rebuilt(points, inherited=self._judge if warm else None)

    def _cleared(self, place: Place) -> list[Finding]:
        if self.alarm is not None:
            return []
        self._num_unconfirmed = max(0, self._num_unconfirmed - 1)
        if self._num_unconfirmed or self._judge.in_warm_up:
            return []
        num_suspect = self._judge.num_suspect_points
        if num_suspect >= len(self._history):
            return []
        through = self._history.step_back(num_suspect + 1)
        return self._throttle.pass_on(place.attempt, through)


class Throttle:
    """Says how far steps are cleared, not at every step: when it has moved by five, or when something changes."""

    def __init__(self) -> None:
        self._said = 0
        self._cleared = 0
        self._attempt = 0
        self._changed = True

    def start_attempt(self) -> None:
        """A new attempt: what was said of the old one does not count."""
        self._said = self._cleared = 0
        self._changed = True

    def pass_on(self, attempt: int, through_step: int) -> list[Finding]:
        """Take in how far steps are cleared; say it when it is time."""
        self._attempt, self._cleared = attempt, max(self._cleared, through_step)
        if self._cleared <= self._said or not (self._changed or self._cleared - self._said >= CLEARED_EVERY_STEPS):
            return []
        self._changed = False
        self._said = self._cleared
        return [Cleared(attempt, self._said)]

    def stop(self, onset: Place) -> list[Finding]:
        """An alarm begins: say what was cleared before its onset and not said yet."""
        self._changed = True
        through = min(self._cleared, onset.step - 1)
        if through <= self._said:
            return []
        self._said = through
        return [Cleared(self._attempt, through)]


def rebuilt(points: Iterable[Point], inherited: Judge | None) -> Judge:
    """Return a judge that has seen these points.

    Args:
        points: Of the lineage, oldest first.
        inherited: Whose estimate of the noise is good from the start where there are few points: the warm-up is then
            short. None: what came before is of no use.
    """
    judge = Judge(inherited)
    for point in points:
        judge.look(point.numbers)
        judge.take()
    return judge


def _exp(level: float | None) -> float | None:
    return None if level is None else math.exp(level)
