"""The processes of one set of ranks: started together, watched together, killed together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from surefoot_worker.launcher.entry import RankStart, run_rank
from surefoot_worker.launcher.forkserver import hidden_main

_KILL_LIMIT_SECONDS = 60.0


class StartFailed(Exception):
    """A set of ranks could not be started; none of it runs. The message says why."""


class RankProcesses:
    """One set of rank processes. Launcher's main thread only.

    Args:
        method: How they are started.
    """

    def __init__(self, method: Literal["forkserver", "spawn"]) -> None:
        self._context: Any = multiprocessing.get_context(method)
        self._processes: dict[int, BaseProcess] = {}
        self._held: dict[int, int] = {}  # pidfds: a fork server that dies takes the ranks' exit codes with it

    def start(self, starts: Sequence[RankStart]) -> dict[int, int]:
        """Start one process per rank and return the pids by rank.

        Raises:
            StartFailed: the fork server is gone, or no process can be made; those that were started are gone again.
            TimeoutError: one of those does not end.
        """
        try:
            with hidden_main():
                for start in starts:
                    self._start_one(start)
        except EOFError:
            self.kill()
            raise StartFailed("the fork server ended while ranks were started") from None
        except OSError as error:
            self.kill()
            raise StartFailed(str(error)) from error
        return self.pids()

    def _start_one(self, start: RankStart) -> None:
        process = self._context.Process(target=run_rank, args=(start,), name=f"rank-{start.rank}")
        process.start()
        self._processes[start.rank] = process
        with suppress(ProcessLookupError):  # it has ended already
            self._held[start.rank] = os.pidfd_open(process.pid)

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
        for held in self._held.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(held, signal.SIGKILL)
        deadline = time.monotonic() + _KILL_LIMIT_SECONDS
        for rank, process in self._processes.items():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                raise TimeoutError(f"rank {rank} (pid {process.pid}) does not end after SIGKILL")
        for rank in list(self._held):
            if not wait([self._held[rank]], max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"rank {rank} (pid {self._processes[rank].pid}) does not end after SIGKILL")
            os.close(self._held.pop(rank))
