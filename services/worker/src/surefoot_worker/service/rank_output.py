"""The output of a job's ranks, line by line, with what is known about each line; at a bounded rate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from surefoot.cli.tail import LOG_HEADER
from surefoot.events import LogLine
from surefoot.progress import ProgressReader, progress_path
from surefoot.spec import JobSpec
from surefoot_worker.service.lines import LineTail
from surefoot_worker.service.state_files import place_within

_LONGEST_TEXT = 8192
_BURST_SECONDS = 5.0


class RankOutput:
    """Reads `<logs>/rank-00000.out` and `.err` of every rank. One thread.

    Args:
        spec: The job, with absolute paths.
        staging: Its staging folder, where ranks say in which step they are.
        lines_per_second: What exceeds this, a burst apart, is left out; a line says how many.
        done: What `position` returned in an earlier process; None: only what is written from now on.
    """

    def __init__(
        self,
        spec: JobSpec,
        staging: Path,
        lines_per_second: float,
        done: Mapping[str, tuple[int, int]] | None,
    ) -> None:
        self._job = spec.job
        num_ranks, logs = spec.nproc_per_node, spec.job_run_dir / "logs"
        self._budget = _Budget(lines_per_second)
        self._pages = [ProgressReader(progress_path(staging, rank)) for rank in range(num_ranks)]
        self._files: list[tuple[int, Literal["stdout", "stderr"], LineTail]] = []
        self._left_out: dict[Path, int] = {}
        for rank in range(num_ranks):
            for ending, stream in (("out", "stdout"), ("err", "stderr")):
                name = f"rank-{rank:05d}.{ending}"
                tail = LineTail(logs / name, *place_within(logs / name, *(done or {}).get(name, (0, 0))))
                if done is None:
                    tail.skip_to_end()
                self._files.append((rank, "stdout" if stream == "stdout" else "stderr", tail))

    @property
    def position(self) -> dict[str, tuple[int, int]]:
        """Byte and line up to which each file has been read."""
        return {tail.path.name: (tail.offset, tail.num_lines) for _, _, tail in self._files}

    def collect(self, now: float, *, last: bool = False) -> list[tuple[LogLine, str, int]]:
        """Return the new lines, each with its source and its number.

        Args:
            now: CLOCK_MONOTONIC.
            last: Nobody writes any more: a line without line break counts too.
        """
        self._budget.refill(now)
        found = []
        for rank, stream, tail in self._files:
            lines = tail.rest() if last else tail.read()
            if not lines and tail.path not in self._left_out:
                continue
            first = tail.num_lines - len(lines) + 1
            for number, line in enumerate(lines, first):
                found += self._judge(rank, stream, tail.path, line, number)
            found += self._say_left_out(rank, stream, tail)
        return found

    def _judge(
        self, rank: int, stream: Literal["stdout", "stderr"], path: Path, line: bytes, number: int
    ) -> list[tuple[LogLine, str, int]]:
        text = line[:_LONGEST_TEXT].decode(errors="replace")
        if not text.strip() or text.startswith(LOG_HEADER):  # of the latter, events say the same
            return []
        if not self._budget.spend():
            self._left_out[path] = self._left_out.get(path, 0) + 1
            return []
        return [(self._line(rank, stream, text), f"job:{self._job}:{path.name}", number)]

    def _say_left_out(
        self, rank: int, stream: Literal["stdout", "stderr"], tail: LineTail
    ) -> list[tuple[LogLine, str, int]]:
        if tail.path not in self._left_out or not self._budget.spend():
            return []
        text = f"{LOG_HEADER}{self._left_out.pop(tail.path)} lines were left out here; they are in {tail.path} ---"
        return [(self._line(rank, stream, text), f"job:{self._job}:{tail.path.name}", tail.num_lines)]

    def _line(self, rank: int, stream: Literal["stdout", "stderr"], text: str) -> LogLine:
        page = self._pages[rank].read()
        known = page is not None and page.attempt > 0
        return LogLine(
            job=self._job,
            attempt=page.attempt if page is not None and known else None,
            rank=rank,
            stream=stream,
            text=text,
            step=page.step if page is not None and known else None,
        )


class _Budget:
    """A token bucket: so many lines per second, and `_BURST_SECONDS` worth of them at once."""

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._most = self._left = per_second * _BURST_SECONDS
        self._at: float | None = None

    def refill(self, now: float) -> None:
        if self._at is not None:
            self._left = min(self._most, self._left + (now - self._at) * self._per_second)
        self._at = now

    def spend(self) -> bool:
        if self._left < 1:
            return False
        self._left -= 1
        return True
