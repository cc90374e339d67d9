"""Choosing what an attempt starts from, and loading it: staged memory first, then storage, else the seed.

All ranks take part and come to one answer. A source that turns out to be bad on any rank is dropped by all, reported
as RestoreFellBack, and the next older one is tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from surefoot.checkpoint.attempts import AttemptRecord, Source, StartsFrom
from surefoot.checkpoint.catalog import list_committed
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.lineage import candidates
from surefoot.errors import CheckpointError, DamagedCheckpoint, NoUsableCheckpoint, UsageError
from surefoot.events import RestoreFellBack
from surefoot.sdk.host import Host
from surefoot.sdk.opening import open_committed, open_staged, read_patiently
from surefoot.sdk.state import TrainingState
from surefoot.sdk.trained import Counters


class Candidate(NamedTuple):
    """Something an attempt could start from."""

    id: CheckpointId
    source: Source


class Restored(NamedTuple):
    """What was loaded.

    Attributes:
        starts_from: For the attempt record.
        counters: How far training was.
    """

    starts_from: StartsFrom
    counters: Counters

    @classmethod
    def from_seed(cls) -> Restored:
        """Return the beginning of a job."""
        return cls(StartsFrom(attempt=0, step=0, source=Source.SEED), Counters())


def find_candidates(host: Host, records: Mapping[int, AttemptRecord]) -> list[Candidate]:
    """Return what every rank can read and what is on the lineage, best first. Collective.

    Raises:
        NoUsableCheckpoint: the job had progress and nothing is left of it.
    """
    snapshots = host.folder.scan()
    newest = max(records, default=0)
    mine = {
        "staged": [list(i) for i, snapshot in snapshots.items() if snapshot.complete],
        "unknown": [list(i) for i in snapshots if i.attempt > newest],
        "committed": [list(i) for i in read_patiently(lambda: list_committed(host.store))],
    }
    reports = host.group.gather_json(mine)
    found = rank_candidates(
        [{CheckpointId(*i) for i in report["staged"]} for report in reports],
        [{CheckpointId(*i) for i in report["committed"]} for report in reports],
        records,
    )
    unknown = [i for report in reports for i in report["unknown"]]
    if unknown:
        raise NoUsableCheckpoint(
            f"{host.store}: there are snapshots of attempt {max(unknown)[0]} in memory, but its record is not on "
            f"storage (the newest is {newest}): is this the right storage, and is it mounted? To begin again at step 0 "
            "say --from-seed"
        )
    had_progress = any(report["committed"] for report in reports) or any(
        record.starts_from.step or record.is_import for record in records.values()
    )
    if not found and had_progress:
        raise NoUsableCheckpoint(
            f"{host.store}: the job had progress, but no snapshot or checkpoint on the lineage of attempt "
            f"{newest} is readable on every rank; to begin again at step 0 say --from-seed"
        )
    return found


def start_over(host: Host) -> list[Candidate]:
    """Forget what is staged, since attempt and step of a new beginning must not meet older ones. Collective."""
    if host.local_rank == 0:  # each host has a folder of its own
        host.folder.remove_surplus(0, 0)
    host.group.gather_json(None)
    return []


def rank_candidates(
    staged: Sequence[set[CheckpointId]],
    committed: Sequence[set[CheckpointId]],
    records: Mapping[int, AttemptRecord],
) -> list[Candidate]:
    """Return the candidates common to all ranks and on the newest attempt's lineage, newest first. Pure.

    Of one id in both places the staged copy comes first: it is read at memory speed.

    Args:
        staged: For each rank the snapshots it can read in full.
        committed: For each rank the committed checkpoints it can see.
        records: All attempt records by number.
    """
    if not records:
        return []
    newest = max(records)
    in_memory = candidates(set.intersection(*staged), newest, records)
    on_storage = candidates(set.intersection(*committed), newest, records)
    both = [Candidate(i, Source.STAGED) for i in in_memory] + [Candidate(i, Source.COMMITTED) for i in on_storage]
    return sorted(both, key=lambda c: (c.id, c.source is Source.STAGED), reverse=True)


def restore(host: Host, state: TrainingState, found: Sequence[Candidate]) -> Restored:
    """Load the best candidate that is good on every rank. Collective.

    Raises:
        NoUsableCheckpoint: none is good.
        UsageError: a good checkpoint does not fit the model or optimizer.
    """
    for candidate in found:
        scalars, problem = _try_load(host, state, candidate)
        worst = worst_of(host.group.gather_json(problem))
        if worst is not None and worst["key"]:
            raise UsageError(worst["key"], worst["reason"])
        if worst is None:
            starts_from = StartsFrom(attempt=candidate.id.attempt, step=candidate.id.step, source=candidate.source)
            return Restored(starts_from, Counters.from_scalars(scalars))
        _report_fall_back(host, candidate, worst)
    tried = ", ".join(f"{c.source.lower()} step {c.id.step} of attempt {c.id.attempt}" for c in found)
    raise NoUsableCheckpoint(
        f"{host.store}: nothing could be restored (tried {tried}); the reasons are in "
        f"{host.settings.spec.events_path}; to begin again at step 0 say --from-seed"
    )


def _try_load(host: Host, state: TrainingState, candidate: Candidate) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Load a candidate; return its scalars and, when it failed, why."""
    opener = open_staged if candidate.source is Source.STAGED else open_committed
    try:
        with opener(host, candidate.id) as (tensors, scalars):
            state.restore(tensors, scalars["state"])
            return scalars, None
    except (UsageError, CheckpointError, OSError) as error:
        return {}, describe_problem(error)


def describe_problem(error: UsageError | CheckpointError | OSError) -> dict[str, str]:
    """Return why something cannot be loaded, as JSON for the other ranks.

    Keys: `reason`; `key`, the argument of `attach` that it does not fit, or empty; `file`, what is damaged, or empty.
    """
    if isinstance(error, UsageError):
        return {"key": error.key, "reason": error.problem, "file": ""}
    if isinstance(error, DamagedCheckpoint):
        return {"key": "", "reason": error.reason, "file": error.path}
    if isinstance(error, OSError):
        # Not its fault: it stays where it is, and may be what the next start begins from.
        return {"key": "", "reason": f"cannot be read and is left in place: {error}", "file": ""}
    return {"key": "", "reason": str(error), "file": ""}


def worst_of(problems: Sequence[dict[str, str] | None]) -> dict[str, str] | None:
    """Return the problem to act on when ranks have several: damage, which somebody must look into, before others."""
    found = [problem for problem in problems if problem is not None]
    return next((problem for problem in found if problem["file"]), found[0] if found else None)


def _report_fall_back(host: Host, candidate: Candidate, problem: dict[str, str]) -> None:
    if host.group.rank != 0:
        return
    if problem["file"]:
        # Ranks never change storage: the drain looks for itself and moves it to quarantine.
        host.folder.write_report(candidate.id, problem["file"], problem["reason"])
    host.report(
        RestoreFellBack(
            job=host.settings.spec.job,
            rank=0,
            source=candidate.source,
            candidate_attempt=candidate.id.attempt,
            candidate_step=candidate.id.step,
            reason=" ".join(filter(None, (problem["file"], problem["reason"]))),
        )
    )
