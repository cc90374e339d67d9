"""What must not end a job: full disks under its logs, a fork server that dies, signals at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.jobs import Job
from helpers.launcher import RING, finish, output, processes_of, started, until, until_trains
from surefoot.checkpoint.locks import holder_pid
from surefoot.events import JobFinished, JobState, RankFailed, RanksRestarted
from surefoot.processes import find_job_processes
from surefoot.progress import ProgressReader, progress_path

MakeJob = Callable[..., Job]

DIES_AT_FORK = """
import os, signal
from pathlib import Path
def die():
    lives = sorted(Path({folder!r}).glob("life-*"))
    if "RANK" not in os.environ and lives:
        lives[0].unlink()
        os.kill(os.getpid(), signal.SIGKILL)
os.register_at_fork(before=die)
"""


def catches(process: subprocess.Popen[str], number: signal.Signals) -> bool:
    text = Path(f"/proc/{process.pid}/status").read_text()
    mask = next(line.split()[1] for line in text.splitlines() if line.startswith("SigCgt"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def fragile_job(make_job: MakeJob, folder: Path, num_deaths: int, more: str = "", **spec: object) -> Job:
    """A job whose fork server dies `num_deaths` times at the moment when it shall fork a rank."""
    folder.mkdir()
    for index in range(num_deaths):
        (folder / f"life-{index:02}").touch()
    (folder / "fragile.py").write_text(more + DIES_AT_FORK.format(folder=str(folder)))
    (folder / "own.py").write_text("import fragile\nprint('trained')\n")
    return make_job(entrypoint=str(folder / "own.py"), spec=spec)


def test_a_full_disk_under_logs_and_events_ends_no_job(make_job: MakeJob) -> None:
    job = make_job(entrypoint=f"{RING} 3")
    logs = job.events_path.parent / "logs"
    logs.mkdir(parents=True)
    names = [f"rank-{rank:05}.{stream}" for rank in (0, 1) for stream in ("out", "err")]
    for path in [job.events_path, *(logs / name for name in ("launcher.log", "preload.log", "drain.log", *names))]:
        path.symlink_to("/dev/full")
    run = job.run()
    assert "Traceback" not in run.stdout
    assert "is lost" in run.stdout


@pytest.mark.slow  # a full disk under them is tested
def test_logs_that_cannot_be_opened_end_no_job(make_job: MakeJob) -> None:
    job = make_job(entrypoint=f"{RING} 3")
    logs = job.events_path.parent / "logs"
    for name in ("launcher.log", "preload.log", "rank-00000.out", "rank-00001.err"):
        (logs / name).mkdir(parents=True)
    run = job.run()
    assert "Traceback" not in run.stdout
    assert job.events(JobFinished)[0].restarts == 0
    assert "first step of start 0" in output(job, 1)


@pytest.mark.slow
def test_a_fork_server_that_dies_while_forking_costs_restarts(make_job: MakeJob, tmp_path: Path) -> None:
    job = fragile_job(make_job, tmp_path / "s", 2)
    run = job.run()
    assert "Traceback" not in run.stdout
    assert "the fork server ended while ranks were started" in run.stdout
    finished = job.events(JobFinished)[0]
    assert (finished.state, finished.restarts) == (JobState.SUCCEEDED, 2)
    assert {event.start_method for event in job.events(RanksRestarted)} == {"forkserver"}
    assert output(job, 1).splitlines()[-1] == "trained"


@pytest.mark.slow  # as the one above
def test_a_fork_server_that_always_dies_uses_up_the_budget(make_job: MakeJob, tmp_path: Path) -> None:
    job = fragile_job(make_job, tmp_path / "s", 50, restart={"max_restarts": 1})
    run = job.run(expect=1)
    assert "Traceback" not in run.stdout
    finished = job.events(JobFinished)[0]
    assert (finished.state, finished.restarts) == (JobState.FAILED, 1)
    assert "could not be started: the fork server ended" in finished.reason
    assert "restart.max_restarts" in finished.reason


@pytest.mark.slow  # the budget is tested with ranks, the fork server with one death
def test_a_fork_server_that_does_not_start_again_uses_up_the_budget(make_job: MakeJob, tmp_path: Path) -> None:
    marker = tmp_path / "s" / "was-here"
    only_once = f"import os\nif os.path.exists({str(marker)!r}): os._exit(3)\nopen({str(marker)!r}, 'w').close()\n"
    job = fragile_job(make_job, tmp_path / "s", 50, only_once, restart={"max_restarts": 2})
    run = job.run(expect=1)
    assert "Traceback" not in run.stdout
    finished = job.events(JobFinished)[0]
    assert (finished.state, finished.restarts) == (JobState.FAILED, 2)
    assert "another one does not start: the fork server did not say that it is ready" in finished.reason


def test_a_restart_ends_the_helpers_of_the_dead_ranks(make_job: MakeJob, tmp_path: Path) -> None:
    path = tmp_path / "helps.py"
    path.write_text(
        "import os, subprocess, sys, time\nfrom pathlib import Path\n"
        f"pids = Path({str(tmp_path / 'pids')!r})\n"
        "before = pids.read_text().split() if pids.exists() else []\n"
        "helper = subprocess.Popen(['sleep', '1000'])\n"
        "pids.write_text(' '.join([*before, str(helper.pid)]))\n"
        # Older than the tick in which the rank dies, as any helper of a rank that trained for a moment is.
        "time.sleep(0.05)\n"
        "if not before: os.kill(os.getpid(), 9)\n"
        "def lives(pid):\n"
        "    try: return Path(f'/proc/{pid}/stat').read_text().rpartition(') ')[2][0] not in 'ZX'\n"
        "    except OSError: return False\n"
        "while lives(before[0]): time.sleep(0.01)\n"
        "print('gone', helper.poll())\nhelper.kill()\nhelper.wait()\n"
    )
    job = make_job(entrypoint=str(path), nproc=1)
    run = job.run(timeout=30)
    assert output(job, 0).splitlines()[-1] == "gone None"
    assert run.stdout.count("left over from earlier ranks") == 1
    assert job.events(JobFinished)[0].restarts == 1


def test_signals_to_fork_server_and_ranks_end_nobody_and_its_death_is_one_more_restart(make_job: MakeJob) -> None:
    job = make_job(entrypoint=f"{RING} 100000")
    with started(job) as process:
        ranks = until_trains(job)
        server = int(Path(f"/proc/{ranks[0]}/stat").read_text().rpartition(") ")[2].split()[1])
        assert server in find_job_processes(job.staging.name)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            for pid in (server, *ranks):
                os.kill(pid, number)
        os.kill(ranks[1], signal.SIGKILL)
        assert until_trains(job, 1)
        assert int(Path(f"/proc/{server}/stat").read_text().rpartition(") ")[2].split()[1]) == process.pid
        assert [event.exit_code for event in job.events(RankFailed)] == [-signal.SIGKILL]
        os.kill(server, signal.SIGKILL)
        until_trains(job, 2)
        process.send_signal(signal.SIGTERM)
        assert finish(process)[0] == 75


def test_a_stop_during_the_imports_is_heeded_and_a_save_does_no_harm(make_job: MakeJob) -> None:
    job = make_job(entrypoint=f"{RING} 100000")
    with started(job) as process:
        until(lambda: catches(process, signal.SIGUSR1) and catches(process, signal.SIGTERM), "handlers are there")
        assert not job.events_path.parent.exists()  # so it is still importing
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGTERM)
        assert finish(process)[0] == 75
    assert job.events(JobFinished)[0].state is JobState.STOPPED
    assert processes_of(job) == []


@pytest.mark.slow  # the stop below goes the same way
def test_a_save_signal_during_the_imports_does_no_harm(make_job: MakeJob) -> None:
    job = make_job(entrypoint=f"{RING} 3")
    with started(job) as process:
        until(lambda: catches(process, signal.SIGUSR1), "handlers are there")
        process.send_signal(signal.SIGUSR1)
        assert finish(process)[0] == 0
    assert job.events(JobFinished)[0].restarts == 0
    assert {event.start_method for event in job.events(RanksRestarted)} == {"forkserver"}


@pytest.mark.timeout(90)
def test_killed_while_storage_fails_it_ends_in_seconds_and_says_what_is_not_saved(make_job: MakeJob) -> None:
    job = make_job(trainer=["--steps", "100000", "--step-seconds", "0.01"])
    with started(job) as process:

        def trains() -> bool:
            page = ProgressReader(progress_path(job.staging, 0)).read()
            return page is not None and page.start_step >= 0 and page.step >= 5

        until(trains, "rank 0 trains")
        job.storage.rename(job.folder / "away")
        job.storage.touch()
        process.send_signal(signal.SIGTERM)
        launcher_log = job.events_path.parent / "logs" / "launcher.log"
        until(lambda: "asking the ranks" in launcher_log.read_text(), "the first signal is taken")
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert finish(process)[0] == 1
        assert time.monotonic() - began < 9
    finished = job.events(JobFinished)[0]
    assert finished.state is JobState.FAILED
    assert f"the last snapshot is not durable, it stays in {job.staging}" in finished.reason
    drain = holder_pid(job.staging / "drain.lock")
    assert drain is not None
    os.kill(drain, signal.SIGKILL)


@pytest.mark.slow  # P1 in test_launcher has a second launcher too
def test_a_second_launcher_of_a_job_with_snapshots_is_refused_at_once(make_job: MakeJob) -> None:
    job = make_job(trainer=["--steps", "100000", "--step-seconds", "0.01"])
    with started(job) as process:
        until(lambda: list(job.staging.glob("*.stage")) != [], "there are snapshots")
        code, text = finish(job.start())
        assert code == 2
        assert f"process {process.pid}" in text
        process.send_signal(signal.SIGTERM)
        assert finish(process)[0] == 75
