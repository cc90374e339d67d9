from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.gateway import step
from surefoot_gateway.curve import Curve


def curve_of(max_points: int, steps: list) -> Curve:
    curve = Curve(max_points)
    for each in steps:
        curve.add(each)
    return curve


def test_few_steps_are_kept_as_they_are() -> None:
    curve = curve_of(20, [step(n, loss=float(n)) for n in range(1, 11)])
    assert [(s.step, s.loss_low, s.loss_high) for s in curve] == [(n, float(n), float(n)) for n in range(1, 11)]


@given(
    losses=st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=300),
    max_points=st.integers(4, 40),
)
@settings(max_examples=60, deadline=None)
def test_extremes_sums_and_order_survive_any_length(losses: list[float], max_points: int) -> None:
    curve = curve_of(max_points, [step(n + 1, loss=loss) for n, loss in enumerate(losses)])
    assert len(curve) <= max_points // 2
    finite = [loss for loss in losses if math.isfinite(loss)]
    lows = [s.loss_low for s in curve if s.loss_low is not None]
    highs = [s.loss_high for s in curve if s.loss_high is not None]
    if finite:
        assert (min(lows), max(highs)) == (min(finite), max(finite))
    else:
        assert lows == highs == []
    assert sum(s.num_units for s in curve) == 2048 * len(losses)
    assert sum(s.num_nonfinite for s in curve) == len(losses) - len(finite)
    stretches = list(curve)
    assert all(a.step < b.step for a, b in pairwise(stretches))
    assert stretches[-1].step == len(losses)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=80))
@settings(max_examples=60, deadline=None)
def test_a_stretch_never_spans_attempts_and_many_attempts_stay_bounded(lengths: list[int]) -> None:
    curve = Curve(40)
    for attempt, length in enumerate(lengths, 1):
        for n in range(1, length + 1):
            curve.add(step(n, attempt=attempt, loss=float(attempt)))
    assert len(curve) <= 20
    assert all(s.loss_low == s.loss_high == s.attempt for s in curve)
    assert list(curve)[-1].attempt == len(lengths)


def test_a_step_that_updated_nothing_counts_as_not_finite() -> None:
    (stretch,) = curve_of(20, [step(1, loss=2.0, grad_norm=math.nan, applied=False, nonfinite_ranks=(1,))])
    assert (stretch.loss_low, stretch.grad_low, stretch.num_nonfinite) == (2.0, None, 1)
