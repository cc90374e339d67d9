"""The processes of one set of ranks: started together, watched together, killed together."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from surefoot_worker.launcher.entry import RankStart, run_rank
from surefoot_worker.launcher.forkserver import hidden_main

_KILL_LIMIT_SECONDS = 60.0


class RankProcesses:
    """One set of rank processes. Launcher's main thread only.

    Args:
        method: How they are started.
    """

    def __init__(self, method: Literal["forkserver", "spawn"]) -> None:
        self._context: Any = multiprocessing.get_context(method)
        self._processes: dict[int, BaseProcess] = {}

    def start(self, starts: Sequence[RankStart]) -> dict[int, int]:
        """Start one process per rank and return the pids by rank.

        Raises:
            OSError: the fork server is gone (also EOFError).
        """
        with hidden_main():
            for start in starts:
                process = self._context.Process(target=run_rank, args=(start,), name=f"rank-{start.rank}")
                process.start()
                self._processes[start.rank] = process
        return self.pids()

    def pids(self) -> dict[int, int]:
        """Return process ids by rank."""
        return {rank: process.pid or 0 for rank, process in self._processes.items()}

    def exit_codes(self) -> dict[int, int]:
        """Return the exit codes of those that have ended; negative: the signal."""
        codes = {rank: process.exitcode for rank, process in self._processes.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def wait(self, also: Sequence[int], timeout_seconds: float) -> None:
        """Wait until another rank ends or one of the descriptors `also` is readable. A plain wait in the kernel."""
        running = [process.sentinel for process in self._processes.values() if process.exitcode is None]
        wait([*running, *also], timeout_seconds)

    def kill(self) -> None:
        """SIGKILL all that still run, and wait until they are gone: their locks and memory are then free.

        Raises:
            TimeoutError: one does not end (stuck in the kernel, on a device or a file server).
        """
        for process in self._processes.values():
            if process.exitcode is None:
                process.kill()
        deadline = time.monotonic() + _KILL_LIMIT_SECONDS
        for rank, process in self._processes.items():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                raise TimeoutError(f"rank {rank} (pid {process.pid}) does not end after SIGKILL")
