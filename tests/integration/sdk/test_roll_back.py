"""Commands obeyed by several ranks in real processes: launcher, gloo, DDP, staging, drain."""

from __future__ import annotations

import json
import shutil

import pytest

from surefoot.checkpoint.attempts import SkipWindow
from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.events import (
    AttemptStarted,
    CommandApplied,
    CommandRefused,
    RankFailed,
    RollBack,
    SetLearningRate,
    encode_message,
)
from surefoot.sdk.data.order import DataOrder

NUM_STEPS = 24
STEPS = ["--steps", str(NUM_STEPS), "--batch", "12"]
SAVES = {"save_every_steps": 5}
TARGET = CheckpointId(1, 5)


def order(at, kind, number, attempt, **fields):
    """A command that rank 0 finds in step `at` (attempt, step), once the target of all roll-backs here is durable."""
    if kind is RollBack:
        fields |= {"to_attempt": TARGET.attempt, "to_step": TARGET.step}
    command = kind(job="case", number=number, attempt=attempt, reason="test", **fields)
    return {"at": at, "wait_for": folder_name(TARGET), "command": json.loads(encode_message(command))}


def run_with_orders(make_job, orders, *options, nproc=2):
    job = make_job("case", nproc=nproc, checkpoint=SAVES)
    plan = {"staging": str(job.staging), "storage": str(job.storage / job.name), "orders": orders}
    path = job.folder / "orders.json"
    path.write_text(json.dumps(plan))
    job.trainer = [*STEPS, "--orders", str(path), *options]
    job.run()
    return job


def told(job):
    return [(line["step"], line["rank"], line["ids"], line["loss"], line["lr"]) for line in job.lines()]


def check_against_fresh_processes(make_job, job, attempts):
    """What followed the last roll-back is what fresh processes make of its target, bit for bit.

    They get the first attempt records and the target's checkpoint, and nothing else.
    """
    fresh = make_job("fresh", nproc=job.nproc, trainer=STEPS, checkpoint=SAVES)
    fresh.name = job.name  # a checkpoint belongs to a job by name
    ours, theirs = job.storage / job.name, fresh.storage / job.name
    shutil.copytree(ours / folder_name(TARGET), theirs / folder_name(TARGET))
    (theirs / "attempts").mkdir()
    for number in range(1, attempts + 1):
        shutil.copy(ours / f"attempts/{number:06d}.json", theirs / "attempts")
    fresh.run()
    assert fresh.records()[attempts + 1].starts_from.checkpoint_id == TARGET
    assert [line for line in told(job) if line[0] > TARGET.step] == told(fresh)
    assert job.newest_state() == fresh.newest_state()


def test_a_roll_back_and_then_a_kill_at_two_ranks(make_job):
    """The restart neither repeats the command nor meets abandoned steps; all is bit-equal to fresh processes."""
    windows = (SkipWindow(start=8, stop=12),)
    control = {"lr_factor": 0.5, "lr_hold_steps": 5, "lr_rewarm_steps": 10, "skip_windows": windows}
    # 12 snapshots in attempt 1, so the 16th is that of step 9 in attempt 2.
    job = run_with_orders(
        make_job, [order((1, 12), RollBack, 1, 1, **control)], "--fault", "1:staging.copied=kill@16"
    )
    (applied,) = job.events(CommandApplied)
    assert (applied.number, applied.step, applied.attempt, applied.new_attempt) == (1, 12, 1, 2)
    assert job.events(CommandRefused) == []
    assert len(job.events(RankFailed)) == 1
    assert [event.from_step for event in job.events(AttemptStarted)] == [0, 5, 8]
    records = job.records()
    assert records[2].skip_windows == windows
    assert [record.command for record in records.values()] == [0, 1, 1]
    assert [record.starts_from.attempt for record in records.values()] == [0, 1, 2]
    check_against_fresh_processes(make_job, job, attempts=2)


@pytest.mark.slow  # the same at two ranks, and killed, stands above
def test_one_command_after_another_at_three_ranks(make_job):
    """Each is for the attempt before it, a late one is refused; loader workers go along; bit-equal at the end."""
    orders = [
        order((1, 8), RollBack, 1, 1, lr_factor=0.5),
        order((2, 7), SetLearningRate, 2, 2, lr_factor=0.25),
        order((3, 9), RollBack, 3, 2, lr_factor=0.5),
        order((3, 10), RollBack, 4, 3, lr_factor=0.1),
    ]
    job = run_with_orders(make_job, orders, "--workers", "1", nproc=3)
    assert [(event.number, event.step) for event in job.events(CommandApplied)] == [(1, 8), (2, 7), (4, 10)]
    assert [(event.number, event.reason) for event in job.events(CommandRefused)] == [
        (3, "it is for attempt 2; this is attempt 3")
    ]
    assert job.events(RankFailed) == []
    records = job.records()
    assert [record.lr_factor for record in records.values()] == [1.0, 0.5, 0.25, 0.1]
    assert [record.starts_from.attempt for record in records.values()] == [0, 1, 2, 1]
    data = DataOrder(num_samples=48, global_batch_size=12, seed=11)
    assert job.joined_ids() == [data.step_samples(step)[1].tolist() for step in range(NUM_STEPS)]
    check_against_fresh_processes(make_job, job, attempts=4)


@pytest.mark.slow  # the quick ones are in tests/unit/sdk/test_commands.py, with one rank
@pytest.mark.parametrize(
    ("fault", "claimed"),
    [("1:rollback.loaded=kill", False), ("0:command.claimed=kill", True)],
    ids=["before the claim", "after the claim"],
)
def test_a_rank_killed_in_the_middle_of_a_roll_back_leaves_one_of_both(make_job, fault, claimed):
    """Before the claim nothing has happened and the command is refused; after it, it has happened."""
    job = run_with_orders(make_job, [order((1, 12), RollBack, 1, 1, lr_factor=0.5)], "--fault", fault)
    records = job.records()
    newest = records[max(records)]
    if not claimed:
        assert list(records) == [1, 2]
        assert (newest.starts_from.checkpoint_id, newest.lr_factor) == (CheckpointId(1, 12), 1.0)
        assert [event.reason for event in job.events(CommandRefused)] == ["it is for attempt 1; this is attempt 2"]
    else:
        assert list(records) == [1, 2, 3]
        assert (newest.starts_from.checkpoint_id, newest.lr_factor) == (TARGET, 0.5)
        assert job.events(CommandRefused) == []
    assert [line["step"] for line in job.lines() if line["rank"] == 0] == list(range(1, NUM_STEPS + 1))
