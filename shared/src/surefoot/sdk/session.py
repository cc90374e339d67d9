"""The training loop's partner: hands out micro-batches and turns their losses into guarded optimizer steps.

One step (DESIGN 4): the micro-batches' backward passes; gradient norm and clipping; one exchange among the ranks,
in which they agree whether to update, save and stop; the update; a snapshot into staging memory. No network, disk
or database call of ours stands on that path.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from surefoot import timeline
from surefoot.checkpoint.attempts import AttemptRecord, Source
from surefoot.checkpoint.ids import CheckpointId
from surefoot.errors import UsageError
from surefoot.events import StepCompleted, TimelineMark
from surefoot.progress import Phase
from surefoot.sdk import rng
from surefoot.sdk.collectives import StepRecord
from surefoot.sdk.data.loader import Loader
from surefoot.sdk.data.order import MicroBatch
from surefoot.sdk.host import Host
from surefoot.sdk.replication import is_replicated, set_gradient_sync
from surefoot.sdk.schedule import SaveSchedule
from surefoot.sdk.snapshot import Snapshots


@dataclass
class Counters:
    """How far training is.

    Attributes:
        step: Global batches drawn; drives the data.
        updates: Optimizer updates taken; drives the schedule. Less than `step` when updates were skipped.
    """

    step: int = 0
    updates: int = 0


@dataclass(frozen=True)
class Trained:
    """What the session trains, as `attach` got it.

    Attributes:
        model: What the loop must call: wrapped in DDP where there are other ranks.
        optimizer: Steps once per global batch.
        lr_scheduler: Steps after each update; None: constant learning rate.
        grad_scaler: For fp16 autocast; None otherwise.
        max_grad_norm: Gradients are clipped to this global L2 norm; None: not clipped.
        total_steps: The loop ends after this step; None: it goes on until something stops it.
        tokens_per_sample: For throughput; None: not known.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: Any
    grad_scaler: Any
    max_grad_norm: float | None
    total_steps: int | None
    tokens_per_sample: int | None


class Session:
    """One rank's part in one attempt; made by `attach`. Main thread of the rank only.

    Iterating gives micro-batches on the model's device, one at a time; each must be answered by one `step(loss)`
    before the next. Iteration ends after `total_steps`, or after the step at which the ranks agreed to stop; the
    last state is then durable.
    """

    def __init__(
        self,
        *,
        trained: Trained,
        host: Host,
        record: AttemptRecord,
        counters: Counters,
        loader: Loader,
        snapshots: Snapshots,
        seed: int,
    ) -> None:
        self._trained = trained
        self._host = host
        self._record = record
        self._counters = counters
        self._loader = loader
        self._snapshots = snapshots
        self._seed = seed
        self._schedule = SaveSchedule(host.settings.checkpoint, trained.total_steps)
        self._device = next(trained.model.parameters()).device
        self._parameters = [p for group in trained.optimizer.param_groups for p in group["params"]]
        self._batch: MicroBatch | None = None
        self._batch_done = True
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        self._num_samples = 0
        self._exchanged_at = time.monotonic()
        self._stopped = False
        self._closed = False
        self._forward_seen = not is_replicated(trained.model)
        if is_replicated(trained.model):
            trained.model.register_forward_pre_hook(self._note_forward)

    @property
    def model(self) -> torch.nn.Module:
        """The model to call in the loop (wrapped in DDP where there are other ranks)."""
        return self._trained.model

    @property
    def attempt(self) -> int:
        """Number of this attempt, from 1."""
        return self._record.attempt

    @property
    def global_step(self) -> int:
        """Global batches completed so far; the batch in hand belongs to step `global_step + 1`."""
        return self._counters.step

    @property
    def rank(self) -> int:
        """This process among all ranks."""
        return self._host.group.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._host.group.world_size

    @property
    def micro_batch(self) -> MicroBatch:
        """Where the batch in hand comes from: its sample indices, epochs and weight.

        Raises:
            UsageError: no batch is in hand.
        """
        if self._batch is None:
            raise UsageError("session.micro_batch", "is only known inside `for batch in session`")
        return self._batch

    @property
    def stopped(self) -> bool:
        """Whether the loop ended because somebody asked for it, before `total_steps`."""
        return self._stopped

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()

    def __iter__(self) -> Iterator[Any]:
        if self._closed:
            raise UsageError("session", "is closed; a process trains in one loop over one session")
        if self._is_finished():
            self._mark_first_step()  # nothing is left to do: say at least where this attempt is
        else:
            for micro_batch, batch in self._loader:
                self._begin(micro_batch)
                yield _to_device(batch, self._device)
                if not self._batch_done:
                    raise UsageError("session.step", "was not called for the last batch; call it once for each")
                if self._is_finished() and micro_batch.is_last:
                    break
        self.close()

    def _note_forward(self, *_: Any) -> None:
        self._forward_seen = True

    def _is_finished(self) -> bool:
        total = self._trained.total_steps
        return self._stopped or (total is not None and self._counters.step >= total)

    def _begin(self, micro_batch: MicroBatch) -> None:
        self._batch = micro_batch
        self._batch_done = False
        self._forward_seen = not is_replicated(self._trained.model)
        set_gradient_sync(self._trained.model, enabled=micro_batch.is_last)
        rng.reseed(self._seed, self._counters.step, self.rank, micro_batch.micro_index)

    def step(self, loss: Tensor) -> None:
        """Run backward for this micro-batch and, after the last one of a step, update.

        Args:
            loss: Scalar, the mean over this micro-batch's samples, on the model's device, with its graph.

        Raises:
            UsageError: called twice for a batch, outside the loop, or with something that is no scalar loss.
            RanksOutOfStep: another rank is in another step.
            Superseded: a newer attempt exists.
        """
        if self._batch is None or self._batch_done:
            raise UsageError("session.step", "must be called once for each batch of `for batch in session`")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UsageError("session.step", f"takes the scalar loss of the batch, got {type(loss).__name__}")
        if not self._forward_seen:
            # Without DDP's forward no gradient would be averaged, and each rank would train a model of its own.
            raise UsageError("session.model", "was not called for this batch: call it, not the model given to attach")
        self._batch_done = True
        weighted = loss * self._batch.weight
        (weighted if self._trained.grad_scaler is None else self._trained.grad_scaler.scale(weighted)).backward()
        self._loss_sum += loss.detach().double() * len(self._batch)
        self._num_samples += len(self._batch)
        if self._batch.is_last:
            self._finish_step()

    def _finish_step(self) -> None:
        if self._trained.grad_scaler is not None:
            self._trained.grad_scaler.unscale_(self._trained.optimizer)
        step = self._counters.step + 1
        # One host sync: loss and gradient norm together.
        loss_sum, grad_norm = torch.stack([self._loss_sum, self._clip().double()]).tolist()
        records = self._exchange(step, loss_sum, grad_norm)
        nonfinite = tuple(rank for rank, record in enumerate(records) if record.nonfinite)
        learning_rate = self._update() if not nonfinite else self._skip_update()
        self._counters.step = step
        self._counters.updates += not nonfinite
        self._stopped = any(record.stop for record in records)
        self._take_snapshot(records)
        self._host.page.write(
            attempt=self.attempt, step=step, start_step=self._record.starts_from.step, phase=Phase.STEP
        )
        if step == self._record.starts_from.step + 1:
            self._mark_first_step()
        if self.rank == 0:
            self._report(records, nonfinite, grad_norm, learning_rate)
        self._loss_sum.zero_()
        self._num_samples = 0

    def _clip(self) -> Tensor:
        maximum = self._trained.max_grad_norm
        return torch.nn.utils.clip_grad_norm_(self._parameters, math.inf if maximum is None else maximum)

    def _exchange(self, step: int, loss_sum: float, grad_norm: float) -> list[StepRecord]:
        self._host.check_not_superseded()
        control = self._host.read_control()
        now = time.monotonic()
        wants_snapshot = self._schedule.wants_snapshot(step)
        wants_save = self._schedule.wants_save(step, now, control.save_requests, stop=control.stop_requested)
        record = StepRecord(
            attempt=self.attempt,
            step=step,
            nonfinite=not (math.isfinite(loss_sum) and math.isfinite(grad_norm)),
            can_snapshot=wants_snapshot and self._snapshots.reserve(),
            # One save waiting for storage at a time: two would leave no buffers for the snapshots of every step, and a
            # killed rank would cost all steps of the outage. What is due now is made up for when storage has caught up.
            save=wants_snapshot and wants_save and not self._snapshots.has_unwritten_save(),
            stop=control.stop_requested,
            loss_sum=loss_sum,
            num_samples=self._num_samples,
            step_seconds=now - self._exchanged_at,
        )
        records = self._host.group.exchange(record)
        self._exchanged_at = time.monotonic()
        return records

    def _update(self) -> float:
        trained = self._trained
        schedule_rates = [group["lr"] for group in trained.optimizer.param_groups]
        # The factor is on only while the optimizer steps: chained schedulers read the rate back, and would
        # otherwise apply it again at every step.
        for group in trained.optimizer.param_groups:
            group["lr"] = group["lr"] * self._record.lr_factor
        learning_rate = float(trained.optimizer.param_groups[0]["lr"])
        if trained.grad_scaler is None:
            trained.optimizer.step()
        else:
            trained.grad_scaler.step(trained.optimizer)
            trained.grad_scaler.update()
        for group, rate in zip(trained.optimizer.param_groups, schedule_rates, strict=True):
            group["lr"] = rate
        if trained.lr_scheduler is not None:
            trained.lr_scheduler.step()
        trained.optimizer.zero_grad(set_to_none=True)
        return learning_rate

    def _skip_update(self) -> float:
        if self._trained.grad_scaler is not None:
            self._trained.grad_scaler.update()
        self._trained.optimizer.zero_grad(set_to_none=True)
        return float(self._trained.optimizer.param_groups[0]["lr"]) * self._record.lr_factor

    def _take_snapshot(self, records: list[StepRecord]) -> None:
        step = self._counters.step
        is_last = self._stopped or self._is_finished()
        save = bool(records[0].save) or is_last
        if is_last:
            # The last state must not be lost for want of a buffer; this is no longer the training path.
            self._snapshots.wait_for_buffer()
        elif not self._schedule.wants_snapshot(step):
            return
        elif not all(record.can_snapshot for record in records):
            self._schedule.missed(step, save=save)
            self._snapshots.release(step, persist=save)
            return
        taken = self._snapshots.take(CheckpointId(self.attempt, step), self._counters.updates, persist=save)
        if save and taken:
            self._schedule.saved(time.monotonic())
        else:
            self._schedule.missed(step, save=save)

    def _report(
        self, records: list[StepRecord], nonfinite: tuple[int, ...], grad_norm: float, learning_rate: float
    ) -> None:
        assert self._batch is not None
        num_samples = int(sum(record.num_samples for record in records))
        tokens = self._trained.tokens_per_sample
        self._host.report(
            StepCompleted(
                job=self._host.settings.spec.job,
                attempt=self.attempt,
                rank=0,
                step=self._counters.step,
                updates=self._counters.updates,
                epoch=int(self._batch.epochs[0]),
                loss=sum(record.loss_sum for record in records) / num_samples,
                grad_norm=grad_norm,
                learning_rate=learning_rate,
                applied=not nonfinite,
                nonfinite_ranks=nonfinite,
                num_samples=num_samples,
                num_tokens=None if tokens is None else tokens * num_samples,
                step_seconds=tuple(record.step_seconds for record in records),
                dropped_events=self._host.num_dropped_events,
            )
        )

    def _mark_first_step(self) -> None:
        timeline.mark("first_step")
        if self.rank == 0:
            self._host.report_start(
                self._record,
                self._trained.total_steps,
                tuple(TimelineMark(name=n, monotonic_seconds=s) for n, s in timeline.marks()),
            )

    def close(self) -> None:
        """Save the last state if it is not saved, wait until it is durable, let go of everything. Idempotent.

        Called by the loop when it ends; call it yourself after leaving the loop early. Every rank must.

        Raises:
            CheckpointError: the last state did not become durable in time; it stays in staging memory.
        """
        if self._closed:
            return
        self._closed = True
        self._loader.close()
        self._host.page.write(
            attempt=self.attempt,
            step=self._counters.step,
            start_step=self._record.starts_from.step,
            phase=Phase.CLOSE,
        )
        # What was restored from memory is not on storage yet, unless it was on its way there.
        starts_from = self._record.starts_from
        if self._counters.step > starts_from.step or starts_from.source is Source.STAGED:
            self._snapshots.close(CheckpointId(self.attempt, self._counters.step), self._counters.updates)
        self._host.close()


def _to_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors inside nested lists, tuples and dicts; anything else stays."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: _to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_to_device(value, device) for value in batch)
    return batch

