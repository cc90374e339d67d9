"""From what a loop recorded to the numbers of the report. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

FEWEST_UNDISTURBED_STEPS = 2

BARE = "bare"
"""The loop without saves."""

PEERS = ("torch.save", "dcp.save", "dcp.async_save", "dcp.async_save+process")
"""The other contenders; see `bench.checkpoint_peers`."""

SUREFOOT = {"surefoot": 2, "surefoot+every step": 3}
"""Contender -> staging buffers per rank."""

WARM_UP_SAVES = 20
"""By then the drain has every staging buffer mapped, in whatever order they came: from there on it is growth."""


@dataclass
class SaveRecord:
    """One save as the loop saw it; times are CLOCK_MONOTONIC in seconds.

    Attributes:
        step: After which step.
        called_at: When the save began, the step being over.
        stall_seconds: How long the loop stood still for it.
        durable_at: When it was on the disk.
        sync_seconds: What an fsync of all files and folders took after that.
    """

    step: int
    called_at: float
    stall_seconds: float = 0.0
    durable_at: float = 0.0
    sync_seconds: float = 0.0


@dataclass(frozen=True)
class Save:
    """What one save cost.

    Attributes:
        lost_seconds: Training time: from the save until it was durable and one step more, minus as many undisturbed
            steps.
        stall_seconds: Of it, standing still.
        durable_seconds: From the save until it was on the disk.
        sync_seconds: An fsync of everything after that.
        step_seconds: Median undisturbed step just before.
    """

    lost_seconds: float
    stall_seconds: float
    durable_seconds: float
    sync_seconds: float
    step_seconds: float


@dataclass
class Run:
    """One process group's run of a contender.

    Attributes:
        ends: When each step ended, before the save that followed it, if any; of rank 0.
        saves: What was saved, in order; the stall is the longest of any rank.
        loads: Seconds to load, by source; the longest of any rank.
        throughput: Bytes per second of parts of the path.
        memory_bytes: Peak of all processes of the contender in the loop.
        held_bytes: The same before the first save.
        snapshot_seconds: Of snapshots that were not saves.
    """

    ends: list[float]
    saves: list[SaveRecord]
    loads: dict[str, float] = field(default_factory=dict)
    throughput: dict[str, float] = field(default_factory=dict)
    memory_bytes: float = 0.0
    held_bytes: float = 0.0
    snapshot_seconds: list[float] = field(default_factory=list)


@dataclass
class Results:
    """What was measured so far.

    Attributes:
        runs: By number of ranks and contender.
        floors: Seconds by name, of each round; `bytes` too.
        growth_mb: Of the rank and of the drain.
        num_growth_saves: How many saves it took.
        state_bytes: Of model and optimizer.
    """

    runs: dict[tuple[int, str], list[Run]] = field(default_factory=dict)
    floors: list[dict[str, float]] = field(default_factory=list)
    growth_mb: tuple[float, float] | None = None
    num_growth_saves: int = 0
    state_bytes: int = 0


def costs(run: Run) -> list[Save]:
    """Return what each save cost, without the first, which warms up, and those too close to others to tell."""
    found = [_cost(run.ends, before, save) for before, save in itertools.pairwise(run.saves)]
    return [save for save in found if save is not None]


def _cost(ends: Sequence[float], before: SaveRecord, save: SaveRecord) -> Save | None:
    # The step in which the save before became durable is disturbed, and so is the one after it.
    calm = [end for end in ends if before.durable_at < end <= save.called_at][1:]
    steps = [later - earlier for earlier, later in itertools.pairwise(calm)]
    after = [end for end in ends if end > save.called_at]
    num_steps = sum(end < save.durable_at for end in after) + 2
    if len(steps) < FEWEST_UNDISTURBED_STEPS or len(after) < num_steps:
        return None
    pace = statistics.median(steps)
    return Save(
        lost_seconds=after[num_steps - 1] - save.called_at - num_steps * pace,
        stall_seconds=save.stall_seconds,
        durable_seconds=save.durable_at - save.called_at,
        sync_seconds=save.sync_seconds,
        step_seconds=pace,
    )


def quartiles(values: Sequence[float]) -> str:
    """Return the first and third quartile as text."""
    if len(values) < 2:
        return "-"
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{low:.3f} .. {high:.3f}"


def median_of(values: Iterable[float]) -> float:
    """Return the median; NaN of nothing."""
    values = list(values)
    return statistics.median(values) if values else float("nan")


def row(contender: str, ranks: int, runs: Sequence[Run], bare_bytes: float) -> dict[str, Any]:
    """Return a contender's line of the report.

    Args:
        contender: Its name.
        ranks: How many.
        runs: All its runs.
        bare_bytes: Memory of the loop without saves.
    """
    saves = [save for run in runs for save in costs(run)]
    return {
        "contender": contender,
        "ranks": ranks,
        "saves": len(saves),
        "saves not counted": sum(max(0, len(run.saves) - 1) for run in runs) - len(saves),
        "lost s": median_of(s.lost_seconds for s in saves),
        "lost s, quartiles": quartiles([s.lost_seconds for s in saves]),
        "stall s": median_of(s.stall_seconds for s in saves),
        "stall s, quartiles": quartiles([s.stall_seconds for s in saves]),
        "durable s": median_of(s.durable_seconds for s in saves),
        "durable s, quartiles": quartiles([s.durable_seconds for s in saves]),
        "fsync after it s": median_of(s.sync_seconds for s in saves),
        "extra RAM GB": median_of((run.memory_bytes - bare_bytes) / 1e9 for run in runs),
        "of it before the first save GB": median_of((run.held_bytes - bare_bytes) / 1e9 for run in runs),
        "load from disk s": median_of(run.loads["storage"] for run in runs if "storage" in run.loads),
        "load from memory s": median_of(run.loads["staging"] for run in runs if "staging" in run.loads),
        "snapshot of other steps s": median_of(s for run in runs for s in run.snapshot_seconds),
        "undisturbed step s": median_of(s.step_seconds for s in saves),
    }


def growth(samples: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return by how many MB rank and drain grew from the end of their warm-up to their highest since then.

    Args:
        samples: Resident bytes of both after each save.
    """
    since = samples[WARM_UP_SAVES - 1 :]
    rank, drain = ((max(sample[i] for sample in since) - since[0][i]) / 1e6 for i in range(2))
    return rank, drain
