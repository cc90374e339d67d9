"""Loading from storage that fails, is damaged, or holds something else; C1, C8 and DESIGN 5.3."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from helpers.shards import commit, plain_shards
from surefoot.checkpoint.attempts import Source
from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.checkpoint.layout import ShardLayout
from surefoot.checkpoint.store import LocalStore
from surefoot.errors import DamagedCheckpoint, NoUsableCheckpoint, UsageError
from surefoot.sdk import opening
from surefoot.sdk.opening import open_committed
from surefoot.sdk.restore import Candidate, describe_problem, restore, worst_of
from surefoot.sdk.rollback import HalfLoaded, Refusal, load_committed
from surefoot.sdk.state import TrainingState

OLDER, NEWER = CheckpointId(1, 10), CheckpointId(1, 20)
RANK_1 = f"{folder_name(NEWER)}/rank-00001.safetensors"


class FlakyStore(LocalStore):
    """Storage whose reads of some keys fail a number of times."""

    def __init__(self, root):
        super().__init__(root)
        self.failures = {}
        self.num_reads = {}

    def read(self, key):
        self.num_reads[key] = self.num_reads.get(key, 0) + 1
        if self.failures.get(key, 0) > 0:
            self.failures[key] -= 1
            raise OSError(errno.EIO, "Input/output error", key)
        return super().read(key)


class Rank:
    """One rank with a model, two committed checkpoints (each of two ranks), and what it reports."""

    def __init__(self, root):
        self.store = FlakyStore(root / "job")
        self.settings = SimpleNamespace(spec=SimpleNamespace(job="job", events_path="events"))
        self.group = SimpleNamespace(rank=0, world_size=1, gather_json=lambda value: [value])
        self.folder = self
        self.events, self.reports = [], []
        self.state = self.make(0.0)
        for checkpoint in (OLDER, NEWER):
            state = self.make(float(checkpoint.step))
            tensors, scalars = state.capture()
            document = {"step": checkpoint.step, "updates": checkpoint.step, "state": scalars}
            commit(self.store, "job", checkpoint, plain_shards(state, tensors, 2), document)

    @staticmethod
    def make(value):
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        state = TrainingState(model, optimizer, {})
        with torch.no_grad():
            for tensor in state.capture()[0].values():
                tensor.fill_(value)
        return state

    def report(self, event):
        self.events.append(event)

    def write_report(self, checkpoint, file, reason):
        self.reports.append((checkpoint, file.rpartition("/")[2], reason))

    def values(self):
        return {value for tensor in self.state.capture()[0].values() for value in tensor.flatten().tolist()}

    def restore(self):
        return restore(self, self.state, [Candidate(i, Source.COMMITTED) for i in (NEWER, OLDER)])

    def damage(self, key, change):
        path = self.store.root / key
        path.write_bytes(change(bytearray(path.read_bytes())))


@pytest.fixture
def rank(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "RETRY_DELAYS_SECONDS", (0.0, 0.0))
    return Rank(tmp_path)


@pytest.mark.parametrize("file", ["manifest.json", "rank-00000.json", "rank-00001.json", "rank-00001.safetensors"])
@pytest.mark.parametrize("num_failures", [2, 3])
def test_a_read_that_fails_is_tried_three_times_and_the_checkpoint_left_in_place(rank, file, num_failures):
    """An I/O error says nothing about a checkpoint: nobody is told to look into it, an older one is used."""
    rank.store.failures[f"{folder_name(NEWER)}/{file}"] = num_failures
    found = rank.restore()
    good = num_failures < 3
    assert found.starts_from.checkpoint_id == (NEWER if good else OLDER)
    assert rank.values() == {float(found.counters.step)}
    assert rank.reports == []
    assert [("left in place" in event.reason, event.candidate_step) for event in rank.events] == [(True, 20)] * (
        not good
    )


@pytest.mark.parametrize("file", ["rank-00000.json", "rank-00001.json", "rank-00000.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "delete"])
def test_any_damaged_file_is_reported_and_the_older_one_used(rank, file, damage):
    path = rank.store.root / folder_name(NEWER) / file
    data = bytearray(path.read_bytes())
    if damage == "delete":
        path.unlink()
    elif damage == "flip":
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    else:
        path.write_bytes(data[: len(data) // 2] if damage == "cut" else b"")
    found = rank.restore()
    assert found.starts_from.checkpoint_id == OLDER
    assert rank.values() == {10.0}
    assert [(checkpoint, name) for checkpoint, name, _ in rank.reports] == [(NEWER, file)]


def test_every_flipped_bit_of_a_header_is_damage_and_never_another_model(rank):
    """Where tensors lie is read before it is verified; what it says must not be believed."""
    whole = (rank.store.root / RANK_1).read_bytes()
    length = int.from_bytes(whole[:8], "little")
    text_bytes = len(whole[8 : 8 + length].rstrip())
    for at in range(0, 8 + text_bytes, 7):
        rank.damage(RANK_1, lambda _, at=at: whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DamagedCheckpoint), open_committed(rank, NEWER) as (tensors, scalars):
            rank.state.restore(tensors, scalars["state"])


def test_another_model_is_refused_and_nothing_falls_back(rank):
    model = nn.Linear(3, 5)
    rank.state = TrainingState(model, torch.optim.AdamW(model.parameters()), {})
    with pytest.raises(UsageError, match="does not match the checkpoint"):
        rank.restore()
    assert (rank.events, rank.reports) == ([], [])


def test_nothing_good_is_left(rank):
    for checkpoint in (OLDER, NEWER):
        rank.damage(f"{folder_name(checkpoint)}/rank-00000.safetensors", lambda data: data[:-1])
    with pytest.raises(NoUsableCheckpoint, match="tried committed step 20 of attempt 1, committed step 10"):
        rank.restore()


def test_a_roll_back_verifies_all_before_it_changes_anything(rank):
    """The last byte of the last shard is wrong, which a load in one pass would find out when it is too late."""
    rank.damage(RANK_1, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(Refusal, match=r"step 20 of attempt 1 cannot be loaded: .*rank-00001.safetensors"):
        load_committed(rank, rank.state, NEWER)
    assert rank.values() == {0.0}
    assert [(checkpoint, name) for checkpoint, name, _ in rank.reports] == [(NEWER, "rank-00001.safetensors")]
    assert load_committed(rank, rank.state, OLDER).counters.step == 10
    assert rank.values() == {10.0}


def test_storage_that_fails_between_verifying_and_loading_leaves_a_state_to_replace(rank):
    rank.store.read_normally = rank.store.read
    num_reads = 0

    def read(key):
        nonlocal num_reads
        num_reads += key == RANK_1
        if num_reads > 2:  # the header, and all of it to verify it
            raise OSError(errno.EIO, "Input/output error", key)
        return rank.store.read_normally(key)

    rank.store.read = read
    with pytest.raises(HalfLoaded, match="Input/output error"):
        load_committed(rank, rank.state, NEWER)
    assert rank.reports == []


def test_shards_are_read_one_after_the_other_into_the_same_memory(rank):
    """So a restore needs no more memory beside the model than the largest shard."""
    with open_committed(rank, NEWER) as (tensors, _):
        addresses = set()
        for number in (0, 1):
            with tensors._open_shard(number) as shard:
                addresses.add(torch.frombuffer(shard, dtype=torch.uint8).data_ptr())
    assert len(addresses) == 1


def test_what_exists_is_filled_in_place(rank):
    """New memory costs several times a copy into it; a roll-back has all of it already."""
    before = {name: tensor.data_ptr() for name, tensor in rank.state.capture()[0].items()}
    rank.restore()
    assert {name: tensor.data_ptr() for name, tensor in rank.state.capture()[0].items()} == before
    assert rank.values() == {20.0}


def test_a_shard_without_tensors_is_part_of_the_checkpoint_too(rank):
    """A tiny model on many ranks: what nobody needs for loading is looked at all the same."""
    state = rank.make(20.0)
    tensors, scalars = state.capture()
    shards = plain_shards(state, tensors, 20)
    checkpoint = CheckpointId(1, 30)
    commit(rank.store, "job", checkpoint, shards, {"step": 30, "updates": 30, "state": scalars})
    (empty, *_) = [number for number, shard in enumerate(shards) if not ShardLayout.parse(memoryview(shard)).entries]
    rank.damage(f"{folder_name(checkpoint)}/rank-{empty:05}.safetensors", lambda data: data[:-1] + b"x")
    with pytest.raises(DamagedCheckpoint), open_committed(rank, checkpoint):
        pass


def test_damage_found_by_any_rank_goes_before_what_others_say():
    io_error = describe_problem(OSError(errno.EIO, "Input/output error"))
    damage = describe_problem(DamagedCheckpoint("/x/rank-00001.json", "is missing"))
    assert worst_of([None, io_error, damage]) == damage
    assert worst_of([None, io_error, None]) == io_error
    assert worst_of([None, None]) is None
    assert (io_error["file"], damage["file"]) == ("", "/x/rank-00001.json")
