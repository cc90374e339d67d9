"""`checkpoint.save_every_seconds: auto`: measures what saves cost, and sets the interval that loses least."""

from __future__ import annotations

from surefoot.events import SaveIntervalChosen
from surefoot.sdk.host import Host
from surefoot.sdk.save_cost import SaveCost
from surefoot.sdk.save_interval import SaveInterval
from surefoot.sdk.schedule import SaveSchedule
from surefoot.sdk.snapshot import Snapshots
from surefoot.sdk.trained import Counters


class AutoSave:
    """Rank 0's part in it, as rank 0 decides about saves by time. Main thread; a few microseconds per step.

    Args:
        host: Takes the event.
        snapshots: Know whether a save waits for storage.
        schedule: What is set.
        num_failures: Restarts that the job has had; see `save_interval.count_failures`.
    """

    def __init__(self, host: Host, snapshots: Snapshots, schedule: SaveSchedule, num_failures: int) -> None:
        self._host = host
        self._snapshots = snapshots
        self._schedule = schedule
        self._cost = SaveCost()
        self._interval = SaveInterval(num_failures)
        schedule.save_every_seconds = self._interval.seconds

    def add_step(self, attempt: int, counters: Counters, seconds: float) -> None:
        """Take note of a step. Where a save became durable in it the interval is chosen again.

        Args:
            attempt: Of the step.
            counters: After it.
            seconds: From the exchange before to its exchange, of the slowest rank.
        """
        if not self._cost.add_step(seconds, is_written=not self._snapshots.has_unwritten_save()):
            return
        choice = self._interval.choose(self._cost.seconds, self._cost.num_saves, counters.trained_seconds)
        if choice is None:
            return
        self._schedule.save_every_seconds = choice.interval_seconds
        self._host.report(
            SaveIntervalChosen(
                job=self._host.settings.spec.job,
                attempt=attempt,
                rank=0,
                step=counters.step,
                interval_seconds=choice.interval_seconds,
                save_cost_seconds=choice.save_cost_seconds,
                mean_seconds_between_failures=choice.mean_seconds_between_failures,
                num_failures=choice.num_failures,
                reason=choice.reason,
            )
        )

    def add_save(self, step: int, copy_seconds: float) -> None:
        """Take note that the state after `step` was handed over for saving.

        Args:
            step: The step.
            copy_seconds: The step loop stood still for so long.
        """
        self._cost.begin(copy_seconds, is_extra=not self._schedule.is_snapshot_step(step))
