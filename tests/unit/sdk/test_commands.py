"""Commands obeyed by one rank in this process: real staging memory, a real drain, real files. A2 and A3 by id."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from helpers.in_process import SCHEDULES, assert_same, build, schedule_values, state_of, train
from helpers.waiting import wait_until
from surefoot.checkpoint.attempts import SkipWindow, Source
from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.checkpoint.locks import holder_pid
from surefoot.checkpoint.staging_folder import StagingFolder
from surefoot.command_files import write_command
from surefoot.errors import Superseded
from surefoot.events import (
    AttemptStarted,
    CheckpointQuarantined,
    CommandApplied,
    CommandRefused,
    RollBack,
    SaveCheckpoint,
    SetLearningRate,
    SnapshotSkipped,
    StepCompleted,
)
from surefoot.testing.faults import TRAINING_FAULT_ENVIRONMENT_KEY, blow_up


def roll_back(place, number, to_step, *, to_attempt=1, attempt=1, lr_factor=1.0, **fields):
    def act():
        place.wait_committed(to_attempt, to_step)
        place.order(
            RollBack, number, attempt=attempt, to_attempt=to_attempt, to_step=to_step, lr_factor=lr_factor, **fields
        )

    return act


def rates(place, attempt):
    return {e.step: e.learning_rate for e in place.events(StepCompleted) if e.attempt == attempt}


@pytest.mark.parametrize(
    ("schedule", "scaled"), [("LambdaLR", True), ("CosineAnnealingLR", False), ("SequentialLR", True)]
)
def test_a_roll_back_is_bit_equal_to_a_fresh_start_from_the_same_checkpoint(make_place, schedule, scaled):
    """Weights, moments, BatchNorm, schedule, scaler, samples, losses: with an LR cut and a skipped window."""
    place, built = make_place(), build(schedule, scaled=scaled)
    action = roll_back(
        place, 1, 10, lr_factor=0.5, lr_hold_steps=4, lr_rewarm_steps=6, skip_windows=(SkipWindow(start=14, stop=17),)
    )
    seen = train(place.attach(built), {(1, 17): action})
    assert [(attempt, step) for attempt, step, _ in seen] == [(1, s) for s in range(1, 18)] + [
        (2, s) for s in range(11, 31)
    ]
    record = place.records()[2]
    assert (record.starts_from.checkpoint_id, record.starts_from.source) == (CheckpointId(1, 10), Source.COMMITTED)
    assert (record.lr_from_step, record.command, record.world_size) == (10, 1, 1)

    fresh, rebuilt = make_place("fresh"), build(schedule, scaled=scaled)
    place.copy_to(fresh, [CheckpointId(1, 10)], attempts=2)
    again = train(fresh.attach(rebuilt))
    assert fresh.records()[3].starts_from.checkpoint_id == CheckpointId(1, 10)
    assert [(step, ids) for _, step, ids in again] == [(step, ids) for a, step, ids in seen if a == 2]
    assert_same(state_of(built), state_of(rebuilt))
    ours = [(e.step, e.position, e.loss, e.learning_rate, e.updates) for e in place.events(StepCompleted)][17:]
    assert ours == [(e.step, e.position, e.loss, e.learning_rate, e.updates) for e in fresh.events(StepCompleted)]
    assert [position for _, position, *_ in ours] == [10, 11, 12, 13, *range(17, 33)]


def test_a_roll_back_is_reported_in_order(place):
    train(place.attach(build()), {(1, 12): roll_back(place, 7, 10)})
    kinds = (AttemptStarted, CommandApplied, StepCompleted)
    told = [(type(e).__name__, e.attempt, getattr(e, "step", None)) for e in place.events(*kinds)]
    middle = told.index(("StepCompleted", 1, 12))
    assert told[middle + 1 : middle + 4] == [
        ("AttemptStarted", 2, None),
        ("CommandApplied", 1, 12),
        ("StepCompleted", 2, 11),
    ]
    _, started = place.events(AttemptStarted)
    assert (started.from_attempt, started.from_step, started.source) == (1, 10, "COMMITTED")
    assert started.cause == "command 7: roll-back to step 10 of attempt 1: test"
    (applied,) = place.events(CommandApplied)
    assert (applied.number, applied.command, applied.new_attempt) == (7, "RollBack", 2)
    assert applied.seconds < 1.0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a3_the_factor_is_absolute_and_never_compounds(place, schedule):
    """LR x 0.5, later x 0.25, later the floor: exactly the schedule's value times that, 1, 2 and 10 steps after."""
    actions = {
        (1, 7): roll_back(place, 1, 5, lr_factor=0.5),
        (2, 18): roll_back(place, 2, 5, attempt=2, lr_factor=0.25),
        (3, 18): roll_back(place, 3, 5, attempt=3, lr_factor=0.1),
        (4, 18): roll_back(place, 4, 5, attempt=4, lr_factor=0.1),
    }
    train(place.attach(build(schedule), total_steps=20), actions)
    schedule_rates = schedule_values(schedule, 20)
    for attempt, factor in ((1, 1.0), (2, 0.5), (3, 0.25), (4, 0.1), (5, 0.1)):
        ours = rates(place, attempt)
        steps = range(1, 8) if attempt == 1 else (6, 7, 15)
        assert [ours[step] for step in steps] == [schedule_rates[step - 1] * factor for step in steps]


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "GradScaler"])
def test_a2_steps_with_infinite_gradients_advance_no_schedule(place, scaled):
    built, steps = build(scaled=scaled), (4, 9, 10)
    session = place.attach(built, total_steps=20)
    first = next(built.model.parameters())
    first.register_hook(lambda grad: grad * float("inf") if session.global_step + 1 in steps else grad)
    train(session)
    told = place.events(StepCompleted)
    assert [event.step for event in told if not event.applied] == list(steps)
    assert all(event.loss == event.loss for event in told)
    assert built.schedule.last_epoch == 17
    assert told[-1].updates == 17
    assert all(torch.isfinite(p).all() for p in built.model.parameters())


def test_another_learning_rate_changes_nothing_else(make_place):
    """With factor 1 the run is the same to the bit; the attempt starts from the present state in memory."""
    whole, broken = make_place("whole"), make_place("broken")
    built, rebuilt = build(), build()
    ids = [step for *_, step in train(whole.attach(built))]
    order = {(1, 8): lambda: broken.order(SetLearningRate, 1, lr_factor=1.0)}
    seen = train(broken.attach(rebuilt), order)
    assert [step for *_, step in seen] == ids
    assert_same(state_of(built), state_of(rebuilt))
    record = broken.records()[2]
    assert (record.starts_from.checkpoint_id, record.starts_from.source) == (CheckpointId(1, 8), Source.STAGED)
    (applied,) = broken.events(CommandApplied)
    assert (applied.step, applied.new_attempt) == (8, 2)


def test_the_factor_holds_and_returns_also_over_a_restart(place):
    order = {
        (1, 4): lambda: place.order(SetLearningRate, 1, lr_factor=0.5, lr_hold_steps=3, lr_rewarm_steps=4)
    }
    train(place.attach(build(), total_steps=9), order)
    train(place.attach(build(), total_steps=14))
    assert place.records()[3].cause == "started by the user"
    plain, ours = schedule_values("LambdaLR", 14), rates(place, 2) | rates(place, 3)
    factors = [rate / plain[step - 1] for step, rate in ours.items()]
    assert factors == pytest.approx([0.5, 0.5, 0.5, 0.625, 0.75, 0.875, 1.0, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("every", [1, 0, 4])
def test_a_learning_rate_waits_for_a_snapshot_and_a_save_is_one(place, every):
    """Snapshots of every step, of none, of every fourth: the commands make the one that they need."""
    checkpoint = {"save_every_seconds": None, "snapshot_every_steps": every}
    staged = []
    actions = {
        (1, 6): lambda: (place.order(SaveCheckpoint, 1), staged.extend(StagingFolder(place.staging).scan())),
        (1, 10): lambda: place.order(SetLearningRate, 2, lr_factor=0.5),
    }
    train(place.attach(build(), total_steps=20, checkpoint=checkpoint), actions)
    save, rate = place.events(CommandApplied)
    assert [i.step for i in staged] == {1: [3, 4, 5], 0: [], 4: [4]}[every]
    # Without snapshots of every step, every step might become a save, and can serve.
    saved = 6 if every == 0 else 7
    assert (save.number, save.step, save.new_attempt) == (1, saved, None)
    assert CheckpointId(1, saved) in place.committed()
    expected = 11 if every == 4 else 10
    assert (rate.step, place.records()[2].starts_from.step) == (expected, expected)
    assert place.events(SnapshotSkipped) == []


def test_what_cannot_be_done_is_refused_and_changes_nothing(make_place):
    whole, place = make_place("whole"), make_place()
    built, rebuilt = build(), build()
    train(whole.attach(built, total_steps=20))
    target = {"to_attempt": 1, "to_step": 5, "lr_factor": 0.5}
    actions = {
        (1, 7): lambda: place.order(RollBack, 1, attempt=2, **target),
        (1, 8): lambda: place.order(RollBack, 2, **target | {"to_attempt": 3}),
        (1, 9): lambda: place.order(RollBack, 3, **target | {"to_step": 6}),
        (1, 10): lambda: place.order(SetLearningRate, 4, attempt=None, lr_factor=0.5),
        (1, 20): lambda: place.order(RollBack, 9, **target),
    }
    train(place.attach(rebuilt, total_steps=20), actions)
    assert [(e.number, e.step, e.reason) for e in place.events(CommandRefused)] == [
        (1, 7, "it is for attempt 2; this is attempt 1"),
        (2, 8, "step 5 of attempt 3 is not on the lineage of attempt 1"),
        (3, 9, "step 6 of attempt 1 cannot be loaded: there is no such checkpoint on storage"),
        (4, 10, "it is for attempt None; this is attempt 1"),
        (9, 20, "training ends with step 20"),
    ]
    assert list(place.records()) == [1]
    assert_same(state_of(built), state_of(rebuilt))


def test_a_damaged_target_is_refused_with_the_file_and_goes_to_quarantine(make_place):
    whole, place = make_place("whole"), make_place()
    built, rebuilt = build(), build()
    train(whole.attach(built, total_steps=20))
    order = roll_back(place, 1, 5)

    def damage_and_order():
        place.wait_committed(1, 5)
        shard = place.storage / "unit" / folder_name(CheckpointId(1, 5)) / "rank-00000.safetensors"
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
        order()

    train(place.attach(rebuilt, total_steps=20), {(1, 8): damage_and_order})
    (refused,) = place.events(CommandRefused)
    assert "rank-00000.safetensors: has checksum" in refused.reason
    assert_same(state_of(built), state_of(rebuilt))
    wait_until(lambda: place.events(CheckpointQuarantined), 10, "the checkpoint is quarantined")
    assert CheckpointId(1, 5) not in place.committed()


def test_numbers_rise_and_a_repeated_command_is_ignored_also_by_the_next_start(place):
    order = roll_back(place, 5, 5)
    train(place.attach(build(), total_steps=12), {(1, 7): order, (2, 8): order, (2, 9): roll_back(place, 4, 5)})
    train(place.attach(build(), total_steps=20))
    assert [(e.number, e.step) for e in place.events(CommandApplied)] == [(5, 7)]
    assert place.events(CommandRefused) == []
    assert [record.command for record in place.records().values()] == [0, 5, 5]


def test_a_new_command_with_a_number_that_is_too_low_is_refused_once(place):
    """Recovery lost its database and counts from 1 again; what quotes another attempt stays unanswered."""
    actions = {
        (1, 7): roll_back(place, 7, 5),
        (2, 8): lambda: (place.order(SaveCheckpoint, 3, attempt=2), place.order(SaveCheckpoint, 4, attempt=1)),
        (2, 10): lambda: place.order(SaveCheckpoint, 7, attempt=2),
        (2, 12): lambda: place.order(SaveCheckpoint, 8, attempt=2),
    }
    train(place.attach(build(), total_steps=20), actions)
    assert [(e.number, e.attempt, e.step, e.reason) for e in place.events(CommandRefused)] == [
        (3, 2, 8, "number 3 is not above 7"),
        (7, 2, 10, "number 7 is not above 7"),
    ]
    assert [event.number for event in place.events(CommandApplied)] == [7, 8]


class Counting:
    """A user's object that takes only young states, but says so only when it is given one."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        if state["count"] < 8:
            raise ValueError("too old for me")
        self.count = state["count"]


def test_a_target_that_turns_out_wrong_half_way_leaves_the_newest_state(make_place):
    """Something was touched already: all go back to the newest snapshot, which is that of the step just done."""
    whole, place = make_place("whole"), make_place()
    built, rebuilt = build(), build()
    train(whole.attach(built, total_steps=20))
    counting = Counting()
    session = place.attach(rebuilt, total_steps=20, extra_state={"counting": counting})
    rebuilt.model.register_forward_pre_hook(lambda *_: setattr(counting, "count", counting.count + 1))
    train(session, {(1, 12): roll_back(place, 1, 5, lr_factor=0.5)})
    (refused,) = place.events(CommandRefused)
    assert "extra_state.counting: Counting does not take the state in the checkpoint" in refused.reason
    record = place.records()[2]
    assert (record.starts_from.checkpoint_id, record.lr_factor) == (CheckpointId(1, 12), 1.0)
    assert place.events(CommandApplied) == []
    assert_same(state_of(built), state_of(rebuilt))


def test_abandoned_saves_block_no_buffer_and_are_not_written(place):
    """The writer hangs with a save of step 15 to write; after a roll-back to 10 it is nobody's any more."""
    drain = []

    def stop_drain():
        place.wait_committed(1, 10)
        drain.append(holder_pid(place.staging / "drain.lock"))
        os.kill(drain[0], signal.SIGSTOP)

    def let_go():
        os.kill(drain[0], signal.SIGCONT)

    actions = {
        (1, 9): lambda: place.wait_committed(1, 5),
        (1, 13): stop_drain,
        (1, 16): roll_back(place, 1, 10),
        (2, 18): let_go,
    }
    train(place.attach(build(), total_steps=20), actions, settle=False)
    assert place.events(SnapshotSkipped) == []
    assert CheckpointId(1, 15) not in place.committed()
    assert {CheckpointId(1, 10), CheckpointId(2, 20)} <= set(place.committed())


def test_loader_workers_live_on_and_fetch_the_right_samples(make_place):
    plain, with_workers = make_place("plain"), make_place("workers")
    window = (SkipWindow(start=11, stop=14),)
    seen = train(plain.attach(build()), {(1, 15): roll_back(plain, 1, 10, skip_windows=window)})
    session = with_workers.attach(build(), num_workers=2)
    workers = []

    def children():
        return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()

    order = roll_back(with_workers, 1, 10, skip_windows=window)
    actions = {(1, 15): lambda: (workers.append(children()), order()), (2, 20): lambda: workers.append(children())}
    assert train(session, actions) == seen
    assert workers[0] == workers[1]


def test_our_own_next_attempt_does_not_supersede_us_but_another_ones_does(place):
    """The watch looks every second: it sees the record of the roll-back, and later one of somebody else."""
    session = place.attach(build(), total_steps=None)
    host = session._host

    def watch_too_early():
        host._watch()
        host._superseded_by = place.records()[2]  # as when the watch was quicker than our own claim's return

    def claim_elsewhere():
        foreign = place.records()[2].model_copy(update={"attempt": 3, "host": "elsewhere"})
        (place.storage / "unit/attempts/000003.json").write_text(foreign.model_dump_json())

    actions = {(1, 7): roll_back(place, 1, 5), (2, 10): watch_too_early, (2, 12): claim_elsewhere}
    with pytest.raises(Superseded, match="attempt 3 was started on elsewhere"):
        train(session, actions)
    host.close()


def test_a_claim_that_somebody_else_won_ends_this_session(place):
    session = place.attach(build(), total_steps=None)
    order = roll_back(place, 1, 5)

    def lose():
        order()
        foreign = place.records()[1].model_copy(update={"attempt": 2, "host": "elsewhere"})
        (place.storage / "unit/attempts/000002.json").write_text(foreign.model_dump_json())

    with pytest.raises(Superseded, match="attempt 2 was claimed by somebody else"):
        train(session, {(1, 7): lose})
    session._host.close()
    session._loader.close()


def test_files_that_are_no_commands_are_passed_over(place):
    def litter():
        place.order(SaveCheckpoint, 1)
        folder = place.staging / "commands"
        (folder / "000000000001.json").write_text("{")
        (folder / "000000000002.json").write_text('{"type": "NewerThanUs"}')
        (folder / "readme.txt").write_text("x")
        write_command(place.staging, SaveCheckpoint(job="other", number=3, attempt=1, reason="test"))
        place.order(SaveCheckpoint, 4)

    train(place.attach(build(), total_steps=20), {(1, 7): litter})
    assert [event.number for event in place.events(CommandApplied)] == [4]
    assert place.events(CommandRefused) == []


@pytest.mark.parametrize("left_out", [False, True])
def test_the_blow_up_comes_with_its_batch(place, monkeypatch, left_out):
    """Again in the same step after a roll-back, unless the batch is left out; beyond clipping and all guards."""
    monkeypatch.setenv(TRAINING_FAULT_ENVIRONMENT_KEY, str(blow_up(factor=1e6).at(step=13)))
    built, blown = build(), []
    built.optimizer.register_step_post_hook(
        lambda *_: blown.append(max(s["exp_avg"].abs().max().item() for s in built.optimizer.state.values()) > 1e3)
    )
    windows = (SkipWindow(start=12, stop=13),) if left_out else ()
    train(place.attach(built, total_steps=20), {(1, 14): roll_back(place, 1, 10, skip_windows=windows)})
    told = [(event.attempt, event.step) for event in place.events(StepCompleted)]
    first_of = {attempt: step for (attempt, step), bad in reversed(list(zip(told, blown, strict=True))) if bad}
    assert first_of == ({1: 13} if left_out else {1: 13, 2: 13})
    assert all(event.grad_norm < 100 and event.applied for event in place.events(StepCompleted))
