"""When to snapshot and when to save."""

from __future__ import annotations

import time

from surefoot.spec import CheckpointSpec


class SaveSchedule:
    """Decides for each step. Steps decide the same on all ranks; by time and on request rank 0 decides.

    Args:
        spec: The intervals.
        total_steps: The last step, which is always saved; None: not known.
        now: CLOCK_MONOTONIC; the first interval begins here.

    Attributes:
        save_every_seconds: None: never by time. `auto` is never too, until `AutoSave` sets an interval.
    """

    def __init__(self, spec: CheckpointSpec, total_steps: int | None, now: float | None = None) -> None:
        self._spec = spec
        self.save_every_seconds = None if spec.save_every_seconds == "auto" else spec.save_every_seconds
        self._total_steps = total_steps
        self._saved_at = time.monotonic() if now is None else now
        self._requests_served: int | None = None
        self._requests_seen = 0
        self._owed = False

    def wants_snapshot(self, step: int) -> bool:
        """Return whether the state after `step` may go into a buffer; the same answer on every rank."""
        # Without per-step snapshots any step may become a save, by time or on request, which only rank 0 knows.
        return self.only_saves or self.is_snapshot_step(step) or self._is_save_step(step)

    def is_snapshot_step(self, step: int) -> bool:
        """Return whether the state after `step` is copied even if nobody wants to save it."""
        every = self._spec.snapshot_every_steps
        return every > 0 and step % every == 0

    @property
    def only_saves(self) -> bool:
        """Whether a state that nobody wants to save or to start from need not be copied either."""
        return self._spec.snapshot_every_steps == 0

    def _is_save_step(self, step: int) -> bool:
        every = self._spec.save_every_steps
        return step == self._total_steps or (every is not None and step % every == 0)

    def wants_save(self, step: int, now: float, save_requests: int, *, stop: bool) -> bool:
        """Return whether the state after `step` is to become durable. Rank 0's answer counts.

        Args:
            step: The step that is about to end.
            now: CLOCK_MONOTONIC.
            save_requests: How often somebody has asked for a save since the launcher started.
            stop: Whether this is the last step because somebody asked.
        """
        if self._requests_served is None:
            self._requests_served = save_requests  # asked for before this attempt: served or moot
        self._requests_seen = save_requests
        every = self.save_every_seconds
        by_time = every is not None and now - self._saved_at >= every
        requested = save_requests > self._requests_served
        return stop or by_time or requested or self._owed or self._is_save_step(step)

    def missed(self, step: int, *, save: bool) -> None:
        """Note that the state after `step` was not saved. One that was due by step is made up for, as soon as can be.

        Args:
            step: The step.
            save: A save was asked for and no buffer was free.
        """
        self._owed = self._owed or save or self._is_save_step(step)

    def went_back(self) -> None:
        """Note that training went on from an earlier step: a save that is owed is of a step that is no more."""
        self._owed = False

    def saved(self, now: float) -> None:
        """Note that a state was handed over for saving."""
        self._saved_at = now
        self._owed = False
        self._requests_served = self._requests_seen
