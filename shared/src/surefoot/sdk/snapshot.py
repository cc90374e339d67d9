"""Copying the state after a step into staging memory, where it outlives this process.

With DDP every rank holds everything, so each stages only its share of the tensors, and the shares of all ranks make
one snapshot. The layout is computed once per attempt; a snapshot is then a list of copies.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import torch
from torch import Tensor

from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.checkpoint.layout import ShardLayout, TensorSpec, assign, plan_digest
from surefoot.checkpoint.manifest import MANIFEST_FILE
from surefoot.checkpoint.staging import SCALARS_CAPACITY_BYTES, StagingBuffer, choose_buffer
from surefoot.errors import CheckpointError, UsageError
from surefoot.events import CheckpointStaged, SnapshotSkipped
from surefoot.sdk.host import Host
from surefoot.sdk.state import DTYPE_NAMES, DTYPES, TrainingState

_POLL_SECONDS = 0.005
DURABLE_TIMEOUT_SECONDS = 600.0


@dataclass
class _Plan:
    """Which tensors this rank stages, and where they lie in its shard.

    Attributes:
        names: Of all tensors of all ranks; another set of names needs another plan.
        layout: Of this rank's shard.
        targets: For each buffer, views of its memory in the order of `layout.entries`.
    """

    names: frozenset[str]
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
        is_on_lineage: Whether a snapshot is on the lineage of this attempt.
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

    def reserve(self) -> bool:
        """Take a free buffer for the step about to end; False when there is none. Never waits."""
        if not self._buffers:
            # Before the first snapshot of a new job the optimizer has no state yet, so its size is not known.
            return True
        keep = set() if self._last is None else {self._last}
        self._reserved = choose_buffer(self._buffers, keep, self._is_on_lineage)
        return self._reserved is not None

    def release(self, step: int, *, persist: bool) -> None:
        """Give the reservation back, since some rank has no free buffer; counted and reported."""
        if self._reserved is not None:
            self._reserved.release()
            self._reserved = None
        self._num_skipped += 1
        self._host.report(
            SnapshotSkipped(
                job=self._host.settings.spec.job,
                rank=self._host.group.rank,
                step=step,
                persist=persist,
                reason="no free staging buffer on every rank: an earlier save is still being written",
                skipped_total=self._num_skipped,
            )
        )

    def wait_for_buffer(self) -> None:
        """Reserve a buffer, waiting until an earlier save is written. Only when no step follows.

        Raises:
            CheckpointError: none became free in time.
        """
        self._wait(lambda: self._reserved is not None or self.reserve(), "a free staging buffer")

    @torch.no_grad()
    def take(self, checkpoint_id: CheckpointId, updates: int, *, persist: bool) -> None:
        """Copy the state into the reserved buffer.

        Args:
            checkpoint_id: What the state is.
            updates: Optimizer updates taken so far.
            persist: Make it durable as well.

        Raises:
            StagingTooSmall: at the first snapshot, when the buffers do not fit.
        """
        started = time.monotonic()
        tensors, scalars = self._state.capture()
        plan = self._plan_for(tensors)
        buffer, self._reserved = self._reserved, None
        if buffer is None:
            buffer = self._buffers[0]
        if not buffer.begin_fill(
            checkpoint_id,
            world_size=self._host.group.world_size,
            rank=self._host.group.rank,
            persist=persist,
            plan_digest=plan.layout.plan_digest,
        ):
            raise CheckpointError(f"{buffer.path}: locked by another process before its first use")
        for target, entry in zip(plan.target_views(buffer), plan.layout.entries, strict=True):
            target.copy_(tensors[entry.name])
        if self._host.group.rank == 0:
            document = {"step": checkpoint_id.step, "updates": updates, "state": scalars}
            document["saved_at"] = datetime.now(UTC).isoformat()
            buffer.write_scalars(self._encode(document))
        buffer.commit(plan.layout.shard_bytes)
        self._num_taken += 1
        # All ranks have the first one complete by now: nobody goes back to what a larger world left behind.
        if self._num_taken == 2 and self._host.group.rank == 0:
            self._host.folder.remove_buffers_from(self._host.group.world_size, self._is_on_lineage)
        self._last = checkpoint_id
        if persist:
            self._last_durable = checkpoint_id
            self._host.folder.wake()
            self._report_staged(checkpoint_id, plan.layout.shard_bytes, time.monotonic() - started)

    def finish_copy(self) -> None:
        """Wait for a copy that still runs beside training, before anything it reads is changed.

        CPU tensors are copied at once and nothing runs then.
        """

    def close(self, checkpoint_id: CheckpointId, updates: int) -> None:
        """Return when the state is durable; save it first if that was not asked for yet.

        Raises:
            CheckpointError: it did not become durable in time. It stays in staging memory.
        """
        if self._last_durable != checkpoint_id:
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
        self._plan_for(tensors)

    def _plan_for(self, tensors: dict[str, Tensor]) -> _Plan:
        if self._plan is not None and self._plan.names == tensors.keys():
            return self._plan
        layout = plan_shard(tensors, self._state.is_replicated, self._host.group.rank, self._host.group.world_size)
        self._plan = _Plan(frozenset(tensors), layout)
        if self._reserved is not None:
            self._reserved.release()
            self._reserved = None
        self._buffers = self._host.folder.create_buffers(
            self._host.group.rank, self._host.settings.checkpoint.num_buffers, layout.shard_bytes
        )
        return self._plan

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


def plan_shard(
    tensors: dict[str, Tensor], is_replicated: Callable[[str], bool], rank: int, world_size: int
) -> ShardLayout:
    """Return what one rank stages. The same plan on every rank, without talking.

    What every rank holds alike is shared out among the ranks; the rest is rank 0's. Tied tensors (same memory, shape
    and strides) are stored once; the other names become aliases.

    Raises:
        UsageError: a dtype that safetensors does not know.
    """
    stored: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    shared_out: list[TensorSpec] = []
    of_rank_0: list[TensorSpec] = []
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise UsageError(name, f"has dtype {tensor.dtype}, which a checkpoint cannot hold")
        key = (tensor.data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in stored:
            aliases[name] = stored[key]
            continue
        stored[key] = name
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
