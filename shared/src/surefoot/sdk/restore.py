"""Choosing what an attempt starts from, and loading it: staged memory first, then storage, else the seed.

All ranks take part and come to one answer. A source that turns out to be bad on any rank is dropped by all, reported
as RestoreFellBack, and the next older one is tried.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from surefoot.checkpoint.attempts import AttemptRecord, Source, StartsFrom
from surefoot.checkpoint.catalog import list_committed, read_manifest, read_scalars, read_shard
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.layout import ShardLayout
from surefoot.checkpoint.lineage import candidates
from surefoot.checkpoint.staging_header import BufferState
from surefoot.errors import CheckpointError, DamagedCheckpoint, NoUsableCheckpoint, UsageError
from surefoot.events import RestoreFellBack
from surefoot.sdk.host import Host
from surefoot.sdk.snapshot import tensor_over
from surefoot.sdk.state import TrainingState


class Candidate(NamedTuple):
    """Something an attempt could start from."""

    id: CheckpointId
    source: Source


class Restored(NamedTuple):
    """What was loaded.

    Attributes:
        starts_from: For the attempt record.
        step: Global batches completed.
        updates: Optimizer updates taken.
    """

    starts_from: StartsFrom
    step: int
    updates: int


SEED = Restored(StartsFrom(attempt=0, step=0, source=Source.SEED), 0, 0)


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
        "committed": [list(i) for i in list_committed(host.store)],
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
        record.starts_from.step for record in records.values()
    )
    if not found and had_progress:
        raise NoUsableCheckpoint(
            f"{host.store}: the job had progress, but no snapshot or checkpoint on the lineage of attempt "
            f"{newest} is readable on every rank; to begin again at step 0 say --from-seed"
        )
    return found


def start_over(host: Host) -> list[Candidate]:
    """Forget what is staged, since attempt and step of a new beginning must not meet older ones. Collective."""
    if host.group.rank == 0:
        host.folder.remove_buffers_from(0, lambda _: False)
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
        problems = [p for p in host.group.gather_json(problem) if p is not None]
        misuse = next((p for p in problems if p["key"]), None)
        if misuse is not None:
            raise UsageError(misuse["key"], misuse["reason"])
        if not problems:
            starts_from = StartsFrom(
                attempt=candidate.id.attempt, step=candidate.id.step, source=candidate.source
            )
            return Restored(starts_from, scalars["step"], scalars["updates"])
        _report_fall_back(host, candidate, problems[0])
    tried = ", ".join(f"{c.source.lower()} step {c.id.step} of attempt {c.id.attempt}" for c in found)
    raise NoUsableCheckpoint(
        f"{host.store}: nothing could be restored (tried {tried}); the reasons are in "
        f"{host.settings.spec.events_path}; to begin again at step 0 say --from-seed"
    )


def _try_load(
    host: Host, state: TrainingState, candidate: Candidate
) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Load a candidate; return its scalars and, when it failed, why."""
    opener = _open_staged if candidate.source is Source.STAGED else open_committed
    try:
        with opener(host, candidate.id) as (tensors, scalars):
            state.restore(tensors, scalars["state"])
            return scalars, None
    except UsageError as error:
        return {}, {"key": error.key, "reason": error.problem, "file": ""}
    except DamagedCheckpoint as error:
        return {}, {"key": "", "reason": error.reason, "file": error.path}
    except (CheckpointError, OSError) as error:
        return {}, {"key": "", "reason": str(error), "file": ""}


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


@contextmanager
def _open_staged(host: Host, checkpoint_id: CheckpointId) -> Iterator[tuple[dict[str, Tensor], dict[str, Any]]]:
    """Give the tensors of a staged snapshot, as views, while its buffers are locked against refilling."""
    snapshot = host.folder.scan().get(checkpoint_id)
    if snapshot is None or not snapshot.complete:
        raise CheckpointError("the staged snapshot is gone")
    with ExitStack() as stack:
        shards: list[memoryview] = []
        scalars: dict[str, Any] = {}
        for rank, part in snapshot.parts.items():
            header = stack.enter_context(part.buffer.lock_shared())
            if header is None or header.state is not BufferState.READY or header.sequence != part.header.sequence:
                raise CheckpointError(f"the staged snapshot of rank {rank} changed while it was opened")
            shards.append(part.buffer.shard[: header.shard_bytes])
            if rank == 0:
                scalars = decode_scalars(part.buffer.scalars())
        yield _tensors_of(shards), scalars


@contextmanager
def open_committed(host: Host, checkpoint_id: CheckpointId) -> Iterator[tuple[dict[str, Tensor], dict[str, Any]]]:
    """Give the tensors of a committed checkpoint, in memory of our own; every byte was checked against its checksum.

    Raises:
        DamagedCheckpoint: a file is missing or not as it was written.
        CheckpointError: it cannot be used.
        OSError: the disk fails.
    """
    manifest = read_manifest(host.store, checkpoint_id, host.settings.spec.job)
    shards = [read_shard(host.store, manifest, rank) for rank in range(manifest.world_size)]
    yield _tensors_of(shards), read_scalars(host.store, checkpoint_id)


def decode_scalars(scalars: bytes) -> dict[str, Any]:
    """Return what rank 0 staged beside its tensors.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        data = json.loads(scalars)
    except ValueError as error:  # not UTF-8, or not JSON
        raise CheckpointError(f"the staged scalars cannot be understood: {error}") from None
    if not isinstance(data, dict) or not {"step", "updates", "state"} <= data.keys():
        raise CheckpointError("the staged scalars are not complete")
    return data


def _tensors_of(shards: Sequence[memoryview]) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint by name, tied names included, as views of the shards."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for shard in shards:
        try:
            layout = ShardLayout.parse(shard)
        except ValueError as error:
            raise CheckpointError(f"a shard cannot be understood: {error}") from None
        aliases |= layout.aliases
        for entry in layout.entries:
            if entry.global_shape is not None and entry.global_shape != entry.shape:
                raise CheckpointError(f"{entry.name} is one part of a sharded tensor; this version loads whole ones")
            tensors[entry.name] = tensor_over(layout.tensor_view(shard, entry.name), entry)
    return tensors | {name: tensors[stored] for name, stored in aliases.items()}
