"""The one call that a training script makes before its loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from surefoot import timeline
from surefoot.checkpoint.attempts import AttemptRecord, Source
from surefoot.checkpoint.staging import free_bytes, required_bytes
from surefoot.checkpoint.staging_folder import StagingFolder
from surefoot.errors import StagingTooSmall, UsageError
from surefoot.sdk.attempts import Attempts
from surefoot.sdk.collectives import ControlGroup
from surefoot.sdk.commands import Commands
from surefoot.sdk.constant import Constant
from surefoot.sdk.data.loader import Loader, dataset_length
from surefoot.sdk.data.order import DataOrder
from surefoot.sdk.host import Host
from surefoot.sdk.replication import rehearse, replicate, unwrap
from surefoot.sdk.restore import SEED, find_candidates, restore, start_over
from surefoot.sdk.session import Session
from surefoot.sdk.settings import SessionSettings, resolve
from surefoot.sdk.snapshot import Snapshots
from surefoot.sdk.state import Stateful, TrainingState
from surefoot.sdk.trained import Counters, Trained
from surefoot.sdk.training_fault import install_fault

HANG_LIMIT = timedelta(minutes=30)
"""Longest that ranks wait for each other in one exchange."""


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    dataset: Any,
    global_batch_size: int,
    micro_batch_size: int | None = None,
    lr_scheduler: Any = None,
    max_grad_norm: float | None = None,
    grad_scaler: Any = None,
    total_steps: int | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    shuffle: bool = True,
    extra_state: Mapping[str, Stateful] | None = None,
    job: str | None = None,
    storage: str | Path | None = None,
    run_dir: str | Path | None = None,
    seed: int | None = None,
    checkpoint: Mapping[str, Any] | None = None,
) -> Session:
    """Join the job: load the newest state there is, and return the session to loop over.

    Call it once per process, from the main thread, on every rank, after the model, optimizer and scheduler are made
    and on their device. Works under `surefoot run`, plain torchrun and plain python. Weights, optimizer, scheduler,
    gradient scaler and data position continue exactly where the newest usable snapshot or checkpoint left them.

    Args:
        model: Plain or already in DistributedDataParallel. Call `session.model` in the loop, not this one.
        optimizer: Over parameters of this model.
        dataset: Map-style: `len()` and `[index]`. Its order is the session's: a pure function of the seed.
        global_batch_size: Samples per optimizer step over all ranks; constant when the world size changes.
        micro_batch_size: Most samples per forward pass of a rank; None: a rank's whole part. More than one
            micro-batch per step is gradient accumulation.
        lr_scheduler: Stepped after each update.
        max_grad_norm: Clip gradients to this global L2 norm.
        grad_scaler: torch's GradScaler for fp16 autocast.
        total_steps: The loop ends after this step; None: it goes on until it is stopped.
        collate_fn: Makes a batch of a list of samples; None: torch's default.
        num_workers: DataLoader worker processes of this rank.
        shuffle: False: samples in index order in every epoch.
        extra_state: More objects with state_dict/load_state_dict to keep in the checkpoint (an EMA, say), by name.
        job: Name of the job; the script's name by default. The spec of `surefoot run` wins over this and the
            following ones.
        storage: Folder of all jobs' checkpoints (default `.surefoot/checkpoints`).
        run_dir: Folder of all jobs' logs and events (default `.surefoot/run`).
        seed: Of data order and per-step random state (default 0).
        checkpoint: Keys of `surefoot.spec.CheckpointSpec`, e.g. `{"save_every_steps": 500}`.

    Raises:
        UsageError: a wrong argument, or a checkpoint of another model; names it.
        StagingTooSmall: the staging file system cannot hold the snapshots.
        NoUsableCheckpoint: the job had progress and nothing of it can be read.
        AttemptTaken: the same job was started somewhere else at this moment.
    """
    timeline.mark("attach")
    settings = resolve({"job": job, "storage": storage, "run_dir": run_dir, "seed": seed, "checkpoint": checkpoint})
    _check_numbers(1, micro_batch_size=micro_batch_size, total_steps=total_steps)
    _check_numbers(0, num_workers=num_workers)
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise UsageError("max_grad_norm", f"must be greater than 0 (got {max_grad_norm})")
    trained = Trained(
        model=model,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        grad_scaler=grad_scaler,
        max_grad_norm=max_grad_norm,
        total_steps=total_steps,
        tokens_per_sample=getattr(dataset, "tokens_per_sample", None),
    )
    data = _Data(
        dataset=dataset,
        order=DataOrder(dataset_length(dataset), global_batch_size, settings.spec.seed, shuffle),
        micro_batch_size=micro_batch_size,
        collate_fn=collate_fn,
        num_workers=num_workers,
    )
    named = _constants(settings, data.order) | _named_states(lr_scheduler, grad_scaler, extra_state)
    return _start(settings, trained, data, TrainingState(unwrap(model), optimizer, named))


@dataclass(frozen=True)
class _Data:
    """What is trained on, and in what portions."""

    dataset: Any
    order: DataOrder
    micro_batch_size: int | None
    collate_fn: Callable[[list[Any]], Any] | None
    num_workers: int

    def loader(self, host: Host, record: AttemptRecord, total_steps: int | None, *, pin_memory: bool) -> Loader:
        """Return the loader that begins where the attempt does."""
        return Loader(
            self.dataset,
            self.order,
            rank=host.group.rank,
            world_size=host.group.world_size,
            micro_batch_size=self.micro_batch_size,
            start_step=record.starts_from.step,
            total_steps=total_steps,
            skip_windows=record.skip_windows,
            num_workers=self.num_workers,
            collate_fn=self.collate_fn,
            pin_memory=pin_memory,
        )


def _start(settings: SessionSettings, trained: Trained, data: _Data, state: TrainingState) -> Session:
    """Meet the other ranks, load what there is, claim the attempt."""
    host = _join(settings, next(trained.model.parameters()).device)
    try:
        return _restore_and_claim(host, trained, data, state)
    except BaseException:
        # Locks are given back: a process that lives on (a notebook, a test) may correct its arguments and try again.
        host.close()
        raise


def _restore_and_claim(host: Host, trained: Trained, data: _Data, state: TrainingState) -> Session:
    timeline.mark("host")
    settings, plain = host.settings, unwrap(trained.model)
    device = next(plain.parameters()).device
    # Before the claim: a batch too small for the ranks would end the attempt as soon as it began.
    data.order.rank_micro_batches(0, host.group.rank, host.group.world_size, data.micro_batch_size)
    attempts = Attempts(host)
    found = start_over(host) if settings.from_seed else find_candidates(host, attempts.records)
    model = replicate(trained.model, host.group.world_size, init_sync=not found)
    rehearse(model, host.group.world_size)
    timeline.mark("replicated")
    restored = restore(host, state, found) if found else SEED
    timeline.mark("loaded")
    record = attempts.claim(restored.starts_from, settings.cause)
    host.begin_attempt(record)
    timeline.mark("claimed")
    snapshots = _prepare_snapshots(host, state, plain, trained.optimizer, attempts)
    session = Session(
        trained=replace(trained, model=model),
        host=host,
        record=record,
        counters=Counters(restored.step, restored.updates),
        loader=data.loader(host, record, trained.total_steps, pin_memory=device.type == "cuda"),
        snapshots=snapshots,
        commands=Commands(host, state, attempts, snapshots, trained.total_steps),
        seed=settings.spec.seed,
    )
    install_fault(session, trained.optimizer)
    return session


def _check_numbers(least: int, **numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None and value < least:
            raise UsageError(name, f"must be at least {least} (got {value})")


def _named_states(
    lr_scheduler: Any, grad_scaler: Any, extra_state: Mapping[str, Stateful] | None
) -> dict[str, Stateful]:
    named = {"lr_scheduler": lr_scheduler, "grad_scaler": grad_scaler}
    named |= {f"extra_state.{name}": item for name, item in (extra_state or {}).items()}
    for name, item in named.items():
        if item is not None and not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
            raise UsageError(name, f"is a {type(item).__name__} without state_dict() and load_state_dict()")
    return {name: item for name, item in named.items() if item is not None}


def _constants(settings: SessionSettings, order: DataOrder) -> dict[str, Stateful]:
    why = "with another value its samples would not continue where they stopped"
    values = {
        "seed": settings.spec.seed,
        "global_batch_size": order.global_batch_size,
        "dataset": f"{order.num_samples} samples",
        "shuffle": order.shuffle,
    }
    return {f"constant.{key}": Constant(key, value, why) for key, value in values.items()}


def _join(settings: SessionSettings, device: torch.device) -> Host:
    """Meet the other ranks and this host's other processes of the job."""
    spec = settings.spec
    folder = StagingFolder.create(settings.checkpoint.staging_dir, spec.job, spec.storage)
    folder.hold_session()
    try:
        host = Host(settings, ControlGroup.join(device, HANG_LIMIT), folder)
    except BaseException:
        folder.release_session()
        raise
    host.ensure_drain()
    return host


def _prepare_snapshots(
    host: Host, state: TrainingState, model: torch.nn.Module, optimizer: torch.optim.Optimizer, attempts: Attempts
) -> Snapshots:
    assert attempts.newest is not None, "it was just claimed"
    starts_from = attempts.newest.starts_from
    if starts_from.source is Source.SEED:
        _check_room(host, model, optimizer)
        return Snapshots(state, host, attempts.is_on_lineage, None)
    snapshots = Snapshots(state, host, attempts.is_on_lineage, starts_from.checkpoint_id)
    snapshots.prepare()
    return snapshots


def _check_room(host: Host, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse now what would not fit after the first step, when the optimizer's state is there to be counted.

    Raises:
        StagingTooSmall: the buffers of all ranks of this host will not fit.
    """
    tensors = [value for value in model.state_dict().values() if isinstance(value, torch.Tensor)]
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    # Two moments per parameter, as Adam has; optimizers with less are overestimated, exotic ones found out later.
    moments = 0 if _is_plain_sgd(optimizer) else 2
    state_bytes = sum(t.nbytes for t in tensors) + moments * sum(t.nbytes for t in trained)
    ranks = host.group.world_size
    needed = ranks * required_bytes(state_bytes // ranks, host.settings.checkpoint.num_buffers)
    held = sum(buffer.path.stat().st_size for buffer in host.folder.buffers())
    available = free_bytes(host.folder.path) + held
    if needed > available:
        raise StagingTooSmall(str(host.settings.checkpoint.staging_dir), needed, available)


def _is_plain_sgd(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups)
