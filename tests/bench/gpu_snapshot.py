"""Snapshots of a model on a GPU: what they cost the training. For a machine with one; nothing else runs this.

    PYTHONPATH=tests python -m bench.gpu_snapshot [--params 124000000] [--steps 40]

Prints a JSON document: median step without snapshots, with one after each step over a side stream into pinned memory,
the same into memory that is not pinned, and copied before the step goes on; beside them the floor, one copy of all
bytes into pinned memory with nothing else running. The side stream is worth its code when "beside" costs less than
"at once", and pinning when "beside" costs less than "beside, not pinned".
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from surefoot.checkpoint.staging import StagingBuffer
from surefoot.sdk.copying import Copier, Copy, CudaCopier

WARM_UP_STEPS = 5


class NotPinned(CudaCopier):
    """As on a machine whose driver refuses to pin the memory."""

    def use(self, memory: object) -> None:
        """Leave it as it is."""


class AtOnce(CudaCopier):
    """Nothing may wait."""

    def start(self, copies: list[Copy]) -> bool:  # type: ignore[override]
        """Copy and wait."""
        super().start([copy._replace(may_wait=False) for copy in copies])
        self.wait()
        return True


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=124_000_000)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing to measure")
    training = Training(arguments.params)
    rows = {"no snapshots": median_step(training, None, arguments.steps)}
    for name, copier in {"beside": CudaCopier(), "beside, not pinned": NotPinned(), "at once": AtOnce()}.items():
        with staging(training) as buffer:
            copier.use([buffer.shard])
            rows[name] = median_step(training, Snapshot(training, copier, buffer), arguments.steps)
            copier.use([])
    report = {
        "device": torch.cuda.get_device_name(),
        "state_bytes": training.state_bytes,
        "median_step_seconds": rows,
        "lost_seconds_per_snapshot": {name: row - rows["no snapshots"] for name, row in rows.items()},
        "floor_seconds": floor(training),
    }
    print(json.dumps(report, indent=1))


class Training:
    """A stack of matrices of about so many parameters under AdamW."""

    def __init__(self, num_parameters: int) -> None:
        width = 2048
        depth = max(1, num_parameters // width**2)
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth))).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = torch.randn(2048, width, device="cuda")
        self.forward_and_backward()
        self.update()

    def forward_and_backward(self) -> float:
        """Return the loss, which waits for the device as the gradient norm does in a session."""
        loss = self.model(self.batch).pow(2).mean()
        loss.backward()
        return float(loss.detach())

    def update(self) -> None:
        """Step."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> list[Tensor]:
        """Return parameters and moments."""
        moments = [v for values in self.optimizer.state.values() for k, v in values.items() if k != "step"]
        return [*(p.detach() for p in self.model.parameters()), *moments]

    @property
    def state_bytes(self) -> int:
        """Bytes of `state`."""
        return sum(tensor.nbytes for tensor in self.state())


class Snapshot:
    """Copies the whole state into one buffer, as a rank alone would."""

    def __init__(self, training: Training, copier: Copier, buffer: StagingBuffer) -> None:
        self._copier = copier
        memory = torch.frombuffer(buffer.shard, dtype=torch.float32)
        self._copies, offset = [], 0
        for tensor in training.state():
            target = memory[offset : offset + tensor.numel()].view(tensor.shape)
            self._copies.append(Copy(target, tensor, may_wait=True))
            offset += tensor.numel()

    def start(self) -> None:
        """Begin, right after an update."""
        self._copier.start(self._copies)

    def wait(self) -> None:
        """Finish, right before the next."""
        self._copier.wait()


@contextmanager
def staging(training: Training) -> Iterator[StagingBuffer]:
    """Give a buffer in tmpfs."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        buffer = StagingBuffer.create(Path(folder) / "rank-00000-buffer-0.stage", training.state_bytes)
        yield buffer
        buffer.close()


def median_step(training: Training, snapshot: Snapshot | None, num_steps: int) -> float:
    """Return the median seconds of a step: forward and backward, wait, update, begin the next copy."""

    def step() -> None:
        training.forward_and_backward()
        if snapshot is not None:
            snapshot.wait()
        training.update()
        if snapshot is not None:
            snapshot.start()

    seconds = [timed(step) for _ in range(WARM_UP_STEPS + num_steps)]
    if snapshot is not None:
        snapshot.wait()
    return statistics.median(seconds[WARM_UP_STEPS:])


def floor(training: Training) -> float:
    """Return the seconds that one copy of all bytes into pinned memory takes on an idle device."""
    source = torch.empty(training.state_bytes // 4, device="cuda")
    target = torch.empty_like(source, device="cpu", pin_memory=True)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return statistics.median(timed(copy) for _ in range(7))


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
