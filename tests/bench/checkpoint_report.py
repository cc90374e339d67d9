"""The tables and targets of `bench.checkpoint`. Pure but for `publish_all`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

from bench.checkpoint_figures import BARE, SUREFOOT, Results, median_of, row
from bench.report import Target, publish

GROWTH_LIMIT_MB = 40.0
SHOWN = ("ranks", "contender", "lost s", "stall s", "durable s", "extra RAM GB", "load from disk s")
"""What fits on a screen; the file has more."""


def publish_all(results: Results) -> None:
    """Print and write build/bench/checkpoint.json."""
    rows = save_rows(results)
    growth, growth_targets = growth_row(results)
    targets = [t for ranks in sorted({r["ranks"] for r in rows}) for t in save_targets(rows, results, ranks)]
    more = {"floors": floor_rows(results), "throughput": throughput_rows(results, rows), "growth": growth}
    publish("checkpoint", rows, targets + growth_targets, more, SHOWN)


def save_rows(results: Results) -> list[dict[str, Any]]:
    """Return a line for each contender and number of ranks."""
    rows = []
    for (ranks, contender), runs in sorted(results.runs.items(), key=lambda item: item[0][0]):
        if contender != BARE:
            bare = statistics.median(run.memory_bytes for run in results.runs[ranks, BARE])
            rows.append(row(contender, ranks, runs, bare))
    for ranks in {r["ranks"] for r in rows}:
        of_ranks = [r for r in rows if r["ranks"] == ranks]
        for key in ("lost s", "durable s"):
            best = best_peer(of_ranks, key)
            for one in of_ranks:
                one[f"{key}, to the best of the others"] = one[key] / best
    return rows


def best_peer(rows: Iterable[dict[str, Any]], key: str) -> float:
    """Return the lowest value of the contenders that are not Surefoot."""
    return min((r[key] for r in rows if r["contender"] not in SUREFOOT), default=math.nan)


def save_targets(rows: list[dict[str, Any]], results: Results, ranks: int) -> list[Target]:
    """Return what issue 4 promises of saves with so many ranks."""
    mine = next(r for r in rows if r["ranks"] == ranks and r["contender"] == "surefoot")
    state_gb, name = results.state_bytes / 1e9, f"{ranks} rank" + "s" * (ranks > 1)
    lost_ratio, durable_ratio = mine["lost s, to the best of the others"], mine["durable s, to the best of the others"]
    held_bytes = SUREFOOT["surefoot"] * state_gb
    common = [
        Target(
            f"{name}: extra RAM, to buffers x state",
            mine["extra RAM GB"] / held_bytes,
            1.1,
            "lower",
        ),
        Target(
            f"{name}: extra RAM held before the first save, as a part of the peak",
            mine["of it before the first save GB"] / mine["extra RAM GB"],
            0.9,
            "higher",
        ),
        Target(
            f"{name}: restore from staging, to the memory copy",
            # Every DDP rank loads everything.
            mine["load from memory s"] / (ranks * floor(results, "copy out of staging")),
            2.0,
            "lower",
        ),
    ]
    if ranks > 1:
        return [
            Target(f"{name}: lost, to the best of the others", lost_ratio, 0.75, "lower"),
            Target(f"{name}: durable, to the best of the others", durable_ratio, 0.5, "lower"),
            *common,
        ]
    to_disk = mine["durable s"] / floor(results, "write and fsync")
    return [
        Target(f"{name}: lost, to the best of the others", lost_ratio, 0.3, "lower"),
        Target(f"{name}: lost seconds per 1.5 GB", mine["lost s"] * 1.5 / state_gb, 0.2, "lower"),
        Target(f"{name}: durable, to the O_DIRECT write and fsync", to_disk, 1.3, "lower"),
        *common,
    ]


def floor(results: Results, name: str) -> float:
    """Return the median of a floor in seconds."""
    return median_of(floors[name] for floors in results.floors)


def floor_rows(results: Results) -> list[dict[str, Any]]:
    """Return a line for each floor."""
    num_bytes = results.floors[0]["bytes"]
    names = [name for name in results.floors[0] if name != "bytes"]
    return [
        {
            "floor": name,
            "seconds": floor(results, name),
            "lowest": min(floors[name] for floors in results.floors),
            "GB/s": num_bytes / floor(results, name) / 1e9,
        }
        for name in names
    ]


def throughput_rows(results: Results, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return GB/s of each part of Surefoot's path beside the floor that it works against."""
    found = []
    for ranks in sorted({r["ranks"] for r in rows}):
        mine = next(r for r in rows if r["ranks"] == ranks and r["contender"] == "surefoot")
        runs = results.runs[ranks, "surefoot"]
        loaded_bytes = ranks * results.state_bytes  # every DDP rank loads everything
        parts = {
            "snapshot copy": (results.state_bytes / mine["stall s"], "copy into staging"),
            "drain, beside training": (_throughput(runs, "drain, beside training"), "write and fsync"),
            "drain, nothing beside it": (_throughput(runs, "drain, nothing beside it"), "write and fsync"),
            "verify": (_throughput(runs, "verify"), "read"),
            "restore from staging": (loaded_bytes / mine["load from memory s"], "copy out of staging"),
            "restore from storage": (loaded_bytes / mine["load from disk s"], "read"),
        }
        for name, (rate, against) in parts.items():
            floor_rate = results.floors[0]["bytes"] / floor(results, against)
            found.append(
                {
                    "part": name,
                    "ranks": ranks,
                    "GB/s": rate / 1e9,
                    "floor GB/s": floor_rate / 1e9,
                    "floor": against,
                    "part of the floor": rate / floor_rate,
                }
            )
    return found


def _throughput(runs: Iterable[Any], name: str) -> float:
    return median_of(run.throughput[name] for run in runs)


def growth_row(results: Results) -> tuple[list[dict[str, Any]], list[Target]]:
    """Return the line and the targets of many small saves."""
    assert results.growth_mb is not None, "it is always measured"
    rank, drain = results.growth_mb
    rows = [{"saves of 20 MB": results.num_growth_saves, "rank MB": rank, "drain MB": drain}]
    name = f"{results.num_growth_saves} saves of 20 MB: RSS growth in MB of the"
    return rows, [
        Target(f"{name} {who}", value, GROWTH_LIMIT_MB, "lower") for who, value in (("rank", rank), ("drain", drain))
    ]
