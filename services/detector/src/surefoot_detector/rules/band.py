"""Where a noisy series is expected next: its level and its scale, hardly moved by outliers or by a trend."""

from __future__ import annotations

from collections import deque

from surefoot_detector.rules.windows import MedianWindow

SLOW_POINTS = 32
FAST_POINTS = 9
SAMPLES = 64
SAMPLE_EVERY = 2
"""The scale is taken from every second of the last 128 points, and from every point as long as there are few."""
NOISE_PER_MEDIAN_DIFFERENCE = 1.048
"""Standard deviation of Gaussian noise in units of the median absolute difference of neighbours: 1/(.6745 x sqrt 2)."""
NOISE_PER_MEDIAN_DEVIATION = 1.4826
"""The same in units of the median absolute deviation."""
MOST_AUTOCORRELATION_RATIO = 3.0


class Band:
    """Level and scale of a series of logarithms.

    The level is the lower of a slow and a fast median, so that a falling series is followed closely and a rising one is
    not. The scale comes from differences of neighbours, which a trend does not touch; where neighbours are alike
    (autocorrelated noise) they understate it, so the deviations from the level may raise it, up to threefold.

    Args:
        floor: Least scale: differences below it are of no interest whatever the noise.
        inherited: A band of the same series whose estimate of the noise is taken over, and which is not used any more.

    Attributes:
        level: What is expected next; meaningless before the first point.
        scale: Standard deviation that noise would have; never below the floor.
        num_points: How many have come.
    """

    __slots__ = ("_deviations", "_differences", "_fast", "_floor", "_last", "_slow", "level", "num_points", "scale")

    def __init__(self, floor: float, inherited: Band | None = None) -> None:
        self._floor = floor
        self._slow = MedianWindow(SLOW_POINTS)
        self._fast: deque[float] = deque(maxlen=FAST_POINTS)
        self._differences: MedianWindow = inherited._differences if inherited else MedianWindow(SAMPLES)
        self._deviations: MedianWindow = inherited._deviations if inherited else MedianWindow(SAMPLES)
        self._last = 0.0
        self.scale: float = inherited.scale if inherited else floor
        self.level = 0.0
        self.num_points = 0

    def push(self, value: float) -> None:
        """Take in the next value of the series."""
        num_points = self.num_points
        if num_points and (num_points < SAMPLES or num_points % SAMPLE_EVERY == 0):
            self._sample(value)
        self._last = value
        self._slow.push(value)
        self._fast.append(value)
        # Nine are sorted in less time than a sorted window takes to keep.
        fast = sorted(self._fast)
        self.level = min(self._slow.median, fast[len(fast) // 2])
        self.num_points = num_points + 1

    def _sample(self, value: float) -> None:
        self._differences.push(abs(value - self._last))
        self._deviations.push(abs(value - self.level))
        noise = NOISE_PER_MEDIAN_DIFFERENCE * self._differences.median
        spread = NOISE_PER_MEDIAN_DEVIATION * self._deviations.median
        self.scale = max(self._floor, min(max(noise, spread), MOST_AUTOCORRELATION_RATIO * noise))
