from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import pytest

from surefoot.events import CheckpointStaged, StepCompleted
from surefoot.sdk import reporting
from surefoot.sdk.reporting import Reporter


class BlockedSink:
    """Takes one event and then no more until it is released."""

    def __init__(self):
        self.entered = threading.Event()
        self.released = threading.Event()
        self.events = []

    def emit(self, event):
        self.entered.set()
        assert self.released.wait(20)
        self.events.append(event)


def step(number):
    return StepCompleted(
        job="j", step=number, updates=number, epoch=0, loss=1.0, learning_rate=0.1, applied=True, num_samples=1,
        step_seconds=(0.1,),
    )


def staged(number):
    return CheckpointStaged(job="j", step=number, num_bytes=1, copy_seconds=0.1)


def test_full_queue_drops_the_oldest_steps_and_never_lifecycle_events():
    sink = BlockedSink()
    reporter = Reporter(sink, capacity=4)
    reporter.report(step(0))
    assert sink.entered.wait(5)  # the thread now holds step 0 and is stuck in the sink
    for event in [staged(1), step(2), step(3), staged(4), staged(5), step(6), staged(7)]:
        reporter.report(event)
    assert reporter.num_dropped == 3
    sink.released.set()
    reporter.close()
    assert [(type(e).__name__[:4], e.step) for e in sink.events] == [
        ("Step", 0), ("Chec", 1), ("Chec", 4), ("Chec", 5), ("Chec", 7),
    ]


class FailingSink:
    def __init__(self, failures):
        self.failures = failures
        self.events = []

    def emit(self, event):
        if self.failures:
            self.failures -= 1
            raise OSError("no")
        self.events.append(event)


def test_a_failing_sink_loses_steps_but_no_lifecycle_event():
    sink = FailingSink(failures=2)
    reporter = Reporter(sink)
    reporter.report(step(1))
    reporter.report(staged(2))
    reporter.report(step(3))
    assert reporter.flush(10)
    reporter.close()
    assert [e.step for e in sink.events] == [2, 3]
    assert reporter.num_dropped == 1


def test_watch_runs_although_events_keep_coming():
    watched = threading.Event()
    sink = FailingSink(0)
    reporter = Reporter(sink, every_second=watched.set)
    stop = threading.Event()

    def feed():
        while not stop.wait(0.001):
            reporter.report(step(1))

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        assert watched.wait(10)
    finally:
        stop.set()
        feeder.join()
        reporter.close()


@pytest.mark.timeout(20)
def test_close_ends_although_the_sink_is_dead():
    reporter = Reporter(FailingSink(failures=10**9))
    reporter.report(staged(1))
    reporter.close(timeout_seconds=2.0)
    assert reporter.num_dropped == 1


def test_a_watch_that_fails_costs_no_event(monkeypatch):
    """While storage is away the look for a newer attempt fails: nothing is told twice or counted as dropped for it."""
    clock, looks = itertools.count(0.0, 10.0), []
    monkeypatch.setattr(reporting, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    def look():
        looks.append(1)
        raise OSError("storage is away")

    sink = FailingSink(failures=0)
    reporter = Reporter(sink, every_second=look)
    for event in [staged(1), step(2)]:
        reporter.report(event)
        assert reporter.flush(5)
    reporter.close()
    assert looks != []
    assert [event.step for event in sink.events] == [1, 2]
    assert reporter.num_dropped == 0
