"""Ends what the programs of dead ranks had started and left behind: helpers that would pile up with every restart."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from surefoot.processes import find_job_processes

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def now_ticks() -> int:
    """Return the present moment as /proc/<pid>/stat counts it: clock ticks since boot."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_SECOND)


def kill_older(job_key: str, *, than_ticks: int, keep: Collection[int]) -> list[int]:
    """SIGKILL the job's processes that started before a moment; do not wait for their end.

    `surefoot.processes.kill_job_processes` is for a job without ranks: it takes whatever it finds. Here the new
    ranks are at work already, and what they start between a look and a kill must live.

    Args:
        job_key: What they carry in their environment.
        than_ticks: `now_ticks()` when the ranks had been killed. What started in the same tick (10 ms) is let live.
        keep: Older ones that are still needed. This process and any drain are never taken.

    Returns:
        The pids killed.
    """
    killed = []
    for pid in find_job_processes(job_key):
        if pid in keep:
            continue
        with suppress(ProcessLookupError, FileNotFoundError):
            held = os.pidfd_open(pid)
            try:
                # Held before its age is looked at, so it cannot be another process that has the pid by now.
                if started_ticks(pid) < than_ticks:
                    signal.pidfd_send_signal(held, signal.SIGKILL)
                    killed.append(pid)
            finally:
                os.close(held)
    return killed


def started_ticks(pid: int) -> int:
    """Return when a process started (proc_pid_stat(5), field 22).

    Raises:
        FileNotFoundError: there is none (also ProcessLookupError, while it vanishes).
    """
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    return int(stat.rpartition(") ")[2].split()[19])
