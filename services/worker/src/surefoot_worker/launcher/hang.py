"""Tells ranks that make no progress from ranks that are slow. Pure: pages and the clock come in.

Limits by phase: `hang` in the spec. A step may take 30 times the median step, 300 s at least (detection.md). Only time
in which the launcher itself was awake counts, so a machine that was suspended wakes up without a false alarm.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from surefoot.progress import Phase, Progress
from surefoot.spec import HangSpec

LEAST_STEP_LIMIT_SECONDS = 300.0
MEDIAN_FACTOR = 30.0
LEAST_SAMPLES = 3
"""Below, the median step is not known yet, and the limit of the start holds: the first steps may compile."""
_LONGEST_GAP_SECONDS = 5.0
_NOT_ATTACHED = Progress(pid=0, attempt=-1, step=0, start_step=-1, phase=Phase.START, monotonic_seconds=0.0)


@dataclass(frozen=True)
class Hang:
    """The ranks stand still.

    Attributes:
        rank: The one furthest behind: the others wait for it.
        progress: Where it stands.
        seconds: Since its last progress.
        limit_seconds: How long that may be.
    """

    rank: int
    progress: Progress
    seconds: float
    limit_seconds: float

    @property
    def phase(self) -> str:
        """What it was doing, as people write it."""
        return self.progress.phase.name.lower()


class HangWatch:
    """Watches one set of ranks after the other. One thread.

    Args:
        spec: The limits.
    """

    def __init__(self, spec: HangSpec) -> None:
        self._spec = spec
        self._durations: deque[float] = deque(maxlen=101)
        self._is_sdk_used = False
        self.ranks_started()

    def ranks_started(self) -> None:
        """Begin anew with new ranks. What is known about the length of a step stays."""
        self._seen: dict[int, Progress] = {}
        self._silent_seconds: dict[int, float] = {}
        self._looked_at: float | None = None
        self._step_seen_at: tuple[int, int, float] | None = None

    def look(self, pages: Mapping[int, Progress | None], ended: Collection[int], now: float) -> Hang | None:
        """Return the hang, if there is one. Called about once a second.

        Ranks that never used the sdk say nothing about themselves and are not judged.

        Args:
            pages: By rank; None: it has not written any yet.
            ended: Ranks whose process has ended, with status 0. They may be to blame, but are not waited for.
            now: CLOCK_MONOTONIC.
        """
        gap_seconds = 0.0 if self._looked_at is None else min(now - self._looked_at, _LONGEST_GAP_SECONDS)
        self._looked_at = now
        self._is_sdk_used = self._is_sdk_used or any(pages.values())
        if not (self._spec.enabled and self._is_sdk_used):
            return None
        for rank, page in pages.items():
            progress = page or _NOT_ATTACHED
            if progress == self._seen.get(rank):
                self._silent_seconds[rank] += gap_seconds
            else:
                self._seen[rank], self._silent_seconds[rank] = progress, 0.0
        self._measure(pages, now)
        if not any(self._is_overdue(rank) for rank in pages if rank not in ended):
            return None
        guilty = min(pages, key=lambda rank: _how_far(self._seen[rank]))
        progress = self._seen[guilty]
        return Hang(guilty, progress, self._silent_seconds[guilty], self._limit_seconds(progress))

    def _is_overdue(self, rank: int) -> bool:
        progress = self._seen[rank]
        return progress.phase is not Phase.DONE and self._silent_seconds[rank] > self._limit_seconds(progress)

    def _measure(self, pages: Mapping[int, Progress | None], now: float) -> None:
        page = pages[min(pages)]
        if page is None or page.phase is not Phase.STEP:
            self._step_seen_at = None
            return
        if self._step_seen_at is not None:
            attempt, step, seen_at = self._step_seen_at
            if (attempt, step) == (page.attempt, page.step):
                return
            if attempt == page.attempt and page.step > step > page.start_step:
                self._durations.append((now - seen_at) / (page.step - step))
        self._step_seen_at = (page.attempt, page.step, now)

    def _limit_seconds(self, progress: Progress) -> float:
        spec = self._spec
        if progress.phase is Phase.STEP:
            return self._step_limit_seconds(is_first=progress.step <= progress.start_step)
        if progress.phase is Phase.START:
            return spec.start_seconds
        return spec.eval_seconds if progress.phase is Phase.EVAL else spec.save_seconds

    def _step_limit_seconds(self, *, is_first: bool) -> float:
        limit = self._spec.step_seconds
        if limit is None and len(self._durations) >= LEAST_SAMPLES:
            limit = max(LEAST_STEP_LIMIT_SECONDS, MEDIAN_FACTOR * statistics.median(self._durations))
        if limit is None:
            return self._spec.start_seconds
        return max(self._spec.start_seconds, limit) if is_first else limit


def _how_far(progress: Progress) -> tuple[int, int, float]:
    # Within a step the sdk renews the page when a rank begins to wait for others: who waits has the later moment.
    return progress.attempt, progress.step, progress.monotonic_seconds
