"""Whatever comes in, and in whatever order: what goes out keeps its promises."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.detector import flat
from surefoot_detector.detector import Detector
from surefoot_detector.findings import Cleared, Healed, Place, Raised
from surefoot_detector.reports import to_event

factors = st.sampled_from([1.0] * 12 + [1.1, 1.4, 3.0, 0.0, -1.0, math.nan, math.inf, 1e300])
norms = st.sampled_from([1.0] * 12 + [4.0, 9.0, 0.0, math.nan, math.inf, None])
stretches = st.lists(st.tuples(st.integers(1, 60), factors, norms, st.booleans()), min_size=1, max_size=12)
restarts = st.dictionaries(st.integers(1, 400), st.integers(0, 400), max_size=4)


def points(pieces):
    base = flat(60 * 12)
    for length, factor, norm, applied in pieces:
        for _ in range(length):
            point = base.pop()
            grad_norm = None if norm is None else point.grad_norm * norm
            yield point._replace(loss=point.loss * factor, grad_norm=grad_norm, applied=applied or factor == 1.0)


@settings(deadline=None, max_examples=60)
@given(stretches, restarts)
def test_promises(pieces, back):
    detector, attempt, step = Detector(), 1, 0
    through: dict[int, int] = {}
    raised, healed = set(), []
    for number, numbers in enumerate(points(pieces), 1):
        if number in back:
            attempt, step = attempt + 1, min(step, back[number])
            detector.start_attempt(attempt, step)
        step += 1
        findings = detector.feed(Place(attempt, step, step), numbers)
        assert detector.feed(Place(attempt, step, step), numbers) == []
        for finding in findings:
            assert to_event("llm", finding).event_id
            if isinstance(finding, Cleared):
                assert finding.attempt == attempt
                assert through.get(attempt, -1) < finding.through_step <= step
                through[attempt] = finding.through_step
            elif isinstance(finding, Raised):
                assert finding.onset.step <= step
                raised.add((finding.kind, finding.at.attempt, finding.onset.step))
            elif isinstance(finding, Healed):
                healed.append((finding.kind, finding.raised_attempt, finding.onset_step))
        if detector.alarm is not None:
            assert not [f for f in findings if isinstance(f, Cleared) and f.through_step >= detector.alarm.onset.step]
    assert set(healed) <= raised
