"""Case C6 on a file system that is really full."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helpers.drains import Node
from helpers.forked import Forge
from helpers.small_disk import SmallDisk, use_own_mounts
from helpers.staging import Ranks, claim, storage_files
from helpers.waiting import wait_until
from surefoot.checkpoint.catalog import list_committed, verify
from surefoot.checkpoint.drain import main
from surefoot.checkpoint.drain_work import Drain
from surefoot.checkpoint.ids import CheckpointId
from surefoot.events import CheckpointCommitted, MemorySink, StorageFailed, StorageRecovered

pytestmark = pytest.mark.chaos

PAGE_BYTES = 4096
SKIPPED = 77

OLD, NEW = CheckpointId(1, 5), CheckpointId(1, 10)


def can_mount(root: str) -> int:
    try:
        use_own_mounts()
        SmallDisk(Path(root), 10 * PAGE_BYTES)
    except OSError as error:
        print(error)
        return SKIPPED
    return 0


def fill_up_after(root: str, tenths: int) -> int:
    """Run the case in this process, which sees a small disk where storage is.

    Args:
        root: An empty folder.
        tenths: How much of the new checkpoint fits.
    """
    use_own_mounts()
    storage = Path(root) / "storage"
    storage.mkdir()
    disk = SmallDisk(storage, 2**20)
    node = Node(Path(root), storage).make()
    node.folder.hold_session()
    claim(node.store, 0)
    ranks = Ranks(node.folder, attempt=1)
    before = disk.free_bytes()
    ranks.save(OLD.step, persist=True)
    Drain(staging=node.folder, store=node.store, sink=MemorySink(), job="job").work()
    files = storage_files(node.store.root)
    needed = before - disk.free_bytes() - 64 * 1024  # the reserve is there from now on
    disk.fill(needed * tenths // 10 // PAGE_BYTES * PAGE_BYTES)
    ranks.save(NEW.step, persist=True)
    drain = os.fork()
    if drain == 0:
        os._exit(main(node.arguments()))
    wait_until(lambda: len(node.events(StorageFailed)) >= 2, 20, "the drain says twice that the disk is full")
    failed = node.events(StorageFailed)[0]
    assert failed.reason.startswith(f"ENOSPC: No space left on device: {node.store}/step-000000010-a0001/"), failed
    assert failed.operation.startswith("write step-000000010-a0001/")
    assert list_committed(node.store) == [OLD]
    verify(node.store, OLD)
    # Whole shards with their parts may stay, they are used when there is room; nothing half-written does.
    left = set(storage_files(node.store.root)) - set(files)
    assert all(name.startswith("step-000000010-a0001/rank-") for name in left), left
    assert ranks.save(NEW.step + 1, keep={NEW}), "training goes on"
    disk.empty()
    wait_until(lambda: node.events(StorageRecovered), 20, "storage works again")
    node.folder.announce_end()
    node.folder.release_session()
    assert os.waitpid(drain, 0)[1] == 0
    assert list_committed(node.store) == [OLD, NEW, CheckpointId(1, 11)]
    for checkpoint in list_committed(node.store):
        ranks.check_committed(node.store, checkpoint.step)
    assert [name for name in storage_files(node.store.root) if ".tmp-" in name] == []
    assert [event.step for event in node.events(CheckpointCommitted)] == [10, 11]
    (recovered,) = node.events(StorageRecovered)
    assert recovered.num_failures == len(node.events(StorageFailed))
    return 0


@pytest.fixture(scope="module")
def forge(tmp_path_factory):
    with Forge("chaos.test_full_disk") as forge:
        root = tmp_path_factory.mktemp("mount")
        log = root.with_suffix(".log")
        code = forge.fork("can_mount", {"root": str(root)}, log=log).wait(30)
        if code == SKIPPED:
            pytest.skip(f"no file system can be mounted here: {log.read_text().strip()}")
        assert code == 0, log.read_text()
        yield forge


@pytest.mark.parametrize("tenths", [0, 2, 4, 5, 7, 9])
def test_c6_a_disk_full_after_some_bytes_costs_nothing_but_time(forge, tmp_path, tenths):
    """Case C6: old checkpoint intact, debris removed, the next try works once there is room."""
    log = tmp_path / "log"
    root = tmp_path / "job"
    root.mkdir()
    assert forge.fork("fill_up_after", {"root": str(root), "tenths": tenths}, log=log).wait(50) == 0, log.read_text()
