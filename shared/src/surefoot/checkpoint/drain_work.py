"""From staging to storage: the work of the drain, apart from when it is done.

The buffer header is the truth and everything is done at least once: a drain that dies anywhere leaves a state
from which the next one finishes. Nothing that it writes counts before manifest.json, which is a function of
the snapshot alone, so a second drain writes the same bytes.

With several nodes each has a drain, which sees the buffers of its node only. It writes their shards and part files
and then looks for the part files of the others: whoever sees all of them writes the manifest. A part file is durable
before its writer looks for the others', so of two drains that finish at the same time one at least sees everything.
A network file system may hide a new file for a while from who looked for it before, so they look again until it is
committed or overtaken.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from surefoot.checkpoint.attempts import AttemptLog, AttemptRecord
from surefoot.checkpoint.catalog import list_committed, read_manifest
from surefoot.checkpoint.damage import DamageReports
from surefoot.checkpoint.drain_prune import Pruning, RetentionRules
from surefoot.checkpoint.drain_retry import StorageTrouble
from surefoot.checkpoint.ids import CheckpointId, folder_name, parse_folder_name
from surefoot.checkpoint.lineage import candidates, newest_on_lineage, on_lineage
from surefoot.checkpoint.manifest import MANIFEST_FILE, build_manifest, encode_manifest
from surefoot.checkpoint.outbox import Outbox
from surefoot.checkpoint.shard_writer import ShardWriter, WrittenPart, staged_loss
from surefoot.checkpoint.staged import StagedSnapshot
from surefoot.checkpoint.staging_folder import StagingFolder
from surefoot.checkpoint.store import Store
from surefoot.checkpoint.watched_store import WatchedStore
from surefoot.errors import AttemptError, CheckpointError, SurefootError
from surefoot.events import CheckpointCommitted, EventSink
from surefoot.faultpoints import reach

_log = logging.getLogger("surefoot.drain")


class _Written(NamedTuple):
    """A snapshot whose parts of this node are on storage, with the buffers that they were written from."""

    sequences: dict[int, int]
    parts: list[WrittenPart]
    started: float


class Drain:
    """Makes staged snapshots of one job durable. One thread of one process at a time (see `drain.lock`).

    Every method may raise OSError when storage fails and AttemptError when the attempt records cannot be
    read or are not there; it can then be called again, and nothing is lost.

    Args:
        staging: The job's staging folder.
        store: The job's storage.
        sink: Takes the events. When it fails they are kept and handed over later.
        job: Name of the job.
        retention: What `prune` keeps; None: somebody else removes checkpoints.
        monotonic: CLOCK_MONOTONIC in seconds.
    """

    def __init__(
        self,
        *,
        staging: StagingFolder,
        store: Store,
        sink: EventSink,
        job: str,
        retention: RetentionRules | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._staging = staging
        self._store = WatchedStore(store)
        self._job = job
        self._monotonic = monotonic
        self._attempts = AttemptLog(self._store)
        self._swept_attempt = 0
        self._announced: set[CheckpointId] = set()
        self._written: dict[CheckpointId, _Written] = {}
        self._writer = ShardWriter(self._store, job, self._attempts.keep_reserve)
        self._outbox = Outbox(sink)
        self._reports = DamageReports(staging, self._store, self._outbox, job)
        self._pruning = None if retention is None else Pruning(retention, self._store, self._outbox, job)
        note = staging.path / "storage-trouble.json"
        self.trouble = StorageTrouble(job, self._store, self._outbox.emit, note, monotonic)
        """Is told of what the callers of these methods catch."""

    @property
    def waits_for_others(self) -> bool:
        """All of some snapshot that is on this node is written, and parts of other nodes are missing."""
        return bool(self._written)

    def work(self) -> list[CheckpointId]:
        """Make durable what is to be, then remove debris. Return what was committed.

        `handle_reports` is apart: a checkpoint that cannot be read must not keep new ones from being written.
        """
        self._outbox.flush()
        try:
            committed = self.drain_once()
        except OSError:
            # Both may take the room that was missing; what a roll-back left behind, say, waits for no commit then.
            with suppress(OSError, SurefootError):  # the first error is the one to report
                self.remove_debris()
            if self._pruning is not None:
                self._pruning.is_due = True
            raise
        self.remove_debris()
        return committed

    def drain_once(self) -> list[CheckpointId]:
        """Commit every complete `persist` snapshot on the lineage, oldest first; free those that never will be.

        Raises:
            AttemptError: one waits whose attempt has no record; nothing is written or freed. Ranks claim the
                record before they stage anything, so storage was deleted, unmounted or is another one.
        """
        committed: list[CheckpointId] = []
        tried: set[CheckpointId] = set()
        if self._written:
            staged = self._staging.scan()
            self._written = {id_: written for id_, written in self._written.items() if id_ in staged}
        while (snapshot := self._next_to_persist(tried)) is not None:
            tried.add(snapshot.id)
            if self._commit(snapshot):
                committed.append(snapshot.id)
        return committed

    def salvage(self) -> CheckpointId | None:
        """Commit the newest complete snapshot on the lineage, asked for or not. For when nobody is left to train.

        One that cannot be written leaves it to the one before. With other nodes every snapshot is written until one
        is complete: nobody knows here which of them the other nodes have. Call it again while `waits_for_others`.

        Returns:
            What was committed beyond what was asked for, or None when storage has it, or newer, already.

        Raises:
            AttemptError: snapshots are staged whose attempt has no record, as in `drain_once`.
        """
        self.drain_once()
        staged = {id_: snapshot for id_, snapshot in self._staging.scan().items() if snapshot.complete_here}
        records = self._attempts.read_all()
        newest_attempt = max(records, default=0)
        self._check_recorded((id_ for id_ in staged if not staged[id_].drained), newest_attempt)
        durable = newest_on_lineage(list_committed(self._store), newest_attempt, records)
        for id_ in candidates(staged, newest_attempt, records):
            # One that is durable and not marked: a drain died before it said so.
            if durable is not None and (durable > id_ or (durable == id_ and staged[id_].drained)):
                break
            if self._commit(staged[id_]):
                return id_
        return None

    def handle_reports(self) -> None:
        """Look into what ranks reported as damaged; see `DamageReports.handle`."""
        self._announced.difference_update(self._reports.handle())

    def remove_debris(self) -> None:
        """Remove folders of older attempts without manifest that nobody can or need complete.

        One that is on the lineage may be what another node is writing, until there is a newer checkpoint.
        """
        newest = self._attempts.newest()
        if newest is None or newest.attempt <= self._swept_attempt:
            return
        records = self._attempts.read_all()
        keep = {
            id_
            for id_, snapshot in self._staging.scan().items()
            if snapshot.complete_here and not snapshot.drained and on_lineage(id_, newest.attempt, records)
        }
        is_clean = True
        for name in self._store.list(""):
            id_ = parse_folder_name(name)
            if id_ is None or id_.attempt >= newest.attempt or id_ in keep or self._is_committed(id_):
                continue
            if on_lineage(id_, newest.attempt, records) and not self._is_overtaken(id_, records):
                is_clean = False
                continue
            _log.info("removing %s: it was never completed", name)
            self._store.delete(name)
            reach("drain.debris_removed")
        if is_clean:
            self._swept_attempt = newest.attempt

    def prune(self) -> None:
        """Remove what retention does not keep, once after every commit; see `Pruning.run`."""
        if self._pruning is not None:
            self._pruning.run()

    def _next_to_persist(self, tried: set[CheckpointId]) -> StagedSnapshot | None:
        # Before the scan: whoever is past a step now has its part READY in the scan, or never will.
        progress = self._progress_by_rank()
        staged = self._staging.scan().values()
        waiting = sorted(s.id for s in staged if s.persist and not s.drained and s.id not in tried)
        if not waiting:
            return None
        by_id = {snapshot.id: snapshot for snapshot in staged}
        records = self._attempts.read_all()
        newest = max(records, default=0)
        self._check_recorded(waiting, newest)
        for snapshot in (by_id[id_] for id_ in waiting):
            name = folder_name(snapshot.id)
            if not on_lineage(snapshot.id, newest, records):
                _log.info("%s is off the lineage of attempt %d: not written", name, newest)
                self._mark_drained(snapshot.id)
            elif snapshot.complete_here:
                return snapshot
            elif _is_hopeless(snapshot, newest, progress):
                _log.info("%s will never be complete: not written", name)
                self._mark_drained(snapshot.id)
        return None

    def _commit(self, snapshot: StagedSnapshot) -> bool:
        """Write a snapshot; False when it changed, is unusable, or parts of other nodes are missing."""
        started = self._monotonic()
        # A drain that died after the manifest and before its event left this for us, or another node was the last.
        if not self._is_committed(snapshot.id):
            try:
                parts = self._write_parts(snapshot, started)
                if parts is None or not self._write_manifest(snapshot.id, parts):
                    return False
            except CheckpointError as error:
                _log.error("%s cannot be written and is given up: %s", folder_name(snapshot.id), error)
                self._mark_drained(snapshot.id)
                return False
        # A rank may stage the same step twice, first without `persist`: that is no second commit. Of several nodes
        # the one with rank 0 speaks.
        if snapshot.id not in self._announced and 0 in snapshot.parts:
            self._announced.add(snapshot.id)
            written = self._written.get(snapshot.id)
            self._emit_committed(snapshot, started if written is None else written.started)
        if self._pruning is not None:
            self._pruning.is_due = True
        reach("drain.event_emitted")
        self._mark_drained(snapshot.id)
        reach("drain.marked")
        return True

    def _write_parts(self, snapshot: StagedSnapshot, started: float) -> list[WrittenPart] | None:
        """Write the parts of this node, unless this drain has; return those of all nodes when they are there."""
        sequences = {rank: part.header.sequence for rank, part in snapshot.parts.items()}
        written = self._written.pop(snapshot.id, None)
        if written is None or written.sequences != sequences:
            parts = self._writer.write(snapshot)
            if parts is None:
                return None
            written = _Written(sequences, parts, started)
        if snapshot.complete:
            return written.parts
        self._written[snapshot.id] = written
        others = self._writer.read_others(snapshot)
        if others is not None:
            return written.parts + others
        if self._is_overtaken(snapshot.id, self._attempts.read_all()):
            # What is written stays: if another node comes to it after all, that one commits it.
            _log.warning("%s: parts of other nodes are missing, and there is a newer one", folder_name(snapshot.id))
            self._mark_drained(snapshot.id)
        return None

    def _write_manifest(self, checkpoint: CheckpointId, parts: list[WrittenPart]) -> bool:
        manifest = encode_manifest(build_manifest(parts))
        # Writing took a while: meanwhile an attempt may have begun that went on from an earlier step.
        records = self._attempts.read_all()
        self._check_recorded([checkpoint], max(records, default=0))
        if not on_lineage(checkpoint, max(records, default=0), records):
            _log.info("%s left the lineage while it was written", folder_name(checkpoint))
            self._mark_drained(checkpoint)
            return False
        reach("drain.before_manifest")
        with suppress(FileExistsError):  # another writer made the same bytes
            self._store.write(f"{folder_name(checkpoint)}/{MANIFEST_FILE}", [manifest], if_absent=True)
        reach("drain.manifest_written")
        return True

    def _check_recorded(self, checkpoints: Iterable[CheckpointId], newest_attempt: int) -> None:
        stray = max((id_.attempt for id_ in checkpoints), default=0)
        if stray > newest_attempt:
            raise AttemptError(
                f"no record of attempt {stray} in {self._store}: was it deleted, is it not mounted, or is it another "
                "storage? The snapshots stay in memory"
            )

    def _mark_drained(self, checkpoint: CheckpointId) -> None:
        self._written.pop(checkpoint, None)
        for part in self._staging.parts():
            if part.header.checkpoint_id == checkpoint and not part.drained:
                part.buffer.mark_drained(part.header.sequence)

    def _progress_by_rank(self) -> dict[int, CheckpointId]:
        progress: dict[int, CheckpointId] = {}
        for header in filter(None, (buffer.header() for buffer in self._staging.buffers())):
            reached = progress.get(header.rank, header.checkpoint_id)
            progress[header.rank] = max(reached, header.checkpoint_id)
        return progress

    def _is_committed(self, checkpoint: CheckpointId) -> bool:
        return MANIFEST_FILE in self._store.list(folder_name(checkpoint))

    def _is_overtaken(self, checkpoint: CheckpointId, records: Mapping[int, AttemptRecord]) -> bool:
        """Tell whether a newer checkpoint on the lineage is committed."""
        newest = newest_on_lineage(list_committed(self._store), max(records, default=0), records)
        return newest is not None and newest > checkpoint

    def _emit_committed(self, snapshot: StagedSnapshot, started: float) -> None:
        now = self._monotonic()
        self._outbox.emit(
            CheckpointCommitted(
                job=self._job,
                attempt=snapshot.id.attempt,
                step=snapshot.id.step,
                world_size=snapshot.world_size,
                num_bytes=self._num_bytes(snapshot),
                write_seconds=now - started,
                staged_age_seconds=now - max(part.header.saved_monotonic for part in snapshot.parts.values()),
                loss=staged_loss(snapshot),
            )
        )

    def _num_bytes(self, snapshot: StagedSnapshot) -> int:
        if not snapshot.complete:
            with suppress(CheckpointError, OSError):  # the event is only a wake-up
                manifest = read_manifest(self._store, snapshot.id)
                return sum(manifest.shard(rank).num_bytes for rank in range(snapshot.world_size))
        return sum(part.header.shard_bytes for part in snapshot.parts.values())


def _is_hopeless(snapshot: StagedSnapshot, newest_attempt: int, progress: Mapping[int, CheckpointId]) -> bool:
    """Tell whether a missing rank of this node is dead or already past the step, so that its part will never come."""
    missing = set(range(snapshot.world_size)) - set(snapshot.parts)
    return snapshot.id.attempt < newest_attempt or any(
        rank in progress and progress[rank] > snapshot.id for rank in missing
    )
