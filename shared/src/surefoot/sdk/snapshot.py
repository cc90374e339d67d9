"""Copying the state after a step into staging memory, where it outlives this process.

With DDP every rank holds everything, so each stages only its share of the tensors, and the shares of all ranks make
one snapshot. The layout is computed once per attempt; a snapshot is then a list of copies.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

import torch
from torch import Tensor

from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.checkpoint.layout import ShardLayout, TensorSpec, assign, plan_digest
from surefoot.checkpoint.manifest import MANIFEST_FILE
from surefoot.checkpoint.staging import SCALARS_CAPACITY_BYTES, StagingBuffer, choose_buffer
from surefoot.checkpoint.staging_header import BufferState
from surefoot.errors import CheckpointError, UsageError
from surefoot.events import CheckpointStaged, SnapshotSkipped
from surefoot.sdk.host import Host
from surefoot.sdk.state import DTYPE_NAMES, DTYPES, TrainingState

_POLL_SECONDS = 0.005
DURABLE_TIMEOUT_SECONDS = 600.0


Signature = list[tuple[str, torch.dtype, torch.Size]]


@dataclass
class _Plan:
    """Which tensors this rank stages, and where they lie in its shard.

    Attributes:
        signature: Name, dtype and shape of every tensor of all ranks; another one needs another plan.
        layout: Of this rank's shard.
        targets: For each buffer, views of its memory in the order of `layout.entries`.
    """

    signature: Signature
    layout: ShardLayout
    targets: dict[StagingBuffer, list[Tensor]] = field(default_factory=dict)

    def target_views(self, buffer: StagingBuffer) -> list[Tensor]:
        """Return tensors over the buffer's memory to copy into; made once per buffer."""
        if buffer not in self.targets:
            shard = buffer.shard
            self.layout.write_header(shard)
            self.targets[buffer] = [
                tensor_over(self.layout.tensor_view(shard, entry.name), entry) for entry in self.layout.entries
            ]
        return self.targets[buffer]


class Snapshots:
    """This rank's staging buffers. Main thread of the rank only.

    Per step: `reserve` before the ranks' exchange, then `take` or `release` after it.

    Args:
        state: What to copy.
        host: Where to.
        is_on_lineage: Whether a snapshot is on the lineage of this attempt; its answers follow the attempt when another
            one begins in process, so that buffers with steps gone back over are free at once.
        restored: The snapshot that this attempt starts from when it lies in staging; it stays until there is a newer
            one that is complete on all ranks.
    """

    def __init__(
        self,
        state: TrainingState,
        host: Host,
        is_on_lineage: Callable[[CheckpointId], bool],
        restored: CheckpointId | None,
    ) -> None:
        self._state = state
        self._host = host
        self._is_on_lineage = is_on_lineage
        # All ranks take the same snapshots, so the last one taken here is complete on every rank as soon as the
        # next exchange has succeeded. Nothing is overwritten before that: `reserve` only takes the lock.
        self._last = restored
        self._last_durable: CheckpointId | None = None
        self._buffers: list[StagingBuffer] = []
        self._plan: _Plan | None = None
        self._reserved: StagingBuffer | None = None
        self._num_skipped = 0
        self._num_taken = 0

    def go_on_from(self, checkpoint_id: CheckpointId) -> None:
        """Go on in another attempt of this process; call it once the attempt is claimed and its state is in place.

        Buffers stay. Between two steps none is reserved, and what is being drained keeps its lock.

        Args:
            checkpoint_id: What the attempt starts from; kept while it lies in staging, as at a start.
        """
        self._last = checkpoint_id
        self._last_durable = None
        self.prepare()

    def reserve(self) -> bool:
        """Take a free buffer for the step about to end; False when there is none. Never waits."""
        if not self._buffers:
            # Before the first snapshot of a new job the optimizer has no state yet, so its size is not known.
            return True
        return self._reserve_one()

    def _reserve_one(self) -> bool:
        keep = set() if self._last is None else {self._last}
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

    @torch.no_grad()
    def take(self, checkpoint_id: CheckpointId, updates: int, *, persist: bool) -> bool:
        """Copy the state into the reserved buffer. Collective when the set of tensors has changed.

        Args:
            checkpoint_id: What the state is.
            updates: Optimizer updates taken so far.
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
        plan, buffer, self._reserved = self._plan, self._reserved, None
        assert plan is not None
        assert buffer is not None, "reserve() came first"
        filling = buffer.begin_fill(
            checkpoint_id,
            world_size=self._host.group.world_size,
            rank=self._host.group.rank,
            persist=persist,
            plan_digest=plan.layout.plan_digest,
        )
        assert filling, "the reservation is the lock"
        for target, entry in zip(plan.target_views(buffer), plan.layout.entries, strict=True):
            target.copy_(tensors[entry.name])
        if self._host.group.rank == 0:
            document = {"step": checkpoint_id.step, "updates": updates, "state": scalars}
            document["saved_at"] = datetime.now(UTC).isoformat()
            buffer.write_scalars(self._encode(document))
        buffer.commit(plan.layout.shard_bytes)
        self._taken(checkpoint_id)
        if persist:
            self._last_durable = checkpoint_id
            self._host.folder.wake()
            self._report_staged(checkpoint_id, plan.layout.shard_bytes, time.monotonic() - started)
        return True

    def _taken(self, checkpoint_id: CheckpointId) -> None:
        self._num_taken += 1
        self._last = checkpoint_id
        # All ranks have the first one complete by now: nobody goes back to what a larger world left behind.
        if self._num_taken == 2 and self._host.group.rank == 0:
            self._host.folder.remove_buffers_from(self._host.group.world_size, self._is_on_lineage)

    def has_unwritten_save(self) -> bool:
        """Return whether an earlier save still waits for storage. Memory reads only."""
        for buffer in self._buffers:
            header = buffer.header()
            if (
                header is not None
                and header.state is BufferState.READY
                and header.persist
                and buffer.drained_sequence() != header.sequence
                and self._is_on_lineage(header.checkpoint_id)
            ):
                return True
        return False

    def close(self, checkpoint_id: CheckpointId, updates: int) -> None:
        """Return when the state is durable; save it first if that was not asked for yet.

        Raises:
            CheckpointError: it did not become durable in time. It stays in staging memory.
        """
        while self._last_durable != checkpoint_id:
            self.wait_for_buffer()
            self.take(checkpoint_id, updates, persist=True)
        self._wait(lambda: self._is_drained(checkpoint_id), f"step {checkpoint_id.step} to become durable")
        # The drain is also done with what it had to give up.
        if MANIFEST_FILE not in self._host.store.list(folder_name(checkpoint_id)):
            raise CheckpointError(
                f"step {checkpoint_id.step} of attempt {checkpoint_id.attempt} could not be written; see "
                f"{self._host.settings.spec.job_run_dir}/logs/drain.log"
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
                    f"{self._host.settings.spec.job_run_dir}/logs/drain.log. Nothing is lost while "
                    f"{self._host.folder.path} is there: start the job again when storage works"
                )
            if now >= next_look:
                self._host.ensure_drain()
                next_look = now + 1.0
            time.sleep(_POLL_SECONDS)

    def prepare(self) -> None:
        """Lay out and allocate now when everything is known: after a restore, so that the first step is not slower."""
        tensors, _ = self._state.capture()
        self._lay_out(tensors, _signature(tensors))

    def _make_plan(self, tensors: dict[str, Tensor]) -> bool:
        """Have a plan and a reserved buffer for these tensors; False: some rank has no buffer free for a new plan."""
        signature = _signature(tensors)
        if self._plan is not None and self._plan.signature == signature:
            return True
        if self._reserved is not None:
            self._reserved.release()
        self._lay_out(tensors, signature)
        self._reserve_one()
        # All ranks lay out anew at the same step; if one cannot take part, nobody may overwrite anything.
        return all(self._host.group.gather_json(self._reserved is not None))

    def _lay_out(self, tensors: dict[str, Tensor], signature: Signature) -> None:
        group = self._host.group
        layout = plan_shard(tensors, self._state.aliases, self._state.is_replicated, group.rank, group.world_size)
        self._plan = _Plan(signature, layout)
        self._buffers = self._host.folder.create_buffers(
            group.rank, self._host.settings.checkpoint.num_buffers, layout.shard_bytes
        )

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

    def _report_staged(self, checkpoint_id: CheckpointId, num_bytes: int, seconds: float) -> None:
        self._host.report(
            CheckpointStaged(
                job=self._host.settings.spec.job,
                attempt=checkpoint_id.attempt,
                rank=self._host.group.rank,
                step=checkpoint_id.step,
                num_bytes=num_bytes,
                copy_seconds=seconds,
            )
        )


def _signature(tensors: Mapping[str, Tensor]) -> Signature:
    return [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]


def plan_shard(
    tensors: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    is_replicated: Callable[[str], bool],
    rank: int,
    world_size: int,
) -> ShardLayout:
    """Return what one rank stages. The same plan on every rank, without talking.

    What every rank holds alike is shared out among the ranks; the rest is rank 0's.

    Raises:
        UsageError: a dtype that safetensors does not know.
    """
    shared_out: list[TensorSpec] = []
    of_rank_0: list[TensorSpec] = []
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise UsageError(name, f"has dtype {tensor.dtype}, which a checkpoint cannot hold")
        specs = shared_out if is_replicated(name) else of_rank_0
        specs.append(TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)))
    shares = assign(shared_out, world_size)
    shares[0] += of_rank_0
    return ShardLayout.build(
        shares[rank],
        rank=rank,
        world_size=world_size,
        plan_digest=plan_digest(shares, world_size),
        aliases=aliases,
    )


def tensor_over(view: memoryview, spec: TensorSpec) -> Tensor:
    """Return a tensor that lies in `view`, which must be writable memory; no copy."""
    dtype = DTYPES[spec.dtype]
    if not view.nbytes:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(view, dtype=dtype).view(spec.shape)
