"""What one save costs in training time: the copy, and slower steps while it is written. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

NUM_QUIET_STEPS = 50
"""The usual pace is the median of so many steps, so that an evaluation or another pause between two does not count."""
MIN_QUIET_STEPS = 3
NUM_SAVES = 9
"""The cost is the median of so many saves: one that fell on a pause of the loop does not count."""


class SaveCost:
    """Compares the steps during which a save was unwritten with those without. Rank 0's main thread.

    The excess of the former over the usual pace holds everything: the copy stands between two exchanges of the ranks,
    and slower steps are what they are slower by. Where every step has its snapshot the copy is in the usual pace too,
    and costs nothing more. The copy that is made for the save alone is known exactly and bounds the cost from below.
    """

    def __init__(self) -> None:
        self._quiet: deque[float] = deque(maxlen=NUM_QUIET_STEPS)
        self._disturbed: list[float] | None = None
        self._copy_seconds = 0.0
        self._is_extra_copy = False
        self._costs: deque[float] = deque(maxlen=NUM_SAVES)

    def begin(self, copy_seconds: float, *, is_extra: bool) -> None:
        """Say that a save began at the end of the step that was added last.

        Args:
            copy_seconds: The step loop stood still for so long.
            is_extra: There would have been no copy without the save.
        """
        if self._disturbed is None:
            self._disturbed, self._copy_seconds, self._is_extra_copy = [], copy_seconds, is_extra

    def add_step(self, seconds: float, *, is_written: bool) -> bool:
        """Add a step.

        Args:
            seconds: From the exchange before to this one, of the slowest rank.
            is_written: No save waits for storage any more.

        Returns:
            A save is over, so `seconds` may have changed.
        """
        if self._disturbed is None:
            self._quiet.append(seconds)
            return False
        self._disturbed.append(seconds)
        if not is_written:
            return False
        self._costs.append(self._cost(self._disturbed))
        self._disturbed = None
        return True

    def _cost(self, disturbed: list[float]) -> float:
        if len(self._quiet) < MIN_QUIET_STEPS:
            return self._copy_seconds  # all that is known: where each step saves there is no pace to compare with
        excess = sum(disturbed) - len(disturbed) * _median(self._quiet)
        return max(excess, self._copy_seconds if self._is_extra_copy else 0.0)

    @property
    def num_saves(self) -> int:
        """Number of saves that `seconds` is the median of."""
        return len(self._costs)

    @property
    def seconds(self) -> float:
        """Cost of a save in seconds of training; 0 before the first one is over."""
        return _median(self._costs) if self._costs else 0.0


def _median(values: Iterable[float]) -> float:
    # The one of `statistics` costs every start of a rank 6 ms of imports.
    ordered = sorted(values)
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[~middle]) / 2
