"""Copying the state after a step into staging memory, where it outlives this process.

A snapshot is begun at the end of its step and complete, at the latest, before the ranks' exchange of the next one: so
the last snapshot is complete on all ranks as soon as an exchange has succeeded, and no update meets a running copy.
Tensors in host memory are copied at once; for those of a device see `copying`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from surefoot.checkpoint.drain_start import drain_log
from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.checkpoint.manifest import MANIFEST_FILE
from surefoot.checkpoint.staging import SCALARS_CAPACITY_BYTES, StagingBuffer, choose_buffer
from surefoot.errors import CheckpointError, UsageError
from surefoot.events import CheckpointStaged, SnapshotSkipped
from surefoot.sdk.buffers import make_buffers
from surefoot.sdk.copying import Copier, Copy
from surefoot.sdk.host import Host
from surefoot.sdk.shard_plan import ShardPlan, make_plan, signature
from surefoot.sdk.state import TrainingState
from surefoot.sdk.trained import Counters

_POLL_SECONDS = 0.005
DURABLE_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class _Filling:
    """A snapshot under way.

    Attributes:
        buffer: Where it goes.
        id: What it is.
        shard_bytes: Length of this rank's part.
        persist: Make it durable.
        pending: What is being copied, with torch's count of changes in place of each source when that began.
        seconds: Training has stood still for it so long.
    """

    buffer: StagingBuffer
    id: CheckpointId
    shard_bytes: int
    persist: bool
    pending: Sequence[tuple[Copy, int]]
    seconds: float


class Snapshots:
    """This rank's staging buffers. Main thread of the rank only.

    Per step: `finish` and `reserve` before the ranks' exchange, then `take` or `release` after it.

    Args:
        state: What to copy.
        host: Where to.
        copier: How.
        is_on_lineage: Whether a snapshot is on the lineage of this attempt; its answers follow the attempt when another
            one begins in process, so that buffers with steps gone back over are free at once.
        restored: The snapshot that this attempt starts from when it lies in staging; it stays until there is a newer
            one that is complete on all ranks.
        about: What does not change, for the scalars of every snapshot.
    """

    def __init__(
        self,
        state: TrainingState,
        host: Host,
        copier: Copier,
        is_on_lineage: Callable[[CheckpointId], bool],
        restored: CheckpointId | None,
        *,
        about: Mapping[str, Any],
    ) -> None:
        self._state = state
        self._host = host
        self._copier = copier
        self._is_on_lineage = is_on_lineage
        self._about = about
        # All ranks take the same snapshots, so the last one taken here is complete on every rank as soon as the
        # next exchange has succeeded. Nothing is overwritten before that: `reserve` only takes the lock.
        self._last = restored
        self._last_durable: CheckpointId | None = None
        self._buffers: list[StagingBuffer] = []
        self._plan: ShardPlan | None = None
        self._reserved: StagingBuffer | None = None
        self._filling: _Filling | None = None
        self._num_skipped = 0
        self._num_taken = 0

    def go_on_from(self, checkpoint_id: CheckpointId) -> None:
        """Go on in another attempt of this process; call it once the attempt is claimed and its state is in place.

        Buffers stay. Between two steps none is reserved, and what is being drained keeps its lock.

        Args:
            checkpoint_id: What the attempt starts from; kept while it lies in staging, as at a start.
        """
        self.finish()
        self._last = checkpoint_id
        self._last_durable = None
        self.prepare()

    def prepare(self) -> None:
        """Lay out and allocate for all that the state is going to hold, so that no step has to. Collective.

        Raises:
            StagingTooSmall: on every rank, when it does not fit on some host.
        """
        self._lay_out(self._state.foresee())

    @property
    def num_bytes(self) -> int:
        """Length of this rank's part of a checkpoint; 0 before `prepare`."""
        return 0 if self._plan is None else self._plan.layout.shard_bytes

    def reserve(self) -> bool:
        """Take a free buffer for the step about to end; False when there is none. Never waits."""
        # With one buffer a save is durable before the next begins: until then `choose_buffer` sees it waiting.
        keep = set() if self._last is None or len(self._buffers) == 1 else {self._last}
        self._reserved = choose_buffer(self._buffers, keep, self._is_on_lineage)
        return self._reserved is not None

    def release(self, step: int, *, persist: bool) -> None:
        """Give the reservation back, since some rank has no free buffer; counted and reported."""
        self.give_back()
        self._num_skipped += 1
        self._host.report(
            SnapshotSkipped(
                job=self._host.settings.spec.job,
                rank=self._host.group.rank,
                step=step,
                persist=persist,
                reason="no staging buffer is free on every rank: they are being read or wait for storage",
                skipped_total=self._num_skipped,
            )
        )

    def give_back(self) -> None:
        """Give the reservation back: nobody needs a snapshot of this step."""
        if self._reserved is not None:
            self._reserved.release()
            self._reserved = None

    def wait_for_buffer(self) -> None:
        """Reserve a buffer, waiting until an earlier save is written. Only when no step follows.

        Raises:
            CheckpointError: none became free in time.
        """
        self._wait(lambda: self._reserved is not None or self.reserve(), "a free staging buffer")

    def take(self, checkpoint_id: CheckpointId, counters: Counters, *, persist: bool) -> bool:
        """Begin to copy the state into the reserved buffer. Collective when the set of tensors has changed.

        Args:
            checkpoint_id: What the state is.
            counters: How far training is.
            persist: Make it durable as well.

        Returns:
            False: there is no snapshot, since new tensors needed a new layout and some rank had no buffer free for it.

        Raises:
            StagingTooSmall: the buffers do not fit.
        """
        started = time.monotonic()
        tensors, scalars = self._state.capture()
        if not self._make_plan(tensors):
            self.release(checkpoint_id.step, persist=persist)
            return False
        buffer, plan = self._begin(checkpoint_id, persist=persist)
        if self._host.group.rank == 0:
            saved_at = datetime.now(UTC).isoformat()
            document = {**counters.to_scalars(), "state": scalars, "saved_at": saved_at, **self._about}
            buffer.write_scalars(self._encode(document))
        copies = self._copies(plan, buffer, tensors)
        complete = self._copier.start(copies)
        pending = () if complete else [(copy, _version(copy.source)) for copy in copies if copy.may_wait]
        seconds = time.monotonic() - started
        self._filling = _Filling(buffer, checkpoint_id, plan.layout.shard_bytes, persist, pending, seconds)
        if complete:
            self.finish()
        self._taken(checkpoint_id)
        if persist:
            self._last_durable = checkpoint_id
        return True

    def _begin(self, checkpoint_id: CheckpointId, *, persist: bool) -> tuple[StagingBuffer, ShardPlan]:
        buffer, self._reserved = self._reserved, None
        assert buffer is not None, "reserve() came first"
        assert self._plan is not None
        filling = buffer.begin_fill(
            checkpoint_id,
            world_size=self._host.group.world_size,
            rank=self._host.group.rank,
            persist=persist,
            plan_digest=self._plan.layout.plan_digest,
            local_world_size=self._host.local_world_size,
        )
        assert filling, "the reservation is the lock"
        return buffer, self._plan

    def _copies(self, plan: ShardPlan, buffer: StagingBuffer, tensors: dict[str, Tensor]) -> list[Copy]:
        may_wait = [self._state.changes_only_in_update(entry.name) for entry in plan.layout.entries]
        return list(map(Copy, plan.targets(buffer), plan.sources(tensors), may_wait))

    @torch.no_grad()
    def finish(self) -> None:
        """Return when the snapshot under way is complete; free when there is none.

        Called before the ranks' exchange of the next step, and before anything else that changes the state.
        """
        filling, self._filling = self._filling, None
        if filling is None:
            return
        began = time.monotonic()
        self._copier.wait()
        for copy, version in filling.pending:
            if _version(copy.source) != version:
                # Changed by the script since (weights clipped after the step, say), and maybe while it was read. Now it
                # is at rest, and what the training goes on with.
                copy.target.copy_(copy.source)
        filling.buffer.commit(filling.shard_bytes)
        if filling.persist:
            self._host.folder.wake()
            self._report_staged(filling, time.monotonic() - began)

    def _taken(self, checkpoint_id: CheckpointId) -> None:
        self._num_taken += 1
        self._last = checkpoint_id
        # All ranks have the first one complete by now: nobody goes back to what more ranks or buffers left behind.
        if self._num_taken == 2 and self._host.local_rank == 0:
            num_buffers = self._host.settings.checkpoint.num_buffers
            self._host.folder.remove_surplus(self._host.group.world_size, num_buffers, self._is_on_lineage)

    def let_go(self) -> None:
        """Let go of what a device needed to know about the buffers. Nothing is taken after this."""
        self.finish()
        self._copier.use([])

    def has_unwritten_save(self) -> bool:
        """Return whether an earlier save still waits for storage. Memory reads only."""
        unwritten = filter(None, (buffer.unwritten() for buffer in self._buffers))
        return any(self._is_on_lineage(checkpoint_id) for checkpoint_id in unwritten)

    def close(self, checkpoint_id: CheckpointId, counters: Counters) -> None:
        """Return when the state is durable; save it first if that was not asked for yet.

        Raises:
            CheckpointError: it did not become durable in time. It stays in staging memory.
        """
        self.finish()
        while self._last_durable != checkpoint_id:
            self.wait_for_buffer()
            self.take(checkpoint_id, counters, persist=True)
            self.finish()
        self._wait(lambda: self._is_drained(checkpoint_id), f"step {checkpoint_id.step} to become durable")
        # The drain is also done with what it had to give up.
        if MANIFEST_FILE not in self._host.store.list(folder_name(checkpoint_id)):
            raise CheckpointError(
                f"step {checkpoint_id.step} of attempt {checkpoint_id.attempt} could not be written; see "
                f"{drain_log(self._host.settings.spec)}"
            )

    def _is_drained(self, checkpoint_id: CheckpointId) -> bool:
        for buffer in self._buffers:
            header = buffer.header()
            if header is not None and header.checkpoint_id == checkpoint_id and header.persist:
                return buffer.drained_sequence() == header.sequence
        return True

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        """Poll what the drain, another process, writes into shared memory; start a drain if it is gone."""
        deadline = time.monotonic() + DURABLE_TIMEOUT_SECONDS
        next_look = 0.0
        while not condition():
            now = time.monotonic()
            if now > deadline:
                raise CheckpointError(
                    f"waited {DURABLE_TIMEOUT_SECONDS:.0f} s for {what}; see "
                    f"{drain_log(self._host.settings.spec)}. Nothing is lost while "
                    f"{self._host.folder.path} is there: start the job again when storage works"
                )
            if now >= next_look:
                self._host.ensure_drain()
                next_look = now + 1.0
            time.sleep(_POLL_SECONDS)

    def _make_plan(self, tensors: dict[str, Tensor]) -> bool:
        """Have a plan and a reserved buffer for these tensors; False: some rank has no buffer free for a new plan."""
        if self._plan is not None and self._plan.signature == signature(tensors):
            return True
        if self._reserved is not None:
            self._reserved.release()
        self._lay_out(tensors)
        self.reserve()
        # All ranks lay out anew at the same step; if one cannot take part, nobody may overwrite anything.
        return all(self._host.group.gather_json(self._reserved is not None))

    def _lay_out(self, tensors: dict[str, Tensor]) -> None:
        self._plan = make_plan(self._state, tensors, self._host.group)
        self._buffers = make_buffers(self._host, self._plan.layout.shard_bytes)
        self._copier.use([buffer.shard for buffer in self._buffers])

    @staticmethod
    def _encode(document: object) -> bytes:
        data = json.dumps(document, separators=(",", ":")).encode()
        if len(data) > SCALARS_CAPACITY_BYTES:
            raise UsageError(
                "lr_scheduler",
                f"and the other attached objects have {len(data)} bytes of state that is not tensors; "
                f"at most {SCALARS_CAPACITY_BYTES} fit into a checkpoint",
            )
        return data

    def _report_staged(self, filling: _Filling, waited_seconds: float) -> None:
        self._host.report(
            CheckpointStaged(
                job=self._host.settings.spec.job,
                attempt=filling.id.attempt,
                rank=self._host.group.rank,
                step=filling.id.step,
                num_bytes=filling.shard_bytes,
                copy_seconds=filling.seconds + waited_seconds,
            )
        )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
