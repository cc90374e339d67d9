from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from surefoot.checkpoint.attempts import SkipWindow
from surefoot.sdk.data.order import position
from surefoot.sdk.rollback import with_new_windows


def window(start, length):
    return SkipWindow(start=start, stop=start + length)


windows = st.lists(st.builds(window, st.integers(0, 60), st.integers(1, 20)), max_size=4).map(tuple)


@given(windows, windows, st.integers(0, 50))
def test_new_windows_change_no_step_that_is_done_and_leave_out_all_the_rest(old, added, from_step):
    both = with_new_windows(old, added, from_step)
    before = [position(step, old) for step in range(from_step)]
    assert [position(step, both) for step in range(from_step)] == before
    coming = [position(step, both) for step in range(from_step, from_step + 60)]
    first = position(from_step, old)
    left_out = {p for w in (*old, *added) for p in range(w.start, w.stop)}
    assert coming == [p for p in range(first, first + 400) if p not in left_out][:60]


def test_the_same_window_twice_is_one():
    one = window(10, 10)
    assert with_new_windows((one,), (one,), 5) == (one,)
