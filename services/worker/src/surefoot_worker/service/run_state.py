"""How one run fares, in memory: the truth while the database is away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from surefoot.events import JobState, StorageFailed
from surefoot_worker.service.states import may_follow


@dataclass
class RunState:
    """What the row in `runs` says, or will say as soon as it can be written.

    Attributes:
        job: Name of the job.
        generation: Of the job that this run answers.
        state: Where it is.
        reason: Why, for people.
        exit_code: Of the last launcher, once it ended.
        attempt: In which it trains.
        step: Last step completed.
        total_steps: Of the whole job, when it says so.
        world_size: Number of ranks.
        started_at: When this generation first started.
        finished_at: When it ended.
        recovering_from: The attempt that a failure ended: training again means a newer one.
        storage_failures: First and last since storage worked; empty: it works.
        end_reason: What the launcher said about its end.
        on_change: Called after each change of `state`.
    """

    job: str
    generation: int
    state: JobState = JobState.PENDING
    reason: str = "submitted"
    exit_code: int | None = None
    attempt: int | None = None
    step: int | None = None
    total_steps: int | None = None
    world_size: int | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    recovering_from: int = 0
    storage_failures: tuple[()] | tuple[StorageFailed, StorageFailed] = ()
    end_reason: str = ""
    on_change: Callable[[RunState], None] = lambda _: None

    def go(self, state: JobState, reason: str) -> None:
        """Go on to another state; staying where it is changes the reason only.

        Raises:
            AssertionError: the table does not allow it.
        """
        self.reason = reason
        if state is self.state:
            return
        assert may_follow(self.state, state), f"{self.job}: {state} cannot follow {self.state}"
        self.state = state
        self.finished_at = datetime.now(UTC) if state.is_final else None
        self.on_change(self)

    def go_if_allowed(self, state: JobState, reason: str) -> None:
        """Go on to another state where that may follow: news of a job that is being stopped change nothing."""
        if may_follow(self.state, state):
            self.go(state, reason)
