from __future__ import annotations

import errno
import mmap
import os
import tracemalloc
from pathlib import Path

import pytest

from surefoot.checkpoint.catalog import (
    list_committed,
    read_manifest,
    read_part,
    read_scalars,
    read_shard,
    verify,
)
from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.checkpoint.manifest import (
    MANIFEST_FILE,
    ShardPart,
    build_manifest,
    encode_manifest,
    encode_part,
    part_file,
    shard_file,
)
from surefoot.checkpoint.store import PIECE_BYTES, LocalStore
from surefoot.errors import EXIT_DAMAGED, CheckpointError, DamagedCheckpoint

ID = CheckpointId(attempt=3, step=120)
WORLD_SIZE = 2
FILES = [shard_file(0), part_file(0), shard_file(1), part_file(1), MANIFEST_FILE]
SCALARS = {"step": 120, "scheduler": {"last_epoch": 120}, "lr": 0.1}


def shard_bytes(checkpoint_id: CheckpointId, rank: int, num_bytes: int = 10_000) -> bytes:
    return bytes((checkpoint_id.step + rank + i) % 251 for i in range(1000)) * (num_bytes // 1000)


def commit(store: LocalStore, checkpoint_id: CheckpointId = ID, num_bytes: int = 10_000) -> None:
    folder = folder_name(checkpoint_id)
    parts = []
    for rank in range(WORLD_SIZE):
        written = store.write(f"{folder}/{shard_file(rank)}", [shard_bytes(checkpoint_id, rank, num_bytes)])
        part = ShardPart(
            job="llm",
            attempt=checkpoint_id.attempt,
            step=checkpoint_id.step,
            world_size=WORLD_SIZE,
            rank=rank,
            plan_digest="ab" * 16,
            file=shard_file(rank),
            num_bytes=written.num_bytes,
            xxh3_128=written.xxh3_128,
            scalars=SCALARS if rank == 0 else None,
        )
        parts.append((encode_part(part), part))
        store.write(f"{folder}/{part_file(rank)}", [parts[-1][0]])
    store.write(f"{folder}/{MANIFEST_FILE}", [encode_manifest(build_manifest(parts))])


@pytest.fixture
def store(tmp_path) -> LocalStore:
    store = LocalStore(tmp_path / "job")
    commit(store)
    return store


def path_of(store: LocalStore, name: str, checkpoint_id: CheckpointId = ID) -> Path:
    return store.root / folder_name(checkpoint_id) / name


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(bytes(data))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def zero(path: Path) -> None:
    """As a file looks whose data never got to the disk."""
    path.write_bytes(bytes(path.stat().st_size))


def test_a_whole_checkpoint_passes(store):
    verify(store, ID)
    assert read_scalars(store, ID) == SCALARS
    manifest = read_manifest(store, ID)
    for rank in range(WORLD_SIZE):
        assert bytes(read_shard(store, manifest, rank)) == shard_bytes(ID, rank)
        assert read_part(store, manifest, rank).rank == rank


def test_another_jobs_checkpoint_is_refused_but_is_no_damage(store):
    assert read_manifest(store, ID, "llm") == read_manifest(store, ID)
    with pytest.raises(CheckpointError, match=r"is a checkpoint of job 'llm' and not of job 'other'") as caught:
        read_manifest(store, ID, "other")
    assert not isinstance(caught.value, DamagedCheckpoint)
    assert str(path_of(store, MANIFEST_FILE)) in str(caught.value)
    verify(store, ID)  # copies can be verified wherever they are


@pytest.mark.parametrize("harm", [Path.unlink, halve, empty, grow, zero])
@pytest.mark.parametrize("name", FILES)
def test_c1_each_file_deleted_halved_or_emptied_is_refused_and_named(store, name, harm):
    previous = CheckpointId(3, 100)
    commit(store, previous)
    harm(path_of(store, name))
    with pytest.raises(DamagedCheckpoint) as caught:
        verify(store, ID)
    assert caught.value.path == str(path_of(store, name))
    assert str(path_of(store, name)) in str(caught.value)
    assert caught.value.exit_code == EXIT_DAMAGED
    verify(store, previous)


def test_c1_a_checkpoint_without_manifest_does_not_exist(store):
    commit(store, CheckpointId(3, 100))
    path_of(store, MANIFEST_FILE).unlink()
    assert list_committed(store) == [(3, 100)]


@pytest.mark.parametrize("harm", [Path.unlink, halve, empty, grow, zero, lambda path: flip(path, 5_000)])
def test_c1_a_damaged_shard_is_refused_on_load_too(store, harm):
    manifest = read_manifest(store, ID)
    harm(path_of(store, shard_file(1)))
    with pytest.raises(DamagedCheckpoint) as caught:
        read_shard(store, manifest, 1)
    assert caught.value.path == str(path_of(store, shard_file(1)))
    assert bytes(read_shard(store, manifest, 0)) == shard_bytes(ID, 0)


@pytest.mark.parametrize("harm", [Path.unlink, halve, empty, grow, zero, lambda path: flip(path, 40)])
@pytest.mark.parametrize("name", [part_file(0), MANIFEST_FILE])
def test_c1_scalars_of_a_damaged_file_are_refused(store, name, harm):
    harm(path_of(store, name))
    with pytest.raises(DamagedCheckpoint) as caught:
        read_scalars(store, ID)
    assert caught.value.path == str(path_of(store, name))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_c8_one_byte_flipped_in_any_file_is_refused_and_named(store, name, where):
    path = path_of(store, name)
    flip(path, {"first": 0, "middle": path.stat().st_size // 2, "last": -1}[where])
    with pytest.raises(DamagedCheckpoint) as caught:
        verify(store, ID)
    assert caught.value.path == str(path)


def test_sizes_are_looked_at_before_any_checksum(store):
    flip(path_of(store, shard_file(0)), 17)
    halve(path_of(store, part_file(1)))
    with pytest.raises(DamagedCheckpoint, match=r"rank-00001\.json: has \d+ bytes instead of"):
        verify(store, ID)


def test_shards_swapped_between_ranks_are_noticed(store):
    one, other = path_of(store, shard_file(0)), path_of(store, shard_file(1))
    one_data, other_data = one.read_bytes(), other.read_bytes()
    one.write_bytes(other_data)
    other.write_bytes(one_data)
    with pytest.raises(DamagedCheckpoint, match="rank-00000"):
        verify(store, ID)


def test_a_folder_renamed_to_another_step_is_refused(store):
    store.move(folder_name(ID), folder_name(CheckpointId(3, 999)))
    with pytest.raises(DamagedCheckpoint, match="is the manifest of step 120 of attempt 3"):
        verify(store, CheckpointId(3, 999))


@pytest.mark.parametrize("order", [1, 0, -1], ids=["rising", "equal", "reversed"])
def test_c3_order_comes_from_the_manifest_whatever_the_file_times_say(store, order):
    ids = [CheckpointId(1, 9000), CheckpointId(2, 40), CheckpointId(2, 200), CheckpointId(10, 5)]
    for checkpoint_id in ids:
        commit(store, checkpoint_id)
    for age, checkpoint_id in enumerate(sorted([*ids, ID])):
        folder = store.root / folder_name(checkpoint_id)
        for path in [*folder.iterdir(), folder]:
            os.utime(path, (1_700_000_000 + order * age,) * 2)
    assert list_committed(store) == [(1, 9000), (2, 40), (2, 200), (3, 120), (10, 5)]


def test_what_is_not_a_committed_checkpoint_is_not_listed(store):
    store.write("attempts/000001.json", [b"{}"])
    store.write("step-000000130-a0003/rank-00000.safetensors", [b"x"])
    store.write("quarantine/step-000000110-a0003/manifest.json", [b"{}"])
    store.write("step-140-a3/manifest.json", [b"{}"])
    (store.root / "step-000000150-a0003").write_text("a file")
    temp = store.root / ".tmp-1-ab-step-000000160-a0003"
    temp.mkdir()
    (temp / MANIFEST_FILE).write_text("{}")
    assert list_committed(store) == [ID]
    assert list_committed(LocalStore(store.root / "nothing")) == []


def test_a_later_file_such_as_stable_json_does_no_harm(store):
    store.write(f"{folder_name(ID)}/stable.json", [b"{}"])
    verify(store, ID)


def test_a_disk_that_cannot_be_read_is_not_damage(store, monkeypatch):
    read = store.read

    class Broken:
        def __init__(self, file):
            self._file = file

        def __getattr__(self, name):
            return getattr(self._file, name)

        def __enter__(self):
            return self

        def __exit__(self, *args):
            self._file.close()

        def readinto(self, buffer):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(store, "read", lambda key: Broken(read(key)) if "safetensors" in key else read(key))
    with pytest.raises(OSError, match="Input/output"):
        verify(store, ID)
    with pytest.raises(OSError, match="Input/output"):
        read_shard(store, read_manifest(store, ID), 0)


def test_a_shard_can_be_read_into_memory_of_the_caller(store):
    manifest = read_manifest(store, ID)
    memory = mmap.mmap(-1, 65536)
    shard = read_shard(store, manifest, 1, into=memoryview(memory))
    assert len(shard) == manifest.shard(1).num_bytes
    assert memory[: len(shard)] == shard_bytes(ID, 1)
    assert memory[len(shard) :] == bytes(65536 - len(shard))
    with pytest.raises(ValueError, match="cannot hold the shard"):
        read_shard(store, manifest, 1, into=memoryview(bytearray(10)))
    shard.release()


def test_large_shards_are_verified_in_little_memory(store):
    big = CheckpointId(4, 1)
    num_bytes = 8 * PIECE_BYTES + 1000
    commit(store, big, num_bytes)
    tracemalloc.start()
    verify(store, big)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert PIECE_BYTES <= peak_bytes < 2 * PIECE_BYTES
    flip(path_of(store, shard_file(1), big), num_bytes - 1001)
    with pytest.raises(DamagedCheckpoint, match="rank-00001"):
        verify(store, big)
    with pytest.raises(DamagedCheckpoint, match="rank-00001"):
        read_shard(store, read_manifest(store, big), 1)
