from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot import faultpoints
from surefoot.checkpoint import store as store_module
from surefoot.checkpoint.store import BLOCK_BYTES, PIECE_BYTES, LocalStore, Written

WRITE_POINTS = ["opened", "some", "written", "synced", "renamed", "durable"]


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "storage" / "job")


def content(store: LocalStore, key: str) -> bytes:
    with store.read(key) as file:
        return file.readall()


def temps(store: LocalStore) -> list[Path]:
    return list(store.root.rglob(".tmp-*"))


def staged(data: bytes) -> memoryview:
    """Return page-aligned shared memory that holds data, as the drain has it."""
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(len(data))
        mapped = memoryview(mmap.mmap(file.fileno(), len(data)))
    mapped[:] = data
    return mapped


def fail_at(monkeypatch, point: str, error: str, nth: int = 1) -> None:
    monkeypatch.setattr(faultpoints, "_plan", {point: (error, nth)})
    monkeypatch.setattr(faultpoints, "_reached", {})


def test_what_is_written_is_read_back_with_its_size_and_checksum(store):
    written = store.write("a/b/file", [b"one ", memoryview(b"two "), b"", b"three"])
    assert written == Written(13, xxhash.xxh3_128_hexdigest(b"one two three"))
    assert content(store, "a/b/file") == b"one two three"
    assert temps(store) == []


def test_nothing_is_a_valid_content(store):
    assert store.write("file", []) == Written(0, xxhash.xxh3_128_hexdigest(b""))
    assert content(store, "file") == b""


def test_a_write_replaces_the_whole_content(store):
    store.write("file", [b"long old content"])
    store.write("file", [b"new"])
    assert content(store, "file") == b"new"


def test_chunks_of_wider_items_are_written_as_bytes(store):
    assert store.write("file", [memoryview(bytes(range(16))).cast("I")]).num_bytes == 16
    assert content(store, "file") == bytes(range(16))


def test_if_absent_writes_once(store):
    store.write("file", [b"first"], if_absent=True)
    with pytest.raises(FileExistsError):
        store.write("file", [b"second"], if_absent=True)
    assert content(store, "file") == b"first"
    assert (store.root / "file").stat().st_nlink == 1
    assert temps(store) == []


def test_if_absent_believes_the_count_of_links_and_not_a_repeated_nfs_request(store, monkeypatch):
    link = os.link

    def link_twice(source, target):
        link(source, target)
        link(source, target)

    monkeypatch.setattr(store_module.os, "link", link_twice)
    store.write("file", [b"first"], if_absent=True)
    assert content(store, "file") == b"first"
    assert temps(store) == []


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", ".", "..", "a/../b", "/etc/passwd", ".tmp-1-x", "a/.tmp-x"])
def test_keys_cannot_leave_the_job(store, key):
    with pytest.raises(ValueError, match="not a storage key"):
        store.write(key, [b"x"])


def test_reading_what_is_not_there_says_so(store):
    with pytest.raises(FileNotFoundError):
        store.read("attempts/000001.json")


def test_list_gives_sorted_children_without_temporary_names(store):
    assert store.list("") == []
    assert store.list("folder") == []
    for key in ("folder/b", "folder/a", "folder/c/d", "e"):
        store.write(key, [b"x"])
    (store.root / "folder" / ".tmp-1-ab-z").write_bytes(b"half")
    assert store.list("folder") == ["a", "b", "c"]
    assert store.list("") == ["e", "folder"]


def test_move_takes_a_folder_with_all_that_is_in_it(store):
    store.write("step/a", [b"x"])
    store.move("step", "quarantine/step")
    assert content(store, "quarantine/step/a") == b"x"
    assert store.list("") == ["quarantine"]


def test_move_takes_a_file(store):
    store.write("a", [b"x"])
    store.move("a", "b")
    assert store.list("") == ["b"]


def test_move_of_nothing_says_so_and_makes_no_folders(store):
    store.write("a", [b"x"])
    with pytest.raises(FileNotFoundError):
        store.move("step", "quarantine/step")
    assert store.list("") == ["a"]


def test_move_never_mixes_two_folders(store):
    store.write("step/a", [b"new"])
    store.write("quarantine/step/a", [b"old"])
    with pytest.raises(OSError, match="not empty"):
        store.move("step", "quarantine/step")
    assert content(store, "step/a") == b"new"
    assert content(store, "quarantine/step/a") == b"old"


def test_delete_removes_files_and_folders_and_takes_what_is_missing(store):
    store.write("step/a/b", [b"x"])
    store.write("file", [b"x"])
    for _ in range(2):
        store.delete("step")
        store.delete("file")
        store.delete("folder/file")
    assert store.list("") == []
    assert temps(store) == []


# --- large and direct ---


def test_large_aligned_memory_goes_around_the_page_cache(store, monkeypatch):
    """Written as O_DIRECT but for the tail, where the file system can do it."""
    data = os.urandom(PIECE_BYTES + 3 * BLOCK_BYTES + 123)
    seen = []
    write = os.write

    def spy(fd, piece):
        direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        num_bytes = write(fd, piece)
        seen.append((direct, num_bytes))
        return num_bytes

    monkeypatch.setattr(store_module.os, "write", spy)
    written = store.write("shard", [staged(data)])
    assert content(store, "shard") == data
    assert written == Written(len(data), xxhash.xxh3_128_hexdigest(data))
    if seen[0][0]:
        assert seen == [(True, PIECE_BYTES), (True, 3 * BLOCK_BYTES), (False, 123)]


def test_memory_that_is_not_aligned_is_written_all_the_same(store):
    data = os.urandom(3 * 2**20 + 77)
    memory = staged(b"." + data)
    store.write("shard", [memory[1:]])
    assert content(store, "shard") == data


def test_a_file_system_without_direct_writes_gets_ordinary_ones(store, monkeypatch):
    control = fcntl.fcntl

    def without_direct(fd, command, argument=0):
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return control(fd, command, argument)

    monkeypatch.setattr(store_module.fcntl, "fcntl", without_direct)
    data = os.urandom(2 * 2**20)
    store.write("shard", [staged(data)])
    assert content(store, "shard") == data


def test_short_writes_are_continued_wherever_they_stop(store, monkeypatch):
    write = os.write
    sizes = iter([4096, 100, 1_048_576, 7, 3996] + [10**9] * 100)
    monkeypatch.setattr(store_module.os, "write", lambda fd, piece: write(fd, piece[: next(sizes)]))
    data = os.urandom(5 * 2**20 + 5)
    written = store.write("shard", [staged(data)])
    assert content(store, "shard") == data
    assert written == Written(len(data), xxhash.xxh3_128_hexdigest(data))


def test_a_file_system_that_takes_nothing_is_an_error_and_no_endless_loop(store, monkeypatch):
    monkeypatch.setattr(store_module.os, "write", lambda fd, piece: 0)
    with pytest.raises(OSError, match="no bytes"):
        store.write("shard", [b"x"])
    assert temps(store) == []


sizes = st.one_of(st.integers(0, 5000), st.sampled_from([4096, 2**20, 2**20 + 4096, 2**20 + 1, PIECE_BYTES + 5]))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(sizes, st.sampled_from([0, 1, 512, 4096])), max_size=5))
def test_any_mix_of_sizes_and_alignments_comes_out_as_it_went_in(pieces):
    memory = staged(os.urandom(PIECE_BYTES + 2 * BLOCK_BYTES))
    chunks = [memory[start : start + size] for size, start in pieces]
    expected = b"".join(chunks)
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder))
        written = store.write("shard", chunks)
        assert content(store, "shard") == expected
    assert written == Written(len(expected), xxhash.xxh3_128_hexdigest(expected))


def test_nothing_gets_its_name_before_it_is_on_the_disk(store, monkeypatch):
    """File, then name, then folder; and every new folder is in its parent for good."""
    calls = []
    sync, rename = os.fsync, Path.rename

    def spy_sync(fd):
        name = Path(f"/proc/self/fd/{fd}").readlink()
        calls.append(("sync", "file" if stat.S_ISREG(os.fstat(fd).st_mode) else name.name))
        sync(fd)

    def spy_rename(source, target):
        calls.append(("rename", target.name))
        return rename(source, target)

    store.root.mkdir(parents=True)
    monkeypatch.setattr(store_module.os, "fsync", spy_sync)
    monkeypatch.setattr(Path, "rename", spy_rename)
    store.write("a/b/file", [b"x"])
    assert calls == [("sync", "job"), ("sync", "a"), ("sync", "file"), ("rename", "file"), ("sync", "b")]
    calls.clear()
    store.move("a/b", "c/b")
    assert calls == [("sync", "job"), ("rename", "b"), ("sync", "c"), ("sync", "a")]
    calls.clear()
    store.delete("c/b/file")
    assert calls == [("sync", "b")]


# --- errors ---


@pytest.mark.parametrize("error", ["enospc", "eio"])
@pytest.mark.parametrize("point", WRITE_POINTS[:4])
def test_an_error_before_the_rename_leaves_the_old_content_and_no_debris(store, monkeypatch, point, error):
    store.write("file", [b"old"])
    fail_at(monkeypatch, f"store.write.{point}", error)
    with pytest.raises(OSError, match=point) as caught:
        store.write("file", [b"new"])
    assert caught.value.errno == getattr(errno, error.upper())
    assert content(store, "file") == b"old"
    assert temps(store) == []
    store.write("file", [b"new"])
    assert content(store, "file") == b"new"


def test_an_error_of_the_source_leaves_the_old_content_and_no_debris(store):
    def chunks():
        yield b"half"
        raise RuntimeError("the buffer was overwritten")

    store.write("file", [b"old"])
    with pytest.raises(RuntimeError):
        store.write("file", chunks())
    assert content(store, "file") == b"old"
    assert temps(store) == []


LIMITED = """
import resource, sys
from pathlib import Path
from surefoot.checkpoint.store import LocalStore
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    LocalStore(Path(sys.argv[1])).write("file", [b"n" * 3_000_000])
except OSError as error:
    sys.exit(error.errno)
"""


def test_running_out_of_room_after_some_bytes_leaves_the_old_content_and_no_debris(store):
    """With a file size limit the kernel makes a really short write, then really fails."""
    store.write("file", [b"old"])
    result = subprocess.run([sys.executable, "-c", LIMITED, str(store.root), "1500001"], check=False)
    assert result.returncode == errno.EFBIG
    assert content(store, "file") == b"old"
    assert temps(store) == []


# --- crashes ---

WRITER = """
import sys
from pathlib import Path
from surefoot.checkpoint.store import LocalStore
root, if_absent = Path(sys.argv[1]), sys.argv[2] == "if_absent"
LocalStore(root).write("folder/file", [b"new" * 500_000, b"er" * 1000], if_absent=if_absent)
"""
OLD, NEW = b"old" * 1000, b"new" * 500_000 + b"er" * 1000


def run_killed(script: str, point: str, *arguments: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | {"SUREFOOT_FAULT": f"{point}=kill"},
        check=False,
    )
    assert result.returncode == -9, f"{point} was never reached"


@pytest.mark.parametrize("before", ["replace", "new", "if_absent"])
@pytest.mark.parametrize("point", WRITE_POINTS)
def test_a_kill_at_any_point_of_a_write_leaves_old_or_new_and_never_half(store, point, before):
    if before == "replace":
        store.write("folder/file", [OLD])
    run_killed(WRITER, f"store.write.{point}", str(store.root), before)
    published = point in ("renamed", "durable")
    if before == "replace" or published:
        assert content(store, "folder/file") == (NEW if published else OLD)
    else:
        assert store.list("folder") == []
    store.remove_debris()
    assert temps(store) == []
    # and life goes on
    if not published or before != "if_absent":
        assert store.write("folder/file", [NEW], if_absent=before == "if_absent").num_bytes == len(NEW)
    assert content(store, "folder/file") == NEW


DELETER = """
import sys
from pathlib import Path
from surefoot.checkpoint.store import LocalStore
LocalStore(Path(sys.argv[1])).delete("step")
"""


@pytest.mark.parametrize("point", ["hidden", "durable"])
def test_a_kill_during_a_delete_leaves_no_half_folder(store, point):
    for name in ("a", "b", "manifest.json"):
        store.write(f"step/{name}", [b"x"])
    run_killed(DELETER, f"store.delete.{point}", str(store.root))
    assert store.list("") == []
    assert len(temps(store)) == 1
    assert len(store.remove_debris()) == 1
    assert temps(store) == []


MOVER = DELETER.replace('delete("step")', 'move("step", "quarantine/step")')


@pytest.mark.parametrize("point", ["renamed", "durable"])
def test_a_kill_during_a_move_leaves_the_folder_whole(store, point):
    for name in ("a", "b"):
        store.write(f"step/{name}", [b"x"])
    run_killed(MOVER, f"store.move.{point}", str(store.root))
    assert store.list("quarantine/step") == ["a", "b"]
    assert store.list("") == ["quarantine"]


SLOW_WRITER = """
import sys
from pathlib import Path
from surefoot.checkpoint.store import LocalStore

def chunks():
    yield b"first "
    print("writing", flush=True)
    sys.stdin.readline()
    yield b"second"

LocalStore(Path(sys.argv[1])).write("folder/file", chunks())
"""


def test_the_temporary_file_of_a_living_writer_is_not_debris(store):
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_WRITER, str(store.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "writing\n"
    assert store.remove_debris() == ()
    assert len(temps(store)) == 1
    assert f".tmp-{process.pid}-" in temps(store)[0].name
    process.communicate("\n", timeout=30)
    assert process.returncode == 0
    assert content(store, "folder/file") == b"first second"


def test_the_temporary_file_of_a_killed_writer_is_debris(store):
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_WRITER, str(store.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "writing\n"
    process.kill()
    process.communicate(timeout=30)
    (removed,) = store.remove_debris()
    assert removed.startswith(f"folder/.tmp-{process.pid}-")
    assert temps(store) == []


def test_a_writer_whose_new_file_was_taken_for_debris_opens_another(store, monkeypatch):
    lock = fcntl.flock
    removed = []

    def sweep_first(fd, operation):
        if not removed:
            removed.append(None)  # the sweep itself locks too
            removed.extend(store.remove_debris())
        lock(fd, operation)

    monkeypatch.setattr(store_module.fcntl, "flock", sweep_first)
    store.write("file", [b"x"])
    assert len(removed) == 2
    assert content(store, "file") == b"x"
    assert temps(store) == []


def test_a_kill_before_a_new_folder_is_durable_is_made_up_for_by_the_next_write(store):
    run_killed(WRITER, "store.folder.made", str(store.root), "new")
    assert store.list("") == []
    store.write("folder/file", [NEW])
    assert content(store, "folder/file") == NEW


@pytest.mark.parametrize("point", ["store.write.some", "store.write.synced"])
def test_a_large_file_is_hashed_beside_the_writing_and_an_error_ends_both(store, monkeypatch, point):
    data = os.urandom(3 * PIECE_BYTES + 5)
    fail_at(monkeypatch, point, "eio")
    with pytest.raises(OSError, match=point):
        store.write("shard", [staged(data)])
    assert temps(store) == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("checksum")] == []
    assert store.write("shard", [staged(data)]).xxh3_128 == xxhash.xxh3_128_hexdigest(data)


def test_debris_next_to_a_linked_record_is_removed_without_the_record(store):
    run_killed(WRITER, "store.write.renamed", str(store.root), "if_absent")
    assert (store.root / "folder" / "file").stat().st_nlink == 2
    assert len(store.remove_debris()) == 1
    assert content(store, "folder/file") == NEW
    assert (store.root / "folder" / "file").stat().st_nlink == 1


def test_what_is_no_file_is_refused_at_once(store):
    store.write("file", [b"x"])
    os.mkfifo(store.root / "fifo")
    (store.root / "loop").symlink_to("loop")
    (store.root / "folder").mkdir()
    (store.root / "nowhere").symlink_to("missing")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for key, number in (("fifo", errno.EINVAL), ("loop", errno.ELOOP), ("folder", errno.EISDIR)):
        with pytest.raises(OSError, match=key) as raised:
            store.read(key)
        assert (raised.value.errno, raised.value.filename) == (number, str(store.root / key))
    with pytest.raises(FileNotFoundError):
        store.read("nowhere")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert store.list("loop") == []
