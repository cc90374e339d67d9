"""How often to save: `checkpoint.save_every_seconds: auto`. Pure.

Saving often costs training time, saving rarely costs the work since the last save when something fails. With a cost of
d seconds per save and M seconds between failures on average the least is lost at sqrt(2 d M) (J. W. Young, "A first
order approximation to the optimum checkpoint interval", CACM 17, 1974); J. T. Daly, "A higher order estimate of the
optimum checkpoint interval for restart dumps", FGCS 22, 2006, eq. 37, holds for costs that are not small against M too.

M is what this job has seen. Every restart of the ranks counts, also one that lost nothing since the snapshot in memory
survived: what ends a rank may as well end the machine. A job that has hardly trained has seen nothing, so half a
failure in four hours is added to what it has seen: eight hours between failures to begin with (those of a job of 1,024
GPUs in A. Kokolis et al., "Revisiting reliability in large-scale machine learning research clusters", 2024), with the
weight of Jeffreys' prior for a Poisson rate, Gamma(1/2), which a single failure outweighs. An M that is wrong by a
factor of four moves the interval by a factor of two, and what is lost by a quarter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.checkpoint.attempts import AttemptRecord, Source

FIRST_SECONDS = 30.0
"""Until the first save has shown what it costs."""
MIN_SECONDS = 10.0
MAX_SECONDS = 3600.0
PRIOR_FAILURES = 0.5
PRIOR_SECONDS = 4 * 3600.0
LEAST_CHANGE_RATIO = 0.1
"""A change by less than this is not worth a word."""


def count_failures(records: Mapping[int, AttemptRecord]) -> int:
    """Return how many restarts the job has had since somebody last started it at its seed.

    Roll-backs, changes of the learning rate and starts by a user are attempts too, but no failures.
    """
    num_failures = 0
    for _, record in sorted(records.items()):
        if record.is_restart:
            num_failures += 1
        elif record.starts_from.source is Source.SEED:
            num_failures = 0
    return num_failures


def mean_seconds_between_failures(num_failures: int, trained_seconds: float) -> float:
    """Return the inverse of the failure rate's posterior mean: (trained + prior seconds) / (seen + prior failures).

    Args:
        num_failures: Restarts seen.
        trained_seconds: Time that the job has trained in all.
    """
    return (trained_seconds + PRIOR_SECONDS) / (num_failures + PRIOR_FAILURES)


def optimal_seconds(cost_seconds: float, mean_seconds: float) -> float:
    """Return Daly's optimum of the time between two saves (eq. 37), not clamped.

    Args:
        cost_seconds: Training time that a save costs.
        mean_seconds: Mean time between failures.
    """
    if cost_seconds >= 2 * mean_seconds:
        return mean_seconds
    ratio = cost_seconds / (2 * mean_seconds)
    return math.sqrt(2 * cost_seconds * mean_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_seconds


@dataclass(frozen=True)
class IntervalChoice:
    """An interval and what it follows from; the fields are those of SaveIntervalChosen."""

    interval_seconds: float
    save_cost_seconds: float
    mean_seconds_between_failures: float
    num_failures: int
    reason: str


class SaveInterval:
    """The interval of one process's attempts.

    Args:
        num_failures: See `count_failures`.
    """

    def __init__(self, num_failures: int) -> None:
        self._num_failures = num_failures
        self._is_chosen = False
        self.seconds = FIRST_SECONDS

    def choose(self, cost_seconds: float, num_saves: int, trained_seconds: float) -> IntervalChoice | None:
        """Choose again, after a save.

        Args:
            cost_seconds: See `SaveCost.seconds`.
            num_saves: Saves that it was measured on.
            trained_seconds: Time that the job has trained in all.

        Returns:
            The new interval; None: it is within a tenth of the last one chosen, which goes on to hold.
        """
        mean_seconds = mean_seconds_between_failures(self._num_failures, trained_seconds)
        optimum = optimal_seconds(cost_seconds, mean_seconds)
        seconds = min(max(optimum, MIN_SECONDS), MAX_SECONDS)
        if self._is_chosen and abs(seconds - self.seconds) <= LEAST_CHANGE_RATIO * self.seconds:
            return None
        self._is_chosen, self.seconds = True, seconds
        reason = (
            f"a save costs {cost_seconds:.3f} s of training (median of {num_saves}) and a failure comes every "
            f"{spelled(mean_seconds)} ({self._num_failures} seen in {spelled(trained_seconds)} of training, "
            f"half a failure in {spelled(PRIOR_SECONDS)} assumed): "
        )
        if seconds == optimum:
            reason += f"least is lost by saving every {spelled(seconds)} (Young/Daly)"
        else:
            bound = "least" if seconds > optimum else "most"
            reason += f"Young/Daly gives {spelled(optimum)}, and the {bound} allowed is {spelled(seconds)}"
        return IntervalChoice(seconds, cost_seconds, mean_seconds, self._num_failures, reason)


def spelled(seconds: float) -> str:
    """Return a duration for people, with three digits."""
    for unit_seconds, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * unit_seconds:
            return f"{seconds / unit_seconds:.3g} {unit}"
    return f"{seconds:.3g} s"
