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
from surefoot.checkpoint.estimate import check_storage_room
from surefoot.checkpoint.staging_folder import StagingFolder
from surefoot.errors import UsageError
from surefoot.sdk.attempts import Attempts
from surefoot.sdk.collectives import ControlGroup
from surefoot.sdk.commands import Commands
from surefoot.sdk.constant import Constant
from surefoot.sdk.copying import choose_copier
from surefoot.sdk.data.loader import Loader, dataset_length
from surefoot.sdk.data.order import DataOrder
from surefoot.sdk.host import Host
from surefoot.sdk.hugging_face import describe_model
from surefoot.sdk.init_from import init_weights
from surefoot.sdk.loaded import LoadedState
from surefoot.sdk.replication import rehearse, replicate, unwrap
from surefoot.sdk.restore import Restored, find_candidates, restore, start_over
from surefoot.sdk.save_interval import count_failures
from surefoot.sdk.session import Session
from surefoot.sdk.settings import SessionSettings, resolve
from surefoot.sdk.snapshot import Snapshots
from surefoot.sdk.state import Stateful, TrainingState
from surefoot.sdk.trained import Trained
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
    init_from: str | Path | None = None,
    tokenizer: str | Path | None = None,
) -> Session:
    """Join the job: load the newest state there is, and return the session to loop over.

    Call it once per process, from the main thread, on every rank, after the model, optimizer and scheduler are made
    and on their device. Works under `surefoot run`, plain torchrun and plain python. Weights, optimizer, scheduler,
    gradient scaler and data position continue exactly where the newest usable snapshot or checkpoint left them.

    Args:
        model: Plain, already in DistributedDataParallel, or sharded over all ranks by FSDP2's `fully_shard` (HSDP too).
            Call `session.model` in the loop, not this one. A checkpoint of one kind and number of ranks is loaded by
            any other.
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
        extra_state: More objects with state_dict/load_state_dict to keep in the checkpoint (an EMA, say), by name. Of
            what is not a DTensor rank 0's is kept.
        job: Name of the job; the script's name by default. The spec of `surefoot run` wins over this and the
            following ones.
        storage: Folder of all jobs' checkpoints (default `.surefoot/checkpoints`).
        run_dir: Folder of all jobs' logs and events (default `.surefoot/run`).
        seed: Of data order and per-step random state (default 0).
        checkpoint: Keys of `surefoot.spec.CheckpointSpec`, e.g. `{"save_every_steps": 500}`.
        init_from: A Hugging Face folder (safetensors) whose weights the model gets when the job starts from the seed.
            Objects that copied the weights before (an EMA, say) keep what they copied.
        tokenizer: The data's tokenizer.json, for `surefoot checkpoints export`, which puts it beside the weights.

    Raises:
        UsageError: a wrong argument, or a checkpoint of another model; names it.
        StagingTooSmall: the staging file system cannot hold the snapshots.
        NoUsableCheckpoint: the job had progress and nothing of it can be read.
        AttemptTaken: the same job was started somewhere else at this moment.
    """
    timeline.mark("attach")
    settings = resolve({
        "job": job, "storage": storage, "run_dir": run_dir, "seed": seed, "checkpoint": checkpoint,
        "init_from": init_from,
    })  # fmt: skip
    _check_numbers(1, micro_batch_size=micro_batch_size, total_steps=total_steps)
    _check_numbers(0, num_workers=num_workers)
    trained = Trained(
        model=model,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        grad_scaler=grad_scaler,
        max_grad_norm=_check_grad_norm(max_grad_norm),
        total_steps=total_steps,
        tokens_per_sample=getattr(dataset, "tokens_per_sample", None),
        about={"hf_config": describe_model(unwrap(model), None if tokenizer is None else Path(tokenizer))},
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
    if not found and settings.spec.init_from is not None:
        init_weights(plain, settings.spec.init_from, host.group)
    model = replicate(trained.model, host.group.world_size, init_sync=not found)
    rehearse(model, host.group.world_size)
    timeline.mark("replicated")
    restored = restore(host, state, found) if found else Restored.from_seed()
    timeline.mark("loaded")
    # Before the claim too: what does not fit into memory begins no attempt.
    snapshots = _prepare_snapshots(host, state, trained, attempts, restored)
    timeline.mark("prepared")
    record = attempts.claim(restored.starts_from, settings.cause)
    host.begin_attempt(record)
    timeline.mark("claimed")
    session = Session(
        trained=replace(trained, model=model),
        host=host,
        record=record,
        counters=restored.counters,
        loader=data.loader(host, record, trained.total_steps, pin_memory=device.type == "cuda"),
        snapshots=snapshots,
        commands=Commands(host, state, attempts, snapshots, trained.total_steps),
        loaded=LoadedState(state, restored.counters.step) if found else None,
        seed=settings.spec.seed,
        num_failures=count_failures(attempts.records),
    )
    install_fault(session, trained.optimizer)
    return session


def _check_numbers(least: int, **numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None and value < least:
            raise UsageError(name, f"must be at least {least} (got {value})")


def _check_grad_norm(maximum: float | None) -> float | None:
    if maximum is not None and not maximum > 0:
        raise UsageError("max_grad_norm", f"must be greater than 0 (got {maximum})")
    return maximum


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
    host: Host, state: TrainingState, trained: Trained, attempts: Attempts, restored: Restored
) -> Snapshots:
    starts_from = restored.starts_from
    kept = None if starts_from.source is Source.SEED else starts_from.checkpoint_id
    copier = choose_copier(unwrap(trained.model))
    snapshots = Snapshots(state, host, copier, attempts.is_on_lineage, kept, about=trained.about)
    snapshots.prepare()
    if not attempts.records:
        _check_storage_room(host, snapshots.num_bytes, trained.total_steps)
    return snapshots


def _check_storage_room(host: Host, shard_bytes: int, total_steps: int | None) -> None:
    """Refuse a new job whose checkpoints are not going to fit, now that their size is known. Collective.

    Raises:
        UsageError: on every rank; rank 0 has looked.
    """
    checkpoint = host.settings.checkpoint
    checkpoint_bytes = sum(host.group.gather_json(shard_bytes))
    problem = None
    if host.group.rank == 0:
        try:
            by_step = checkpoint.save_every_steps if checkpoint.save_every_seconds is None else None
            check_storage_room(
                host.store.root,
                checkpoint.retention,
                checkpoint_bytes,
                num_steps=total_steps,
                save_every_steps=by_step,
            )
        except UsageError as error:
            problem = [error.key, error.problem]
    problem = host.group.broadcast_json(problem)
    if problem is not None:
        raise UsageError(*problem)
