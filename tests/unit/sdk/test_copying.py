from __future__ import annotations

import multiprocessing
import threading

import pytest
import torch

from surefoot.sdk import copying
from surefoot.sdk.copying import Copy, HostCopier, choose_copier, copy_all
from surefoot.sdk.state import DTYPES


@pytest.fixture
def small_pieces(monkeypatch):
    """Let small tensors take the way of large ones: several pieces, several threads."""
    monkeypatch.setattr(copying, "_PIECE_BYTES", 64)
    monkeypatch.setattr(copying, "_BYTES_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def some(dtype, *shape):
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    return (torch.randn(shape, dtype=torch.float64) * 50).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (7, 9), (33, 17, 3)])
def test_copies_are_equal_to_the_bit_and_share_nothing(small_pieces, dtype, shape):
    source = some(dtype, *shape)
    target = torch.zeros(shape, dtype=dtype)
    copy_all([(target, source)])
    wanted = bits(source).clone()
    assert torch.equal(bits(target), wanted)
    if source.numel():
        bits(source).bitwise_not_()
        assert torch.equal(bits(target), wanted)


def awkward():
    base = torch.randn(6, 4, 5, 5)
    parameter = torch.nn.Parameter(base.clone())
    return [
        base.to(memory_format=torch.channels_last),
        base.transpose(0, 1),
        base[::2],
        base[0, 0, 0, 0].expand(3, 3),
        torch._neg_view(base),
        parameter,
        parameter.detach(),
    ]


@pytest.mark.parametrize("index", range(7))
def test_whatever_lies_in_memory_another_way_is_copied_by_value(small_pieces, index):
    source = awkward()[index]
    target = torch.zeros(source.shape)
    copy_all([(target, source)])
    assert torch.equal(target, source)
    assert not target.requires_grad


def test_another_dtype_is_cast_and_views_made_on_the_way_last_long_enough(small_pieces):
    source, target = torch.randn(40, 10), torch.zeros(40, 10)
    copy_all((target[i], source[i] + 0) for i in range(40))
    assert torch.equal(target, source)
    half = torch.zeros(40, 10, dtype=torch.bfloat16)
    copy_all([(half, source)])
    assert torch.equal(half, source.bfloat16())


def test_many_tensors_with_few_and_many_threads(small_pieces, monkeypatch):
    for num_threads in (1, 2, 64):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=num_threads: n)
        sources = [torch.randn(int(n)) for n in torch.randint(0, 400, (300,))]
        targets = [torch.full_like(source, -1.0) for source in sources]
        copy_all(zip(targets, sources, strict=True))
        assert all(map(torch.equal, targets, sources))
    helpers = [t for t in threading.enumerate() if t.name.startswith("surefoot-copy")]
    assert 1 <= len(helpers) < copying._MAX_THREADS


def copy_in_child(answers):
    source, target = torch.randn(1000), torch.zeros(1000)
    copy_all([(target, source)])
    answers.put(bool(torch.equal(target, source)))


def test_a_forked_child_has_threads_of_its_own(small_pieces):
    """Those of its parent did not come with it: to wait for them would be for ever."""
    copy_all([(torch.zeros(1000), torch.randn(1000))])
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    child = fork.Process(target=copy_in_child, args=(answers,))
    child.start()
    assert answers.get(timeout=20)
    child.join(20)


def test_host_memory_is_copied_at_once():
    copier = choose_copier(torch.nn.Linear(2, 2))
    assert isinstance(copier, HostCopier)
    target, source = torch.zeros(5), torch.randn(5)
    before = source.clone()
    assert copier.start([Copy(target, source, may_wait=True)])
    source.add_(1)
    copier.wait()
    assert torch.equal(target, before)
