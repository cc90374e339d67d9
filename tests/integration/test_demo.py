"""The demo on real processes that stand in for a training job: what it measures, and when it fails."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from surefoot.checkpoint.staging_folder import staging_folder_path
from surefoot.cli import demo, demo_job
from surefoot.cli import main as cli

HELPERS = Path(__file__).parents[1] / "helpers"


def run_demo(behaviour: str, monkeypatch: pytest.MonkeyPatch, steps: int = 120) -> tuple[int, dict[str, Any]]:
    """Run `surefoot demo` here, on the fake job."""
    command = [sys.executable, str(HELPERS / "fake_job.py")]
    monkeypatch.setattr(demo_job, "run_command", lambda spec_file: [*command, str(spec_file), behaviour])
    monkeypatch.setenv("PYTHONPATH", str(HELPERS.parent))
    words = ["surefoot", "demo", "--work-dir", "work", "--json", "out/report.json", "--plain", "--steps", str(steps)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0), json.loads(Path("out/report.json").read_text())


def failed_checks(report: dict[str, Any]) -> list[str]:
    return [check["name"] for check in report["checks"] if not check["passed"]]


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_all_is_well(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, report = run_demo("good", monkeypatch)
    shown = capsys.readouterr().out
    assert (code, report["passed"], failed_checks(report)) == (0, True, [])
    kill = report["kill"]
    assert kill["rank"] == 1
    assert kill["step"] >= 48, "40 percent of the way"
    assert kill["steps_lost"] in (1, 2)
    # one fake step at least, and not the time that any later step took
    assert 0.01 <= kill["recovery_seconds"] < 1.0
    assert report["losses"]["num_steps"] == 120
    assert report["losses"]["nats_below_first"] == pytest.approx(4 * 119 / 120 - 4 * 9.5 / 120)
    assert [(v["step"], v["problem"]) for v in report["checkpoints"]] == [(5, None)]
    assert [a["starts_from"]["source"] for a in report["attempts"]] == ["SEED", "STAGED"]
    assert "SIGKILL to rank 1" in shown
    assert shown.count("PASS") == 5
    assert not (tmp_path / ".surefoot").exists()


@pytest.mark.parametrize(
    ("behaviour", "failed", "told"),
    [
        ("gives-up", ["the job finished", "training went on after the kill"], "the job ended (status 1) after"),
        ("hangs", ["the job finished", "training went on after the kill"], "did not go on within 1 s"),
        ("too-short", ["training went on after the kill", "every kept checkpoint is good"], "before step 48"),
        ("leaves", ["nothing left behind"], "surefoot-"),
    ],
)
def test_it_fails_when_something_did_not_happen(
    behaviour: str, failed: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_job, "RECOVERY_LIMIT_SECONDS", 1.0)
    monkeypatch.setattr(demo_job, "DRAIN_SECONDS", 0.5)
    code, report = run_demo(behaviour, monkeypatch)
    assert code == 1
    assert set(failed) <= set(failed_checks(report))
    assert any(told in check["detail"] for check in report["checks"])
    (folder,) = Path("work").absolute().glob("run-*")
    assert not staging_folder_path(Path("/dev/shm"), demo.JOB_NAME, folder / "checkpoints").exists()


def test_a_demo_removes_the_folder_of_the_one_before_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo_job, "DRAIN_SECONDS", 0.5)
    mine = tmp_path / "work" / "run-of-mine"
    mine.mkdir(parents=True)
    for _ in range(2):
        run_demo("too-short", monkeypatch)
    assert mine.exists()
    assert len(list((tmp_path / "work").iterdir())) == 2


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_every_process_ends_with_the_demo(ending: signal.Signals, tmp_path: Path) -> None:
    code = (
        # A shell's background job starts with SIGINT ignored; a person at a terminal is what is tested.
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import sys\nfrom surefoot.cli import demo_job, main\n"
        f"fake = [sys.executable, {str(HELPERS / 'fake_job.py')!r}]\n"
        "demo_job.run_command = lambda file: [*fake, str(file), 'good']\n"
        "sys.argv = ['surefoot', 'demo', '--work-dir', 'work', '--steps', '100000']\nmain.main()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(HELPERS.parent)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, cwd=tmp_path) as process:
        staging = wait_for_staging(tmp_path)
        process.send_signal(ending)
        assert process.wait(20) in (130, -signal.SIGKILL)
    assert_gone(tmp_path)
    assert staging.exists() == (ending is signal.SIGKILL), "the real job's drain removes it then"
    shutil.rmtree(staging, ignore_errors=True)


def wait_for_staging(tmp_path: Path) -> Path:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for folder in (tmp_path / "work").glob("run-*"):
            staging = staging_folder_path(Path("/dev/shm"), demo.JOB_NAME, folder / "checkpoints")
            if (staging / "rank-00001.progress").exists() and (staging / "rank-00000.progress").exists():
                return staging
        time.sleep(0.02)
    raise AssertionError("the fake job did not start")


def assert_gone(tmp_path: Path) -> None:
    """No process of the demo, known by its current directory, is left after 5 s."""
    deadline = time.monotonic() + 5
    others = [path for path in Path("/proc").glob("[0-9]*") if path.name != str(os.getpid())]
    while left := [path for path in others if _works_in(path, tmp_path)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)


def _works_in(process: Path, folder: Path) -> bool:
    try:
        return (process / "cwd").readlink() == folder
    except OSError:
        return False
