"""Case P1: SIGTERM during a step, an evaluation and a save, with loader workers, on two ranks; saves on request."""

from __future__ import annotations

import os
import signal

import pytest

from helpers.launcher import finish, started, until
from surefoot.checkpoint.catalog import read_manifest, verify
from surefoot.checkpoint.locks import holder_pid
from surefoot.events import CheckpointStaged, JobFinished, JobState, RankFailed
from surefoot.processes import find_job_processes
from surefoot.progress import Phase, ProgressReader, progress_path

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from surefoot import sdk

out, eval_step = Path(sys.argv[1]), int(sys.argv[2])
model = torch.nn.Linear(1, 1)
session = sdk.attach(
    model,
    torch.optim.AdamW(model.parameters(), lr=0.01),
    dataset=torch.utils.data.TensorDataset(torch.arange(64.0)[:, None]),
    global_batch_size=4,
    num_workers=2,
    total_steps=100000,
)
for (batch,) in session:
    session.step(session.model(batch / 64).pow(2).mean())
    time.sleep(0.01)
    if session.global_step == eval_step:
        with session.evaluating():
            (out / f"evaluating-{session.rank}").touch()
            while not (out / "go-on").exists():
                time.sleep(0.005)
(out / f"stopped-{session.rank}").write_text(f"{session.global_step} {session.stopped}")
"""


@pytest.fixture
def make_p1(make_job, tmp_path):
    def make(eval_step=0, **checkpoint):
        script = tmp_path / "train.py"
        script.write_text(SCRIPT)
        return make_job(entrypoint=f"{script} {tmp_path} {eval_step}", checkpoint=checkpoint)

    return make


def progress(job, rank=0):
    return ProgressReader(progress_path(job.staging, rank)).read()


def until_trained(job, step):
    until(lambda: (page := progress(job)) is not None and page.start_step >= 0 and page.step >= step, "it trains", 60)


def signal_everybody(job, process):
    """As Slurm and systemd do: launcher, fork server, ranks, loader workers and drain."""
    everybody = find_job_processes(job.staging.name)
    assert len(everybody) >= 1 + 2 + 4 + 1
    for pid in {process.pid, *everybody}:
        os.kill(pid, signal.SIGTERM)


def check_preempted(job, process, folder):
    """Exit 75; both ranks ended after the same step, and it is the last committed one and whole."""
    code, text = finish(process, 60)
    assert code == 75, text
    stopped = {(folder / f"stopped-{rank}").read_text() for rank in (0, 1)}
    last = job.committed()[-1]
    assert stopped == {f"{last.step} True"}
    verify(job.store, last)
    assert read_manifest(job.store, last).world_size == 2
    assert job.events(RankFailed) == []
    assert [event.state for event in job.events(JobFinished)] == [JobState.STOPPED]
    return last.step


@pytest.mark.timeout(120)
def test_p1_during_a_step_to_every_process(make_p1, tmp_path):
    """And before it a save on request: of one step of both ranks, and training goes on."""
    job = make_p1()
    with started(job) as process:
        until_trained(job, 5)
        process.send_signal(signal.SIGUSR1)
        until(lambda: len(job.committed()) == 1, "the request is served", 60)
        (asked,) = job.committed()
        assert asked.step > 5
        assert read_manifest(job.store, asked).world_size == 2
        until_trained(job, asked.step + 20)
        assert job.committed() == [asked]
        signal_everybody(job, process)
        assert check_preempted(job, process, tmp_path) > asked.step
    assert len(job.committed()) == 2


@pytest.mark.slow  # the step that follows ends as any other
@pytest.mark.timeout(120)
def test_p1_during_an_evaluation(make_p1, tmp_path):
    """The evaluation is not cut short; the step after it is the last."""
    job = make_p1(eval_step=7)
    with started(job) as process:
        until(lambda: all((tmp_path / f"evaluating-{rank}").exists() for rank in (0, 1)), "both evaluate", 60)
        process.send_signal(signal.SIGTERM)
        launcher_log = job.events_path.parent / "logs" / "launcher.log"
        until(lambda: "asking the ranks" in launcher_log.read_text(), "the signal is taken")
        assert process.poll() is None
        assert progress(job).phase is Phase.EVAL
        (tmp_path / "go-on").touch()
        assert check_preempted(job, process, tmp_path) == 8


@pytest.mark.slow  # P5 stops a job during a save too
@pytest.mark.timeout(120)
def test_p1_during_a_save(make_p1, tmp_path):
    """The save is written to its end, and then the last step's: neither is lost or torn."""
    job = make_p1(save_every_steps=10)
    with started(job) as process:
        drain = until_drains(job)
        os.kill(drain, signal.SIGSTOP)
        try:
            until(lambda: any(event.step >= 10 for event in job.events(CheckpointStaged)), "a save waits", 60)
            saved = [event.step for event in job.events(CheckpointStaged)]
            process.send_signal(signal.SIGTERM)
            until(lambda: progress(job).phase in (Phase.SAVE, Phase.CLOSE), "the ranks have stopped", 60)
            assert process.poll() is None
        finally:
            os.kill(drain, signal.SIGCONT)
        last = check_preempted(job, process, tmp_path)
    steps = [checkpoint.step for checkpoint in job.committed()]
    assert steps == [*saved, last]
    for checkpoint in job.committed():
        verify(job.store, checkpoint)


def until_drains(job):
    until(lambda: holder_pid(job.staging / "drain.lock") is not None, "there is a drain", 60)
    return holder_pid(job.staging / "drain.lock")
