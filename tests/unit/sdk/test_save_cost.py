from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.sdk.save_cost import NUM_SAVES, SaveCost


def pace(cost, seconds=0.5, steps=10):
    for _ in range(steps):
        assert not cost.add_step(seconds, is_written=True)


def save(cost, *seconds, copy=0.1, is_extra=True):
    """One save; each step is `seconds` long, the last one ends after the save is written."""
    cost.begin(copy, is_extra=is_extra)
    for length in seconds[:-1]:
        assert not cost.add_step(length, is_written=False)
    assert cost.add_step(seconds[-1], is_written=True)


def test_the_cost_is_what_the_steps_of_a_save_take_longer():
    """The copy stands in the first of them, the others are slower while storage is written."""
    cost = SaveCost()
    pace(cost)
    save(cost, 0.5 + 0.1 + 0.05, 0.6, 0.52)
    assert cost.seconds == pytest.approx(0.1 + 0.05 + 0.1 + 0.02)
    assert cost.num_saves == 1


def test_a_copy_that_every_step_makes_costs_nothing_more():
    cost = SaveCost()
    pace(cost, 0.6)
    save(cost, 0.6, 0.6, copy=0.1, is_extra=False)
    assert cost.seconds == pytest.approx(0.0)


def test_the_extra_copy_is_the_least_that_a_save_costs():
    """Steps that happen to be quick do not make a save free."""
    cost = SaveCost()
    pace(cost)
    save(cost, 0.45, 0.4, copy=0.1)
    assert cost.seconds == 0.1


def test_without_quiet_steps_the_copy_is_what_is_known():
    cost = SaveCost()
    save(cost, 3.0, copy=0.2, is_extra=False)
    assert cost.seconds == 0.2


def test_a_pause_of_the_loop_is_no_cost():
    """An evaluation that falls on one save of several, or on a quiet step, changes nothing."""
    cost = SaveCost()
    pace(cost)
    for pause in (0.0, 60.0, 0.0):
        save(cost, 0.7, 0.5 + pause)
        pace(cost)
        cost.add_step(90.0, is_written=True)
    assert cost.seconds == pytest.approx(0.2)


def test_what_saves_cost_long_ago_is_forgotten():
    cost = SaveCost()
    pace(cost)
    for _ in range(NUM_SAVES):
        save(cost, 2.5)
    for _ in range(NUM_SAVES):
        pace(cost)
        save(cost, 0.7)
    assert cost.seconds == pytest.approx(0.2)
    assert cost.num_saves == NUM_SAVES


def test_a_save_begun_while_another_is_written_counts_with_it():
    cost = SaveCost()
    pace(cost)
    cost.begin(0.1, is_extra=True)
    cost.add_step(0.7, is_written=False)
    cost.begin(0.1, is_extra=True)
    assert cost.add_step(0.7, is_written=True)
    assert cost.seconds == pytest.approx(0.4)
    assert cost.num_saves == 1


@given(
    st.lists(st.floats(0.001, 10), min_size=3, max_size=30),
    st.lists(st.floats(0.001, 10), min_size=1, max_size=5),
    st.floats(0, 5),
    st.booleans(),
)
def test_a_cost_is_never_negative_nor_less_than_the_extra_copy(quiet, disturbed, copy, is_extra):
    cost = SaveCost()
    for seconds in quiet:
        cost.add_step(seconds, is_written=True)
    save(cost, *disturbed, copy=copy, is_extra=is_extra)
    assert cost.seconds >= (copy if is_extra else 0.0)
    assert cost.seconds <= max(copy, sum(disturbed))
