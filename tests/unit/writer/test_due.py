from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.rows import NOW
from surefoot.checkpoint.attempts import AttemptRecord, Source, StartsFrom
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.lineage import on_lineage
from surefoot.errors import AttemptError
from surefoot_writer.cleared import Cleared
from surefoot_writer.promotion import due


def records(*starts: tuple[int, int]) -> dict[int, AttemptRecord]:
    """Attempt 1, 2, ... began at these."""
    return {
        number: AttemptRecord(
            attempt=number,
            starts_from=StartsFrom(attempt=a, step=s, source=Source.STAGED if a else Source.SEED),
            cause="test",
            world_size=1,
            host="h",
            started_at=NOW,
        )
        for number, (a, s) in enumerate(starts, start=1)
    }


def ids(*pairs: tuple[int, int]) -> list[CheckpointId]:
    return [CheckpointId(*pair) for pair in pairs]


@pytest.mark.parametrize(("through", "expected"), [(119, []), (120, [(1, 100)]), (219, [(1, 100)])])
def test_probation_ends_with_the_last_of_its_steps(through: int, expected: list[tuple[int, int]]) -> None:
    assert due(ids((1, 100), (1, 200)), records((0, 0)), Cleared(1, through), 20) == expected


def test_oldest_first() -> None:
    assert due(ids((1, 30), (1, 10), (1, 20)), records((0, 0)), Cleared(1, 1000), 20) == ids((1, 10), (1, 20), (1, 30))


def test_what_was_left_behind_is_never_promoted() -> None:
    lines = records((0, 0), (1, 100))  # attempt 2 went back to step 100
    assert due(ids((1, 100), (1, 150), (2, 150)), lines, Cleared(2, 1000), 20) == ids((1, 100), (2, 150))
    # Also not by a message about attempt 1 that comes late.
    assert due(ids((1, 100), (1, 150)), lines, Cleared(1, 1000), 20) == ids((1, 100))


def test_steps_of_an_attempt_clear_nothing_of_another_line() -> None:
    lines = records((0, 0), (1, 100), (1, 50))  # attempt 3 went back further than attempt 2 had begun
    assert due(ids((1, 50), (1, 100), (2, 150)), lines, Cleared(2, 1000), 20) == ids((1, 50))


def test_a_missing_record_is_an_error_and_no_promotion() -> None:
    with pytest.raises(AttemptError):
        due(ids((2, 10)), records((0, 0)), Cleared(2, 100), 20)


@given(
    starts=st.lists(st.integers(0, 300), max_size=5),
    committed=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 400)), max_size=12),
    attempt=st.integers(1, 6),
    through=st.integers(0, 400),
    probation=st.integers(0, 100),
)
def test_whatever_is_promoted_is_current_and_was_cleared(
    starts: list[int], committed: list[tuple[int, int]], attempt: int, through: int, probation: int
) -> None:
    lines = records((0, 0), *((number, step) for number, step in enumerate(starts, start=1)))
    newest = max(lines)
    promoted = due(ids(*committed), lines, Cleared(min(attempt, newest), through), probation)

    for id_ in promoted:
        assert on_lineage(id_, newest, lines)
        assert on_lineage(id_, min(attempt, newest), lines)
        assert id_.step + probation <= through
