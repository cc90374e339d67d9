"""How every benchmark reports: a table for people and build/bench/NAME.json for scripts."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

FOLDER = Path("build/bench")


@dataclass(frozen=True)
class Target:
    """A number that was promised, beside the one measured."""

    name: str
    value: float
    limit: float
    better: Literal["lower", "higher"]

    @property
    def met(self) -> bool:
        return self.value <= self.limit if self.better == "lower" else self.value >= self.limit


def machine() -> str:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    software = f"Linux {platform.release()}, Python {platform.python_version()}"
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, {software}"


def percentile(values: list[float], fraction: float) -> float:
    """Nearest rank: a value that was measured."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(len(ordered) * fraction * 1000) // 1000) - 1)]


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _lines(title: str, rows: list[dict[str, Any]], keys: Sequence[str]) -> Table:
    table = Table(title=title)
    for key in keys:
        table.add_column(key, justify="left" if isinstance(rows[0][key], str) else "right")
    for row in rows:
        table.add_row(*(_cell(row[key]) for key in keys))
    return table


def _columns(title: str, rows: list[dict[str, Any]]) -> Table:
    # There are more numbers than fit side by side.
    table = Table(title=title)
    table.add_column("")
    for _ in rows:
        table.add_column(justify="right")
    for key in rows[0]:
        table.add_row(key, *(_cell(row.get(key, "")) for row in rows))
    return table


def publish(
    name: str,
    rows: list[dict[str, Any]],
    targets: list[Target],
    more: Mapping[str, list[dict[str, Any]]] | None = None,
    shown: Sequence[str] = (),
) -> None:
    """Print and write the result.

    Args:
        name: Of the benchmark and of its file.
        rows: The result, all with the keys of the first.
        targets: What was promised.
        more: Further tables of other keys, by title.
        shown: Keys of `rows` to print, one line per row; without them everything is printed, one column per row.
    """
    console = Console()
    console.print(_lines(name, rows, shown) if shown else _columns(name, rows))
    for title, lines in (more or {}).items():
        console.print(_lines(title, lines, list(lines[0])))
    for target in targets:
        sign = "<=" if target.better == "lower" else ">="
        verdict = "met" if target.met else "MISSED"
        console.print(f"target {target.name}: {target.value:.3f} {sign} {target.limit:g}: {verdict}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    content = {
        "name": name,
        "machine": machine(),
        "rows": rows,
        "targets": [asdict(target) | {"met": target.met} for target in targets],
        **(more or {}),
    }
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"written to {path}")
