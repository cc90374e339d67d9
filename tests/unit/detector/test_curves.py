"""The labelled curves, where they are there: what the rules were tuned to must not get worse unnoticed."""

from __future__ import annotations

import pytest

from bench.detection import CURVES, measure


@pytest.mark.skipif(not (CURVES / "manifest.json").is_file(), reason=f"no labelled curves in {CURVES}")
def test_events_are_found_and_data_outliers_are_not_acted_on():
    # Up to where the last event is; `make bench-detection` takes all, three times as long.
    critical = measure(CURVES, max_points=3000)["critical"].row("critical")
    assert critical["found"] >= 40, critical
    assert critical["FA per 10k"] <= 0.11, critical
    assert critical["benign per 10k"] == 0, critical
