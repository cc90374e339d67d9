"""From the data order to collated micro-batches, through torch's DataLoader, from any step.

The DataLoader's batch sampler walks the order in this process; worker processes only fetch what they are
told. So what is trained on never depends on the number of workers, nor on how far they have read ahead.
"""

from __future__ import annotations

import os
import random
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from surefoot.errors import UsageError
from surefoot.processes import set_parent_death_signal
from surefoot.sdk.data.order import DataOrder, MicroBatch, Window, position
from surefoot.sdk.rng import derive_seed

SampleKey = tuple[int, int]
"""(epoch, dataset index)."""


def dataset_length(dataset: Any) -> int:
    """Return the number of samples of a map-style dataset.

    Raises:
        UsageError: the dataset is iterable-style, has no length or is empty: no exact order is possible.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            "dataset",
            f"{type(dataset).__name__} is iterable-style; an exact resume needs a map-style dataset, "
            "one with __getitem__(index) and __len__()",
        )
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError):
        raise UsageError("dataset", f"{type(dataset).__name__} has no __len__()") from None
    if length < 1:
        raise UsageError("dataset", f"{type(dataset).__name__} is empty")
    return length


class Loader(Iterator[tuple[MicroBatch, Any]]):
    """An iterator over one rank's (micro-batch, collated samples), in order, from a step on to the last.

    Owned by the thread that made it: forked workers die with that thread.

    Before each `dataset[index]` the RNGs of python, numpy and torch (CPU) are seeded from (seed, epoch,
    index), so augmentations are the same at any number of workers, any world size and after any resume.
    Without workers that happens in the caller's process, which must set its own RNG state after each item.

    Args:
        dataset: Map-style, of `order.num_samples` samples.
        order: The data order; its seed also seeds the samples' RNGs.
        rank: Of this process, 0 to world_size-1.
        world_size: Ranks that share each global batch.
        micro_batch_size: Most samples in a micro-batch; None: all of the rank's part at once.
        start_step: First step to give, from 0.
        total_steps: Step to end before; None: never ends.
        skip_windows: Batch positions that are left out.
        num_workers: Forked processes that fetch ahead; 0: fetch in the caller's process, when asked.
        collate_fn: Makes a batch of a list of samples; None: torch's default.
        pin_memory: Copy batches into pinned memory.
        prefetch_factor: Micro-batches that each worker fetches ahead.

    Raises:
        UsageError: an unusable dataset, a batch too small for the ranks, or a bad number.
    """

    def __init__(
        self,
        dataset: Any,
        order: DataOrder,
        *,
        rank: int,
        world_size: int,
        micro_batch_size: int | None = None,
        start_step: int = 0,
        total_steps: int | None = None,
        skip_windows: Iterable[Window] = (),
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        prefetch_factor: int = 2,
    ) -> None:
        length = dataset_length(dataset)
        if length != order.num_samples:
            raise UsageError("dataset", f"has {length} samples, but the data order is of {order.num_samples}")
        if num_workers < 0:
            raise UsageError("num_workers", f"must not be negative (got {num_workers})")
        # Bad sizes surface here, not at the first batch.
        order.rank_micro_batches(0, rank, world_size, micro_batch_size)
        self._sampler = _OrderSampler(
            partial(order.rank_micro_batches, rank=rank, world_size=world_size, micro_batch_size=micro_batch_size),
            total_steps,
        )
        self._sampler.restart(start_step, skip_windows)
        workers: dict[str, Any] = {}
        if num_workers:
            workers = {
                "num_workers": num_workers,
                "multiprocessing_context": "fork",
                "persistent_workers": True,
                "prefetch_factor": prefetch_factor,
                "worker_init_fn": partial(_live_as_long_as, os.getpid()),
            }
        self._loader: DataLoader[Any] | None = DataLoader(
            _SeededDataset(dataset, order.seed),
            batch_sampler=self._sampler,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            # Its own, so that the loader draws nothing from the caller's global RNG.
            generator=torch.Generator(),
            **workers,
        )
        self._batches: Iterator[Any] | None = None

    def __next__(self) -> tuple[MicroBatch, Any]:
        """Return the next micro-batch of this rank and its collated samples. The first call starts the workers.

        Raises:
            StopIteration: after the last micro-batch of the last step.
            Exception: whatever the dataset raises, with the worker's traceback in the message.
        """
        if self._loader is None:
            raise RuntimeError("the loader is closed")
        if self._batches is None:
            self._sampler.planned.clear()
            self._batches = iter(self._loader)
        batch = next(self._batches)
        return self._sampler.planned.popleft(), batch

    def restart(self, step: int, skip_windows: Iterable[Window] = ()) -> None:
        """Go on at another step. Workers live on; what they have fetched ahead is dropped."""
        self._sampler.restart(step, skip_windows)
        self._batches = None

    def close(self) -> None:
        """End the workers at once, also in the middle of a sample. Closing twice is fine."""
        batches = getattr(self._loader, "_iterator", None)
        self._loader = self._batches = None
        if batches is not None:
            # Torch watches for workers that are killed; these are so on purpose, and the shutdown waits for nobody.
            _remove_worker_pids(id(batches))
            batches._worker_pids_set = False
            for worker in batches._workers:
                worker.kill()
            batches._shutdown_workers()


class _OrderSampler(Sampler[list[SampleKey]]):
    """Walks the order and notes what it handed out; the DataLoader returns batches in the same order."""

    def __init__(self, micro_batches: Callable[[int], list[MicroBatch]], total_steps: int | None) -> None:
        self._micro_batches = micro_batches
        self._total_steps = total_steps
        self._start_step = 0
        self._skip_windows: tuple[Window, ...] = ()
        self.planned: deque[MicroBatch] = deque()

    def restart(self, step: int, skip_windows: Iterable[Window]) -> None:
        self._start_step = step
        self._skip_windows = tuple(skip_windows)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        step = self._start_step
        while self._total_steps is None or step < self._total_steps:
            for micro_batch in self._micro_batches(position(step, self._skip_windows)):
                self.planned.append(micro_batch)
                yield list(zip(micro_batch.epochs.tolist(), micro_batch.indices.tolist(), strict=True))
            step += 1


class _SeededDataset(Dataset[Any]):
    """Seeds the RNGs as a function of the sample before it is made."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, key: SampleKey) -> Any:
        epoch, index = key
        value = derive_seed(self._seed, epoch, index)
        random.seed(value)
        np.random.seed(value & 0xFFFFFFFF)
        # Not torch.manual_seed: it also seeds accelerators, which a forked worker must not touch; 0.2 ms.
        torch.default_generator.manual_seed(value)
        return self._dataset[index]


def _live_as_long_as(parent_pid: int, _worker_id: int) -> None:
    """Prepare a worker process: it ends with its rank and with nothing else."""
    # A SIGTERM to every process of the job (systemd, Slurm) must not end a worker before the rank has saved.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    set_parent_death_signal()
    if os.getppid() != parent_pid:
        # The rank died between the fork and the line above.
        os._exit(1)
