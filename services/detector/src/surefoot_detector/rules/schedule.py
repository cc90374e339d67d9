"""Whether the learning rate is being raised again on purpose: the loss then rises too, and nothing is wrong."""

from __future__ import annotations

REWARM_RATIO = 1.5
REWARM_POINTS = 200


class Rewarm:
    """Notices that a learning rate that had come down goes up again. The first warm-up is none.

    Attributes:
        active: Whether the current point lies within 200 points of such a rise.
    """

    def __init__(self) -> None:
        self.active = False
        self._peak = self._low = 0.0
        self._num_points = 0

    def take(self, learning_rate: float) -> None:
        """Take in the learning rate of the next point."""
        limit = REWARM_RATIO * self._low
        self.active = self._peak > limit and learning_rate > limit
        if learning_rate > self._peak and not self.active:
            self._peak = self._low = learning_rate
        self._low = min(self._low, learning_rate)
        self._num_points = self._num_points + 1 if self.active else 0
        if self._num_points > REWARM_POINTS:
            self.active, self._num_points = False, 0
            self._peak = self._low = learning_rate
