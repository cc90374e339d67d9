"""The interval against numbers from the papers, against brute force, and the words that explain it."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.checkpoint.attempts import RESTART_CAUSE_PREFIX, AttemptRecord, Source, StartsFrom
from surefoot.sdk.save_interval import (
    FIRST_SECONDS,
    MAX_SECONDS,
    MIN_SECONDS,
    SaveInterval,
    count_failures,
    mean_seconds_between_failures,
    optimal_seconds,
    spelled,
)

HOUR = 3600.0


def expected_seconds(interval, cost, mean):
    """Wall seconds per second of work with exponential failures and no restart time (Daly 2006, eq. 20)."""
    return mean * math.expm1((interval + cost) / mean) / interval


@given(st.floats(0.001, 100), st.floats(60, 1e6))
def test_no_other_interval_is_much_better(cost, mean):
    """Daly's estimate lies within 2 % of the best that any interval reaches, while a save costs less than M / 4."""
    cost = min(cost, mean / 4)
    ours = expected_seconds(optimal_seconds(cost, mean), cost, mean)
    grid = (math.sqrt(2 * cost * mean) * factor for factor in (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 2, 3))
    assert ours <= 1.02 * min(expected_seconds(interval, cost, mean) for interval in grid)


def test_numbers_of_the_papers():
    """Young's estimate is the limit for cheap saves; Daly's higher orders by hand; a save dearer than 2 M: M."""
    assert optimal_seconds(0.01, 1e6) == pytest.approx(math.sqrt(2 * 0.01 * 1e6), rel=1e-3)
    assert optimal_seconds(300.0, 24 * HOUR) == pytest.approx(7200.0 * (1 + 1 / 72 + 1 / 5184) - 300)
    assert optimal_seconds(500.0, 200.0) == 200.0


@given(st.floats(0, 100), st.floats(0, 100), st.floats(1, 1e6), st.floats(1, 1e6))
def test_dearer_saves_and_rarer_failures_make_the_interval_longer(cost, more, mean, longer):
    cost = min(cost, mean / 4)
    assert optimal_seconds(min(cost + more, mean / 4), mean) >= optimal_seconds(cost, mean) - 1e-6
    assert optimal_seconds(cost, mean + longer) >= optimal_seconds(cost, mean) - 1e-6


def test_the_assumption_is_eight_hours_and_soon_outweighed():
    assert mean_seconds_between_failures(0, 0.0) == 8 * HOUR
    assert mean_seconds_between_failures(12, 2 * HOUR) == pytest.approx(0.48 * HOUR)  # seen: every 10 minutes
    assert mean_seconds_between_failures(0, 24 * HOUR) == pytest.approx(56 * HOUR)
    assert mean_seconds_between_failures(10, 240 * HOUR) == pytest.approx(24 * HOUR, rel=0.05)


def record(number, cause, source=Source.STAGED):
    step = 0 if source is Source.SEED else 5
    starts_from = StartsFrom(attempt=0 if source is Source.SEED else number - 1, step=step, source=source)
    return AttemptRecord(
        attempt=number, starts_from=starts_from, cause=cause, world_size=1, host="h", started_at=datetime.now(UTC)
    )


def failures(*records):
    return count_failures({r.attempt: r for r in records})


def test_only_restarts_are_failures():
    died = RESTART_CAUSE_PREFIX + "rank 1 was killed by SIGKILL"
    assert failures() == 0
    assert failures(
        record(1, "started by the user", Source.SEED),
        record(2, died),
        record(3, "command 4: roll-back to step 5 of attempt 2: loss spike"),
        record(4, "command 5: learning rate x 0.5: loss spike"),
        record(5, "started by the user", Source.COMMITTED),
        record(6, died, Source.COMMITTED),
    ) == 2  # fmt: skip


def test_a_start_over_forgets_the_failures_of_the_run_before():
    died = RESTART_CAUSE_PREFIX + "rank 1 was killed by SIGKILL"
    first = [record(1, "started by the user", Source.SEED), record(2, died, Source.SEED)]
    assert failures(*first) == 1  # it died before its first snapshot: a failure all the same
    assert failures(*first, record(3, "started by the user", Source.SEED)) == 0
    assert failures(*first, record(3, "started by the user", Source.SEED), record(4, died)) == 1


def test_the_choice_says_what_it_follows_from():
    interval = SaveInterval(num_failures=2)
    assert interval.seconds == FIRST_SECONDS
    choice = interval.choose(0.15, 3, 5 * HOUR)
    mean = 9 * HOUR / 2.5
    assert choice.interval_seconds == interval.seconds == optimal_seconds(0.15, mean)
    assert (choice.save_cost_seconds, choice.mean_seconds_between_failures, choice.num_failures) == (0.15, mean, 2)
    assert choice.reason == (
        "a save costs 0.150 s of training (median of 3) and a failure comes every 3.6 h (2 seen in 5 h of training, "
        "half a failure in 4 h assumed): least is lost by saving every 62.3 s (Young/Daly)"
    )


def test_a_small_change_is_left_alone():
    """Of the one before; the first is a choice even when it is what held without one."""
    interval = SaveInterval(num_failures=0)
    assert interval.choose(FIRST_SECONDS**2 / (16 * HOUR), 1, 0.0).interval_seconds == pytest.approx(30.0, rel=0.001)
    first = interval.choose(0.2, 2, 0.0)
    assert interval.choose(0.2 * 1.15, 2, 60.0) is None
    assert interval.seconds == first.interval_seconds
    assert interval.choose(0.2 * 1.5, 3, 60.0) is not None


@pytest.mark.parametrize(
    ("cost", "trained", "bound", "words"),
    [
        (0.0, 0.0, MIN_SECONDS, "gives 0 s, and the least allowed is 10 s"),
        (3000.0, 1000 * HOUR, MAX_SECONDS, "and the most allowed is 60 min"),
    ],
)
def test_the_interval_has_bounds(cost, trained, bound, words):
    interval = SaveInterval(num_failures=0)
    choice = interval.choose(cost, 1, trained)
    assert choice.interval_seconds == bound
    assert words in choice.reason
    assert interval.choose(cost, 2, trained) is None


@given(st.integers(0, 1000), st.floats(0, 1e5), st.floats(0, 1e9))
def test_every_choice_is_within_the_bounds(num_failures, cost, trained):
    interval = SaveInterval(num_failures)
    interval.choose(cost, 1, trained)
    assert MIN_SECONDS <= interval.seconds <= MAX_SECONDS


def test_durations_in_words():
    assert [spelled(s) for s in (0.1234, 45.67, 119.0, 150.0, 3600.0, 7200.0, 360_000.0)] == [
        "0.123 s", "45.7 s", "119 s", "2.5 min", "60 min", "2 h", "100 h",
    ]  # fmt: skip
