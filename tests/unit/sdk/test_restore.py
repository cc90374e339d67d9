from __future__ import annotations

from datetime import UTC, datetime

import pytest

from surefoot.checkpoint.attempts import AttemptRecord, Source, StartsFrom
from surefoot.checkpoint.ids import CheckpointId
from surefoot.errors import CheckpointError, RanksOutOfStep
from surefoot.sdk.attempts import claim_with_patience
from surefoot.sdk.collectives import StepRecord, check_in_step
from surefoot.sdk.opening import complete_scalars
from surefoot.sdk.restore import Candidate, rank_candidates


def record(attempt, from_attempt, from_step):
    source = Source.STAGED if from_attempt else Source.SEED
    return AttemptRecord(
        attempt=attempt,
        starts_from=StartsFrom(attempt=from_attempt, step=from_step, source=source),
        cause="test",
        world_size=2,
        host="h",
        started_at=datetime.now(UTC),
    )


RECORDS = {1: record(1, 0, 0), 2: record(2, 1, 30), 3: record(3, 2, 45)}


def ids(*pairs):
    return {CheckpointId(*pair) for pair in pairs}


def test_newest_common_on_the_lineage_first_and_memory_before_storage():
    staged = [ids((3, 50), (3, 51), (2, 45)), ids((3, 50), (3, 49))]
    committed = [ids((1, 20), (1, 40), (2, 45), (3, 50))] * 2
    assert rank_candidates(staged, committed, RECORDS) == [
        Candidate(CheckpointId(3, 50), Source.STAGED),
        Candidate(CheckpointId(3, 50), Source.COMMITTED),
        Candidate(CheckpointId(2, 45), Source.COMMITTED),
        Candidate(CheckpointId(1, 20), Source.COMMITTED),
    ]


def test_a_higher_step_off_the_lineage_is_never_a_candidate():
    assert rank_candidates([ids((1, 31))], [ids((2, 46), (1, 400))], RECORDS) == []


def test_without_records_nothing_is_trusted():
    assert rank_candidates([ids((1, 3))], [ids((1, 3))], {}) == []


def test_ranks_out_of_step_names_the_odd_one():
    rows = [StepRecord(3, step, 0, 1, 0, 0, 0, 1.0, 2, 0.1) for step in (10, 10, 11)]
    with pytest.raises(RanksOutOfStep, match=r"rank 2 is at attempt 3 step 11; the others are at attempt 3 step 10"):
        check_in_step(rows)


@pytest.mark.parametrize("data", [b"\xff{}", b"not json", b"[]", b'{"step": 1}'])
def test_damaged_staged_scalars_are_a_reason_to_try_the_next_candidate(data):
    with pytest.raises(CheckpointError, match="the staged scalars"):
        complete_scalars(data)


def test_a_record_that_storage_refuses_is_tried_again():
    answers = [OSError(30, "Read-only file system"), OSError(28, "No space left on device"), record(1, 0, 0)]

    def claim():
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    assert claim_with_patience(claim).attempt == 1
    assert answers == []
