import os
import random
import signal
import subprocess
import sys
import time
from itertools import chain, islice
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from surefoot.errors import UsageError
from surefoot.sdk.data.loader import Loader, dataset_length
from surefoot.sdk.data.order import DataOrder


class Ids:
    """Samples carry their own id, and a draw from each RNG."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        draws = [random.random(), np.random.random(), torch.rand(1, dtype=torch.float64).item()]
        return {"id": index, "draws": torch.tensor(draws, dtype=torch.float64)}


def make(num_samples: int = 24, batch: int = 8, **kwargs: Any) -> Loader:
    dataset = kwargs.pop("dataset", None) or Ids(num_samples)
    arguments = {"rank": 0, "world_size": 1} | kwargs
    return Loader(dataset, DataOrder(num_samples, batch, seed=7), **arguments)


def ids(loader: Loader, num_items: int | None = None) -> list[list[int]]:
    got = []
    for micro_batch, batch in islice(iter(loader), num_items):
        assert batch["id"].tolist() == micro_batch.indices.tolist()
        got.append(batch["id"].tolist())
    return got


@pytest.mark.parametrize("num_workers", [0, 2])
def test_r3_resume_after_the_last_batch_of_an_epoch(num_workers: int) -> None:
    whole, resumed = make(total_steps=9), make(start_step=3, total_steps=9, num_workers=num_workers)
    try:
        expected = ids(whole)
        assert ids(resumed) == expected[3:]
        assert sorted(chain(*expected[3:6])) == list(range(24))
    finally:
        resumed.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_r2_resume_in_the_middle_of_epoch_2(num_workers: int) -> None:
    whole = make(num_samples=53, total_steps=20)
    first = make(num_samples=53, total_steps=20, num_workers=num_workers)
    second = make(num_samples=53, start_step=10, total_steps=20, num_workers=num_workers)
    try:
        assert ids(first, 10) + ids(second) == ids(whole)
    finally:
        first.close()
        second.close()


def test_r5_accumulation_4_resumes_at_micro_batch_40() -> None:
    whole = ids(make(total_steps=20, micro_batch_size=2))
    assert ids(make(start_step=10, total_steps=20, micro_batch_size=2)) == whole[40:]
    wide = ids(make(start_step=10, total_steps=20, micro_batch_size=4))
    assert len(wide) == 20
    assert list(chain(*wide)) == list(chain(*whole[40:]))


def draws(**kwargs: Any) -> dict[tuple[int, int], list[float]]:
    found = {}
    for rank in range(kwargs.get("world_size", 1)):
        loader = make(num_samples=10, batch=4, **kwargs | {"rank": rank})
        for micro_batch, batch in loader:
            keys = zip(micro_batch.epochs.tolist(), micro_batch.indices.tolist(), strict=True)
            found |= dict(zip(keys, batch["draws"].tolist(), strict=True))
        loader.close()
    return found


def test_augmentations_depend_on_seed_epoch_and_index_only() -> None:
    expected = draws(total_steps=5)
    assert len(expected) == 20
    assert len({tuple(values) for values in expected.values()}) == 20
    assert draws(total_steps=5, num_workers=2) == expected
    assert draws(total_steps=5, world_size=2, micro_batch_size=1, num_workers=1) == expected
    assert draws(start_step=3, total_steps=5).items() <= expected.items()


def test_skip_windows_are_left_out() -> None:
    class Window:
        start, stop = 2, 5

    whole = ids(make(total_steps=9))
    assert ids(make(total_steps=6, skip_windows=[Window()])) == whole[:2] + whole[5:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_restart_goes_to_another_step_with_the_same_workers(num_workers: int) -> None:
    whole = ids(make(total_steps=9))
    loader = make(total_steps=9, num_workers=num_workers)
    try:
        assert ids(loader, 4) == whole[:4]
        before = workers(loader)
        assert len(before) == num_workers
        loader.restart(1)
        assert ids(loader) == whole[1:]
        assert workers(loader) == before
        loader.restart(7)
        assert ids(loader) == whole[7:]
    finally:
        loader.close()


def workers(loader: Loader) -> set[int]:
    """Its worker processes. Other children of this process are drains and servers of other tests: they come and go."""
    batches = loader._loader._iterator
    return {worker.pid for worker in getattr(batches, "_workers", ()) if worker.is_alive()}


def is_there(pid: int) -> bool:
    """Whether the process is there, ended and not waited for included."""
    return psutil.pid_exists(pid)


class StuckAfter(Ids):
    """Stuck from its third sample in each worker on."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.num_given = getattr(self, "num_given", 0) + 1
        if self.num_given > 2:
            time.sleep(1000)
        return super().__getitem__(index)


def test_p1_a_signal_to_every_process_ends_no_worker() -> None:
    """The rank goes on to the end of its step, and needs its batches for that."""
    loader = make(num_samples=96, micro_batch_size=1, num_workers=2)
    assert len(ids(loader, 3)) == 3
    pids = workers(loader)
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    assert len(ids(loader, 80)) == 80  # much more than was fetched ahead
    assert workers(loader) == pids
    loader.close()
    assert not any(map(is_there, pids))


def test_close_ends_workers_in_the_middle_of_a_sample_at_once() -> None:
    loader = make(dataset=StuckAfter(24), micro_batch_size=1, num_workers=2)
    assert len(ids(loader, 4)) == 4
    pids = workers(loader)
    assert len(pids) == 2
    start = time.monotonic()
    loader.close()
    assert time.monotonic() - start < 1
    assert not any(map(is_there, pids))
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


def test_the_callers_torch_rng_is_not_drawn_from_by_workers() -> None:
    torch.manual_seed(0)
    expected = torch.get_rng_state()
    loader = make(total_steps=2, num_workers=1)
    list(loader)
    loader.close()
    assert torch.equal(torch.get_rng_state(), expected)


class Broken(Ids):
    def __getitem__(self, index: int) -> dict[str, Any]:
        raise KeyError(f"sample {index} is broken")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_the_dataset_reaches_the_caller(num_workers: int) -> None:
    loader = make(dataset=Broken(24), num_workers=num_workers)
    with pytest.raises(KeyError, match="is broken"):
        next(iter(loader))
    loader.close()


def test_custom_collate() -> None:
    loader = make(total_steps=1, collate_fn=lambda samples: [s["id"] for s in samples])
    [(micro_batch, batch)] = list(loader)
    assert batch == micro_batch.indices.tolist()


RANK = """
import os, sys, time
from surefoot.sdk.data.loader import Loader
from surefoot.sdk.data.order import DataOrder

class Stuck:
    def __len__(self): return 8
    def __getitem__(self, index):
        os.write(1, b"%d\\n" % os.getpid())
        while True: time.sleep(1000)

next(iter(Loader(Stuck(), DataOrder(8, 2, 0), rank=0, world_size=1, num_workers=2)))
"""


def test_workers_die_with_their_rank() -> None:
    with subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        pids = {int(rank.stdout.readline()) for _ in range(2)}
        # Opened before the kill, so that a reused pid cannot be mistaken for the worker.
        handles = [os.pidfd_open(pid) for pid in pids]
        rank.send_signal(signal.SIGKILL)
        rank.wait()
        deadline = time.monotonic() + 2
        # A pidfd is readable when its process has ended; the pipe ends when the last writer has.
        assert rank.stdout.read() == ""
        assert time.monotonic() < deadline
        for handle in handles:
            os.close(handle)


class Stream(IterableDataset):
    def __iter__(self):
        yield 1


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Stream(), "iterable-style"),
        ((i for i in range(3)), "iterable-style"),
        (NoLength(), "no __len__"),
        ([], "is empty"),
        (TensorDataset(torch.zeros(0, 2)), "is empty"),
    ],
)
def test_datasets_without_an_exact_order_are_refused(dataset: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        dataset_length(dataset)
    assert caught.value.key == "dataset"


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"world_size": 9}, "global_batch_size"),
        ({"micro_batch_size": 0}, "micro_batch_size"),
        ({"num_workers": -1}, "num_workers"),
        ({"dataset": Ids(23)}, "dataset"),
    ],
)
def test_bad_arguments_are_refused_before_the_first_batch(arguments: dict[str, Any], key: str) -> None:
    with pytest.raises(UsageError) as caught:
        make(**arguments)
    assert caught.value.key == key
