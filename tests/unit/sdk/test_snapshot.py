"""Snapshots of one rank in this process: real staging memory, a real drain, and a device that copies when it likes."""

from __future__ import annotations

import copy
import importlib
import os
import shutil
import signal
import threading

import pytest
import torch

from helpers.in_process import JOB, build, train
from helpers.waiting import wait_until
from surefoot.checkpoint.catalog import read_manifest, read_scalars, read_shard
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.layout import ShardLayout
from surefoot.checkpoint.locks import holder_pid
from surefoot.checkpoint.staging import required_bytes
from surefoot.errors import StagingTooSmall, UsageError
from surefoot.events import SetLearningRate, SnapshotSkipped
from surefoot.sdk import buffers
from surefoot.sdk.collectives import ControlGroup
from surefoot.sdk.copying import HostCopier
from surefoot.sdk.host import _is_child_running
from surefoot.sdk.sharding import tensor_over

ATTACH = importlib.import_module("surefoot.sdk.attach")  # `surefoot.sdk.attach` is the function in it
SAVE_AT_3 = {"save_every_steps": 3, "save_every_seconds": None}



class Average:
    """The user's own state: a running average of the weights, changed in place."""

    def __init__(self, model):
        self.tensors = {name: p.detach().clone() for name, p in model.named_parameters()}

    def state_dict(self):
        return dict(self.tensors)

    def load_state_dict(self, state_dict):
        self.tensors = state_dict


class LateDevice:
    """A device whose copies happen on a thread of their own, and not before somebody waits for them."""

    def __init__(self):
        self.log = []
        self.threads = []
        self.waited = threading.Event()

    def use(self, memory):
        self.log.append(f"use {len(memory)}")

    def start(self, copies):
        HostCopier().start([c for c in copies if not c.may_wait])
        late = [c for c in copies if c.may_wait]
        self.waited.clear()
        self.threads.append(threading.Thread(target=self.run, args=(late,)))
        self.threads[-1].start()
        self.log.append("start")
        return False

    def run(self, late):
        assert self.waited.wait(30)
        HostCopier().start(late)

    def wait(self):
        self.waited.set()
        while self.threads:
            self.threads.pop().join()
        self.log.append("wait")


@pytest.fixture
def late_device(monkeypatch):
    device = LateDevice()
    monkeypatch.setattr(ATTACH, "choose_copier", lambda model: device)
    return device


def content(place, checkpoint_id):
    """Every tensor of a committed checkpoint, and its scalars without the time."""
    manifest = read_manifest(place.store, checkpoint_id, JOB)
    tensors = {}
    for rank in range(manifest.world_size):
        shard = read_shard(place.store, manifest, rank)
        layout = ShardLayout.parse(shard)
        tensors |= {e.name: tensor_over(layout.tensor_view(shard, e.name), e).clone() for e in layout.entries}
    scalars = read_scalars(place.store, checkpoint_id)
    for changing in ("saved_at", "trained_seconds"):
        scalars.pop(changing)
    return tensors, scalars


def captured(session):
    tensors, scalars = session._snapshots._state.capture()
    return {name: tensor.clone() for name, tensor in tensors.items()}, copy.deepcopy(scalars)


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert different == []


def drain_of(place):
    return wait_until(lambda: holder_pid(place.staging / "drain.lock"), 20, "there is a drain")


def sizes(place):
    return {path.name: path.stat().st_size for path in place.staging.glob("*.stage")}


@pytest.mark.parametrize("num_buffers", [1, 2, 3])
def test_everything_is_allocated_before_the_first_step_and_never_more(place, num_buffers):
    """The first snapshot of a new job finds its memory there, laid out: nothing grows, and it is buffers x state."""
    every = 0 if num_buffers < 3 else 1
    options = {"num_buffers": num_buffers, "snapshot_every_steps": every, "save_every_steps": 2}
    session = place.attach(build(), total_steps=6, checkpoint=options | {"save_every_seconds": None})
    at_start, plan = sizes(place), session._snapshots._plan
    layout = plan.layout
    assert len(at_start) == num_buffers
    assert set(at_start.values()) == {required_bytes(layout.shard_bytes)}
    allocated = [path.stat().st_blocks * 512 for path in place.staging.glob("*.stage")]
    assert sum(allocated) >= num_buffers * layout.shard_bytes
    during = []
    for batch in session:
        session.step(session.model(batch).pow(2).mean())
        during.append(sizes(place))
    assert during == [at_start] * 6
    assert session._snapshots._plan is plan
    assert {name for name in layout.by_name if name.startswith("optimizer.")} != set()


class TwoRanks(ControlGroup):
    """This rank and another one, which is about to allocate as much."""

    def __init__(self, memory_of_other=None):
        super().__init__(0, 2, None)
        self.memory_of_other = memory_of_other

    def gather_json(self, value):
        other = dict(value) if isinstance(value, dict) else value
        if self.memory_of_other and isinstance(value, dict):
            other["memory"] = self.memory_of_other
        return [value, other]


@pytest.mark.parametrize(("elsewhere", "factor", "fits"), [(False, 1.5, False), (False, 2.5, True), (True, 1.5, True)])
def test_ranks_of_a_host_are_refused_together(place, monkeypatch, elsewhere, factor, fits):
    """There is room for each of two ranks alone and not for both: each finds out, before either allocates."""
    session = place.attach(build())
    host = session._host
    one = 3 * required_bytes(5 << 20) - sum(sizes(place).values())
    monkeypatch.setattr(host, "group", TwoRanks("another host" if elsewhere else None))
    monkeypatch.setattr(buffers, "free_bytes", lambda path: int(factor * one))
    before = sizes(place)
    if fits:
        assert len(buffers.make_buffers(host, 5 << 20)) == 3
        assert set(sizes(place).values()) == {required_bytes(5 << 20)}
    else:
        with pytest.raises(StagingTooSmall) as raised:
            buffers.make_buffers(host, 5 << 20)
        assert raised.value.needed_bytes == 2 * one
        assert sizes(place) == before


def test_a_job_that_does_not_fit_begins_no_attempt(place, monkeypatch):
    monkeypatch.setattr(buffers, "free_bytes", lambda path: 1 << 20)
    with pytest.raises(StagingTooSmall, match="num_buffers"):
        place.attach(build())
    assert place.records() == {}
    assert sizes(place) == {}
    monkeypatch.undo()
    train(place.attach(build(), total_steps=2))
    assert list(place.records()) == [1]


def test_one_buffer_is_refilled_once_it_is_durable(place):
    """`num_buffers: 1` is a synchronous save: while the only buffer waits for storage it is left alone."""
    options = {"num_buffers": 1, "snapshot_every_steps": 0, "save_every_steps": 2, "save_every_seconds": None}
    session = place.attach(build(), total_steps=12, checkpoint=options)
    drain, stopped, seen = drain_of(place), False, {}
    for batch in session:
        if session.global_step == 3:
            wait_until(lambda: not session._snapshots.has_unwritten_save(), 20, "step 2 is durable")
            os.kill(drain, signal.SIGSTOP)
            stopped = True
        if session.global_step == 8:
            os.kill(drain, signal.SIGCONT)
            wait_until(lambda: not session._snapshots.has_unwritten_save(), 20, "step 4 is durable")
            stopped = False
        session.step(session.model(batch).pow(2).mean())
        (buffer,) = session._snapshots._buffers
        header = buffer.header()
        seen[session.global_step] = 0 if header is None else header.step
        assert not stopped or header.step in (2, 4)
    assert [seen[step] for step in (2, 4, 6, 8)] == [2, 4, 4, 4]
    assert [c.step for c in place.committed()][:3] == [2, 4, 9]  # 9 makes up for 6 and 8
    assert place.committed()[-1].step == 12


def test_one_buffer_for_the_snapshot_of_each_step_is_refused(place):
    """It would be overwritten while it is the only thing to go back to."""
    with pytest.raises(UsageError) as raised:
        place.attach(build(), checkpoint={"num_buffers": 1})
    assert raised.value.key == "checkpoint.num_buffers"
    assert "snapshot_every_steps" in raised.value.problem


def test_a_command_with_one_buffer_starts_from_what_is_saved(place):
    """A new learning rate needs a snapshot. In the only buffer it is a save, so it does not stay there for ever."""
    options = {"num_buffers": 1, "snapshot_every_steps": 0, "save_every_steps": 4, "save_every_seconds": None}
    session = place.attach(build(), total_steps=12, checkpoint=options)
    train(session, {(1, 6): lambda: place.order(SetLearningRate, 1, lr_factor=0.5)})
    start = place.records()[2].starts_from
    assert start.checkpoint_id in place.committed()
    assert place.committed()[-1] == CheckpointId(2, 12)
    assert {c.step for c in place.committed()} >= {4, 8, 12}


def test_where_the_staging_folder_was_removed_no_drain_is_started(place):
    """The drain ends with the folder; another one, second by second, would end as soon as it began."""
    host = place.attach(build())._host
    host.close()  # the background thread does what is done below
    drain = drain_of(place)
    shutil.rmtree(place.staging)
    wait_until(lambda: not _is_child_running(drain), 20, "the drain has ended")
    host.ensure_drain()
    assert host._drain_pid == drain


def test_fewer_buffers_than_before_give_the_memory_back(place):
    checkpoint = {"save_every_steps": 4, "save_every_seconds": None}
    first = place.attach(build(), total_steps=4, checkpoint=checkpoint)
    folder = first._host.folder
    folder.hold_session()
    train(first)
    assert len(sizes(place)) == 3
    less = {"num_buffers": 2, "snapshot_every_steps": 0, "save_every_steps": 1, "save_every_seconds": None}
    train(place.attach(build(), total_steps=8, checkpoint=less))
    assert sorted(sizes(place)) == ["rank-00000-buffer-0.stage", "rank-00000-buffer-1.stage"]
    folder.release_session()


@pytest.mark.parametrize("late", [False, True], ids=["host", "device"])
def test_what_changes_right_after_a_step_is_not_in_its_checkpoint(place, monkeypatch, late):
    """C4: nothing is aliased, neither model, buffers, optimizer, schedule nor the user's own state."""
    if late:
        monkeypatch.setattr(ATTACH, "choose_copier", lambda model: LateDevice())
    built = build()
    average = Average(built.model)
    session = place.attach(built, total_steps=6, extra_state={"average": average}, checkpoint=SAVE_AT_3)
    os.kill(drain_of(place), signal.SIGSTOP)
    for batch in session:
        session.step(session.model(batch).pow(2).mean())
        if session.global_step == 3:
            tensors, scalars = captured(session)
            if late:
                session._snapshots.finish()  # as before the next exchange; what the update changes may wait until then
            with torch.no_grad():
                for tensor in session._snapshots._state.capture()[0].values():
                    tensor.add_(1)
            built.schedule.last_epoch += 100
            os.kill(drain_of(place), signal.SIGCONT)
    saved, document = content(place, CheckpointId(1, 3))
    assert_equal(saved, tensors)
    assert document["state"] == scalars
    assert {name.split(".")[0] for name in saved} == {"model", "optimizer", "extra_state"}
    assert "model.1.running_mean" in saved


def test_a_device_copies_beside_the_step_and_is_waited_for_before_the_next_exchange(make_place, monkeypatch):
    """What the optimizer's step changes is copied later, the rest at once; checkpoints are the same to the bit."""
    usual = make_place("usual")
    train(usual.attach(build(), total_steps=9, checkpoint=SAVE_AT_3))
    device, place = LateDevice(), make_place("late")
    monkeypatch.setattr(ATTACH, "choose_copier", lambda model: device)
    exchange = ControlGroup.exchange
    monkeypatch.setattr(ControlGroup, "exchange", lambda *a: device.log.append("exchange") or exchange(*a))
    built = build()
    built.optimizer.register_step_pre_hook(lambda *_: device.log.append("update"))
    session = place.attach(built, total_steps=9, checkpoint=SAVE_AT_3)
    train(session)
    one_step = ["wait", "exchange", "update", "start"]
    assert device.log == ["use 3", *one_step[1:], *one_step * 8, "wait", "use 0"]
    assert place.committed() == usual.committed() == [CheckpointId(1, step) for step in (3, 6, 9)]
    for checkpoint_id in place.committed():
        ours, theirs = content(place, checkpoint_id), content(usual, checkpoint_id)
        assert_equal(ours[0], theirs[0])
        assert ours[1] == theirs[1]


def test_a_snapshot_is_complete_before_a_command_starts_from_it_or_loads_over_it(place, late_device):
    session = place.attach(build(), total_steps=12, checkpoint=SAVE_AT_3)
    seen = []
    carry_out = session._commands.carry_out

    def watched(end):
        if session._commands.wants_snapshot:
            seen.append((end.step, late_device.log[-1]))
        return carry_out(end)

    session._commands.carry_out = watched
    train(session, {(1, 5): lambda: place.order(SetLearningRate, 1, lr_factor=0.5)})
    assert seen == [(5, "wait")]
    assert place.records()[2].starts_from.step == 5


def test_an_evaluation_does_not_hold_a_save_up(place, late_device):
    session = place.attach(build(), total_steps=6, checkpoint=SAVE_AT_3)
    for batch in session:
        session.step(session.model(batch).pow(2).mean())
        if session.global_step == 3:
            assert session._snapshots.has_unwritten_save() is False  # not even complete
            with session.evaluating():
                place.wait_committed(1, 3)


def test_weights_that_a_script_clips_after_the_step_are_never_torn(place, late_device):
    """Changed in place while they may be read: the snapshot has them as training goes on with them, all of them."""
    built = build()
    session = place.attach(built, total_steps=4, checkpoint=SAVE_AT_3)
    for batch in session:
        session.step(session.model(batch).pow(2).mean())
        with torch.no_grad():
            for parameter in built.model.parameters():
                parameter.clamp_(-0.05, 0.05)
        if session.global_step == 3:
            tensors, _ = captured(session)
    saved, _ = content(place, CheckpointId(1, 3))
    assert_equal(saved, tensors)
    assert max(float(saved[name].abs().max()) for name in saved if name.startswith("model.0")) <= 0.051


def test_no_buffer_is_skipped_and_counted_with_a_device_too(place, late_device):
    session = place.attach(build(), total_steps=8, checkpoint=SAVE_AT_3)
    drain = drain_of(place)
    for batch in session:
        if session.global_step == 1:
            os.kill(drain, signal.SIGSTOP)
        if session.global_step == 7:
            os.kill(drain, signal.SIGCONT)
        session.step(session.model(batch).pow(2).mean())
    assert place.committed()[-1].step == 8
    assert place.events(SnapshotSkipped) == []  # one save waits, two buffers go on

