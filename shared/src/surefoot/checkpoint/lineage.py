"""Which checkpoints led to the present. Pure.

(a, s) is on the lineage of attempt n if a == n, or if s <= starts_from.step of n and (a, s) is on the lineage
of starts_from.attempt. Attempt 0 is the seed. Only what is on the lineage is restored, drained or shown as
current.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from surefoot.checkpoint.attempts import AttemptRecord
from surefoot.checkpoint.ids import CheckpointId
from surefoot.errors import AttemptError


def on_lineage(checkpoint_id: CheckpointId, attempt: int, records: Mapping[int, AttemptRecord]) -> bool:
    """Return whether a checkpoint is on the lineage of `attempt`.

    Args:
        checkpoint_id: The checkpoint.
        attempt: The attempt asked about; 0 for the seed.
        records: Attempt records by number.

    Raises:
        AttemptError: a record that the answer depends on is missing.
    """
    return _contains(_last_steps(attempt, records), checkpoint_id)


def candidates(ids: Iterable[CheckpointId], attempt: int, records: Mapping[int, AttemptRecord]) -> list[CheckpointId]:
    """Return those of `ids` that are on the lineage of `attempt`, newest (highest attempt, then step) first.

    Raises:
        AttemptError: a record that the answer depends on is missing.
    """
    last_steps = _last_steps(attempt, records)
    return sorted({i for i in ids if _contains(last_steps, i)}, reverse=True)


def newest_on_lineage(
    ids: Iterable[CheckpointId], attempt: int, records: Mapping[int, AttemptRecord]
) -> CheckpointId | None:
    """Return the newest of `ids` on the lineage of `attempt`, None if there is none.

    Raises:
        AttemptError: a record that the answer depends on is missing.
    """
    return next(iter(candidates(ids, attempt, records)), None)


def _contains(last_steps: Mapping[int, float], checkpoint_id: CheckpointId) -> bool:
    return checkpoint_id.step <= last_steps.get(checkpoint_id.attempt, -1)


def _last_steps(attempt: int, records: Mapping[int, AttemptRecord]) -> dict[int, float]:
    """Return for each attempt on the way back to the seed the last step of it that still counts."""
    last_steps = {attempt: math.inf}
    while attempt != 0:
        if attempt not in records:
            raise AttemptError(f"the record of attempt {attempt} is missing, so the lineage is not known")
        starts_from = records[attempt].starts_from
        # An attempt can begin before the point where its source began, hence min.
        last_steps[starts_from.attempt] = min(last_steps[attempt], starts_from.step)
        attempt = starts_from.attempt
    return last_steps
