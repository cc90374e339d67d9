"""Running statistics of the last points. Pure; every operation costs the same however long the run is."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque


class MedianWindow:
    """Median of the last `size` values. Values must not be NaN, which has no place in an order.

    Kept sorted: a push moves at most `size` pointers, which for the sizes used here takes less than a heap.
    """

    __slots__ = ("_arrived", "_size", "_sorted")

    def __init__(self, size: int) -> None:
        self._size = size
        self._arrived: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._arrived)

    def push(self, value: float) -> None:
        """Take a value in; the oldest goes once there are `size`."""
        ordered, arrived = self._sorted, self._arrived
        if len(arrived) == self._size:
            del ordered[bisect_left(ordered, arrived.popleft())]
        arrived.append(value)
        insort(ordered, value)

    @property
    def median(self) -> float:
        """The upper median. There must be a value."""
        return self._sorted[len(self._sorted) // 2]


class Mean:
    """Exponential mean with a span, a plain mean until that many values have come.

    Args:
        span: Number of values over which a value's weight falls to 1/e.
    """

    __slots__ = ("_span", "num_values", "value")

    def __init__(self, span: int) -> None:
        self._span = span
        self.num_values = 0
        self.value = 0.0

    def push(self, value: float) -> None:
        """Take a value in."""
        self.num_values += 1
        self.value += (value - self.value) / min(self.num_values, self._span)


class Cusum:
    """One-sided cumulative sum (Page 1954): grows while values lie above the allowance, never below 0.

    Attributes:
        total: The sum.
        num_points: How many points ago it began to grow; 0 while it is 0. The change is estimated to lie there.
    """

    __slots__ = ("num_points", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self.num_points = 0

    def push(self, excess: float) -> None:
        """Take in how far the value lies above the allowance; negative below it."""
        self.total = max(0.0, self.total + excess)
        self.num_points = self.num_points + 1 if self.total > 0.0 else 0

    def clear(self) -> None:
        """Start again from 0."""
        self.total = 0.0
        self.num_points = 0
