"""Health files: what a reader makes of them, whatever is in them."""

from __future__ import annotations

import json

import pytest

from surefoot.telemetry.health import STALE_SECONDS, HealthFile, HealthState, read_health


def test_what_a_service_says_is_read_back(tmp_path):
    health = HealthFile(tmp_path, "detector")
    health.turn(HealthState.WAITING, "redis is away")
    found = read_health(tmp_path, "detector")
    assert (found.state, found.detail) == (HealthState.WAITING, "redis is away")
    health.remove()
    assert read_health(tmp_path, "detector").state is HealthState.ABSENT


def test_a_loop_that_does_not_come_round_is_stale_whatever_it_said(tmp_path):
    HealthFile(tmp_path, "detector").turn(HealthState.OK)
    path = tmp_path / "detector.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"monotonic_seconds": data["monotonic_seconds"] - STALE_SECONDS - 1}))
    assert read_health(tmp_path, "detector").state is HealthState.STALE


@pytest.mark.parametrize(
    "change", [{"monotonic_seconds": "soon"}, {"monotonic_seconds": None}, {"state": "fine"}, {"more": 1}]
)
def test_a_file_of_another_shape_counts_as_absent(tmp_path, change):
    HealthFile(tmp_path, "detector").turn(HealthState.OK)
    path = tmp_path / "detector.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert read_health(tmp_path, "detector").state is HealthState.ABSENT


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "{}"])
def test_no_health_in_it(tmp_path, text):
    (tmp_path / "detector.json").write_text(text)
    assert read_health(tmp_path, "detector").state is HealthState.ABSENT
