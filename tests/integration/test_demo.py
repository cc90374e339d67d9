"""The demo: its kill on real processes that stand in for a job, its checks, and that nothing outlives it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from helpers.waiting import wait_until
from surefoot.cli import demo_job
from surefoot.cli.demo import demo_spec
from surefoot.cli.demo_job import DemoJob, Kill, KillError, kill_rank_on_the_way
from surefoot.cli.demo_report import build_report, print_report
from surefoot.cli.demo_stack import DemoStack, processes_of
from surefoot.embedded.stack_file import StackState, running_stack
from surefoot.spec import parse_spec

FAKE_JOB = Path(__file__).parents[1] / "helpers" / "fake_job.py"
STEPS = 120


class FakeJob:
    """`fake_job.py` as a process, and the demo's view of it."""

    def __init__(self, folder: Path, behaviour: str, steps: int = STEPS) -> None:
        document = demo_spec(None, folder, folder / "data", steps, 0)
        spec_file = folder / "spec.json"
        spec_file.write_text(json.dumps(document))
        self.spec = parse_spec(document)
        self.job = DemoJob(self.spec, self.end_reason)
        command = [sys.executable, str(FAKE_JOB), str(spec_file), behaviour]
        self.process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(FAKE_JOB.parents[1])})

    def end_reason(self) -> str | None:
        code = self.process.poll()
        return None if code is None else f"status {code}"

    def kill(self) -> Kill:
        return kill_rank_on_the_way(self.job, 1, at_step=48, say=lambda _: None)


@pytest.fixture
def fake(tmp_path):
    made = []

    def make(behaviour, steps=STEPS):
        made.append(FakeJob(tmp_path, behaviour, steps))
        return made[-1]

    yield make
    for job in made:
        job.process.kill()
        job.process.wait()
        shutil.rmtree(job.job.staging_folder, ignore_errors=True)


def report_of(fake_job, kill, incidents, *, state="SUCCEEDED", problem=None, leftovers=()):
    stack = DemoStack(fake_job.spec.storage.parent)
    stack.exit_code = 0
    return build_report(
        fake_job.spec,
        stack,
        outcome={"state": state, "reason": ""},
        kill=kill,
        problem=problem,
        incidents=incidents,
        leftovers=list(leftovers),
    )


def incident(number, kind, action, state="HEALED"):
    return {
        "id": number,
        "kind": kind,
        "severity": "critical",
        "state": state,
        "onset_step": 7,
        "cause": f"{kind} was seen",
        "outcome": "",
        "recovery_seconds": 0.25,
        "steps_lost": 3,
        "actions": [{"kind": action, "state": "APPLIED", "reason": "the policy says so"}],
    }


HEALED = [incident(1, "rank_failure", "restart"), incident(2, "divergence", "rollback")]


def test_a_kill_is_measured_and_a_healed_run_passes_every_check(fake):
    job = fake("good")
    kill = job.kill()
    assert (kill.rank, kill.attempt) == (1, 1)
    assert kill.step >= 48
    # one fake step at least, and not the time that any later step took
    assert 0.01 <= kill.recovery_seconds < 1.5
    assert job.process.wait(30) == 0
    assert job.job.sweep() == []
    report = report_of(job, kill, HEALED)
    assert [check.name for check in report.checks if not check.passed] == []
    # The fake goes back one step from where its rank 0 was when it saw the death, which is a little after the kill.
    assert kill.steps_lost == max(0, kill.step - report.attempts[1].starts_from.step)
    assert report.losses is not None
    assert report.losses.nats_below_first == pytest.approx(4 * 119 / 120 - 4 * 9.5 / 120)
    console = Console(record=True, width=200)
    print_report(report, console)
    shown = console.export_text()
    assert shown.count("PASS") == 7
    for text in ("divergence was seen", "rollback (APPLIED): the policy says so", "0.250 s", "steps lost", "HEALED"):
        assert text in shown
    assert json.loads(report.to_json())["incidents"] == HEALED


@pytest.mark.parametrize(
    ("incidents", "failed"),
    [
        ([], {"the killed rank was healed", "the blown-up update was healed"}),
        ([HEALED[0], incident(2, "spike", "rollback", "RESUMED")], {"the blown-up update was healed"}),
        ([HEALED[0], incident(2, "spike", "set_lr")], {"the blown-up update was healed"}),
        ([*HEALED, incident(3, "spike", "rollback", "ESCALATED")], {"the blown-up update was healed"}),
    ],
)
def test_what_was_not_healed_fails_the_demo(fake, incidents, failed):
    job = fake("too-short")
    job.process.wait(20)
    kill = Kill(pid=1, rank=1, attempt=1, step=5, restart_step=5, recovery_seconds=0.1)
    report = report_of(job, kill, incidents)
    assert not report.passed
    assert failed <= {check.name for check in report.checks if not check.passed}


@pytest.mark.parametrize(
    ("behaviour", "told"),
    [
        ("gives-up", "after the kill"),
        ("hangs", "did not go on within 1 s"),
        ("too-short", "before step 48"),
    ],
)
def test_a_kill_that_is_not_survived_is_told(fake, behaviour, told, monkeypatch):
    monkeypatch.setattr(demo_job, "RECOVERY_LIMIT_SECONDS", 1.0)
    job = fake(behaviour)
    with pytest.raises(KillError, match=told):
        job.kill()
    report = report_of(job, None, [], state="FAILED", problem="it was not survived", leftovers=["process 5"])
    failed = {check.name: check.detail for check in report.checks if not check.passed}
    assert failed["training went on after the kill"] == "it was not survived"
    assert "process 5" in failed["nothing left behind"]
    assert "the job finished" in failed


def test_staging_that_stays_is_named_and_removed(fake, monkeypatch):
    monkeypatch.setattr(demo_job, "DRAIN_SECONDS", 0.2)
    job = fake("leaves", steps=60)
    job.process.wait(20)
    assert job.job.sweep() == [str(job.job.staging_folder)]
    assert not job.job.staging_folder.exists()


@pytest.mark.chaos
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "ending", [signal.SIGKILL, *(pytest.param(s, marks=pytest.mark.slow) for s in (signal.SIGINT, signal.SIGTERM))]
)
def test_every_process_ends_with_the_demo(ending, tmp_path):
    code = (
        # A shell's background job starts with SIGINT ignored; a person at a terminal is what is tested.
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import sys\nfrom surefoot.cli import main\n"
        "sys.argv = ['surefoot', 'demo', '--work-dir', 'work', '--steps', '100000']\nmain.main()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, cwd=tmp_path) as process:
        home = wait_until(lambda: next((tmp_path / "work").glob("run-*/surefoot"), None), 30, "the demo begins")
        wait_until(lambda: _is_running(home), 60, "the stack runs")
        assert processes_of(home)
        process.send_signal(ending)
        assert process.wait(60) in (130, -signal.SIGKILL)
    wait_until(lambda: not processes_of(home), 20, "every process is gone")


def _is_running(home: Path) -> bool:
    stack = running_stack(home)
    return stack is not None and stack.state is StackState.RUNNING
