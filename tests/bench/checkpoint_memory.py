"""How much memory the processes of a contender hold, sampled from outside."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType

from surefoot.processes import command_words, find_processes

SAMPLE_SECONDS = 0.05
FIND_SECONDS = 1.0
"""Looking for new processes costs a walk over /proc; reading the numbers of known ones next to nothing."""


class MemorySampler:
    """Samples in a thread what the processes hold that carry an environment variable.

    Anonymous memory of all of them, and shared memory that the ranks have mapped: another process that maps the same
    (a drain, a saving process) holds nothing more.

    Args:
        variable: Name of the variable.
        value: Its value.
        rank_module: A word of the command line of the ranks.
    """

    def __init__(self, variable: str, value: str, rank_module: str) -> None:
        self.samples: list[tuple[float, int]] = []
        self._variable = variable
        self._value = value
        self._rank_module = rank_module.encode()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory")

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def peak(self, start: float, end: float) -> int:
        """Return the most that was held between two moments of CLOCK_MONOTONIC."""
        return max((num_bytes for at, num_bytes in self.samples if start <= at <= end), default=0)

    def _run(self) -> None:
        found_at, pids = 0.0, {}
        while not self._is_over.wait(SAMPLE_SECONDS):
            now = time.monotonic()
            if now - found_at > FIND_SECONDS:
                found_at = now
                pids = {pid: self._role(pid) for pid in find_processes(self._variable, self._value)}
            self.samples.append((now, sum(held(pid, with_shared=role == "rank") for pid, role in pids.items() if role)))

    def _role(self, pid: int) -> str | None:
        words = command_words(pid)
        if b"torch.distributed.run" in words:
            return None  # torchrun itself, which every contender has
        return "rank" if self._rank_module in words else "helper"


def held(pid: int, *, with_shared: bool) -> int:
    """Return the bytes of anonymous and, if asked, of shared memory in the resident set of a process; 0: it ended."""
    kinds = ("RssAnon:", "RssShmem:") if with_shared else ("RssAnon:",)
    return sum(_status(pid, kind) for kind in kinds)


def resident(pid: int) -> int:
    """Return the bytes of the resident set of a process."""
    return _status(pid, "VmRSS:")


def _status(pid: int, key: str) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(key)), 0)
