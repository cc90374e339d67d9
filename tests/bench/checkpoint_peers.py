"""The other ways of saving that `bench.checkpoint` compares with, each as its documentation recommends.

All save the state of model and optimizer; tied weights once. What each promises about the disk: torch.save here writes
a temporary file, fsyncs file and folder and renames, as careful scripts do; DCP fsyncs its files (`sync_files`) and
not the folder, which is done here afterwards and reported apart.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save, save

from bench.checkpoint_figures import BARE, SaveRecord
from bench.checkpoint_model import Training


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def evict(folder: Path) -> None:
    """Drop what the page cache holds of the files, so that every contender loads from the disk."""
    for path in filter(Path.is_file, folder.rglob("*")):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


class Peer:
    """One way of saving. Main thread of each rank, all ranks alike.

    Args:
        training: What to save.
        folder: Of all its checkpoints.
        rank: Of this process.
    """

    def __init__(self, training: Training, folder: Path, rank: int) -> None:
        self.records: list[SaveRecord] = []
        self._training = training
        self._folder = folder
        self._rank = rank

    def save(self, step: int) -> None:
        """Save; returns when training may go on."""
        called_at = time.monotonic()
        record = SaveRecord(step, called_at)
        self.records.append(record)
        self._save(self._path(step), record)
        record.stall_seconds = time.monotonic() - called_at

    def before_update(self) -> None:
        """Wait for what must not change while it is read; counts as stall of the last save."""

    def wait(self) -> None:
        """Wait until the last save is durable."""

    def load(self) -> dict[str, float]:
        """Return the seconds that loading the last checkpoint into model and optimizer takes."""
        path = self._path(self.records[-1].step)
        evict(path)
        dist.barrier()
        started = time.monotonic()
        self._load(path)
        return {"storage": time.monotonic() - started}

    def sync_seconds(self) -> float:
        """Return how long it takes to make durable what the last save left to the system. Call it at once after it."""
        path = self._path(self.records[-1].step)
        started = time.monotonic()
        for file in path.iterdir():
            sync(file)
        sync(path)
        sync(path.parent)
        return time.monotonic() - started

    def close(self) -> None:
        """Let go of threads and memory."""

    def _save(self, path: Path, record: SaveRecord) -> None:
        raise NotImplementedError

    def _load(self, path: Path) -> None:
        raise NotImplementedError

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:05}"

    def _state(self) -> dict[str, Any]:
        model = self._training.model
        shared = dict(model.named_parameters(remove_duplicate=True))
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - shared.keys()
        state = {name: value for name, value in model.state_dict().items() if name not in tied}
        return {"model": state, "optimizer": self._training.optimizer.state_dict()}

    def _put(self, state: dict[str, Any]) -> None:
        self._training.model.load_state_dict(state["model"], strict=False)  # strict: tied names are left out
        self._training.optimizer.load_state_dict(state["optimizer"])


class NoSaves(Peer):
    """The bare loop."""

    def save(self, step: int) -> None:
        """Do nothing."""

    def load(self) -> dict[str, float]:
        """Return nothing."""
        return {}

    def sync_seconds(self) -> float:
        """Return nothing."""
        return 0.0


class TorchSave(Peer):
    """torch.save by rank 0: temporary file, fsync, rename, fsync of the folder."""

    def _save(self, path: Path, record: SaveRecord) -> None:
        if self._rank == 0:
            path.mkdir(parents=True)
            temporary = path / "state.pt.tmp"
            with temporary.open("wb") as file:
                torch.save(self._state(), file)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path / "state.pt")
            sync(path)
        record.durable_at = time.monotonic()

    def _load(self, path: Path) -> None:
        self._put(torch.load(path / "state.pt", map_location="cpu", weights_only=True))


class DcpSave(Peer):
    """torch.distributed.checkpoint.save."""

    def __init__(self, training: Training, folder: Path, rank: int) -> None:
        super().__init__(training, folder, rank)
        # Its collectives on the job's own group, beside DDP's, can crash the job.
        self._group = dist.new_group(backend="gloo")

    def _save(self, path: Path, record: SaveRecord) -> None:
        save(self._state(), checkpoint_id=path, process_group=self._group)
        record.durable_at = time.monotonic()

    def _load(self, path: Path) -> None:
        state = self._state()
        load(state, checkpoint_id=path, process_group=self._group)
        self._put(state)


class DcpAsync(DcpSave):
    """torch.distributed.checkpoint.async_save as it comes: a copy, then a thread."""

    def __init__(self, training: Training, folder: Path, rank: int) -> None:
        super().__init__(training, folder, rank)
        self._pending: Future[Any] | None = None

    def _save(self, path: Path, record: SaveRecord) -> None:
        self.wait()  # one at a time, as its documentation asks
        self._pending = self._begin(path)
        self._pending.add_done_callback(lambda _: _note_durable(record))

    def _begin(self, path: Path) -> Future[Any]:
        future = async_save(self._state(), checkpoint_id=path, process_group=self._group)
        assert isinstance(future, Future)
        return future

    def wait(self) -> None:
        """Wait for the pending save."""
        if self._pending is not None:
            self._pending.result()


class DcpAsyncProcess(DcpAsync):
    """async_save with all it offers without a GPU: a process, shared memory, staging in a thread."""

    def __init__(self, training: Training, folder: Path, rank: int) -> None:
        super().__init__(training, folder, rank)
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False
            )
        )
        self._staging: Future[None] | None = None

    def _begin(self, path: Path) -> Future[Any]:
        response = async_save(
            self._state(),
            checkpoint_id=path,
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=self._stager,
        )
        assert isinstance(response, AsyncSaveResponse)
        self._staging = response.staging_completion
        return response.upload_completion

    def before_update(self) -> None:
        """Wait for the staging thread: the optimizer is about to change what it copies."""
        if self._staging is not None:
            started = time.monotonic()
            self._staging.result()
            self.records[-1].stall_seconds += time.monotonic() - started
            self._staging = None

    def close(self) -> None:
        """End the staging thread."""
        self._stager.close()


def _note_durable(record: SaveRecord) -> None:
    record.durable_at = time.monotonic()


SAVERS: dict[str, Callable[[Training, Path, int], Peer]] = {
    BARE: NoSaves,
    "torch.save": TorchSave,
    "dcp.save": DcpSave,
    "dcp.async_save": DcpAsync,
    "dcp.async_save+process": DcpAsyncProcess,
}


def batches(training: Training, rank: int, world_size: int) -> Iterator[torch.Tensor]:
    """Yield this rank's batches of one sample."""
    for index in range(rank, len(training.data), world_size):
        yield training.data[index][None]
