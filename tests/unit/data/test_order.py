from collections.abc import Iterator
from itertools import chain, count, islice
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from surefoot.errors import UsageError
from surefoot.sdk.data.order import DataOrder, MicroBatch, position


class Skip(NamedTuple):
    start: int
    stop: int


def step_ids(order: DataOrder, step: int, world_size: int, micro_batch_size: int | None = None) -> list[int]:
    """What all ranks together train on in a step, in rank order."""
    return [
        index
        for rank in range(world_size)
        for micro_batch in order.rank_micro_batches(position(step), rank, world_size, micro_batch_size)
        for index in micro_batch.indices.tolist()
    ]


def micro_batches(
    order: DataOrder, first_step: int, micro_batch_size: int, rank: int = 0, world_size: int = 1
) -> Iterator[MicroBatch]:
    return chain.from_iterable(
        order.rank_micro_batches(position(step), rank, world_size, micro_batch_size) for step in count(first_step)
    )


def test_r2_resume_in_the_middle_of_epoch_2_joins_seamlessly() -> None:
    num_samples, batch = 53, 8
    num_steps = -(-3 * num_samples // batch)
    uninterrupted = DataOrder(num_samples, batch, seed=11)
    whole = [step_ids(uninterrupted, step, world_size=2) for step in range(num_steps)]
    killed_after = 10  # of 20 steps: samples 80..87 of 159, so in epoch 2 of 3
    joined = [step_ids(DataOrder(num_samples, batch, seed=11), s, 2) for s in range(killed_after)]
    joined += [step_ids(DataOrder(num_samples, batch, seed=11), s, 2) for s in range(killed_after, num_steps)]
    assert joined == whole
    ids = list(chain.from_iterable(whole))
    for epoch in range(3):
        assert sorted(ids[epoch * num_samples : (epoch + 1) * num_samples]) == list(range(num_samples))
    assert ids[:num_samples] != ids[num_samples : 2 * num_samples]


def test_r3_after_the_last_batch_of_an_epoch_comes_batch_0_of_the_next() -> None:
    order = DataOrder(num_samples=24, global_batch_size=8, seed=3)
    epochs, indices = order.step_samples(position(3))
    assert epochs.tolist() == [1] * 8
    second_epoch = [i for step in (3, 4, 5) for i in order.step_samples(step)[1].tolist()]
    assert indices.tolist() == second_epoch[:8]
    assert sorted(second_epoch) == list(range(24))


@pytest.mark.parametrize("world_sizes", [(4, 2, 4), (2, 1, 3)], ids=["r4-4-2-4", "r7-2-1-3"])
@pytest.mark.parametrize("batch", [8, 13])
def test_r4_r7_ids_of_every_step_are_those_of_constant_world_size(world_sizes: tuple[int, ...], batch: int) -> None:
    constant = DataOrder(100, batch, seed=5)
    for step in range(30):
        order = DataOrder(100, batch, seed=5)
        world_size = world_sizes[step // 10]
        expected = constant.step_samples(step)[1].tolist()
        assert step_ids(order, step, world_size, micro_batch_size=3) == expected


def test_r5_accumulation_4_resumed_after_10_steps_begins_with_micro_batch_40() -> None:
    order = DataOrder(1000, global_batch_size=8, seed=9)
    uninterrupted = list(islice(micro_batches(order, 0, micro_batch_size=2), 80))
    assert uninterrupted[0].num_micro_batches == 4
    resumed = list(islice(micro_batches(DataOrder(1000, 8, seed=9), 10, micro_batch_size=2), 40))
    assert [m.indices.tolist() for m in resumed] == [m.indices.tolist() for m in uninterrupted[40:]]


def test_r5_accumulation_2_with_twice_the_micro_batch_has_the_same_remaining_ids() -> None:
    order = DataOrder(1000, global_batch_size=16, seed=9)
    for rank in range(2):
        by_4 = list(islice(micro_batches(order, 10, 2, rank, world_size=2), 40))
        by_2 = list(islice(micro_batches(order, 10, 4, rank, world_size=2), 20))
        assert (by_4[0].num_micro_batches, by_2[0].num_micro_batches) == (4, 2)
        assert np.concatenate([m.indices for m in by_4]).tolist() == (
            np.concatenate([m.indices for m in by_2]).tolist()
        )


@given(st.integers(0, 60), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=6))
@example(0, [(0, 3), (3, 5)])
@example(4, [(10, 12), (2, 8), (4, 6), (2, 2)])
def test_position_is_the_nth_outside_all_windows(step: int, windows: list[tuple[int, int]]) -> None:
    skipped = {p for start, stop in windows for p in range(start, stop)}
    expected = next(islice((p for p in count() if p not in skipped), step, None))
    assert position(step, [Skip(*window) for window in windows]) == expected


orders = st.builds(DataOrder, st.integers(1, 400), st.integers(1, 40), st.integers(0, 2**63 - 1), shuffle=st.booleans())


@settings(deadline=None)
@given(orders, st.integers(0, 10**6), st.data())
def test_ranks_and_micro_batches_split_the_batch_exactly(order: DataOrder, at: int, data: st.DataObject) -> None:
    batch = order.global_batch_size
    world_size = data.draw(st.integers(1, batch))
    micro_batch_size = data.draw(st.none() | st.integers(1, 50))
    parts = [order.rank_micro_batches(at, r, world_size, micro_batch_size) for r in range(world_size)]
    epochs, indices = order.step_samples(at)
    flat = list(chain.from_iterable(parts))
    assert np.concatenate([m.indices for m in flat]).tolist() == indices.tolist()
    assert np.concatenate([m.epochs for m in flat]).tolist() == epochs.tolist()
    assert all(1 <= len(m) <= (micro_batch_size or batch) for m in flat)
    for part in parts:
        assert [m.micro_index for m in part] == list(range(len(part)))
        assert [m.is_last for m in part] == [False] * (len(part) - 1) + [True]
        assert {(m.num_micro_batches, m.position) for m in part} == {(len(part), at)}
    if micro_batch_size != 1:
        assert len({len(part) for part in parts}) == 1


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 10))
def test_weights_make_the_mean_over_ranks_the_mean_over_the_batch(
    batch: int, world_size: int, micro_batch_size: int
) -> None:
    world_size = min(batch, world_size)
    order = DataOrder(97, batch, seed=1)
    loss_of = np.random.default_rng(0).normal(size=97)
    per_rank = [
        sum(m.weight * loss_of[m.indices].mean() for m in order.rank_micro_batches(5, r, world_size, micro_batch_size))
        for r in range(world_size)
    ]
    assert np.mean(per_rank) == pytest.approx(loss_of[order.step_samples(5)[1]].mean())


@settings(deadline=None)
@given(orders)
def test_every_epoch_is_a_permutation(order: DataOrder) -> None:
    n, batch = order.num_samples, order.global_batch_size
    num_steps = -(-3 * n // batch)
    epochs = np.concatenate([order.step_samples(s)[0] for s in range(num_steps)])
    ids = np.concatenate([order.step_samples(s)[1] for s in range(num_steps)])
    assert (np.diff(epochs) >= 0).all()
    for epoch in range(3):
        assert sorted(ids[epochs == epoch].tolist()) == list(range(n)) or epoch == epochs[-1]
    assert sorted(ids[:n].tolist()) == list(range(n))
    assert order.epoch_of(num_steps - 1) == epochs[(num_steps - 1) * batch]


def test_no_shuffle_is_index_order() -> None:
    order = DataOrder(5, 4, seed=1, shuffle=False)
    assert [order.step_samples(s)[1].tolist() for s in range(3)] == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4, 0, 1]]
    assert order.step_samples(1)[0].tolist() == [0, 1, 1, 1]


def test_a_batch_may_hold_several_epochs() -> None:
    epochs, indices = DataOrder(3, 8, seed=1).step_samples(0)
    assert epochs.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert sorted(indices[:3].tolist()) == sorted(indices[3:6].tolist()) == [0, 1, 2]


def test_far_positions_of_huge_datasets_do_not_overflow() -> None:
    order = DataOrder(2**61 + 1, 4096, seed=1)
    at = 2**60
    assert order.epoch_of(at) == at * 4096 // (2**61 + 1)
    _, indices = order.step_samples(at)
    assert len(set(indices.tolist())) == 4096
    assert indices.max() <= 2**61


def test_the_order_of_a_seed_never_changes() -> None:
    assert DataOrder(1000, 8, seed=42).step_samples(125)[1].tolist() == GOLDEN_STEP


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: DataOrder(0, 8, 0), "dataset"),
        (lambda: DataOrder(10, 0, 0), "global_batch_size"),
        (lambda: DataOrder(10, 8, -1), "seed"),
        (lambda: DataOrder(10, 3, 0).rank_micro_batches(0, 0, 4), "global_batch_size"),
        (lambda: DataOrder(10, 3, 0).rank_micro_batches(0, 0, 2, 0), "micro_batch_size"),
    ],
)
def test_bad_numbers_name_the_setting(make, key: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert caught.value.key == key


GOLDEN_STEP = [797, 443, 956, 392, 385, 173, 791, 829]
