"""The last points on the lineage: what is expected can be rebuilt from them after a roll-back."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from typing import NamedTuple

from surefoot_detector.findings import Place
from surefoot_detector.rules.signals import Numbers

HISTORY_POINTS = 512
SLACK_POINTS = 128
"""So many more are kept before the oldest are dropped, all at once."""

_WIDTH = 9
_STEP = 1


class Point(NamedTuple):
    """A step that was judged.

    Attributes:
        place: Which.
        numbers: What it reported.
        loss_level: What was expected of ln loss before it; None at the very first.
        grad_norm_level: What was expected of the ln of the gradient norm before it.
        ordinary: Whether it moved what is expected: finite, and in no alarm.
    """

    place: Place
    numbers: Numbers
    loss_level: float | None
    grad_norm_level: float | None
    ordinary: bool


class History:
    """At least the last 512 points on the lineage.

    One flat array: as objects they would take ten times the memory, and there may be a thousand jobs.
    """

    def __init__(self) -> None:
        self._rows = array("d")

    def __len__(self) -> int:
        return len(self._rows) // _WIDTH

    def __iter__(self) -> Iterator[Point]:
        """Oldest first."""
        return (self.back(num_points) for num_points in range(len(self), 0, -1))

    def add(
        self,
        place: Place,
        numbers: Numbers,
        *,
        loss_level: float | None,
        grad_norm_level: float | None,
        ordinary: bool,
    ) -> None:
        """Add the newest; see `Point`."""
        flags = ordinary + 2 * numbers.applied + 4 * (numbers.grad_norm is not None)
        self._rows.extend(
            (
                place.attempt,
                place.step,
                -1 if place.position is None else place.position,
                numbers.loss,
                0.0 if numbers.grad_norm is None else numbers.grad_norm,
                math.nan if numbers.learning_rate is None else numbers.learning_rate,
                math.nan if loss_level is None else loss_level,
                math.nan if grad_norm_level is None else grad_norm_level,
                flags,
            )
        )
        if len(self._rows) >= (HISTORY_POINTS + SLACK_POINTS) * _WIDTH:
            del self._rows[: SLACK_POINTS * _WIDTH]

    def drop_after(self, step: int) -> None:
        """Drop the points after a step, which are no longer on the lineage."""
        while self._rows and self._rows[-_WIDTH + _STEP] > step:
            del self._rows[-_WIDTH:]

    def step_back(self, num_points: int) -> int:
        """Return the step of the point `num_points` from the end; see `back`."""
        return int(self._rows[-min(num_points, len(self)) * _WIDTH + _STEP])

    def back(self, num_points: int) -> Point:
        """Return the point `num_points` from the end, 1 for the newest; the oldest where there are fewer."""
        begin = (len(self) - min(num_points, len(self))) * _WIDTH
        attempt, step, position, loss, norm, rate, loss_level, norm_level, flags = self._rows[begin : begin + _WIDTH]
        known = int(flags)
        return Point(
            Place(int(attempt), int(step), None if position < 0 else int(position)),
            Numbers(loss, norm if known & 4 else None, _or_none(rate), bool(known & 2)),
            _or_none(loss_level),
            _or_none(norm_level),
            bool(known & 1),
        )


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
