"""Snapshots of a model on a GPU. Skipped where there is none: then only unit/sdk/test_snapshot's stand-in is tested."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from surefoot import sdk
from surefoot.checkpoint.catalog import list_committed, read_manifest, read_shard
from surefoot.checkpoint.layout import ShardLayout
from surefoot.checkpoint.staging import StagingBuffer
from surefoot.checkpoint.staging_folder import staging_folder_path
from surefoot.checkpoint.store import LocalStore
from surefoot.sdk.copying import Copy, CudaCopier
from surefoot.sdk.sharding import tensor_over

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture
def buffer(tmp_path):
    buffer = StagingBuffer.create(tmp_path / "rank-00000-buffer-0.stage", 256 << 20)
    yield buffer
    buffer.close()


def busy():
    """Keep the current stream busy for some tens of milliseconds."""
    torch.cuda._sleep(50_000_000)


def test_what_may_wait_is_read_before_the_update_that_follows_the_wait(buffer):
    copier = CudaCopier()
    copier.use([buffer.shard])
    weight = torch.randn(1 << 24, device="cuda")
    average = torch.randn(1 << 20, device="cuda")
    expected = weight.cpu(), average.cpu()
    memory = torch.frombuffer(buffer.shard, dtype=torch.float32)
    target, small = memory[: 1 << 24], memory[1 << 24 : (1 << 24) + (1 << 20)]
    busy()
    assert not copier.start([Copy(target, weight, may_wait=True), Copy(small, average, may_wait=False)])
    average.add_(1)  # the next forward, right away
    copier.wait()
    weight.add_(1)  # the next update
    torch.cuda.synchronize()
    assert torch.equal(target, expected[0])
    assert torch.equal(small, expected[1])
    copier.use([])


def test_staging_memory_is_pinned_and_let_go(buffer):
    copier = CudaCopier()
    memory = torch.frombuffer(buffer.shard, dtype=torch.uint8)
    copier.use([buffer.shard])
    assert memory.is_pinned()
    copier.use([buffer.shard])  # again, as after a command: nothing happens
    assert memory.is_pinned()
    copier.use([])
    assert not memory.is_pinned()


def test_memory_that_cannot_be_pinned_is_copied_into_all_the_same(buffer):
    """A second registration of the same pages is refused by the driver; the error must not reach the training."""
    first, second = CudaCopier(), CudaCopier()
    first.use([buffer.shard])
    second.use([buffer.shard])
    assert second._pinned == {}
    source = torch.randn(1 << 20, device="cuda")
    target = torch.frombuffer(buffer.shard, dtype=torch.float32)[: 1 << 20]
    second.start([Copy(target, source, may_wait=True)])
    second.wait()
    assert torch.equal(target, source.cpu())
    first.use([])


class Samples:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.sin(torch.arange(64.0) * (index + 1))


@pytest.mark.parametrize("fused", [False, True])
def test_c4_checkpoints_of_a_gpu_are_the_states_of_their_steps(tmp_path, fused):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    session = sdk.attach(
        model, optimizer, dataset=Samples(), global_batch_size=8, total_steps=9, job="gpu", storage=tmp_path / "c",
        run_dir=tmp_path / "r", checkpoint={"save_every_steps": 3, "save_every_seconds": None},
    )  # fmt: skip
    expected = {}
    for batch in session:
        session.step(session.model(batch).pow(2).mean())
        tensors, _ = session._snapshots._state.capture()
        expected[session.global_step] = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
        while session._snapshots.has_unwritten_save():
            pass
    store = LocalStore(tmp_path / "c" / "gpu")
    assert [i.step for i in list_committed(store)] == [3, 6, 9]
    for checkpoint_id in list_committed(store):
        shard = read_shard(store, read_manifest(store, checkpoint_id, "gpu"), 0)
        layout = ShardLayout.parse(shard)
        assert layout.by_name.keys() == expected[checkpoint_id.step].keys()
        for entry in layout.entries:
            saved = tensor_over(layout.tensor_view(shard, entry.name), entry)
            assert torch.equal(saved, expected[checkpoint_id.step][entry.name]), entry.name
    shutil.rmtree(staging_folder_path(Path("/dev/shm"), "gpu", tmp_path / "c"), ignore_errors=True)
