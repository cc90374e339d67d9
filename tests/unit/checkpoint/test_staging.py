from __future__ import annotations

import errno
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from helpers.staging import Ranks
from surefoot.checkpoint import staging, staging_folder
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.locks import LockedFile
from surefoot.checkpoint.staging import (
    PAGE_BYTES,
    SCALARS_CAPACITY_BYTES,
    StagingBuffer,
    choose_buffer,
    free_bytes,
    required_bytes,
)
from surefoot.checkpoint.staging_folder import StagingFolder, staging_folder_path
from surefoot.checkpoint.staging_header import BufferState, newest, pack_slot, unpack_mark, unpack_slot
from surefoot.errors import StagingTooSmall, UsageError

DIGEST = bytes(range(16))
OTHER_DIGEST = bytes(16)


@pytest.fixture
def folder(tmp_path):
    folder = StagingFolder.create(tmp_path, "job", tmp_path / "storage")
    yield folder
    for buffer in folder.buffers():
        buffer.close()


def begin(buffer: StagingBuffer, checkpoint=(1, 1)) -> None:
    assert buffer.begin_fill(CheckpointId(*checkpoint), world_size=1, rank=0, plan_digest=DIGEST, persist=False)


def fill(
    buffer: StagingBuffer,
    checkpoint: tuple[int, int],
    *,
    rank=0,
    world_size=1,
    persist=False,
    digest=DIGEST,
    payload=b"payload",
    scalars=b"{}",
):
    assert buffer.begin_fill(
        CheckpointId(*checkpoint), world_size=world_size, rank=rank, plan_digest=digest, persist=persist
    )
    buffer.shard[: len(payload)] = payload
    buffer.write_scalars(scalars)
    return buffer.commit(len(payload))


def run_python(code: str, *args: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


HOLD = """
import sys
from pathlib import Path
from surefoot.checkpoint.locks import LockedFile
file = LockedFile.open(Path(sys.argv[1]))
print(getattr(file, sys.argv[2])(), flush=True)
sys.stdin.read()
"""


class TestBuffer:
    def test_a_fresh_buffer_is_empty_and_allocated(self, folder):
        (buffer,) = folder.create_buffers(0, 1, 10_000)
        assert buffer.header() is None
        assert buffer.drained_sequence() == 0
        assert buffer.shard_capacity == 12_288
        status = buffer.path.stat()
        assert status.st_size == required_bytes(10_000)
        assert status.st_blocks * 512 >= status.st_size
        assert status.st_mode & 0o777 == 0o600

    def test_a_snapshot_is_read_back(self, folder):
        (buffer,) = folder.create_buffers(0, 1, 10_000)
        before = time.monotonic()
        fill(buffer, (3, 120), persist=True, payload=b"abc" * 1000, scalars=b'{"step": 120}')
        with buffer.lock_shared() as header:
            assert header is not None
            assert header.state is BufferState.READY
            assert header.checkpoint_id == CheckpointId(3, 120)
            assert (header.persist, header.world_size, header.rank) == (True, 1, 0)
            assert header.plan_digest == DIGEST
            assert before <= header.saved_monotonic <= time.monotonic()
            assert bytes(buffer.shard[: header.shard_bytes]) == b"abc" * 1000
            assert buffer.scalars() == b'{"step": 120}'

    def test_filling_takes_the_old_snapshot_away_and_abort_leaves_nothing(self, folder):
        (buffer,) = folder.create_buffers(0, 1, 100)
        fill(buffer, (1, 1))
        assert buffer.begin_fill(CheckpointId(1, 2), world_size=1, rank=0, plan_digest=DIGEST, persist=False)
        assert folder.scan() == {}
        buffer.abort()
        assert folder.scan() == {}
        assert buffer.header().state is BufferState.FREE

    def test_sequence_grows_and_slots_alternate(self, folder):
        (buffer,) = folder.create_buffers(0, 1, 100)
        assert [fill(buffer, (1, step)).sequence for step in range(4)] == [2, 4, 6, 8]

    def test_a_torn_slot_leaves_the_header_before(self, folder):
        (buffer,) = folder.create_buffers(0, 1, 100)
        fill(buffer, (1, 7))
        ready = buffer.header()
        slot = bytearray(pack_slot(ready._replace(sequence=3, state=BufferState.FILLING)))
        for length in range(len(slot)):
            buffer._view[PAGE_BYTES : PAGE_BYTES + length] = slot[:length]
            assert buffer.header() == ready
        buffer._view[PAGE_BYTES : PAGE_BYTES + len(slot)] = slot
        assert buffer.header().state is BufferState.FILLING

    def test_sequence_is_not_reused_after_both_slots_are_lost(self, folder):
        (buffer,) = folder.create_buffers(0, 1, 100)
        fill(buffer, (1, 1))
        buffer.mark_drained(41)
        buffer._view[: 2 * PAGE_BYTES] = bytes(2 * PAGE_BYTES)
        assert fill(buffer, (1, 2)).sequence == 43

    def test_another_jobs_file_is_no_content(self, folder):
        (buffer,) = folder.create_buffers(0, 1, 100)
        fill(buffer, (1, 7))
        buffer._write_slot(buffer.header()._replace(sequence=3, job_digest=OTHER_DIGEST))
        assert buffer.header() is None
        assert fill(buffer, (1, 8)).sequence == 5

    def test_drained_mark(self, folder):
        (buffer,) = folder.create_buffers(0, 1, 100)
        header = fill(buffer, (1, 7), persist=True)
        buffer.mark_drained(header.sequence)
        assert folder.scan()[CheckpointId(1, 7)].drained
        fill(buffer, (1, 8), persist=True)
        assert not folder.scan()[CheckpointId(1, 8)].drained
        assert unpack_mark(b"\1" * 20) == 0

    def test_misuse_is_refused(self, folder):
        (buffer,) = folder.create_buffers(0, 1, 100)
        with pytest.raises(RuntimeError, match="first"):
            buffer.commit(1)
        assert buffer.begin_fill(CheckpointId(1, 2), world_size=1, rank=0, plan_digest=DIGEST, persist=False)
        with pytest.raises(RuntimeError, match="again"):
            buffer.begin_fill(CheckpointId(1, 2), world_size=1, rank=0, plan_digest=DIGEST, persist=False)
        with pytest.raises(RuntimeError, match="being filled"):
            buffer.release()
        with pytest.raises(ValueError, match="buffer of 4096"):
            buffer.commit(4097)
        with pytest.raises(ValueError, match=str(SCALARS_CAPACITY_BYTES)):
            buffer.write_scalars(b" " * (SCALARS_CAPACITY_BYTES + 1))
        buffer.abort()

    def test_reopening_reuses_the_file_and_growing_keeps_the_snapshot(self, folder):
        (buffer,) = folder.create_buffers(0, 1, 100)
        fill(buffer, (1, 7), payload=b"keep me")
        assert folder.create_buffers(0, 1, 50) == [buffer]
        inode = buffer.path.stat().st_ino
        (grown,) = folder.create_buffers(0, 1, 1_000_000)
        assert grown is buffer
        assert grown.shard_capacity >= 1_000_000
        assert grown.path.stat().st_ino == inode
        assert bytes(grown.shard[:7]) == b"keep me"
        fill(buffer, (1, 8), payload=b"x" * 1_000_000)

    def test_a_reader_follows_growth(self, folder):
        (buffer,) = folder.create_buffers(0, 1, 100)
        code = """
import sys
from surefoot.checkpoint.staging import StagingBuffer
from pathlib import Path
buffer = StagingBuffer.open(Path(sys.argv[1]))
print("open", flush=True)
sys.stdin.readline()
with buffer.lock_shared() as header:
    print(bytes(buffer.shard[:header.shard_bytes]).count(b"x"), flush=True)
"""
        child = run_python(code, buffer.path)
        assert child.stdout.readline() == b"open\n"
        folder.create_buffers(0, 1, 1_000_000)
        fill(buffer, (1, 8), payload=b"x" * 1_000_000)
        out, _ = child.communicate(b"go\n")
        assert out == b"1000000\n"

    def test_a_full_file_system_is_an_error_with_numbers(self, folder, monkeypatch):
        monkeypatch.setattr(staging_folder, "free_bytes", lambda path: 3 * required_bytes(100))
        with pytest.raises(StagingTooSmall) as raised:
            folder.create_buffers(0, 4, 100)
        assert raised.value.needed_bytes == 4 * required_bytes(100)
        assert raised.value.available_bytes == 3 * required_bytes(100)
        assert folder.buffers() == []

    def test_losing_the_race_for_memory_leaves_no_files(self, folder, monkeypatch):
        real, calls = os.posix_fallocate, []

        def allocate(fd, offset, length):
            calls.append(fd)
            if len(calls) == 3:
                raise OSError(errno.ENOSPC, "full")
            real(fd, offset, length)

        monkeypatch.setattr(staging.os, "posix_fallocate", allocate)
        with pytest.raises(StagingTooSmall, match="num_buffers") as raised:
            folder.create_buffers(0, 3, 100)
        assert raised.value.needed_bytes == 3 * required_bytes(100)
        assert raised.value.available_bytes > 0
        assert list(folder.path.glob("*.stage")) == []
        monkeypatch.undo()
        assert len(folder.create_buffers(0, 3, 100)) == 3

    @pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
    def test_a_really_full_tmpfs_is_enospc_and_not_sigbus(self, tmp_path):
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", tmp_path], check=False)
        if mounted.returncode:
            pytest.skip("may not mount here")
        try:
            folder = StagingFolder.create(tmp_path, "job", tmp_path)
            assert free_bytes(folder.path) <= 8 << 20
            with pytest.raises(StagingTooSmall):
                folder.create_buffers(0, 3, 4 << 20)
            with pytest.raises(StagingTooSmall):
                StagingBuffer.create(folder.path / "rank-00000-buffer-0.stage", 9 << 20)
            assert folder.buffers() == []
            (buffer,) = folder.create_buffers(0, 1, 4 << 20)
            fill(buffer, (1, 1), payload=b"x" * (4 << 20))
            buffer.close()
        finally:
            subprocess.run(["umount", "-l", tmp_path], check=True)


class TestLocks:
    def test_a_file_is_opened_once_per_process(self, folder):
        (buffer,) = folder.create_buffers(0, 1, 100)
        num_fds = len(list(Path("/proc/self/fd").iterdir()))
        assert StagingBuffer.open(buffer.path) is buffer
        assert StagingFolder(folder.path).buffers() == [buffer]
        assert len(list(Path("/proc/self/fd").iterdir())) == num_fds

    def test_looking_at_a_buffer_does_not_drop_its_lock(self, folder):
        (buffer,) = folder.create_buffers(0, 1, 100)
        assert buffer.reserve()
        StagingFolder(folder.path).scan()
        assert run_python(HOLD, buffer.path, "try_shared").communicate()[0] == b"False\n"
        buffer.release()

    @pytest.mark.parametrize("mode", ["try_shared", "try_exclusive"])
    def test_a_locked_buffer_is_passed_over(self, folder, mode):
        first, second = folder.create_buffers(0, 2, 100)
        child = run_python(HOLD, first.path, mode)
        assert child.stdout.readline() == b"True\n"
        assert not first.begin_fill(CheckpointId(1, 1), world_size=1, rank=0, plan_digest=DIGEST, persist=False)
        assert choose_buffer([first, second], set(), lambda _: True) is second
        second.release()
        child.kill()
        child.communicate()
        assert choose_buffer([first, second], set(), lambda _: True) is first
        first.release()

    def test_a_buffer_being_filled_yields_no_header(self, folder):
        (buffer,) = folder.create_buffers(0, 1, 100)
        fill(buffer, (1, 1))
        child = run_python(HOLD, buffer.path, "try_exclusive")
        assert child.stdout.readline() == b"True\n"
        with buffer.lock_shared() as header:
            assert header is None
        child.communicate()
        with buffer.lock_shared() as header, buffer.lock_shared() as again:
            assert header == again
            assert header is not None
        assert buffer.reserve()
        with buffer.lock_shared() as header:
            assert header is None
        buffer.release()

    def test_a_forked_child_may_not_use_the_locks(self, folder):
        (buffer,) = folder.create_buffers(0, 1, 100)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                buffer.reserve()
            except RuntimeError:
                # Opening it anew is what a child may do; the parent's lock is not the child's.
                code = 0 if StagingBuffer.open(buffer.path) is not buffer else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    def test_closing_forgets_the_file(self, folder):
        (buffer,) = folder.create_buffers(0, 1, 100)
        view = buffer.shard
        buffer.close()
        buffer.close()
        assert view[0] == 0
        view.release()
        assert StagingBuffer.open(folder.path / buffer.path.name) is not buffer


class TestChoose:
    @pytest.fixture
    def buffers(self, folder):
        return folder.create_buffers(0, 3, 100)

    def choose(self, buffers, keep=(), lineage=lambda _: True):
        buffer = choose_buffer(buffers, set(keep), lineage)
        if buffer is not None:
            buffer.release()
        return buffer

    def test_empty_first_then_oldest(self, buffers):
        fill(buffers[0], (1, 2))
        assert self.choose(buffers) is buffers[1]
        fill(buffers[1], (1, 1))
        fill(buffers[2], (2, 1))
        assert self.choose(buffers) is buffers[1]

    def test_what_a_dead_rank_was_filling_is_empty(self, buffers):
        for buffer in buffers:
            fill(buffer, (1, 1))
        buffers[2]._write_slot(buffers[2].header()._replace(sequence=3, state=BufferState.FILLING))
        assert self.choose(buffers) is buffers[2]

    def test_kept_and_undrained_ones_are_never_taken(self, buffers):
        fill(buffers[0], (1, 1), persist=True)
        fill(buffers[1], (1, 2))
        drained = fill(buffers[2], (1, 3), persist=True)
        assert self.choose(buffers, keep=[CheckpointId(1, 2)]) is None
        buffers[2].mark_drained(drained.sequence)
        assert self.choose(buffers, keep=[CheckpointId(1, 2)]) is buffers[2]
        assert self.choose(buffers, keep=[CheckpointId(1, 2)], lineage=lambda c: c.step != 1) is buffers[0]

    def test_one_being_filled_by_a_copy_in_flight_is_not_taken(self, buffers):
        fill(buffers[0], (1, 1))
        fill(buffers[1], (1, 2))
        assert buffers[2].begin_fill(CheckpointId(1, 3), world_size=1, rank=0, plan_digest=DIGEST, persist=False)
        assert self.choose(buffers) is buffers[0]
        buffers[2].abort()


class TestFolder:
    def test_path_tells_storages_apart(self, tmp_path):
        a = staging_folder_path(tmp_path, "job", tmp_path / "a")
        assert a != staging_folder_path(tmp_path, "job", tmp_path / "b")
        assert a == staging_folder_path(tmp_path, "job", tmp_path / "a")
        assert a.parent.name == f"surefoot-{os.getuid()}"
        assert a.name.startswith("job-")
        assert len(a.name) == len("job-") + 8

    def test_folders_are_private(self, folder):
        assert folder.path.stat().st_mode & 0o777 == 0o700
        assert folder.path.parent.stat().st_mode & 0o777 == 0o700

    def test_a_link_planted_by_somebody_else_is_refused(self, tmp_path):
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / f"surefoot-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(UsageError, match="staging_dir"):
            StagingFolder.create(tmp_path, "job", tmp_path)

    def test_a_folder_that_cannot_be_made_is_a_usage_error(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(UsageError, match="staging_dir"):
            StagingFolder.create(tmp_path / "file", "job", tmp_path)

    def test_scan_knows_what_is_complete(self, folder):
        buffers = {rank: folder.create_buffers(rank, 2, 100) for rank in (0, 1)}
        for rank in (0, 1):
            fill(buffers[rank][0], (1, 5), rank=rank, world_size=2)
        fill(buffers[0][1], (1, 6), rank=0, world_size=2, persist=True)
        found = folder.scan()
        assert set(found) == {(1, 5), (1, 6)}
        assert found[CheckpointId(1, 5)].complete
        assert sorted(found[CheckpointId(1, 5)].parts) == [0, 1]
        assert not found[CheckpointId(1, 6)].complete
        assert found[CheckpointId(1, 6)].persist

    def test_a_node_knows_when_all_of_its_own_is_there(self, folder):
        """Ranks 2 and 3 of 4 are here; the others' parts are in a folder of another node."""
        ranks = Ranks(folder, attempt=1, world_size=4, here=[2, 3])
        ranks.save(5)
        ranks.save(6, ranks=[3])
        found = folder.scan()
        assert [(s.complete, s.complete_here) for s in found.values()] == [(False, True), (False, False)]
        assert sorted(found[CheckpointId(1, 5)].parts) == [2, 3]

    def test_parts_of_different_plans_never_mix(self, folder):
        buffers = {rank: folder.create_buffers(rank, 2, 100) for rank in (0, 1)}
        fill(buffers[0][0], (1, 5), rank=0, world_size=2)
        fill(buffers[1][0], (1, 5), rank=1, world_size=2, digest=OTHER_DIGEST)
        assert not folder.scan()[CheckpointId(1, 5)].complete
        fill(buffers[1][1], (1, 5), rank=1, world_size=2)
        assert folder.scan()[CheckpointId(1, 5)].complete

    def test_buffers_of_more_ranks_than_now_stay_readable(self, folder):
        for rank in range(4):
            fill(folder.create_buffers(rank, 1, 100)[0], (1, 5), rank=rank, world_size=4)
        for rank in range(2):
            fill(folder.create_buffers(rank, 2, 100)[1], (2, 6), rank=rank, world_size=2)
        found = StagingFolder(folder.path).scan()
        assert found[CheckpointId(1, 5)].complete
        assert found[CheckpointId(2, 6)].complete

    def test_files_in_the_making_and_strangers_are_no_buffers(self, folder):
        (folder.path / "rank-00000-buffer-9.stage").write_bytes(b"")
        (folder.path / "rank-00000.progress").write_bytes(b"x" * 4096)
        assert folder.scan() == {}
        assert StagingFolder(folder.path / "nowhere").scan() == {}

    def test_wake(self, folder):
        folder.wake()  # nobody listens: nothing happens
        assert not folder.wait_for_wake(0)
        for _ in range(70_000):
            folder.wake()  # more than a pipe holds: nothing blocks
            if folder.wait_for_wake(0):
                break
        thread = threading.Timer(0.05, folder.wake)
        thread.start()
        assert folder.wait_for_wake(5)
        thread.join()
        assert not folder.wait_for_wake(0.01)
        StagingFolder(folder.path / "nowhere").wake()

    def test_a_full_pipe_never_blocks_a_rank(self, folder):
        assert not folder.wait_for_wake(0)
        fd = os.open(folder.path / "wake.fifo", os.O_WRONLY | os.O_NONBLOCK)
        while True:
            try:
                os.write(fd, bytes(4096))
            except BlockingIOError:
                break
        os.close(fd)
        folder.wake()
        assert folder.wait_for_wake(0)

    def test_reports(self, folder):
        folder.write_report(CheckpointId(3, 120), "rank-00000.safetensors", "wrong size")
        (folder.path / "reports" / "zzz.json").write_text("not json")
        (report,) = folder.reports()
        assert report.checkpoint == CheckpointId(3, 120)
        assert (report.file, report.reason) == ("rank-00000.safetensors", "wrong size")
        report.path.unlink()
        assert folder.reports() == []

    def test_the_session_lock_says_whether_anybody_is_left(self, folder):
        folder.hold_session()
        code = """
import sys
from pathlib import Path
from surefoot.checkpoint.staging_folder import StagingFolder
print(StagingFolder(Path(sys.argv[1])).try_take_session(), flush=True)
sys.stdin.read()
"""
        assert run_python(code, folder.path).communicate()[0] == b"False\n"
        folder.release_session()
        assert run_python(code, folder.path).communicate()[0] == b"True\n"

    def test_a_process_that_comes_while_the_folder_is_removed_gets_a_new_one(self, folder):
        assert folder.try_take_session()
        code = """
import sys
from pathlib import Path
from surefoot.checkpoint.staging_folder import StagingFolder
folder = StagingFolder(Path(sys.argv[1]))
print("waiting", flush=True)
folder.hold_session()
print(folder.path.joinpath("wake.fifo").exists(), flush=True)
"""
        (folder.path / "old").touch()
        child = run_python(code, folder.path)
        assert child.stdout.readline() == b"waiting\n"
        folder.remove()
        assert child.communicate()[0] == b"True\n"
        assert child.returncode == 0
        assert not (folder.path / "old").exists()
        assert [path.name for path in folder.path.parent.iterdir()] == [folder.path.name]

    def test_a_new_session_takes_back_the_end_of_the_one_before(self, folder):
        folder.hold_session()
        folder.release_session()
        folder.announce_end()
        assert folder.is_end_announced()
        StagingFolder(folder.path).hold_session()
        assert not folder.is_end_announced()
        LockedFile.open(folder.path / "session.lock").close()

    @pytest.mark.parametrize("way", ["create", "hold_session", "sweep"])
    def test_what_a_removal_that_was_killed_left_is_swept(self, folder, tmp_path, way):
        name = folder.path.name
        other = folder.path.with_name(f".removing-{name}-9-12ab34cd-56")  # of a job whose name begins like this one
        for left in (*(folder.path.with_name(f".removing-{name}-{end}") for end in ("4711", "0af")), other):
            (left / "reports").mkdir(parents=True)
            (left / "reports" / "1.json").touch()
            (left / "rank-00000-buffer-0.stage").write_bytes(b"memory")
        if way == "create":
            StagingFolder.create(tmp_path, "job", tmp_path / "storage")
        elif way == "hold_session":
            folder.remove()
            folder.hold_session()
            LockedFile.open(folder.path / "session.lock").close()
        else:
            folder.sweep()
        assert {path.name for path in folder.path.parent.iterdir()} == {name, other.name}
        StagingFolder(tmp_path / "nowhere" / "job").sweep()

    def test_a_removal_that_another_process_helps_with_succeeds(self, folder, monkeypatch):
        (folder.path / "rank-00000.progress").touch()
        monkeypatch.setattr(staging_folder, "reach", lambda point: folder.sweep())
        folder.remove()
        assert list(folder.path.parent.iterdir()) == []

    def test_hold_session_makes_a_folder_that_is_gone(self, folder):
        folder.remove()
        folder.hold_session()
        assert (folder.path / "session.lock").exists()
        folder.release_session()
        LockedFile.open(folder.path / "session.lock").close()


FILLER = """
import os, struct, sys
from pathlib import Path
from surefoot.checkpoint.ids import CheckpointId
from surefoot.checkpoint.staging import choose_buffer
from surefoot.checkpoint.staging_folder import StagingFolder
folder, seed = StagingFolder(Path(sys.argv[1])), int(sys.argv[2])
num_words = 1 << 15
buffers = folder.create_buffers(0, 2, 8 * num_words)
print("ready", flush=True)
step = seed
while True:
    step += 1
    buffer = choose_buffer(buffers, set(), lambda _: True)
    assert buffer.begin_fill(CheckpointId(1, step), world_size=1, rank=0, plan_digest=bytes(16), persist=False)
    words = struct.pack("<Q", step) * 512
    for start in range(0, 8 * num_words, len(words)):
        buffer.shard[start:start + len(words)] = words
    buffer.write_scalars(b"%d" % step)
    buffer.commit(8 * num_words)
"""


@pytest.mark.chaos
@pytest.mark.parametrize("num_kills", [30, pytest.param(120, marks=pytest.mark.slow)])
def test_a_snapshot_of_a_rank_killed_at_any_moment_is_whole_or_absent(folder, num_kills):
    """Kills at random; whatever is READY afterwards is the very snapshot its header names."""
    source = random.Random(20261201)
    accepted = torn = step = 0
    for _ in range(num_kills):
        child = run_python(FILLER, folder.path, step)
        assert child.stdout.readline() == b"ready\n"
        time.sleep(source.uniform(0, 0.03))
        child.send_signal(signal.SIGKILL)
        child.communicate()
        for buffer in folder.buffers():
            with buffer.lock_shared() as header:
                torn += header is not None and header.state is BufferState.FILLING
                if header is None or header.state is not BufferState.READY:
                    continue
                step = max(step, header.step)
                expected = struct.pack("<Q", header.step) * (header.shard_bytes // 8)
                assert bytes(buffer.shard[: header.shard_bytes]) == expected
                assert buffer.scalars() == b"%d" % header.step
                accepted += 1
    assert accepted >= num_kills * 2 // 3
    assert torn >= num_kills // 6  # the kills did hit copies in flight


def test_slots_with_any_bit_flipped_are_refused():
    slot = pack_slot(staging.BufferHeader(7, BufferState.READY, DIGEST, 3, 120, 2, 1, True, DIGEST, 4096, 17, 12.5))
    assert unpack_slot(slot).step == 120
    assert newest([slot, slot]).sequence == 7
    for bit in range(8 * len(slot)):
        flipped = bytearray(slot)
        flipped[bit // 8] ^= 1 << bit % 8
        assert unpack_slot(bytes(flipped)) is None


@pytest.mark.parametrize(("local_world_size", "expected"), [(0, 4), (2, 2), (4, 4)])
def test_the_header_says_how_many_ranks_are_here(local_world_size, expected):
    """0 is what headers of before have there: all of them."""
    header = staging.BufferHeader(
        7, BufferState.READY, DIGEST, 3, 120, 4, 1, True, DIGEST, 4096, 17, 12.5, local_world_size
    )
    assert unpack_slot(pack_slot(header)) == header
    assert unpack_slot(pack_slot(header)).num_local_ranks == expected


def test_opening_and_scanning_is_cheap_at_a_restart(tmp_path):
    """A restart has 0.1 s in all: 8 ranks x 3 buffers are opened and read within a few milliseconds."""
    folder = StagingFolder.create(Path("/dev/shm"), "test-scan", tmp_path)
    try:
        for rank in range(8):
            for index, buffer in enumerate(folder.create_buffers(rank, 3, 1 << 20)):
                fill(buffer, (1, index), rank=rank, world_size=8)
        seconds = []
        for _ in range(5):
            for buffer in folder.buffers():
                buffer.close()
            start = time.perf_counter()
            assert all(snapshot.complete for snapshot in folder.scan().values())
            seconds.append(time.perf_counter() - start)
        assert min(seconds) < 0.02
    finally:
        folder.remove()


def test_buffers_of_ranks_that_are_gone_are_freed_unless_they_still_have_to_be_written(tmp_path):
    folder = StagingFolder.create(tmp_path / "staging", "job", tmp_path / "storage")
    ranks = Ranks(folder, attempt=1, world_size=3)
    ranks.save(5, persist=True)
    ranks.save(6)
    folder.remove_surplus(1, 8, lambda checkpoint: checkpoint.step == 5)
    left = [(b.path.name, b.header().step) for b in folder.buffers() if b.header() is not None and b.header().rank]
    assert [step for _, step in left] == [5, 5]
    assert len(folder.buffers(0)) == 3
    folder.remove_surplus(1, 8, lambda checkpoint: False)
    assert [b.path.name[:10] for b in folder.buffers()] == ["rank-00000"] * 3
