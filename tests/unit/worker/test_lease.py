from __future__ import annotations

from surefoot_worker.service.lease import LeaseWatch


def poll(watch: LeaseWatch, now: float, version: int) -> bool:
    watch.polled(now)
    return watch.is_expired("job", "other", version, now)


def test_expires_after_one_lease_time_without_a_change() -> None:
    watch = LeaseWatch(10)
    assert not any(poll(watch, now, 3) for now in range(10))
    assert poll(watch, 10, 3)


def test_a_renewal_begins_anew() -> None:
    watch = LeaseWatch(10)
    assert not any(poll(watch, now, now // 4) for now in range(100))


def test_an_outage_expires_nothing() -> None:
    watch = LeaseWatch(10)
    assert not any(poll(watch, now, 3) for now in range(9))
    watch.failed()
    assert not any(poll(watch, now, 3) for now in range(9, 19))
    assert poll(watch, 19, 3)


def test_a_worker_that_was_asleep_itself_waits_anew() -> None:
    watch = LeaseWatch(10)
    poll(watch, 0, 3)
    assert not poll(watch, 100, 3)
