from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.checkpoint.attempts import AttemptRecord, Source, StartsFrom
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.lineage import candidates, newest_on_lineage, on_lineage
from surefoot.errors import AttemptError

SEED = CheckpointId(0, 0)


def record(attempt: int, starts_from: CheckpointId) -> AttemptRecord:
    source = Source.SEED if starts_from.attempt == 0 else Source.COMMITTED
    return AttemptRecord(
        attempt=attempt,
        starts_from=StartsFrom(attempt=starts_from.attempt, step=starts_from.step, source=source),
        cause="test",
        world_size=1,
        host="here",
        started_at=datetime(2026, 12, 1, tzinfo=UTC),
    )


@dataclass(frozen=True)
class State:
    """A state that training was in, and the state it came from."""

    name: CheckpointId
    came_from: State | None

    def ancestors(self) -> set[CheckpointId]:
        found, state = set(), self
        while state is not None:
            found.add(state.name)
            state = state.came_from
        return found


@dataclass
class History:
    records: dict[int, AttemptRecord]
    states: list[State]
    last: dict[int, State]


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Train, die, restart or roll back to any state that there ever was, and train on."""
    seed = State(SEED, None)
    history = History({}, [seed], {0: seed})
    for attempt in range(1, draw(st.integers(1, 7)) + 1):
        start = draw(st.sampled_from(history.states))
        history.records[attempt] = record(attempt, start.name)
        # The state before the first step of the attempt is the one it started from, under its own name.
        state = State(CheckpointId(attempt, start.name.step), start)
        history.states.append(state)
        for _ in range(draw(st.integers(0, 4))):
            state = State(CheckpointId(attempt, state.name.step + 1), state)
            history.states.append(state)
        history.last[attempt] = state
    return history


@settings(deadline=None)
@given(histories())
def test_the_lineage_is_what_training_really_went_through(history):
    for attempt, last in history.last.items():
        ancestors = last.ancestors()
        for state in history.states:
            assert on_lineage(state.name, attempt, history.records) == (state.name in ancestors)


@settings(deadline=None)
@given(histories(), st.randoms())
def test_the_newest_on_the_lineage_is_the_last_state_of_the_attempt(history, random):
    ids = [state.name for state in history.states]
    random.shuffle(ids)
    for attempt, last in history.last.items():
        assert newest_on_lineage(ids, attempt, history.records) == last.name
        found = candidates(ids, attempt, history.records)
        assert found == sorted(last.ancestors(), reverse=True)


def by_the_rule(checkpoint_id: CheckpointId, attempt: int, records: dict[int, AttemptRecord]) -> bool:
    """DESIGN 3, word for word."""
    if checkpoint_id.attempt == attempt:
        return True
    if attempt == 0:
        return False
    starts_from = records[attempt].starts_from
    return checkpoint_id.step <= starts_from.step and by_the_rule(checkpoint_id, starts_from.attempt, records)


@st.composite
def any_records(draw: st.DrawFn) -> dict[int, AttemptRecord]:
    """Records that only keep to the schema: an attempt may start before the start of its source."""
    records = {}
    for attempt in range(1, draw(st.integers(1, 7)) + 1):
        source = draw(st.integers(0, attempt - 1))
        step = draw(st.integers(0, 6)) if source else 0
        records[attempt] = record(attempt, CheckpointId(source, step))
    return records


@settings(deadline=None)
@given(any_records())
def test_the_lineage_is_what_the_rule_says_for_any_records(records):
    for attempt in [0, *records]:
        for checkpoint_id in (CheckpointId(a, s) for a in range(9) for s in range(8)):
            expected = by_the_rule(checkpoint_id, attempt, records)
            assert on_lineage(checkpoint_id, attempt, records) == expected


def test_steps_after_the_point_of_a_roll_back_are_abandoned():
    records = {1: record(1, SEED), 2: record(2, CheckpointId(1, 50))}
    assert on_lineage(CheckpointId(1, 50), 2, records)
    assert not on_lineage(CheckpointId(1, 51), 2, records)
    assert on_lineage(CheckpointId(2, 51), 2, records)
    assert on_lineage(CheckpointId(1, 51), 1, records)


def test_a_roll_back_behind_the_start_of_the_source_cuts_all_attempts_before_it_too():
    records = {
        1: record(1, SEED),
        2: record(2, CheckpointId(1, 50)),
        3: record(3, CheckpointId(2, 50)),
    }
    ids = [CheckpointId(1, 40), CheckpointId(1, 60), CheckpointId(2, 50), CheckpointId(2, 60)]
    assert candidates(ids, 3, records) == [(2, 50), (1, 40)]


def test_starting_over_from_the_seed_abandons_everything_else():
    records = {1: record(1, SEED), 2: record(2, SEED)}
    assert candidates([CheckpointId(1, 1), CheckpointId(1, 900), SEED], 2, records) == [SEED]


def test_the_seed_is_the_lineage_of_a_job_without_attempts():
    assert on_lineage(SEED, 0, {})
    assert newest_on_lineage([CheckpointId(1, 5)], 0, {}) is None


def test_a_checkpoint_of_a_later_attempt_is_not_on_the_lineage():
    assert not on_lineage(CheckpointId(5, 1), 1, {1: record(1, SEED)})


def test_an_id_given_twice_is_one_candidate():
    twice = [CheckpointId(1, 5), CheckpointId(1, 5)]
    assert candidates(twice, 1, {1: record(1, SEED)}) == [(1, 5)]


def test_a_missing_record_is_an_error_and_not_an_empty_lineage():
    records = {3: record(3, CheckpointId(2, 10))}
    with pytest.raises(AttemptError, match="attempt 2 is missing"):
        on_lineage(CheckpointId(2, 10), 3, records)


def test_a_lineage_of_thousands_of_attempts_is_walked_without_recursion():
    records = {1: record(1, SEED)} | {n: record(n, CheckpointId(n - 1, n - 1)) for n in range(2, 5000)}
    assert on_lineage(CheckpointId(1, 1), 4999, records)
