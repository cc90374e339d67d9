"""Field cases R1-R3, R5-R7 on real jobs: launcher, gloo, staging, drain."""

from __future__ import annotations

import threading

import pytest

from helpers.waiting import wait_until
from surefoot.checkpoint.attempts import Source
from surefoot.checkpoint.ids import CheckpointId
from surefoot.events import AttemptStarted, RankFailed
from surefoot.testing.faults import FaultInjector, kill, wait_for_progress

SLOW_STEP = ["--step-seconds", "0.02"]


@pytest.fixture
def whole_ids(whole):
    """The ids of each of 20 steps of a job that never stopped: 3 epochs and a bit, 2 ranks, global batch 8."""
    return whole.joined_ids()


def losses(job):
    return [(line["step"], line["rank"], line["loss"]) for line in job.lines()]


def check_bit_equal(job, whole):
    """Weights, moments, step counts, scheduler, losses (R1), and the rates to 0 ulp (R6)."""
    assert job.newest_state() == whole.newest_state()
    assert losses(job) == losses(whole)
    assert [line["lr"] for line in job.lines()] == [line["lr"] for line in whole.lines()]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_r1_r2_r6_three_kills_change_nothing(make_job, whole, workers):
    """Bit-equal to a run that never stopped; every step's ids, in order, are its ids; each epoch is a permutation."""
    broken = make_job("broken", trainer=["--steps", "20", "--workers", str(workers), *SLOW_STEP])
    broken.run([kill(rank=1).at(step=5), kill(rank=0).at(step=9), kill(rank=1).at(step=13)])
    assert len(broken.records()) == 4
    check_bit_equal(broken, whole)
    assert broken.joined_ids() == whole.joined_ids()
    flat = [sample for ids in broken.joined_ids() for sample in ids]
    for epoch in range(3):
        assert sorted(flat[epoch * 48 : (epoch + 1) * 48]) == list(range(48))
    assert len({tuple(flat[epoch * 48 : (epoch + 1) * 48]) for epoch in range(3)}) == 3


@pytest.mark.slow  # the same at two ranks stands above
@pytest.mark.parametrize("nproc", [1, 3])
def test_r1_r6_resume_after_a_kill_is_bit_equal(make_job, nproc):
    """Equal to a run that never stopped, at equal world size."""
    trainer = ["--steps", "20", "--batch", "12"]
    whole = make_job("whole", nproc=nproc, trainer=trainer)
    whole.run()
    broken = make_job("broken", nproc=nproc, trainer=[*trainer, *SLOW_STEP])
    broken.run([kill(rank=nproc - 1).at(step=10)])
    check_bit_equal(broken, whole)
    assert len(broken.records()) == 2


@pytest.mark.chaos
@pytest.mark.timeout(120)
def test_r1_resume_from_storage_is_bit_equal(make_job, whole):
    """As R1, with every process killed and staging memory gone: from the committed checkpoint."""
    broken = make_job("broken", trainer=["--steps", "20", "--step-seconds", "0.05"])
    process = broken.start()
    with FaultInjector(broken.staging, [kill(rank=0).at(step=8)]):
        wait_for_progress(broken.staging, 1, 11, 1, threading.Event())
        process.kill()
        process.communicate(timeout=20)
    wait_until(lambda: not broken.staging.exists(), 20, "the staging folder is gone")
    broken.trainer = ["--steps", "20"]
    broken.run()
    assert broken.records()[3].starts_from.source is Source.COMMITTED
    check_bit_equal(broken, whole)


@pytest.mark.slow  # unit/data has the borders of epochs, R2 kills in the middle of one
@pytest.mark.parametrize("workers", [0, 2])
def test_r3_resume_right_after_the_last_batch_of_an_epoch(make_job, whole_ids, workers):
    """6 steps make an epoch: a job that ends there goes on with batch 0 of the next epoch in its order."""
    job = make_job("parts", trainer=["--steps", "6", "--workers", str(workers)])
    job.run()
    assert job.records()[1].starts_from.step == 0
    job.trainer = ["--steps", "12", "--workers", str(workers)]
    job.run()
    assert job.records()[2].starts_from.step == 6
    assert job.joined_ids() == whole_ids[:12]


@pytest.mark.slow  # unit/data has the same counting without jobs
@pytest.mark.timeout(300)
def test_r5_accumulation_counts_micro_batches(make_job):
    """Accumulation 4, ended after 10 steps: on with micro-batch 40; with accumulation 2 the same remaining ids."""
    whole = make_job("whole", trainer=["--steps", "16", "--batch", "16", "--micro", "2"])
    whole.run()
    assert len([line for line in whole.lines() if (line["step"], line["rank"]) == (1, 1)]) == 4
    killed = make_job("killed", trainer=["--steps", "16", "--batch", "16", "--micro", "2", *SLOW_STEP])
    killed.run([kill(rank=1).at(step=10)])
    parts = make_job("parts", trainer=["--steps", "10", "--batch", "16", "--micro", "2"])
    parts.run()
    parts.trainer = ["--steps", "16", "--batch", "16", "--micro", "4"]
    parts.run()
    for job, accumulation in ((killed, 4), (parts, 2)):
        step = job.records()[2].starts_from.step
        assert step >= 10
        for rank in (0, 1):
            uninterrupted = [line["ids"] for line in whole.lines() if line["rank"] == rank]
            resumed = [line for line in job.lines() if (line["attempt"], line["rank"]) == (2, rank)]
            assert len([line for line in resumed if line["step"] == step + 1]) == accumulation
            assert resumed[0]["ids"][:2] == uninterrupted[4 * step]
        assert job.joined_ids() == whole.joined_ids()
    assert parts.records()[2].starts_from.step == 10


@pytest.mark.slow  # R1 compares the rates of warm-up + cosine; test_state those of others, without a kill
@pytest.mark.timeout(120)
@pytest.mark.parametrize("scheduler", ["warmup-cosine", "onecycle"])
def test_r6_learning_rate_is_equal_to_the_last_bit(make_job, scheduler):
    trainer = ["--steps", "40", "--scheduler", scheduler]
    whole = make_job("whole", nproc=1, trainer=trainer)
    whole.run()
    broken = make_job("broken", nproc=1, trainer=[*trainer, "--step-seconds", "0.05"])
    broken.run([kill(rank=0).at(step=37)])
    assert 37 <= broken.records()[2].starts_from.step < 40
    assert [line["lr"] for line in broken.lines()] == [line["lr"] for line in whole.lines()]


@pytest.mark.slow  # unit/data has the ids, test_restore the loading
def test_r7_resume_at_other_world_sizes(make_job, whole_ids):
    """2 ranks, then 1, then 3: no crash, the ids of every global step as at constant world size."""
    job = make_job("elastic", nproc=2, trainer=["--steps", "4"])
    job.run()
    for nproc, steps in ((1, 8), (3, 12)):
        job.nproc = nproc
        job.trainer = ["--steps", str(steps)]
        job.run()
    assert [record.world_size for record in job.records().values()] == [2, 1, 3]
    assert job.joined_ids() == whole_ids[:12]


@pytest.mark.slow  # chaos/test_services looks at the same events
def test_start_reports_where_it_came_from(make_job):
    job = make_job(trainer=["--steps", "12", *SLOW_STEP])
    job.run([kill(rank=1).at(step=6)])
    first, second = job.events(AttemptStarted)
    assert (first.source, first.from_step) == ("SEED", 0)
    assert second.source == "STAGED"
    assert second.from_step >= 6
    (failed,) = job.events(RankFailed)
    assert failed.exit_code == -9
    assert failed.rank == 1


@pytest.mark.slow
def test_finished_job_started_again_has_nothing_to_do(make_job):
    job = make_job(trainer=["--steps", "5"])
    job.run()
    job.run()
    assert [line["step"] for line in job.lines() if line["rank"] == 0] == [1, 2, 3, 4, 5]
    assert job.committed() == [CheckpointId(1, 5)]
