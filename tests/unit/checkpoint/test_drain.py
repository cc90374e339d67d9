from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import subprocess
from contextlib import contextmanager

import pytest
from safetensors import deserialize

from helpers.staging import Ranks, claim, storage_files
from surefoot import faultpoints
from surefoot.checkpoint.attempts import RESERVE_BYTES, RESERVE_KEY
from surefoot.checkpoint.catalog import list_committed, read_scalars, verify
from surefoot.checkpoint.drain import Drain, DrainLoop
from surefoot.checkpoint.drain_prune import RetentionRules
from surefoot.checkpoint.drain_retry import Retried
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.staging_folder import StagingFolder
from surefoot.checkpoint.store import LocalStore
from surefoot.errors import AttemptError
from surefoot.events import (
    CheckpointCommitted,
    CheckpointPruned,
    CheckpointQuarantined,
    MemorySink,
    StorageFailed,
    StorageRecovered,
)


class HookedStore(LocalStore):
    """Calls `before_write(key)` before every write; it may raise OSError or change the world."""

    def __init__(self, root):
        super().__init__(root)
        self.before_write = lambda key: None

    def write(self, key, chunks, *, if_absent=False):
        self.before_write(key)
        return super().write(key, chunks, if_absent=if_absent)


@pytest.fixture
def folder(tmp_path):
    folder = StagingFolder.create(tmp_path / "staging", "job", tmp_path / "storage")
    yield folder
    for buffer in folder.buffers():
        buffer.close()


@pytest.fixture
def store(tmp_path):
    return HookedStore(tmp_path / "storage" / "job")


@pytest.fixture
def sink():
    return MemorySink()


@pytest.fixture
def drain(folder, store, sink):
    return Drain(staging=folder, store=store, sink=sink, job="job")


@pytest.fixture
def ranks(folder, store):
    claim(store, 0)
    return Ranks(folder, attempt=1)


def ids(*pairs):
    return [CheckpointId(*pair) for pair in pairs]


class TestCommit:
    def test_a_persist_snapshot_becomes_a_verified_checkpoint(self, drain, ranks, store, folder, sink):
        ranks.save(9)
        ranks.save(10, persist=True)
        assert drain.drain_once() == ids((1, 10))
        assert list_committed(store) == ids((1, 10))
        verify(store, CheckpointId(1, 10))
        ranks.check_committed(store, 10)
        assert read_scalars(store, CheckpointId(1, 10)) == ranks.scalars(10)
        assert storage_files(store.root / "step-000000010-a0001") == [
            "manifest.json",
            "rank-00000.json",
            "rank-00000.safetensors",
            "rank-00001.json",
            "rank-00001.safetensors",
        ]
        (event,) = sink.events
        assert isinstance(event, CheckpointCommitted)
        assert (event.job, event.attempt, event.step, event.world_size) == ("job", 1, 10, 2)
        assert event.num_bytes == sum(layout.shard_bytes for layout in ranks.layouts)
        assert 0 <= event.write_seconds <= event.staged_age_seconds
        assert folder.scan()[CheckpointId(1, 10)].drained
        assert drain.drain_once() == []

    def test_the_files_are_safetensors(self, drain, ranks, store):
        ranks.save(10, persist=True)
        drain.drain_once()
        names = set()
        for rank in range(2):
            path = store.root / "step-000000010-a0001" / f"rank-{rank:05}.safetensors"
            names |= {name for name, _ in deserialize(path.read_bytes())}
        assert names == {entry.name for layout in ranks.layouts for entry in layout.entries}

    def test_several_are_committed_oldest_first(self, drain, ranks, store):
        for step in (10, 20, 30):
            assert ranks.save(step, persist=True)
        assert not ranks.save(40, persist=True)
        assert drain.drain_once() == ids((1, 10), (1, 20), (1, 30))
        assert ranks.save(40, persist=True)

    def test_c4_a_blocked_writer_still_writes_the_step_it_was_asked_for(self, drain, ranks, store):
        """Case C4: save at step 10, storage hangs, snapshots go on to 15; what is written is step 10, bit for bit."""

        def train_on(key):
            store.before_write = lambda key: None
            for step in range(11, 16):
                assert ranks.save(step, keep=ids((1, step - 1)))

        ranks.save(10, persist=True)
        store.before_write = train_on
        assert drain.drain_once() == ids((1, 10))
        ranks.check_committed(store, 10)

    def test_two_drains_make_the_same_manifest(self, drain, ranks, store, folder, tmp_path):
        ranks.save(10, persist=True)
        drain.drain_once()
        other = LocalStore(tmp_path / "other" / "job")
        claim(other, 0)
        for part in folder.parts():
            part.buffer.mark_drained(0)
        Drain(staging=folder, store=other, sink=MemorySink(), job="job").drain_once()
        for name in ("manifest.json", "rank-00000.json", "rank-00001.json"):
            key = f"step-000000010-a0001/{name}"
            assert (store.root / key).read_bytes() == (other.root / key).read_bytes()

    def test_a_commit_without_event_and_mark_is_caught_up(self, drain, ranks, store, folder, sink):
        ranks.save(10, persist=True)
        drain.drain_once()
        before = (store.root / "step-000000010-a0001" / "manifest.json").stat()
        for part in folder.parts():
            part.buffer.mark_drained(0)
        assert Drain(staging=folder, store=store, sink=sink, job="job").drain_once() == ids((1, 10))
        assert [event.step for event in sink.events] == [10, 10]
        assert (store.root / "step-000000010-a0001" / "manifest.json").stat().st_mtime_ns == before.st_mtime_ns
        assert folder.scan()[CheckpointId(1, 10)].drained

    def test_two_buffers_with_one_snapshot_are_both_freed(self, drain, ranks, store, folder):
        ranks.save(10)
        ranks.save(10, persist=True)
        assert drain.drain_once() == ids((1, 10))
        assert all(part.drained for part in folder.parts())

    def test_a_snapshot_staged_again_to_be_saved_is_announced_once(self, drain, ranks, folder, sink):
        ranks.save(10)
        ranks.save(10, persist=True, ranks=[0])
        assert drain.drain_once() == ids((1, 10))  # rank 1 has it too, only not marked
        ranks.save(10, persist=True, ranks=[1])
        drain.drain_once()
        assert [event.step for event in sink.events] == [10]
        assert all(part.drained for part in folder.parts())


class TestWhatIsNotWritten:
    def test_a_part_that_is_still_being_copied_is_waited_for(self, drain, ranks, store, folder):
        ranks.save(10, persist=True, ranks=[0])
        assert drain.drain_once() == []
        buffer = ranks.begin(1, 10, persist=True)
        assert drain.drain_once() == []
        assert not folder.scan()[CheckpointId(1, 10)].drained
        shard = ranks.shard(1, 10)
        buffer.shard[: len(shard)] = shard
        buffer.commit(len(shard))
        assert drain.drain_once() == ids((1, 10))

    def test_a_part_that_a_rank_skipped_never_comes(self, drain, ranks, store, folder):
        ranks.save(10, persist=True, ranks=[0])
        ranks.save(11, ranks=[0, 1])
        assert drain.drain_once() == []
        assert folder.scan()[CheckpointId(1, 10)].drained
        assert storage_files(store.root / "step-000000010-a0001") == []

    def test_c7_a_rank_killed_while_filling_leaves_one_step_100_from_one_attempt(self, drain, ranks, store, folder):
        """Case C7: rank 1 dies filling step 100 of attempt 1; attempt 2 goes on from 99 and reaches another 100."""
        ranks.save(99)
        ranks.save(100, persist=True, ranks=[0])
        ranks.begin(1, 100, persist=True)
        assert drain.drain_once() == []
        claim(store, 1, attempt=1, step=99)
        for buffer in folder.buffers():
            if buffer.is_filling:
                # The rank is dead: the lock is gone and the file says FILLING.
                buffer._filling = None
                buffer.release()
        second = Ranks(folder, attempt=2)
        assert second.save(100, persist=True, keep=ids((1, 99)))
        assert drain.work() == ids((2, 100))
        assert list_committed(store) == ids((2, 100))
        assert [name for name in store.list("") if name.startswith("step")] == ["step-000000100-a0002"]
        second.check_committed(store, 100)
        assert all(part.drained for part in folder.parts() if part.header.persist)

    def test_off_the_lineage_is_freed_and_not_written(self, drain, ranks, store, folder):
        ranks.save(10, persist=True)
        claim(store, 1, attempt=1, step=9)
        assert drain.drain_once() == []
        assert folder.scan()[CheckpointId(1, 10)].drained
        assert list_committed(store) == []

    def test_one_that_leaves_the_lineage_while_it_is_written_is_not_committed(self, drain, ranks, store, folder):
        def restart(key):
            store.before_write = lambda key: None
            claim(store, 1, attempt=1, step=9)

        ranks.save(10, persist=True)
        store.before_write = restart
        assert drain.work() == []
        assert list_committed(store) == []
        assert folder.scan()[CheckpointId(1, 10)].drained
        assert [name for name in store.list("") if name.startswith("step")] == []

    @pytest.mark.parametrize("verb", ["drain_once", "work", "salvage"])
    def test_without_the_attempts_record_nothing_is_written_or_freed(self, drain, ranks, store, folder, verb):
        """Deleted, not mounted, or another one: here it knows attempt 1 only, and attempt 2 has staged."""
        ranks.save(10, persist=True)
        Ranks(folder, attempt=2).save(20, persist=True)
        before = storage_files(store.root)
        with pytest.raises(AttemptError, match=f"no record of attempt 2 in {store}"):
            getattr(drain, verb)()
        assert storage_files(store.root) == before
        assert not any(part.drained for part in folder.parts())
        claim(store, 1, attempt=1, step=10)
        assert drain.drain_once() == ids((1, 10), (2, 20))

    def test_storage_deleted_while_a_shard_is_written_does_not_cost_the_snapshot(self, drain, ranks, store, folder):
        def delete(key):
            store.before_write = lambda key: None
            shutil.rmtree(store.root)

        ranks.save(10, persist=True)
        store.before_write = delete
        with pytest.raises(AttemptError, match="no record of attempt 1"):
            drain.work()
        assert list_committed(store) == []
        assert not folder.scan()[CheckpointId(1, 10)].drained
        claim(store, 0)
        assert drain.work() == ids((1, 10))
        ranks.check_committed(store, 10)

    def test_a_buffer_in_use_is_tried_again_later(self, drain, ranks, store):
        ranks.save(10, persist=True)
        buffer = ranks.buffers[1][0]
        assert buffer.reserve()
        assert drain.drain_once() == []
        buffer.release()
        assert drain.drain_once() == ids((1, 10))

    def test_one_that_changes_while_it_is_written_is_not_committed(self, drain, ranks, store, folder):
        def overwrite(key):
            store.before_write = lambda key: None
            buffer = ranks.buffers[0][0]
            buffer._write_slot(buffer.header()._replace(sequence=4, step=11))

        ranks.save(10, persist=True)
        store.before_write = overwrite
        assert drain.drain_once() == []
        assert list_committed(store) == []

    @pytest.mark.parametrize("damage", ["shard", "length", "scalars", "scalars_type"])
    def test_what_no_reader_could_load_is_given_up(self, drain, ranks, store, folder, damage):
        ranks.save(10, persist=True, ranks=[1])
        buffer = ranks.begin(0, 10, persist=True)
        shard = b"\xff" * 8192 if damage == "shard" else ranks.shard(0, 10)
        buffer.shard[: len(shard)] = shard
        buffer.write_scalars({"scalars": b"{", "scalars_type": b"[]"}.get(damage, b"{}"))
        buffer.commit(len(shard) - (damage == "length"))
        assert drain.drain_once() == []
        assert list_committed(store) == []
        assert folder.scan()[CheckpointId(1, 10)].drained


class TestErrors:
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
    @pytest.mark.parametrize("at", ["rank-00000.safetensors", "rank-00001.json", "manifest.json"])
    def test_a_disk_error_is_raised_and_the_next_try_works(self, drain, ranks, store, number, at):
        def fail(key):
            if key.endswith(at):
                raise OSError(number, "disk")

        ranks.save(10, persist=True)
        store.before_write = fail
        with pytest.raises(OSError, match="disk"):
            drain.work()
        assert list_committed(store) == []
        store.before_write = lambda key: None
        assert drain.work() == ids((1, 10))
        ranks.check_committed(store, 10)

    def test_debris_goes_although_the_disk_is_full(self, drain, ranks, store):
        """It is what takes the room; the first error is the one that is raised."""

        def fail(key):
            raise OSError(errno.ENOSPC, "disk")

        store.write("step-000000005-a0001/rank-00000.safetensors", [b"half"])
        claim(store, 1)
        Ranks(drain._staging, attempt=2).save(10, persist=True)
        store.before_write = fail
        with pytest.raises(OSError, match="disk"):
            drain.work()
        assert store.list("") == ["attempts", "reserve.bin"]

    def test_events_wait_for_a_sink_that_fails(self, ranks, folder, store):
        class Sink(MemorySink):
            broken = True

            def emit(self, event):
                if self.broken:
                    raise OSError(errno.ENOSPC, "full")
                super().emit(event)

        sink = Sink()
        drain = Drain(staging=folder, store=store, sink=sink, job="job")
        ranks.save(10, persist=True)
        ranks.save(20, persist=True)
        assert drain.work() == ids((1, 10), (1, 20))
        assert all(part.drained for part in folder.parts())
        sink.broken = False
        drain.work()
        assert [event.step for event in sink.events] == [10, 20]

    def test_delays_double_up_to_a_limit(self, drain):
        now, calls = 0.0, []

        def work():
            calls.append(now)
            if len(calls) < 8:
                raise OSError("disk")

        retried = Retried(work, 1.0, lambda: now, drain.trouble)
        while not retried.call():
            now += 1 / 1024
        assert calls == pytest.approx([0.0, 0.1, 0.3, 0.7, 1.5, 2.5, 3.5, 4.5], abs=0.01)


class SmallDisk(LocalStore):
    """A disk of so many bytes. What does not fit takes what there is until it fails."""

    capacity_bytes = 10**9

    def free_bytes(self):
        return self.capacity_bytes - sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())

    def write(self, key, chunks, *, if_absent=False):
        chunks = list(chunks)
        if sum(map(len, chunks)) > self.free_bytes():
            raise OSError(errno.ENOSPC, "the disk is full")
        return super().write(key, chunks, if_absent=if_absent)


class TestReserve:
    def test_the_drain_makes_the_reserve_anew_before_it_writes_a_shard(self, drain, ranks, store):
        written = []
        ranks.save(10, persist=True)
        store.delete(RESERVE_KEY)
        store.before_write = written.append
        assert drain.drain_once() == ids((1, 10))
        assert written[:2] == [RESERVE_KEY, "step-000000010-a0001/rank-00000.safetensors"]
        assert (store.root / RESERVE_KEY).stat().st_size == RESERVE_BYTES

    @pytest.mark.parametrize("point", ["store.write.opened", "store.write.some", "store.write.synced"])
    def test_without_room_for_the_reserve_no_shard_is_written(self, drain, ranks, store, point):
        ranks.save(10, persist=True)
        store.delete(RESERVE_KEY)
        faultpoints.plan(f"{point}=enospc")
        try:
            with pytest.raises(OSError, match="No space left"):
                drain.drain_once()
        finally:
            faultpoints.plan("")
        assert storage_files(store.root) == ["attempts/000001.json"]
        assert drain.drain_once() == ids((1, 10))

    def test_a_full_disk_takes_one_restart_after_the_other_while_a_snapshot_waits(self, folder, tmp_path):
        """The shard would fit into what the first restart freed, and the second could not be recorded."""
        store = SmallDisk(tmp_path / "storage" / "job")
        drain = Drain(staging=folder, store=store, sink=MemorySink(), job="job")
        claim(store, 0)
        ranks = Ranks(folder, attempt=1, world_size=8)
        ranks.save(10, persist=True)
        assert min(layout.shard_bytes for layout in ranks.layouts) < RESERVE_BYTES
        store.capacity_bytes -= store.free_bytes()
        for after in range(1, 4):
            assert claim(store, after, attempt=1, step=10).attempt == after + 1
            with pytest.raises(OSError, match="full"):
                drain.work()
            assert not folder.scan()[CheckpointId(1, 10)].drained
        store.capacity_bytes = 10**9
        assert drain.work() == ids((1, 10))
        assert (store.root / RESERVE_KEY).stat().st_size == RESERVE_BYTES


class TestReports:
    def damage(self, store, file):
        path = store.root / "step-000000010-a0001" / file
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    @pytest.mark.parametrize("file", ["rank-00001.safetensors", "rank-00000.json", "manifest.json"])
    def test_a_damaged_checkpoint_is_quarantined(self, drain, ranks, store, folder, sink, file):
        ranks.save(10, persist=True)
        drain.work()
        self.damage(store, file)
        folder.write_report(CheckpointId(1, 10), file, "checksum")
        drain.handle_reports()
        assert list_committed(store) == []
        assert store.list("quarantine") == ["step-000000010-a0001"]
        event = sink.events[-1]
        assert isinstance(event, CheckpointQuarantined)
        assert (event.attempt, event.step, event.file) == (1, 10, file)
        assert event.moved_to == "quarantine/step-000000010-a0001"
        assert folder.reports() == []

    def test_a_good_checkpoint_stays(self, drain, ranks, store, folder, sink):
        ranks.save(10, persist=True)
        drain.work()
        folder.write_report(CheckpointId(1, 10), "rank-00000.safetensors", "misread")
        folder.write_report(CheckpointId(1, 77), "rank-00000.safetensors", "no such thing")
        drain.handle_reports()
        assert list_committed(store) == ids((1, 10))
        assert folder.reports() == []
        assert len(sink.events) == 1

    def test_a_name_taken_in_quarantine_gets_a_number(self, drain, ranks, store, folder, sink):
        ranks.save(10, persist=True)
        drain.work()
        for name in ("step-000000010-a0001", "step-000000010-a0001-2"):
            (store.root / "quarantine" / name).mkdir(parents=True)
        self.damage(store, "rank-00000.safetensors")
        folder.write_report(CheckpointId(1, 10), "rank-00000.safetensors", "checksum")
        drain.handle_reports()
        assert sink.events[-1].moved_to == "quarantine/step-000000010-a0001-3"

    def test_the_event_of_a_drain_that_died_after_the_move_is_caught_up(self, drain, ranks, store, folder, sink):
        ranks.save(10, persist=True)
        drain.work()
        store.move("step-000000010-a0001", "quarantine/step-000000010-a0001")
        folder.write_report(CheckpointId(1, 10), "rank-00000.safetensors", "checksum")
        drain.handle_reports()
        assert isinstance(sink.events[-1], CheckpointQuarantined)

    def test_an_io_error_is_not_damage(self, drain, ranks, store, folder, monkeypatch):
        ranks.save(10, persist=True)
        drain.work()
        folder.write_report(CheckpointId(1, 10), "rank-00000.safetensors", "checksum")

        def fail(key):
            raise OSError(errno.EIO, "disk")

        with monkeypatch.context() as patch:
            patch.setattr(store, "read", fail)
            with pytest.raises(OSError, match="disk"):
                drain.handle_reports()
        assert len(folder.reports()) == 1
        assert list_committed(store) == ids((1, 10))

    def test_a_report_that_cannot_be_looked_into_does_not_hold_up_the_others(
        self, drain, ranks, store, folder, monkeypatch
    ):
        for step in (10, 20, 30):
            ranks.save(step, persist=True)
            drain.work()
            folder.write_report(CheckpointId(1, step), "rank-00000.safetensors", "checksum")
        read = store.read

        def fail(key):
            if key.startswith("step-000000020"):
                raise OSError(errno.EIO, "disk")
            return read(key)

        monkeypatch.setattr(store, "read", fail)
        with pytest.raises(OSError, match="disk"):
            drain.handle_reports()
        assert [report.checkpoint.step for report in folder.reports()] == [20]


class TestDebris:
    def test_unfinished_folders_go_when_a_newer_attempt_exists(self, drain, ranks, store):
        store.write("step-000000005-a0001/rank-00000.safetensors", [b"half"])
        store.write("notes/mine.txt", [b"not ours"])
        ranks.save(10, persist=True)
        drain.work()
        assert "step-000000005-a0001" in store.list("")
        claim(store, 1, attempt=1, step=10)
        drain.work()
        assert store.list("") == ["attempts", "notes", "reserve.bin", "step-000000010-a0001"]

    def test_what_staging_can_still_complete_is_left(self, drain, ranks, store):
        ranks.save(10)
        store.write("step-000000010-a0001/rank-00000.safetensors", [b"half"])
        claim(store, 1, attempt=1, step=10)
        drain.work()
        assert "step-000000010-a0001" in store.list("")
        assert drain.salvage() == CheckpointId(1, 10)
        ranks.check_committed(store, 10)


class TestSalvage:
    def test_the_newest_complete_snapshot_is_saved_without_being_asked_for(self, drain, ranks, store):
        ranks.save(10, persist=True)
        ranks.save(11)
        ranks.save(12, ranks=[0])
        assert drain.salvage() == CheckpointId(1, 11)
        assert list_committed(store) == ids((1, 10), (1, 11))
        ranks.check_committed(store, 11)
        assert drain.salvage() is None

    def test_not_off_the_lineage(self, drain, ranks, store):
        ranks.save(10)
        ranks.save(11)
        claim(store, 1, attempt=1, step=10)
        assert drain.salvage() == CheckpointId(1, 10)

    def test_not_what_storage_has_already(self, drain, ranks, store):
        ranks.save(9)
        ranks.save(10, persist=True)
        drain.work()
        assert drain.salvage() is None

    def test_the_one_before_where_the_newest_cannot_be_used(self, drain, ranks, folder, store):
        ranks.save(10)
        ranks.save(11)
        for part in folder.parts():
            if part.header.step == 11:
                part.buffer.shard[:8] = bytes(8)
        assert drain.salvage() == CheckpointId(1, 10)
        ranks.check_committed(store, 10)

    def test_an_empty_folder_is_fine(self, drain):
        assert drain.salvage() is None


class TestNodes:
    """Each node has a staging folder and a drain of its own; storage is one."""

    @pytest.fixture
    def other_folder(self, tmp_path):
        folder = StagingFolder.create(tmp_path / "staging-b", "job", tmp_path / "storage")
        yield folder
        for buffer in folder.buffers():
            buffer.close()

    @pytest.fixture
    def ours(self, folder, store):
        claim(store, 0)
        return Ranks(folder, 1, world_size=4, here=[0, 1])

    @pytest.fixture
    def theirs(self, other_folder):
        return Ranks(other_folder, 1, world_size=4, here=[2, 3])

    @pytest.fixture
    def other_sink(self):
        return MemorySink()

    @pytest.fixture
    def other_drain(self, other_folder, store, other_sink):
        return Drain(staging=other_folder, store=store, sink=other_sink, job="job")

    def test_the_last_to_see_all_parts_commits_and_the_other_takes_note(
        self, drain, other_drain, ours, theirs, store, folder, sink, other_sink
    ):
        for ranks in (ours, theirs):
            ranks.save(10, persist=True)
        assert drain.drain_once() == []
        assert drain.waits_for_others
        assert list_committed(store) == []
        assert not folder.scan()[CheckpointId(1, 10)].drained
        assert other_drain.drain_once() == ids((1, 10))
        assert not other_drain.waits_for_others
        assert drain.drain_once() == ids((1, 10))
        assert not drain.waits_for_others
        assert folder.scan()[CheckpointId(1, 10)].drained
        ours.check_committed(store, 10)
        (event,) = sink.events
        assert other_sink.events == []
        assert (event.world_size, event.num_bytes) == (4, sum(layout.shard_bytes for layout in ours.layouts))

    def test_what_waits_for_another_node_is_written_once_and_holds_up_nothing(self, drain, ours, store):
        written = []
        store.before_write = written.append
        for step in (10, 20):
            ours.save(step, persist=True)
        for _ in range(3):
            assert drain.work() == []
        shards = [key for key in written if key.endswith(".safetensors")]
        files = ("rank-00000.safetensors", "rank-00001.safetensors")
        assert shards == [f"step-0000000{step}-a0001/{file}" for step in (10, 20) for file in files]

    def test_a_drain_that_comes_after_one_that_died_writes_no_shard_again(self, drain, ours, theirs, store, folder):
        for ranks in (ours, theirs):
            ranks.save(10, persist=True)
        drain.drain_once()
        written = []
        store.before_write = written.append
        assert Drain(staging=folder, store=store, sink=MemorySink(), job="job").drain_once() == []
        assert written == []

    @pytest.mark.parametrize("damage", ["rank-00000.json", "rank-00001.safetensors"])
    def test_what_is_not_as_staged_is_written_again(self, drain, other_drain, ours, theirs, store, folder, damage):
        for ranks in (ours, theirs):
            ranks.save(10, persist=True)
        drain.drain_once()
        path = store.root / "step-000000010-a0001" / damage
        path.write_bytes(path.read_bytes()[:-5])
        assert Drain(staging=folder, store=store, sink=MemorySink(), job="job").drain_once() == []
        assert other_drain.drain_once() == ids((1, 10))
        ours.check_committed(store, 10)

    def test_one_of_another_plan_is_no_part(self, drain, ours, theirs, store, other_folder):
        ours.save(10, persist=True)
        theirs.digest = bytes(16)
        theirs.save(10, persist=True)
        Drain(staging=other_folder, store=store, sink=MemorySink(), job="job").drain_once()
        assert drain.drain_once() == []
        assert list_committed(store) == []

    def test_it_is_given_up_when_a_newer_one_is_committed(self, drain, other_drain, ours, theirs, store, folder):
        ours.save(10, persist=True)
        assert drain.drain_once() == []
        for ranks in (ours, theirs):
            ranks.save(20, persist=True)
        assert drain.drain_once() == []
        assert not folder.scan()[CheckpointId(1, 10)].drained
        assert other_drain.drain_once() == ids((1, 20))
        assert drain.work() == ids((1, 20))
        assert drain.drain_once() == []
        assert folder.scan()[CheckpointId(1, 10)].drained
        assert not drain.waits_for_others
        theirs.save(10, persist=True)  # it comes after all
        assert other_drain.drain_once() == ids((1, 10))
        ours.check_committed(store, 10)

    def test_it_is_given_up_off_the_lineage(self, drain, ours, store, folder):
        ours.save(10, persist=True)
        assert drain.drain_once() == []
        claim(store, 1, attempt=1, step=9)
        assert drain.work() == []
        assert folder.scan()[CheckpointId(1, 10)].drained
        assert not drain.waits_for_others
        assert [name for name in store.list("") if name.startswith("step")] == []

    def test_what_another_node_may_be_writing_is_no_debris(self, drain, other_drain, ours, theirs, store):
        """Attempt 2 goes on from what is in memory everywhere while the second node still writes step 10."""
        theirs.save(10, persist=True)
        assert other_drain.drain_once() == []
        claim(store, 1, attempt=1, step=10)
        drain.work()
        assert "step-000000010-a0001" in store.list("")
        ours.save(10, persist=True)
        assert drain.work() == ids((1, 10))
        assert other_drain.work() == ids((1, 10))

    def test_a_rank_of_this_node_that_is_still_copying_is_waited_for(self, drain, ours, store):
        ours.save(10, persist=True, ranks=[0])
        assert drain.drain_once() == []
        assert not drain.waits_for_others
        assert [name for name in store.list("") if name.startswith("step")] == []

    def test_the_salvage_finds_the_newest_that_all_nodes_have(self, drain, other_drain, ours, theirs, store):
        """The first node is one step ahead when all are killed."""
        for step in (11, 12):
            ours.save(step)
        for step in (10, 11):
            theirs.save(step)
        assert drain.salvage() is None
        assert drain.waits_for_others
        assert other_drain.salvage() == CheckpointId(1, 11)
        assert drain.salvage() == CheckpointId(1, 11)
        assert list_committed(store) == ids((1, 11))
        ours.check_committed(store, 11)

    @pytest.mark.parametrize("others_seconds", [0.0, 60.0])
    def test_at_the_end_the_loop_waits_for_the_others_but_not_for_ever(
        self, drain, other_drain, ours, theirs, store, folder, monkeypatch, others_seconds
    ):
        for ranks in (ours, theirs):
            ranks.save(10)
        loop = DrainLoop(
            drain, folder, is_current=folder.path.exists, linger_seconds=0.0, others_seconds=others_seconds
        )
        waits = []

        def wait_for_wake(timeout_seconds):
            waits.append(timeout_seconds)
            if len(waits) == 2:
                other_drain.salvage()

        monkeypatch.setattr(folder, "wait_for_wake", wait_for_wake)
        assert loop.run() == 0
        assert not folder.path.exists()
        assert waits == ([] if others_seconds == 0 else [0.1, 0.1])
        if others_seconds == 0:
            assert list_committed(store) == []
            other_drain.salvage()
        assert list_committed(store) == ids((1, 10))
        ours.check_committed(store, 10)


class TestTrouble:
    def events(self, sink, kind):
        return [event for event in sink.events if isinstance(event, kind)]

    def loop(self, drain, folder, **options):
        return DrainLoop(drain, folder, is_current=folder.path.exists, linger_seconds=0.0, **options)

    @pytest.mark.parametrize(
        ("number", "at", "operation"),
        [
            (errno.ENOSPC, "rank-00001.safetensors", "write step-000000010-a0001/rank-00001.safetensors"),
            (errno.EIO, "rank-00000.json", "write step-000000010-a0001/rank-00000.json"),
            (errno.EROFS, "manifest.json", "write step-000000010-a0001/manifest.json"),
        ],
    )
    def test_c9_every_failed_try_is_an_event_and_the_recovery_is_one(
        self, ranks, folder, store, sink, number, at, operation
    ):
        """Case C9, the drain's part: told with the first failure, and again each time."""
        now = 100.0
        drain = Drain(staging=folder, store=store, sink=sink, job="job", monotonic=lambda: now)
        loop = self.loop(drain, folder, monotonic=lambda: now)

        def fail(key):
            if key.endswith(at):
                raise OSError(number, os.strerror(number))

        ranks.save(10, persist=True)
        store.before_write = fail
        for _ in range(3):
            assert not loop._work.call()
            assert not loop._work.call()  # too early: no try, no event
            loop._reports.call()  # works, and is no sign that writing does
            now = loop._work.next_try
        failed = self.events(sink, StorageFailed)
        assert [event.num_failures for event in failed] == [1, 2, 3]
        assert {event.operation for event in failed} == {operation}
        path = f"{store}/{operation.removeprefix('write ')}"
        assert {event.reason for event in failed} == {f"{errno.errorcode[number]}: {os.strerror(number)}: {path}"}
        assert self.events(sink, StorageRecovered) == []
        store.before_write = lambda key: None
        assert loop._work.call()
        (recovered,) = self.events(sink, StorageRecovered)
        assert (recovered.num_failures, recovered.seconds) == (3, pytest.approx(0.7))
        assert loop._work.call()
        assert len(self.events(sink, StorageRecovered)) == 1

    def test_having_nothing_to_write_any_more_is_no_recovery(self, drain, ranks, folder, store, sink):
        def fail(key):
            raise OSError(errno.ENOSPC, "full")

        loop = self.loop(drain, folder, monotonic=lambda: 0.0)
        ranks.save(10, persist=True)
        store.before_write = fail
        assert not loop._work.call()
        store.before_write = lambda key: None
        claim(store, 1, attempt=1, step=9)  # step 10 leaves the lineage
        loop._work.next_try = 0.0
        assert loop._work.call()
        assert self.events(sink, StorageRecovered) == []
        Ranks(folder, attempt=2).save(10, persist=True, keep=ids((1, 9)))
        assert loop._work.call()
        assert len(self.events(sink, StorageRecovered)) == 1

    @pytest.mark.parametrize("note", [None, "", "[1.0]", '{"a": 1}', '["x", 2]'])
    def test_the_end_of_the_trouble_is_told_by_the_next_drain_too(self, ranks, folder, store, sink, note):
        """A drain dies while the disk is full; consumers shall not believe for ever that nobody can save."""

        def fail(key):
            raise OSError(errno.ENOSPC, "full")

        now = 100.0
        ranks.save(10, persist=True)
        store.before_write = fail
        first = Drain(staging=folder, store=store, sink=sink, job="job", monotonic=lambda: now)
        assert not self.loop(first, folder, monotonic=lambda: now)._work.call()
        store.before_write = lambda key: None
        path = folder.path / "storage-trouble.json"
        if note is not None:
            path.write_text(note)
        now = 107.0
        second = Drain(staging=folder, store=store, sink=sink, job="job", monotonic=lambda: now)
        loop = self.loop(second, folder, monotonic=lambda: now)
        assert loop._reports.call()
        assert self.events(sink, StorageRecovered) == []
        assert loop._work.call()
        told = [(event.seconds, event.num_failures) for event in self.events(sink, StorageRecovered)]
        assert told == ([(7.0, 1)] if note is None else [])
        assert path.exists() == (note is not None)

    def test_records_that_are_gone_are_storage_that_failed(self, drain, folder, store, sink):
        Ranks(folder, attempt=1).save(10, persist=True)
        loop = self.loop(drain, folder, monotonic=lambda: 0.0)
        assert not loop._work.call()
        (event,) = self.events(sink, StorageFailed)
        assert event.operation == "read the job's records"
        assert event.reason.startswith(f"no record of attempt 1 in {store}")

    def test_a_disk_that_cannot_be_read_is_named(self, drain, ranks, folder, store, sink, monkeypatch):
        class Broken(io.BytesIO):
            def readall(self):
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        ranks.save(10, persist=True)
        drain.work()
        folder.write_report(CheckpointId(1, 10), "rank-00000.safetensors", "checksum")
        loop = self.loop(drain, folder, monotonic=lambda: 0.0)
        with monkeypatch.context() as patch:
            patch.setattr(store, "read", lambda key: Broken())
            assert not loop._reports.call()
        (event,) = self.events(sink, StorageFailed)
        assert event.operation == "read step-000000010-a0001/manifest.json"
        loop._reports.next_try = 0.0
        assert loop._reports.call()
        assert len(self.events(sink, StorageRecovered)) == 1


class TestLoss:
    @pytest.mark.parametrize(
        ("staged", "reported"), [(2.5, 2.5), (3, 3.0), (None, None), (float("nan"), None), ("low", None)]
    )
    def test_the_loss_that_rank_0_staged_is_in_the_event(self, drain, ranks, sink, monkeypatch, staged, reported):
        monkeypatch.setattr(ranks, "scalars", lambda step: {"step": step, "loss": staged})
        ranks.save(10, persist=True)
        drain.drain_once()
        assert sink.events[-1].loss == reported


class TestPrune:
    RULES = RetentionRules(keep_last=2, keep_every_steps=None, keep_best=0, keep_stable=2)

    def test_what_retention_does_not_keep_goes_after_each_commit(self, ranks, folder, store, sink):
        drain = Drain(staging=folder, store=store, sink=sink, job="job", retention=self.RULES)
        loop = DrainLoop(drain, folder, is_current=folder.path.exists)
        for step in (10, 20, 30, 40):
            ranks.save(step, persist=True)
            assert loop._work.call()
            assert loop._prune.call()
        assert list_committed(store) == ids((1, 30), (1, 40))
        pruned = [event.step for event in sink.events if isinstance(event, CheckpointPruned)]
        assert pruned == [10, 20]

    def test_without_rules_nothing_goes(self, drain, ranks, store):
        for step in (10, 20, 30, 40):
            ranks.save(step, persist=True)
            drain.work()
            drain.prune()
        assert len(list_committed(store)) == 4

    def test_storage_is_looked_at_only_when_something_was_committed(self, ranks, folder, store, sink, monkeypatch):
        drain = Drain(staging=folder, store=store, sink=sink, job="job", retention=self.RULES)
        ranks.save(10, persist=True)
        drain.work()
        drain.prune()
        monkeypatch.setattr(store, "list", lambda prefix: pytest.fail(f"listed {prefix!r}"))
        drain.prune()

    def test_a_full_disk_is_a_reason_to_look_again(self, ranks, folder, store, sink, monkeypatch):
        """Case C6: what a roll-back left behind goes, and then there is room."""
        drain = Drain(staging=folder, store=store, sink=sink, job="job", retention=self.RULES)
        for step in (10, 20):
            ranks.save(step, persist=True)
            drain.work()
        drain.prune()
        claim(store, 1, attempt=1, step=10)  # step 20 is abandoned
        ranks = Ranks(folder, attempt=2)
        ranks.save(15, persist=True)
        with monkeypatch.context() as patched:

            def write(*_: object, **__: object) -> None:
                raise OSError(errno.ENOSPC, "full")

            patched.setattr(store, "write", write)
            with pytest.raises(OSError, match="full"):
                drain.work()
        drain.prune()
        assert list_committed(store) == ids((1, 10))


class TestLoop:
    @contextmanager
    def somebody_comes_while_salvaging(self, drain, monkeypatch, action):
        real, calls = drain.salvage, []

        def salvage():
            calls.append(1)
            result = real()
            if len(calls) == 1:
                action()
            return result

        monkeypatch.setattr(drain, "salvage", salvage)
        yield calls

    def loop(self, drain, folder, **options):
        return DrainLoop(drain, folder, is_current=folder.path.exists, linger_seconds=0.0, poll_seconds=0.01, **options)

    def test_it_salvages_and_removes_the_folder_when_all_have_left(self, drain, ranks, folder, store):
        ranks.save(10)
        assert self.loop(drain, folder).run() == 0
        assert list_committed(store) == ids((1, 10))
        assert not folder.path.exists()

    def test_what_is_staged_during_the_salvage_is_not_lost(self, drain, ranks, folder, store, monkeypatch):
        ranks.save(10)
        with self.somebody_comes_while_salvaging(drain, monkeypatch, lambda: ranks.save(11)) as calls:
            assert self.loop(drain, folder).run() == 0
        assert len(calls) == 2
        assert list_committed(store) == ids((1, 10), (1, 11))

    def test_it_gives_up_in_the_end_and_leaves_the_snapshots(self, drain, folder):
        Ranks(folder, attempt=1).save(10)  # without a record the salvage fails
        assert self.loop(drain, folder, give_up_seconds=0.1).run() == 1
        assert folder.scan()[CheckpointId(1, 10)].complete

    def test_a_salvage_that_failed_is_no_longer_wanted_when_somebody_comes(self, drain, folder, monkeypatch):
        """Its next try never comes: the loop must not spin for it, nor the trouble last until it was done."""
        Ranks(folder, attempt=1).save(10)  # without a record the salvage fails
        now, there, waits = [0.0], iter([False, True, True]), []

        def wait(timeout_seconds):
            waits.append(timeout_seconds)
            now[0] += 10.0
            if len(waits) == 3:
                folder.remove()

        monkeypatch.setattr(folder, "wait_for_wake", wait)
        loop = self.loop(drain, folder, monotonic=lambda: now[0])
        monkeypatch.setattr(loop, "_is_somebody_there", lambda: next(there))
        assert loop.run() == 0
        assert waits == [0.01] * 3
        assert drain.trouble._failing == set()

    def test_a_report_that_cannot_be_looked_into_does_not_hold_up_saves(self, drain, ranks, folder, store, monkeypatch):
        """The bad checkpoint cannot be read for ever; what is saved after it becomes durable at once."""
        ranks.save(10, persist=True)
        drain.work()
        folder.write_report(CheckpointId(1, 10), "rank-00000.safetensors", "checksum")
        loop = self.loop(drain, folder, monotonic=lambda: 0.0)
        tried = []

        def fail():
            tried.append(1)
            raise OSError(errno.EIO, "disk")

        monkeypatch.setattr(loop._reports, "_work", fail)
        rounds = iter((20, 30))

        def next_round(timeout_seconds):
            step = next(rounds, None)
            if step is None:
                folder.remove()
            else:
                assert list_committed(store)[-1] == (1, step - 10)
                ranks.save(step, persist=True)

        monkeypatch.setattr(folder, "wait_for_wake", next_round)
        monkeypatch.setattr(loop, "_is_somebody_there", lambda: True)
        assert loop.run() == 0
        assert list_committed(store) == ids((1, 10), (1, 20), (1, 30))
        assert tried == [1]  # its own back-off, for which no time has passed

    def test_children_of_the_job_are_killed_before_the_folder_goes(self, drain, folder, monkeypatch):
        def start(key):
            return subprocess.Popen(["sleep", "1000"], env={"SUREFOOT_JOB_KEY": key})

        name = folder.path.name
        children = [start(name), start(f"{name}0"), start(name)]
        launcher = children[2].pid
        monkeypatch.setattr("surefoot.checkpoint.drain.holder_pid", lambda path: {"launcher.lock": launcher}[path.name])
        there_at = []
        remove = folder.remove
        monkeypatch.setattr(folder, "remove", lambda: (there_at.append(children[0].poll()), remove()))
        try:
            assert self.loop(drain, folder).run() == 0
            assert there_at == [-signal.SIGKILL]
            assert [child.poll() for child in children] == [-signal.SIGKILL, None, None]
        finally:
            for child in children:
                child.kill()
                child.wait()

    def test_it_ends_when_the_folder_was_deleted(self, drain, folder):
        folder.remove()
        assert self.loop(drain, folder).run() == 0
