"""How commands print: tables for people, JSON for scripts."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def print_json(value: Any) -> None:
    """Print a value that JSON can hold."""
    print(json.dumps(value, indent=2, default=str))


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    """Print a table; off a terminal it is as wide as its content, so that nothing is cut in a pipe."""
    console = Console() if sys.stdout.isatty() else Console(width=max(80, _width(columns, rows)))
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)


def mebibytes(num_bytes: int) -> str:
    """Return a size for people."""
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes >= 2**20 / 10 else f"{num_bytes / 2**10:,.1f} KiB"


def _width(columns: list[str], rows: list[list[str]]) -> int:
    return sum(max(len(cell) for cell in column) + 2 for column in zip(columns, *rows, strict=True))
