"""Everything the ranks tell each other, on a gloo group of its own.

Checkpoint and control traffic on the job's own process group can meet its collectives in another order on
another rank; a group of its own cannot.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import astuple, dataclass, fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from surefoot import timeline
from surefoot.errors import RanksOutOfStep


@dataclass(frozen=True)
class StepRecord:
    """What every rank says once per optimizer step: one row of float64.

    Attributes:
        attempt: Its attempt.
        step: The step it is about to finish.
        nonfinite: 1 when its loss or gradient norm is not finite.
        can_snapshot: 1 when it holds a free buffer for this step's snapshot.
        save: 1 to make this step's snapshot durable (rank 0 decides).
        stop: 1 to stop after this step.
        command: Number of the next command that rank 0 has found; 0: none.
        loss_sum: Sum of its samples' losses.
        num_samples: Number of its samples.
        step_seconds: From its last exchange to this one.
    """

    attempt: float
    step: float
    nonfinite: float
    can_snapshot: float
    save: float
    stop: float
    command: float
    loss_sum: float
    num_samples: float
    step_seconds: float


_RECORD_LENGTH = len(fields(StepRecord))


class ControlGroup:
    """The ranks of this job as seen from one of them. All methods are collective: every rank calls them."""

    def __init__(self, rank: int, world_size: int, group: dist.ProcessGroup | None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group = group
        self._all = torch.zeros(world_size, _RECORD_LENGTH, dtype=torch.float64)
        self._rows = list(self._all.unbind())

    @classmethod
    def join(cls, device: torch.device, time_out: timedelta) -> ControlGroup:
        """Join the other ranks under torchrun's environment; without it be alone.

        Initialises the default process group when the script has not done so (nccl for CUDA, else gloo).
        """
        if not dist.is_initialized():
            if int(os.environ.get("WORLD_SIZE", "1")) == 1:
                return cls(0, 1, None)
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        if dist.get_world_size() == 1:
            return cls(0, 1, None)
        timeline.mark("process_group")
        group = dist.new_group(backend="gloo", timeout=time_out)
        return cls(dist.get_rank(), dist.get_world_size(), group)

    def exchange(self, record: StepRecord) -> list[StepRecord]:
        """Return the records of all ranks, in rank order (0.2 ms for 2 ranks on loopback).

        All-gather and a local reduction, since gloo's MAX loses a NaN of another rank.

        Raises:
            RanksOutOfStep: the ranks are not in the same attempt and step.
            RuntimeError: a rank is gone, or did not answer within the time-out.
        """
        if self._group is None:
            return [record]
        dist.all_gather(self._rows, torch.tensor(astuple(record), dtype=torch.float64), group=self._group)
        records = [StepRecord(*row) for row in self._all.tolist()]
        check_in_step(records)
        return records

    def gather_json(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. JSON, so that nothing is ever unpickled."""
        if self._group is None:
            return [value]
        payload = json.dumps(value).encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(payload)]), group=self._group)
        longest = max(int(size) for size in sizes)
        rows = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        padded = bytearray(payload.ljust(longest, b" "))
        dist.all_gather(rows, torch.frombuffer(padded, dtype=torch.uint8), group=self._group)
        return [json.loads(bytes(row.numpy())) for row in rows]

    def broadcast_json(self, value: Any) -> Any:
        """Return rank 0's value on every rank; what the others pass is ignored."""
        return self.gather_json(value if self.rank == 0 else None)[0]


def check_in_step(records: list[StepRecord]) -> None:
    """Check that all ranks are in one attempt and step.

    Raises:
        RanksOutOfStep: names the ranks that differ from the majority.
    """
    places = [(int(record.attempt), int(record.step)) for record in records]
    if len(set(places)) == 1:
        return
    usual, _ = Counter(places).most_common(1)[0]
    odd = ", ".join(
        f"rank {rank} is at attempt {attempt} step {step}"
        for rank, (attempt, step) in enumerate(places)
        if (attempt, step) != usual
    )
    raise RanksOutOfStep(f"{odd}; the others are at attempt {usual[0]} step {usual[1]}")
