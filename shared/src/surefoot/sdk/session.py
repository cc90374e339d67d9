"""The training loop's partner: hands out micro-batches and turns their losses into guarded optimizer steps.

One step (DESIGN 4): the micro-batches' backward passes; gradient norm and clipping; one exchange among the ranks,
in which they agree whether to update, save and stop; the update; a snapshot into staging memory. No network, disk
or database call of ours stands on that path.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from surefoot import timeline
from surefoot.checkpoint.attempts import AttemptRecord, Source
from surefoot.checkpoint.ids import CheckpointId
from surefoot.errors import UsageError
from surefoot.events import TimelineMark
from surefoot.progress import Phase
from surefoot.sdk import rng
from surefoot.sdk.auto_save import AutoSave
from surefoot.sdk.collectives import StepRecord
from surefoot.sdk.commands import Begun, Commands, StepEnd
from surefoot.sdk.data.device import to_device
from surefoot.sdk.data.loader import Loader
from surefoot.sdk.data.order import MicroBatch
from surefoot.sdk.host import Host
from surefoot.sdk.loaded import LoadedState
from surefoot.sdk.replication import is_replicated, set_gradient_sync
from surefoot.sdk.schedule import SaveSchedule
from surefoot.sdk.snapshot import Snapshots
from surefoot.sdk.step_report import mean_loss, report_step
from surefoot.sdk.trained import Counters, Trained
from surefoot.sdk.update import Updater


class Session:
    """One rank's part in the job; made by `attach`. Main thread of the rank only.

    Iterating gives micro-batches on the model's device, one at a time; each must be answered by one `step(loss)`
    before the next. Iteration ends after `total_steps`, or after the step at which the ranks agreed to stop; the
    last state is then durable.

    A command of the recovery service may change what follows a step: after a roll-back `global_step` is lower,
    `attempt` is higher, and the loop goes on with the batch that belongs there. Whatever the loop keeps of its own and
    must go back too belongs into `attach(extra_state=...)`.
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
        commands: Commands,
        loaded: LoadedState | None,
        seed: int,
        num_failures: int,
    ) -> None:
        self._trained = trained
        self._host = host
        self._record = record
        self._counters = counters
        self._loader = loader
        self._snapshots = snapshots
        self._commands = commands
        self._loaded = loaded
        self._updater = Updater(trained)
        self._seed = seed
        self._schedule = SaveSchedule(host.settings.checkpoint, trained.total_steps)
        self._auto_save: AutoSave | None = None
        if host.settings.checkpoint.save_every_seconds == "auto" and host.group.rank == 0:
            self._auto_save = AutoSave(host, snapshots, self._schedule, num_failures)
        self._device = next(trained.model.parameters()).device
        self._batch: MicroBatch | None = None
        self._batch_done = True
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        self._num_samples = 0
        self._exchanged_at = time.monotonic()
        self._first_step: int | None = counters.step + 1
        self._stopped = False
        self._learning_rate: float | None = None
        self._closed = False
        self._forward_seen = not is_replicated(trained.model)
        if is_replicated(trained.model):
            trained.model.register_forward_pre_hook(self._note_forward)

    @property
    def model(self) -> torch.nn.Module:
        """The model to call in the loop (wrapped in DDP where there are other ranks and it is not sharded)."""
        return self._trained.model

    @property
    def attempt(self) -> int:
        """Number of this attempt, from 1; grows when a command begins another one."""
        return self._record.attempt

    @property
    def learning_rate(self) -> float | None:
        """The rate of the last step, factor included; None before it. `param_groups` hold it without the factor."""
        return self._learning_rate

    @property
    def global_step(self) -> int:
        """Global batches completed; the batch in hand belongs to step `global_step + 1`. A roll-back lowers it."""
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
                yield to_device(batch, self._device)
                if not self._batch_done:
                    raise UsageError("session.step", "was not called for the last batch; call it once for each")
                if self._is_finished() and micro_batch.is_last:
                    break
        self.close()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Say that what runs inside is evaluation, which has a time limit of its own (`hang.eval_seconds`)."""
        self._host.page.beat(Phase.EVAL)
        self._snapshots.finish()  # the next step may be far away
        yield
        self._host.page.beat(Phase.STEP)

    def _note_forward(self, *_: Any) -> None:
        self._host.page.beat()  # before it can wait for others: a hang is the fault of the rank that did not come here
        self._forward_seen = True

    def _is_finished(self) -> bool:
        total = self._trained.total_steps
        return self._stopped or (total is not None and self._counters.step >= total)

    def _begin(self, micro_batch: MicroBatch) -> None:
        if self._batch is None:
            self._host.page.beat(Phase.STEP)
        if self._loaded is not None:
            self._loaded.check()
            self._loaded = None
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
        self._host.page.beat()
        self._updater.backward(loss * self._batch.weight)
        self._loss_sum += loss.detach().double() * len(self._batch)
        self._num_samples += len(self._batch)
        if self._batch.is_last:
            self._finish_step()

    def _finish_step(self) -> None:
        step = self._counters.step + 1
        # One host sync: loss and gradient norm together.
        loss_sum, grad_norm = torch.stack([self._loss_sum, self._updater.clip().double()]).tolist()
        self._snapshots.finish()  # that of the step before; the exchange then says so to all
        # Settled before the exchange: a command that comes with it counts from the next step on.
        wants_snapshot = self._schedule.wants_snapshot(step) or self._commands.wants_snapshot
        records = self._exchange(step, loss_sum, grad_norm, wants_snapshot=wants_snapshot)
        self._commands.receive(int(records[0].command))
        finite = not any(record.nonfinite for record in records)
        factor = self._record.lr_factor_at(step)
        learning_rate = self._updater.update(factor) if finite else self._updater.skip(factor)
        self._learning_rate = learning_rate
        step_seconds = max(record.step_seconds for record in records)
        self._counters.complete_step(updated=finite, seconds=step_seconds, loss=mean_loss(records))
        if self._auto_save is not None:
            self._auto_save.add_step(self.attempt, self._counters, step_seconds)
        self._stopped = any(record.stop for record in records)
        end = self._take_snapshot(records, wants_snapshot=wants_snapshot)
        self._write_page(Phase.STEP)
        if step == self._first_step:
            self._mark_first_step()
        self._report(records, grad_norm, learning_rate)
        self._loss_sum.zero_()
        self._num_samples = 0
        if self._commands.wants_snapshot:
            self._snapshots.finish()  # a command may start from it, or load another state over it
        begun = self._commands.carry_out(end)
        if begun is not None:
            self._go_on(begun)

    def _exchange(self, step: int, loss_sum: float, grad_norm: float, *, wants_snapshot: bool) -> list[StepRecord]:
        self._host.check_not_superseded()
        control = self._host.read_control()
        now = time.monotonic()
        wants_save = self._schedule.wants_save(step, now, control.save_requests, stop=control.stop_requested)
        wants_save = wants_save or self._commands.wants_save
        record = StepRecord(
            attempt=self.attempt,
            step=step,
            nonfinite=not (math.isfinite(loss_sum) and math.isfinite(grad_norm)),
            can_snapshot=wants_snapshot and self._snapshots.reserve(),
            # One save waiting for storage at a time: two would leave no buffers for the snapshots of every step, and a
            # killed rank would cost all steps of the outage. What is due now is made up for when storage has caught up.
            save=wants_snapshot and wants_save and not self._snapshots.has_unwritten_save(),
            stop=control.stop_requested,
            command=self._commands.next_number(),
            loss_sum=loss_sum,
            num_samples=self._num_samples,
            step_seconds=now - self._exchanged_at,
        )
        records = self._host.group.exchange(record)
        self._exchanged_at = time.monotonic()
        return records

    def _take_snapshot(self, records: list[StepRecord], *, wants_snapshot: bool) -> StepEnd:
        step = self._counters.step
        is_last = self._stopped or self._is_finished()
        # Without per-step snapshots what a command starts from is saved too: it must not stay in the way of saves.
        only_for_command = self._schedule.only_saves and self._commands.wants_snapshot
        save = bool(records[0].save) or is_last or only_for_command
        taken = False
        if self._schedule.only_saves and not save:
            self._snapshots.give_back()
            self._schedule.missed(step, save=False)
            return StepEnd(step, self._counters.updates, has_snapshot=False, is_saved=False, is_last=False)
        if is_last:
            # The last state must not be lost for want of a buffer; this is no longer the training path.
            self._host.page.beat(Phase.SAVE)
            self._snapshots.wait_for_buffer()
        started = time.monotonic()
        if is_last or (wants_snapshot and all(record.can_snapshot for record in records)):
            taken = self._snapshots.take(CheckpointId(self.attempt, step), self._counters, persist=save)
        elif wants_snapshot:
            self._snapshots.release(step, persist=save)
        if save and taken:
            now = time.monotonic()
            self._schedule.saved(now)
            if self._auto_save is not None:
                self._auto_save.add_save(step, now - started)
        elif is_last or wants_snapshot:
            self._schedule.missed(step, save=save)
        return StepEnd(step, self._counters.updates, has_snapshot=taken, is_saved=save and taken, is_last=is_last)

    def _go_on(self, begun: Begun) -> None:
        """Continue as the attempt that a command began. The loop notices nothing but another batch."""
        came_back = begun.counters.step < self._counters.step
        begun.counters.went_on_from(self._counters)
        self._record, self._counters = begun.record, begun.counters
        if came_back:
            # What was fetched ahead is of other steps; the loader's workers live on. With the present state all stays.
            self._loader.restart(self._counters.step, self._record.skip_windows)
            self._schedule.went_back()
        self._exchanged_at = time.monotonic()

    def _report(self, records: list[StepRecord], grad_norm: float, learning_rate: float) -> None:
        assert self._batch is not None
        if self.rank == 0:
            report_step(
                self._host,
                attempt=self.attempt,
                counters=self._counters,
                batch=self._batch,
                records=records,
                grad_norm=grad_norm,
                learning_rate=learning_rate,
                tokens_per_sample=self._trained.tokens_per_sample,
            )

    def _write_page(self, phase: Phase) -> None:
        start_step = self._record.starts_from.step
        self._host.page.write(attempt=self.attempt, step=self._counters.step, start_step=start_step, phase=phase)

    def _mark_first_step(self) -> None:
        self._first_step = None  # once per process: a roll-back comes by there again
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
        self._write_page(Phase.CLOSE)
        # What was restored from memory is not on storage yet, unless it was on its way there.
        starts_from = self._record.starts_from
        if self._counters.step > starts_from.step or starts_from.source is Source.STAGED:
            self._snapshots.close(CheckpointId(self.attempt, self._counters.step), self._counters)
        self._snapshots.let_go()
        self._host.close()
        self._host.page.beat(Phase.DONE)
