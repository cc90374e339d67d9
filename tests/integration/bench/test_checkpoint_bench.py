"""`make bench-checkpoint` works, on a small model; what is promised of memory holds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
GROWTH_LIMIT_MB = 40
LIMIT_SECONDS = 240


def run_bench(folder, *arguments):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))}
    process = subprocess.Popen([sys.executable, "-m", "bench.checkpoint", *arguments], cwd=folder, env=environment)
    try:
        assert process.wait(LIMIT_SECONDS) == 0
    finally:
        # It ends what it started by itself, but not on SIGKILL.
        process.send_signal(signal.SIGINT)
        process.wait()
    (path,) = (folder / "build" / "bench").iterdir()
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quick_run_has_every_field_and_leaves_nothing_behind(tmp_path):
    result = run_bench(tmp_path, "--quick")
    rows = {row["contender"]: row for row in result["rows"]}
    assert set(rows) == {"torch.save", "surefoot"}
    for row in rows.values():
        assert row["saves"] + row["saves not counted"] == 2
        assert row["load from disk s"] > 0
    assert rows["surefoot"]["load from memory s"] > 0
    assert {row["floor"] for row in result["floors"]} >= {"copy into staging", "copy out of staging", "write and fsync"}
    assert {row["part"] for row in result["throughput"]} >= {"snapshot copy", "drain, beside training", "verify"}
    assert {target["name"] for target in result["targets"]} >= {"1 rank: lost, to the best of the others"}
    assert not list(Path("/dev/shm").glob("surefoot-bench-*"))
    assert [path.name for path in (tmp_path / "build" / "bench").iterdir()] == ["checkpoint.json"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_200_saves_of_20_mb_grow_neither_rank_nor_drain_by_40_mb(tmp_path):
    result = run_bench(tmp_path, "--rss")
    (row,) = result["rows"]
    assert row["saves of 20 MB"] == 200
    assert row["rank MB"] < GROWTH_LIMIT_MB
    assert row["drain MB"] < GROWTH_LIMIT_MB
