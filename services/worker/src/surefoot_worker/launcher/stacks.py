"""Saves what hung ranks are doing before they are killed: py-spy's dump of every Python thread."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

_LIMIT_SECONDS = 20.0
_AT_ONCE = 8


class SavedStacks(NamedTuple):
    """Where the stacks are; `problem` says why they are not."""

    path: Path
    problem: str | None


def save_stacks(pids: Mapping[int, int], folder: Path, headline: str) -> SavedStacks:
    """Write the stacks of these ranks (pid by rank) to a new file `stacks-<UTC>.txt`, in rank order.

    Args:
        pids: The ranks; one that has ended is only noted.
        folder: For the file.
        headline: Its first line.

    Returns:
        The file. With a problem when no rank could be looked into, or it could not be written.
    """
    path = folder / f"stacks-{datetime.now(UTC):%Y%m%dT%H%M%S}.txt"
    return SavedStacks(path, _save(pids, path, headline))


def _save(pids: Mapping[int, int], path: Path, headline: str) -> str | None:
    command = _py_spy()
    if command is None:
        return "py-spy is not installed (pip install py-spy)"
    deadline = time.monotonic() + _LIMIT_SECONDS
    ranks = sorted(pids)
    texts: list[str] = []
    problems: list[str] = []
    for first in range(0, len(ranks), _AT_ONCE):
        some = ranks[first : first + _AT_ONCE]
        running = {rank: _start(command, pids[rank]) for rank in some}
        for rank, process in running.items():
            text, is_good = _result(process, deadline)
            texts.append(f"=== rank {rank}, pid {pids[rank]}\n{text}\n")
            if not is_good:
                problems.append(f"rank {rank}: {text.strip()}")
    try:
        path.write_text("\n".join([headline, *texts]), encoding="utf-8")
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return problems[0] if len(problems) == len(ranks) else None


def _py_spy() -> str | None:
    beside_python = str(Path(sys.executable).parent)
    return shutil.which("py-spy", path=os.pathsep.join([beside_python, os.environ.get("PATH", os.defpath)]))


def _start(command: str, pid: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [command, "dump", "--pid", str(pid)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip


def _result(process: subprocess.Popen[str], deadline: float) -> tuple[str, bool]:
    with process:
        try:
            text, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:  # a rank stuck in the kernel cannot be looked into
            process.kill()
            text, _ = process.communicate()
            return f"py-spy got no answer in {_LIMIT_SECONDS:.0f} s\n{text}", False
    return text, process.returncode == 0
