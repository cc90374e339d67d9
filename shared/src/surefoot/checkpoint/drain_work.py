"""From staging to storage: the work of the drain, apart from when it is done.

The buffer header is the truth and everything is done at least once: a drain that dies anywhere leaves a state
from which the next one finishes. Nothing that it writes counts before manifest.json, which is a function of
the snapshot alone, so a second drain writes the same bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from surefoot.checkpoint.attempts import AttemptLog
from surefoot.checkpoint.catalog import list_committed, verify
from surefoot.checkpoint.ids import CheckpointId, folder_name, parse_folder_name
from surefoot.checkpoint.lineage import newest_on_lineage, on_lineage
from surefoot.checkpoint.manifest import (
    MANIFEST_FILE,
    ShardPart,
    build_manifest,
    encode_manifest,
)
from surefoot.checkpoint.outbox import Outbox
from surefoot.checkpoint.shard_writer import ShardWriter
from surefoot.checkpoint.staged import StagedSnapshot
from surefoot.checkpoint.staging_folder import DamageReport, StagingFolder
from surefoot.checkpoint.store import Store
from surefoot.errors import AttemptError, CheckpointError, DamagedCheckpoint, SurefootError
from surefoot.events import CheckpointCommitted, CheckpointQuarantined, EventSink
from surefoot.faultpoints import reach

QUARANTINE_FOLDER = "quarantine"

_log = logging.getLogger("surefoot.drain")


class Drain:
    """Makes staged snapshots of one job durable. One thread of one process at a time (see `drain.lock`).

    Every method may raise OSError when storage fails and AttemptError when the attempt records cannot be
    read or are not there; it can then be called again, and nothing is lost.

    Args:
        staging: The job's staging folder.
        store: The job's storage.
        sink: Takes the events. When it fails they are kept and handed over later.
        job: Name of the job.
        monotonic: CLOCK_MONOTONIC in seconds.
    """

    def __init__(
        self,
        *,
        staging: StagingFolder,
        store: Store,
        sink: EventSink,
        job: str,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._staging = staging
        self._store = store
        self._job = job
        self._monotonic = monotonic
        self._attempts = AttemptLog(store)
        self._swept_attempt = 0
        self._announced: set[CheckpointId] = set()
        self._writer = ShardWriter(store, job, self._attempts.keep_reserve)
        self._outbox = Outbox(sink)

    def work(self) -> list[CheckpointId]:
        """Make durable what is to be, then remove debris. Return what was committed.

        `handle_reports` is apart: a checkpoint that cannot be read must not keep new ones from being written.
        """
        self._outbox.flush()
        try:
            committed = self.drain_once()
        except OSError:
            with suppress(OSError, SurefootError):  # the first error is the one to report
                self.remove_debris()  # it may take the room that was missing
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
        while (snapshot := self._next_to_persist(tried)) is not None:
            tried.add(snapshot.id)
            if self._commit(snapshot):
                committed.append(snapshot.id)
        return committed

    def salvage(self) -> CheckpointId | None:
        """Commit the newest complete snapshot on the lineage, asked for or not. For when nobody is left to train.

        Returns:
            What was committed beyond what was asked for, or None when storage has it, or newer, already.

        Raises:
            AttemptError: snapshots are staged whose attempt has no record, as in `drain_once`.
        """
        self.drain_once()
        staged = {id_: snapshot for id_, snapshot in self._staging.scan().items() if snapshot.complete}
        records = self._attempts.read_all()
        newest_attempt = max(records, default=0)
        self._check_recorded((id_ for id_ in staged if not staged[id_].drained), newest_attempt)
        newest = newest_on_lineage(staged, newest_attempt, records)
        durable = newest_on_lineage(list_committed(self._store), newest_attempt, records)
        if newest is None or (durable is not None and durable >= newest):
            return None
        return newest if self._commit(staged[newest]) else None

    def handle_reports(self) -> None:
        """Look into what ranks reported as damaged; move what really is to quarantine/.

        A report that cannot be looked into now stays; its error is raised once the others are dealt with.
        """
        errors: list[OSError | SurefootError] = []
        for report in self._staging.reports():
            try:
                self._handle_report(report)
            except (OSError, SurefootError) as error:
                errors.append(error)
            else:
                if report.path is not None:
                    report.path.unlink(missing_ok=True)
        if errors:
            raise errors[0]

    def remove_debris(self) -> None:
        """Remove folders without manifest that nobody can complete: older attempt, and nothing staged for them."""
        newest = self._attempts.newest()
        if newest is None or newest.attempt <= self._swept_attempt:
            return
        records = self._attempts.read_all()
        waiting = {
            id_
            for id_, snapshot in self._staging.scan().items()
            if snapshot.complete and not snapshot.drained and on_lineage(id_, newest.attempt, records)
        }
        for name in self._store.list(""):
            id_ = parse_folder_name(name)
            if id_ is None or id_.attempt >= newest.attempt or id_ in waiting or self._is_committed(id_):
                continue
            _log.info("removing %s: it was never completed", name)
            self._store.delete(name)
            reach("drain.debris_removed")
        self._swept_attempt = newest.attempt

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
            elif snapshot.complete:
                return snapshot
            elif _is_hopeless(snapshot, newest, progress):
                _log.info("%s will never be complete: not written", name)
                self._mark_drained(snapshot.id)
        return None

    def _commit(self, snapshot: StagedSnapshot) -> bool:
        """Write a complete snapshot; False when it turned out to have changed or to be unusable."""
        started = self._monotonic()
        # A drain that died after the manifest and before its event left this for us.
        if not self._is_committed(snapshot.id):
            try:
                parts = self._writer.write(snapshot)
                if parts is None or not self._write_manifest(snapshot.id, parts):
                    return False
            except CheckpointError as error:
                _log.error("%s cannot be written and is given up: %s", folder_name(snapshot.id), error)
                self._mark_drained(snapshot.id)
                return False
        # A rank may stage the same step twice, first without `persist`: that is no second commit.
        if snapshot.id not in self._announced:
            self._announced.add(snapshot.id)
            self._emit_committed(snapshot, started)
        reach("drain.event_emitted")
        self._mark_drained(snapshot.id)
        reach("drain.marked")
        return True

    def _write_manifest(self, checkpoint: CheckpointId, parts: list[tuple[bytes, ShardPart]]) -> bool:
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

    def _handle_report(self, report: DamageReport) -> None:
        name = folder_name(report.checkpoint)
        if not self._is_committed(report.checkpoint):
            # A drain may have died between the move and the event; otherwise there is nothing to do.
            if name in self._store.list(QUARANTINE_FOLDER):
                self._emit_quarantined(report, report.file, report.reason, f"{QUARANTINE_FOLDER}/{name}")
            return
        try:
            verify(self._store, report.checkpoint)
        except DamagedCheckpoint as error:
            taken = self._store.list(QUARANTINE_FOLDER)
            target = f"{QUARANTINE_FOLDER}/{_free_name(name, taken)}"
            self._store.move(name, target)
            self._announced.discard(report.checkpoint)
            reach("drain.quarantined")
            _log.error("%s is damaged and was moved to %s: %s", name, target, error)
            file = error.path.removeprefix(f"{self._store}/{name}/")
            self._emit_quarantined(report, file, error.reason, target)
        else:
            _log.warning("%s was reported as damaged (%s), but it is as it was written", name, report.reason)

    def _emit_committed(self, snapshot: StagedSnapshot, started: float) -> None:
        now = self._monotonic()
        headers = [part.header for part in snapshot.parts.values()]
        self._outbox.emit(
            CheckpointCommitted(
                job=self._job,
                attempt=snapshot.id.attempt,
                step=snapshot.id.step,
                world_size=snapshot.world_size,
                num_bytes=sum(header.shard_bytes for header in headers),
                write_seconds=now - started,
                staged_age_seconds=now - max(header.saved_monotonic for header in headers),
            )
        )

    def _emit_quarantined(self, report: DamageReport, file: str, reason: str, moved_to: str) -> None:
        self._outbox.emit(
            CheckpointQuarantined(
                job=self._job,
                attempt=report.checkpoint.attempt,
                step=report.checkpoint.step,
                file=file,
                reason=reason,
                moved_to=moved_to,
            )
        )


def _is_hopeless(snapshot: StagedSnapshot, newest_attempt: int, progress: Mapping[int, CheckpointId]) -> bool:
    """Tell whether a missing rank is dead or already past the step, so that its part will never come."""
    missing = set(range(snapshot.world_size)) - set(snapshot.parts)
    return snapshot.id.attempt < newest_attempt or any(
        rank in progress and progress[rank] > snapshot.id for rank in missing
    )


def _free_name(name: str, taken: list[str]) -> str:
    candidates = (name if n == 1 else f"{name}-{n}" for n in range(1, len(taken) + 2))
    return next(candidate for candidate in candidates if candidate not in taken)
