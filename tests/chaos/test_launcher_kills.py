"""Cases P4 and P6, and the death of the launcher; that of the fork server is in integration/launcher."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.jobs import Job
from helpers.launcher import RING, finish, output, processes_of, started, until, until_trains
from surefoot.events import JobFinished, RankFailed, RanksRestarted

MakeJob = Callable[..., Job]


@pytest.mark.chaos
@pytest.mark.timeout(120)
def test_p6_rank_1_and_rank_0_killed_in_turn_ten_rounds(make_job: MakeJob) -> None:
    job = make_job(entrypoint=f"{RING} 100000")
    with started(job) as process:
        for start in range(10):
            os.kill(until_trains(job, start)[(start + 1) % 2], signal.SIGKILL)
        until_trains(job, 10)
        process.send_signal(signal.SIGTERM)
        assert finish(process)[0] == 75
        failed = job.events(RankFailed)
        assert [event.rank for event in failed] == [1, 0] * 5
        assert {event.exit_code for event in failed} == {-signal.SIGKILL}
        restarted = job.events(RanksRestarted)
        assert [event.restart for event in restarted] == list(range(11))
        assert {event.start_method for event in restarted} == {"forkserver"}
        assert {event.attempt for event in [*failed, *restarted[1:], *job.events(JobFinished)]} == {1}
        for event in restarted[1:]:
            assert [mark.name for mark in event.timeline] == ["detect", "killed", "rendezvous", "forked"]


@pytest.mark.slow  # test_saves kills the launcher of a job of the sdk
@pytest.mark.chaos
@pytest.mark.timeout(120)
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_sigkill_of_the_launcher_leaves_no_process(make_job: MakeJob, method: str) -> None:
    job = make_job(entrypoint=f"{RING} 100000", spec={"start_method": method})
    with started(job) as process:
        until_trains(job)
        assert len(processes_of(job)) >= 3 - (method == "spawn")
        process.kill()
        seconds = until(lambda: processes_of(job) == [], "all are gone", timeout_seconds=5)
        finish(process)
        assert seconds < 1.0


@pytest.mark.slow  # unit/data has the same without a launcher
@pytest.mark.chaos
@pytest.mark.timeout(120)
def test_loader_workers_die_with_their_rank(make_job: MakeJob, tmp_path: Path) -> None:
    path = tmp_path / "loads.py"
    path.write_text(
        "import os\nfrom torch.utils.data import DataLoader\nfor n in range(100000):\n"
        "    for i, _ in enumerate(DataLoader(range(100000), num_workers=2)):\n"
        "        if i == 5: print('first step of start', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n"
    )
    job = make_job(entrypoint=str(path), nproc=1)
    with started(job) as process:
        (rank,) = until_trains(job)
        workers = Path(f"/proc/{rank}/task/{rank}/children").read_text().split()
        assert len(workers) == 2
        os.kill(rank, signal.SIGKILL)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "workers are gone", timeout_seconds=2)
        until_trains(job, 1)
        process.send_signal(signal.SIGTERM)
        assert finish(process)[0] == 75
        assert "unexpected pid" not in output(job, 0, "err")


@pytest.mark.chaos
@pytest.mark.timeout(120)
def test_p4_the_restart_budget_ends_the_job(make_job: MakeJob) -> None:
    job = make_job(entrypoint=f"{RING} 100000", spec={"restart": {"max_restarts": 2, "window_seconds": 600}})
    with started(job) as process:
        for start in range(3):
            os.kill(until_trains(job, start)[0], signal.SIGKILL)
        code, text = finish(process)
        assert code == 1
        assert "restart.max_restarts" in text
        assert "rank 0 was killed by SIGKILL" in job.events(JobFinished)[0].reason
