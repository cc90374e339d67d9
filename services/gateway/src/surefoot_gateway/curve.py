"""A curve of any length in bounded memory: the lowest and highest value of each stretch of steps. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import NamedTuple

from surefoot.events import StepCompleted


class Stretch(NamedTuple):
    """Consecutive steps of one attempt.

    Attributes:
        attempt: Of all its steps.
        step: The last one.
        loss_low, loss_high: Extremes of the finite losses, None when there is none.
        grad_low, grad_high: The same of the gradient norm.
        learning_rate: Of the last step.
        num_units: Tokens, or samples where the data has no tokens.
        seconds: Of the slowest rank, summed.
        num_nonfinite: Steps whose loss or gradient was not finite.
    """

    attempt: int
    step: int
    loss_low: float | None
    loss_high: float | None
    grad_low: float | None
    grad_high: float | None
    learning_rate: float
    num_units: int
    seconds: float
    num_nonfinite: int


class Curve:
    """The stretches of a job, oldest first.

    Args:
        max_points: Bound on points; a stretch is two, low and high. When it is reached stretches become twice as
            long; attempts too many and too short for that go, oldest first.
    """

    def __init__(self, max_points: int) -> None:
        self._max_stretches = max_points // 2
        self._width = 1
        self._stretches: list[Stretch] = []

    def __iter__(self) -> Iterator[Stretch]:
        return iter(self._stretches)

    def __len__(self) -> int:
        return len(self._stretches)

    def add(self, event: StepCompleted) -> None:
        """Put in one step; amortised O(1)."""
        new = _stretch(event)
        if self._stretches and self._key(self._stretches[-1]) == self._key(new):
            self._stretches[-1] = _joined(self._stretches[-1], new)
            return
        self._stretches.append(new)
        if len(self._stretches) > self._max_stretches:
            self._shrink()

    def _shrink(self) -> None:
        num_runs = sum(1 for _ in groupby(self._stretches, lambda stretch: stretch.attempt))
        if num_runs > self._max_stretches // 2:
            del self._stretches[: self._max_stretches // 4]
        # Ends at one stretch per run at the latest.
        while len(self._stretches) > self._max_stretches:
            self._width *= 2
            self._stretches = [_all_joined(list(group)) for _, group in groupby(self._stretches, self._key)]

    def _key(self, stretch: Stretch) -> tuple[int, int]:
        return stretch.attempt, (stretch.step - 1) // self._width


def _stretch(event: StepCompleted) -> Stretch:
    loss = _finite(event.loss)
    grad = _finite(event.grad_norm)
    return Stretch(
        attempt=event.attempt or 0,
        step=event.step,
        loss_low=loss,
        loss_high=loss,
        grad_low=grad,
        grad_high=grad,
        learning_rate=event.learning_rate,
        num_units=event.num_samples if event.num_tokens is None else event.num_tokens,
        seconds=max(event.step_seconds, default=0.0),
        num_nonfinite=int(loss is None or not event.applied),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _all_joined(stretches: list[Stretch]) -> Stretch:
    result = stretches[0]
    for stretch in stretches[1:]:
        result = _joined(result, stretch)
    return result


def _joined(a: Stretch, b: Stretch) -> Stretch:
    return Stretch(
        attempt=b.attempt,
        step=b.step,
        loss_low=_extreme(min, a.loss_low, b.loss_low),
        loss_high=_extreme(max, a.loss_high, b.loss_high),
        grad_low=_extreme(min, a.grad_low, b.grad_low),
        grad_high=_extreme(max, a.grad_high, b.grad_high),
        learning_rate=b.learning_rate,
        num_units=a.num_units + b.num_units,
        seconds=a.seconds + b.seconds,
        num_nonfinite=a.num_nonfinite + b.num_nonfinite,
    )


def _extreme(choose: Callable[[float, float], float], a: float | None, b: float | None) -> float | None:
    if a is None or b is None:
        return b if a is None else a
    return choose(a, b)
