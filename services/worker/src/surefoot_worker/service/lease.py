"""When another worker's lease counts as expired. Pure: the clock comes in."""

from __future__ import annotations

from typing import NamedTuple


class _Sighting(NamedTuple):
    worker: str
    version: int
    since_seconds: float


class LeaseWatch:
    """Watches the leases of other workers (DESIGN 8). One thread.

    A lease has expired only for a worker that has polled the database without error for one lease time and seen the
    version unchanged, all on its own monotonic clock: an outage, or a poll that came late, expires nothing.

    Args:
        lease_seconds: The lease time.
    """

    def __init__(self, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._seen: dict[str, _Sighting] = {}
        self._polled_at: float | None = None

    def polled(self, now: float) -> None:
        """Say that a poll succeeded; before `is_expired` is asked about what it read."""
        if self._polled_at is not None and now - self._polled_at > self._lease_seconds / 2:
            self._seen.clear()  # this worker was asleep itself
        self._polled_at = now

    def failed(self) -> None:
        """Say that a poll failed: everything is watched anew."""
        self._seen.clear()
        self._polled_at = None

    def is_expired(self, job: str, worker: str, version: int, now: float) -> bool:
        """Return whether this lease, as the last poll read it, has expired."""
        seen = self._seen.get(job)
        if seen is None or (seen.worker, seen.version) != (worker, version):
            self._seen[job] = _Sighting(worker, version, now)
            return False
        return now - seen.since_seconds >= self._lease_seconds
