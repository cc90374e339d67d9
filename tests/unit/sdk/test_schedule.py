from __future__ import annotations

from surefoot.sdk.schedule import SaveSchedule
from surefoot.spec import CheckpointSpec


def schedule(total_steps=None, **keys):
    return SaveSchedule(CheckpointSpec(**keys), total_steps, now=0.0)


def due(s, step, now=0.0, requests=0, stop=False):
    return s.wants_save(step, now, requests, stop=stop)


def test_by_step_and_at_the_end():
    s = schedule(total_steps=7, save_every_steps=3, save_every_seconds=None)
    assert [step for step in range(1, 8) if due(s, step)] == [3, 6, 7]


def test_by_time_counts_from_the_last_save():
    s = schedule(save_every_seconds=10.0)
    assert not due(s, 1, now=9.9)
    assert due(s, 2, now=10.0)
    s.saved(10.0)
    assert not due(s, 3, now=19.9)
    assert due(s, 4, now=20.0)


def test_a_request_is_served_once_and_old_ones_are_moot():
    s = schedule(save_every_seconds=None)
    assert not due(s, 1, requests=4)
    assert due(s, 2, requests=5)
    assert due(s, 3, requests=5)  # not saved yet
    s.saved(1.0)
    assert not due(s, 4, requests=5)


def test_a_missed_save_is_made_up_for():
    s = schedule(save_every_steps=5, save_every_seconds=None)
    assert due(s, 5)
    s.missed(5, save=False)  # storage had not caught up, so none was asked for
    assert due(s, 6)
    s.saved(1.0)
    assert not due(s, 7)


def test_a_missed_snapshot_owes_no_save():
    s = schedule(save_every_seconds=None)
    s.missed(1, save=False)
    assert not due(s, 2)
    s.missed(2, save=True)
    assert due(s, 3)


def test_stop_saves():
    assert due(schedule(save_every_seconds=None), 1, stop=True)


def test_snapshots_every_so_many_steps_and_at_saves():
    s = schedule(total_steps=11, snapshot_every_steps=4, save_every_steps=6, save_every_seconds=None)
    assert [step for step in range(1, 12) if s.wants_snapshot(step)] == [4, 6, 8, 11]
