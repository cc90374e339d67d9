"""Field cases C1, C4, C5, C7 on real jobs, and what happens to the drain and to the launcher beside a running job."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from helpers.launcher import finish, started
from helpers.waiting import wait_until
from surefoot.checkpoint.attempts import Source
from surefoot.checkpoint.catalog import verify
from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.checkpoint.locks import holder_pid
from surefoot.events import CheckpointCommitted, CheckpointQuarantined, RankFailed, RestoreFellBack, SnapshotSkipped
from surefoot.processes import find_job_processes
from surefoot.progress import ProgressPage, progress_path
from surefoot.testing.faults import FaultInjector, kill

SLOW_STEP = ["--step-seconds", "0.02"]


def step_of(job, rank=0):
    try:
        progress = ProgressPage.open(progress_path(job.staging, rank)).read()
    except FileNotFoundError:
        return -1
    return -1 if progress is None or progress.start_step < 0 else progress.step


def drain_of(job):
    return holder_pid(job.staging / "drain.lock")


@pytest.mark.parametrize(
    "damage", ["halve", *(pytest.param(damage, marks=pytest.mark.slow) for damage in ("delete", "empty"))]
)
def test_c1_c5_a_damaged_checkpoint_is_left_for_the_one_before(make_job, whole, damage):
    """The newest checkpoint loses a shard's bytes: the one before is used, the bad one quarantined, with the reason.

    C5: the job that goes on from there ends when its last save is durable.
    """
    job = make_job(whole.name, trainer=["--steps", "22"])
    shutil.copytree(whole.storage, job.storage)
    assert job.committed() == [CheckpointId(1, 10), CheckpointId(1, 20)]
    shard = job.storage / job.name / folder_name(CheckpointId(1, 20)) / "rank-00001.safetensors"
    if damage == "delete":
        shard.unlink()
    else:
        os.truncate(shard, 0 if damage == "empty" else shard.stat().st_size // 2)
    job.run()
    assert job.committed() == [CheckpointId(1, 10), CheckpointId(2, 22)]
    assert [event.step for event in job.events(CheckpointCommitted)] == [22]
    assert not job.staging.exists()
    assert job.newest_state()[1]["step"] == 22
    start = job.records()[2].starts_from
    assert (start.checkpoint_id, start.source) == (CheckpointId(1, 10), Source.COMMITTED)
    (fell_back,) = job.events(RestoreFellBack)
    assert (fell_back.candidate_step, fell_back.source) == (20, "COMMITTED")
    assert "rank-00001.safetensors" in fell_back.reason
    (quarantined,) = job.events(CheckpointQuarantined)
    assert (quarantined.step, quarantined.file) == (20, "rank-00001.safetensors")
    assert (job.storage / job.name / quarantined.moved_to).is_dir()


@pytest.mark.chaos
@pytest.mark.timeout(120)
def test_c4_a_blocked_writer_writes_what_was_saved(make_job, whole):
    """Saved at step 10 while the writer is stopped, trained on to 15: the file is step 10, to the bit."""
    job = make_job("blocked", trainer=["--steps", "20", "--step-seconds", "0.15"], checkpoint={"save_every_steps": 10})
    process = job.start()
    try:
        wait_until(lambda: step_of(job) >= 2, 30, "step 2 is trained")
        drain = wait_until(lambda: drain_of(job), 30, "there is a drain")
        os.kill(drain, signal.SIGSTOP)
        assert step_of(job) < 10
        wait_until(lambda: step_of(job) >= 15, 30, "step 15 is trained")
        assert job.committed() == []
        os.kill(drain, signal.SIGCONT)
        wait_until(lambda: CheckpointId(1, 10) in job.committed(), 30, "step 10 is committed")
    finally:
        os.kill(drain, signal.SIGCONT)
        process.communicate(timeout=60)
    assert process.returncode == 0
    ours, theirs = (state_at(j, CheckpointId(1, 10)) for j in (job, whole))
    assert ours == theirs


def state_at(job, checkpoint_id):
    """Every byte of a checkpoint's shards, and its scalars without times."""
    verify(job.store, checkpoint_id)
    folder = job.storage / job.name / folder_name(checkpoint_id)
    shards = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    scalars = json.loads((folder / "rank-00000.json").read_text())["scalars"]
    del scalars["saved_at"], scalars["trained_seconds"]
    return shards, scalars


@pytest.mark.slow  # test_checkpoint_cases has it without a launcher
@pytest.mark.chaos
@pytest.mark.timeout(120)
def test_c7_a_rank_killed_in_the_middle_of_a_save(make_job, whole):
    """Rank 1 dies copying step 10; the retry reaches step 10 again: one committed step 10, of one attempt."""
    job = make_job(
        trainer=["--steps", "20", "--fault", "1:staging.copied=kill@10"], checkpoint={"save_every_steps": 10}
    )
    job.run()
    assert job.committed() == [CheckpointId(2, 10), CheckpointId(2, 20)]
    assert job.records()[2].starts_from.checkpoint_id == CheckpointId(1, 9)
    assert job.newest_state() == whole.newest_state()


@pytest.mark.chaos
@pytest.mark.timeout(120)
def test_a_killed_drain_is_replaced_and_no_save_is_lost(make_job):
    """A save that is due while the one before waits for the new drain follows as soon as that is written."""
    checkpoint = {"save_every_steps": 10, "retention": {"keep_last": None}}
    job = make_job(trainer=["--steps", "100000", "--step-seconds", "0.05"], checkpoint=checkpoint)
    with started(job) as process:
        wait_until(lambda: step_of(job) >= 3, 30, "step 3 is trained")
        first = wait_until(lambda: drain_of(job), 30, "there is a drain")
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: drain_of(job) not in (None, first), 30, "there is another drain")
        wait_until(lambda: len(job.committed()) >= 5, 60, "saves follow")
        process.send_signal(signal.SIGTERM)
        assert finish(process, 60)[0] == 75
    steps = [i.step for i in job.committed()]
    assert steps[0] == 10
    assert steps[-1] == job.lines()[-1]["step"]


@pytest.mark.chaos
@pytest.mark.timeout(120)
def test_sigkill_of_the_launcher_leaves_no_process_and_loses_no_step(make_job):
    """5 s after the SIGKILL nothing of the job runs, the drain included, and the newest snapshot is durable."""
    job = make_job(trainer=["--steps", "500", "--step-seconds", "0.02"])
    process = job.start()
    wait_until(lambda: step_of(job) >= 20, 30, "step 20 is trained")
    drain = wait_until(lambda: drain_of(job), 30, "there is a drain")
    process.send_signal(signal.SIGKILL)
    killed_at = time.monotonic()
    process.communicate(timeout=20)
    reached = step_of(job)
    wait_until(lambda: not find_job_processes(job.staging.name), 30, "the ranks are gone")
    wait_until(lambda: is_over(drain), 30, "the drain has ended")
    assert time.monotonic() - killed_at < 5.0
    assert not job.staging.exists()
    (saved,) = job.committed()
    assert saved.step >= reached - 1
    verify(job.store, saved)
    assert job.events(CheckpointCommitted)[-1].step == saved.step


def is_over(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.slow  # test_readme has the README's, R1 the kills
@pytest.mark.chaos
@pytest.mark.timeout(120)
def test_the_example_of_a_users_own_script_survives_a_kill(make_job):
    script = "services/worker/examples/own_script.py"
    job = make_job(entrypoint=f"{script} --steps 60")
    job.run([kill(rank=1).at(step=20)])
    assert len(job.records()) == 2
    assert job.committed()[-1] == CheckpointId(2, 60)
    printed = (job.folder / "run" / job.name / "logs" / "rank-00000.out").read_text()
    assert "step 60 loss" in printed
    assert "attempt 2" in printed


@pytest.mark.slow  # C4 blocks the writer too
@pytest.mark.chaos
@pytest.mark.timeout(120)
def test_an_outage_of_storage_costs_no_snapshots(make_job):
    """The writer hangs for many saves; a rank killed then costs at most the step it was in, and saves follow after."""
    job = make_job(trainer=["--steps", "90", "--step-seconds", "0.05"], checkpoint={"save_every_steps": 5})
    process = job.start()
    try:
        wait_until(lambda: step_of(job) >= 2, 30, "step 2 is trained")
        drain = wait_until(lambda: drain_of(job), 30, "there is a drain")
        os.kill(drain, signal.SIGSTOP)
        with FaultInjector(job.staging, [kill(rank=1).at(step=40)]) as injector:
            wait_until(lambda: len(job.records()) == 2, 30, "a second attempt has begun")
        reached = injector.done[0].step
        assert job.records()[2].starts_from.step >= reached - 1
    finally:
        os.kill(drain, signal.SIGCONT)
        process.communicate(timeout=60)
    assert process.returncode == 0
    steps = [i.step for i in job.committed()]
    assert steps[-1] == 90
    assert len([step for step in steps if step > reached]) >= 5


UNFREEZE = """
import torch
from surefoot import sdk

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Linear(4, 1))
for parameter in model[0].parameters():
    parameter.requires_grad_(False)
session = sdk.attach(
    model,
    torch.optim.AdamW(model.parameters(), lr=0.1),
    dataset=torch.utils.data.TensorDataset(torch.arange(64.0)[:, None]),
    global_batch_size=4,
    total_steps=20,
)
for (batch,) in session:
    if session.global_step == 9:
        for parameter in model[0].parameters():
            parameter.requires_grad_(True)
    session.step(session.model(batch).pow(2).mean())
"""


@pytest.mark.slow  # unit/sdk has the layout that changes
def test_state_that_appears_later_is_saved_too(make_job, tmp_path):
    """Unfrozen at step 10, in the very step of a save: new optimizer state needs a new layout of the snapshot."""
    script = tmp_path / "unfreeze.py"
    script.write_text(UNFREEZE)
    job = make_job(nproc=1, entrypoint=str(script), checkpoint={"save_every_steps": 5})
    job.run()
    assert job.committed()[-1].step == 20
    assert job.events(SnapshotSkipped) == []
    tensors, _ = job.newest_state()
    assert "optimizer.exp_avg.0.weight" in tensors


def test_storage_that_vanished_is_no_new_job(make_job):
    """The storage folder goes (an unmount, say) and a rank dies: the job stops and says so, it never starts over."""
    job = make_job(trainer=["--steps", "200", "--step-seconds", "0.05"])
    process = job.start()
    wait_until(lambda: step_of(job) >= 5, 30, "step 5 is trained")
    hidden = job.storage.rename(job.storage.with_name("unmounted"))
    with FaultInjector(job.staging, [kill(rank=1).at(step=8)]):
        wait_until(lambda: len(job.events(RankFailed)) == 2, 30, "both ranks have failed")
    killed, refused = job.events(RankFailed)
    assert killed.exit_code == -9
    assert refused.error_type == "NoUsableCheckpoint"
    assert "is this the right storage, and is it mounted?" in refused.error_message
    shutil.rmtree(job.storage, ignore_errors=True)
    hidden.rename(job.storage)
    process.communicate(timeout=60)
    assert process.returncode == 1
    assert list(job.records()) == [1]
    assert job.committed()[-1].step >= 8
