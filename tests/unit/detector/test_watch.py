"""From messages to messages, on the bus in memory."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

import surefoot_detector
from helpers.detector import JobEvents, falling, flat, raised
from surefoot.bus.consumer import Consumer
from surefoot.bus.publisher import Publisher
from surefoot.bus.streams import EVENTS
from surefoot.errors import BusUnavailable
from surefoot.events import AnomalyCleared, AnomalyDetected, StepsCleared
from surefoot.testing.bus import MemoryBus
from surefoot_detector.handlers import handlers
from surefoot_detector.replay import Replay
from surefoot_detector.reports import _WHAT
from surefoot_detector.settings import DetectorSettings
from surefoot_detector.watch import Watch


class Service:
    """What main connects, on a bus of the test's."""

    def __init__(self, bus, max_jobs=10, publish=None):
        self.watch = Watch(publish or Publisher(bus, "detector").publish_all, max_jobs)
        reader = bus.group(EVENTS, "detector", "detector")
        self.replay = Replay(bus, reader, self.watch)
        self.consumer = Consumer(reader, handlers(self.watch), self.watch.lose)

    def run(self, turns=60):
        while not self.replay.is_over:
            self.replay.turn()
        for _ in range(turns):
            self.watch.send()
            self.consumer.turn(0.0)
        return self


def said(bus, *types):
    return [d.message for d in bus.read(EVENTS, "0", 100_000, 0.0) if isinstance(d.message, types)]


def send(bus, job, points):
    bus.publish(EVENTS, [*job.started(), *job.steps(points)])


@pytest.fixture
def bus():
    return MemoryBus()


def test_an_excursion_as_others_see_it(bus):
    job = JobEvents("llm")
    send(bus, job, raised(flat(260), 200, 230, 1.3, 5.0))
    Service(bus).run()
    detected = said(bus, AnomalyDetected)
    assert [(d.job, d.attempt, d.kind, d.severity, d.onset_step, d.onset_position, d.step) for d in detected] == [
        ("llm", 1, "spike", "critical", 200, 200, 200)
    ]
    assert "loss" in detected[0].message
    assert "since step 200" in detected[0].message
    assert [(c.onset_attempt, c.onset_step, c.step) for c in said(bus, AnomalyCleared)] == [(1, 200, 231)]
    assert said(bus, StepsCleared)[-1].through_step >= 255


def test_nothing_is_lost_or_said_twice_when_the_bus_is_away_for_a_while(bus):
    publisher = Publisher(bus, "detector")
    outages = iter([True, True, False, True])

    def publish(messages):
        if next(outages, False):
            raise BusUnavailable("away")
        publisher.publish_all(messages)

    service = Service(bus, publish=publish)
    send(bus, JobEvents("llm"), raised(flat(260), 200, 230, 1.3, 5.0))
    for _ in range(10):
        try:
            service.run(40)
        except BusUnavailable:
            continue
    ids = [m.event_id for m in said(bus, AnomalyDetected, AnomalyCleared, StepsCleared)]
    assert len(said(bus, AnomalyDetected, AnomalyCleared)) == 2
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("cut", [10, 150, 205, 231])
def test_a_restart_knows_what_the_one_before_knew(bus, cut):
    points = raised(flat(300), 200, 230, 1.3, 5.0)
    whole = MemoryBus()
    send(whole, JobEvents("llm"), points)
    Service(whole).run()

    job = JobEvents("llm")
    bus.publish(EVENTS, [*job.started(), *job.steps(points[:cut])])
    Service(bus).run()
    bus.publish(EVENTS, job.steps(points[cut:]))
    Service(bus).run()
    types = (AnomalyDetected, AnomalyCleared, StepsCleared)
    assert [m.event_id for m in said(bus, *types)] == [m.event_id for m in said(whole, *types)]


def test_what_was_given_but_not_done_is_said_by_the_next(bus):
    job = JobEvents("llm")
    send(bus, job, raised(flat(205), 200, 300, 1.3, 5.0))
    # Handed out and never acknowledged: its reader was killed.
    assert len(bus.group(EVENTS, "detector", "detector").read(1000, 0.0)) == 206
    Service(bus).run()
    assert [d.onset_step for d in said(bus, AnomalyDetected)] == [200]


def test_lost_events_stop_what_is_cleared_for_a_while(bus):
    job = JobEvents("llm")
    items = [*job.started(), *job.steps(flat(200))]
    bus.publish(EVENTS, items[:101] + items[111:])
    Service(bus).run()
    through = [m.through_step for m in said(bus, StepsCleared)]
    assert not [step for step in through if 100 < step < 139]
    assert through[-1] >= 195


def test_many_jobs_at_once_and_no_more_than_wanted(bus):
    jobs = [JobEvents(f"job-{n}") for n in range(6)]
    for job in jobs:
        bus.publish(EVENTS, job.started())
    curves = [falling(60, seed=n) for n in range(6)]
    for i in range(60):
        for job, curve in zip(jobs, curves, strict=True):
            bus.publish(EVENTS, job.steps([curve[i]]))
    service = Service(bus, max_jobs=6).run()
    assert {m.job for m in said(bus, StepsCleared)} == {job.name for job in jobs}
    assert len(service.watch._followed) == 6
    other = Service(MemoryBus(), max_jobs=2)
    for job in jobs:
        other.watch.start_attempt(job.started()[0].message, job.source)
    assert list(other.watch._followed) == ["job-4", "job-5"]


def test_a_job_begun_anew_under_the_same_name_warms_up_anew(bus):
    send(bus, JobEvents("llm"), flat(100, level=2.0))
    send(bus, JobEvents("llm", file_id="2"), flat(100, level=9.0))
    Service(bus).run()
    assert said(bus, AnomalyDetected) == []
    assert [m.through_step for m in said(bus, StepsCleared)].count(30) == 2


def test_a_job_named_with_colons_and_infinite_numbers(bus):
    job = JobEvents("team:llm")
    points = flat(60)
    points[50] = points[50]._replace(loss=math.inf, applied=False)
    items = [*job.started(), *job.steps(points)]
    del items[40]
    bus.publish(EVENTS, items)
    Service(bus).run()
    assert [(d.kind, d.severity, d.loss) for d in said(bus, AnomalyDetected)] == [("nonfinite", "warning", math.inf)]


def test_every_rule_has_its_sentence():
    folder = Path(surefoot_detector.__file__).parent
    text = "".join(path.read_text() for path in folder.rglob("*.py") if path.name != "reports.py")
    missing = [rule for rule in _WHAT if f'"{rule}"' not in text]
    assert missing == []
    named = set(re.findall(r'(?:CRITICAL|WARNING|SPIKE|DIVERGENCE|severity), "([a-z_]+)"', text))
    assert named
    assert named <= set(_WHAT)


def test_the_readme_has_every_rule_and_setting():
    readme = (Path(__file__).parents[3] / "services" / "detector" / "README.md").read_text()
    assert [rule for rule in _WHAT if f"`{rule}`" not in readme] == []
    for name, field in DetectorSettings.model_fields.items():
        if name.startswith("detector_"):
            assert f"| `SUREFOOT_{name.upper()}` | {field.default} |" in readme
