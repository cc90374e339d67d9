import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.sdk.data.permutation import MAX_DOMAIN_SIZE, epoch_keys, permute, stream


def shuffled(size: int, seed: int, epoch: int) -> list[int]:
    return permute(np.arange(size), size, epoch_keys(seed, np.array([epoch]))).tolist()


def test_round_function_is_splitmix64() -> None:
    # The reference implementation's first outputs for this seed (prng.di.unimi.it/splitmix64.c).
    outputs = stream(np.array([1234567], np.uint64), np.arange(5, dtype=np.uint64))
    assert outputs.tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_golden_values_never_change() -> None:
    assert {key: shuffled(*key)[:8] for key in GOLDEN} == GOLDEN
    big = permute(np.arange(5), 10**9 + 7, epoch_keys(42, np.array([3])))
    assert big.tolist() == GOLDEN_BIG


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_every_small_size_is_a_permutation(seed: int) -> None:
    for size in range(1, 301):
        assert sorted(shuffled(size, seed, epoch=1)) == list(range(size))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20_000), st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_any_size_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(shuffled(size, seed, epoch)) == list(range(size))


@pytest.mark.parametrize("size", [10**9 + 7, 2**31, 2**32 + 1, 2**40 - 1, MAX_DOMAIN_SIZE])
def test_large_domains_are_injective_and_stay_inside(size: int) -> None:
    picked = np.unique(np.random.default_rng(0).integers(0, size, 200_000))
    images = permute(picked, size, epoch_keys(7, np.array([0])))
    assert len(np.unique(images)) == len(picked)
    assert images.min() >= 0
    assert images.max() < size
    assert images.max() > 0.99 * size


def test_keys_may_differ_per_value() -> None:
    epochs = np.arange(50) // 10
    mixed = permute(np.arange(50) % 10, 10, epoch_keys(5, epochs))
    assert mixed.tolist() == [index for epoch in range(5) for index in shuffled(10, 5, epoch)]


def test_epochs_and_seeds_differ() -> None:
    assert len({tuple(shuffled(100, seed, epoch)) for seed in range(20) for epoch in range(20)}) == 400


@pytest.mark.parametrize("size", [5, 10, 17, 64])
def test_each_place_is_equally_likely(size: int) -> None:
    """Chi-square over 20,000 epochs: which index comes at the first, a middle and the last place."""
    num_epochs = 20_000
    keys = epoch_keys(1, np.arange(num_epochs))
    for place in (0, size // 2, size - 1):
        images = permute(np.full(num_epochs, place), size, keys)
        expected = num_epochs / size
        chi_square = (((np.bincount(images, minlength=size) - expected) ** 2) / expected).sum()
        # Mean size-1, variance 2(size-1): five standard deviations.
        assert chi_square < (size - 1) + 5 * (2 * (size - 1)) ** 0.5


def test_neighbours_are_unrelated() -> None:
    """A good shuffle correlates place and index by 0 +- 1/sqrt(N), and so it does neighbours."""
    order = np.array(shuffled(100_003, 3, 0))
    limit = 5 / len(order) ** 0.5
    assert abs(np.corrcoef(np.arange(len(order)), order)[0, 1]) < limit
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < limit


GOLDEN = {
    (2, 0, 0): [0, 1],
    (3, 0, 1): [2, 1, 0],
    (10, 0, 0): [6, 5, 8, 3, 1, 7, 9, 2],
    (10, 0, 1): [3, 1, 6, 4, 8, 5, 9, 7],
    (10, 1, 0): [2, 3, 7, 8, 5, 6, 1, 9],
    (1000, 42, 0): [36, 928, 475, 627, 410, 959, 633, 340],
    (65536, 42, 7): [40780, 6700, 63301, 3007, 54734, 6389, 52265, 58534],
    (103, 9223372036854775808, 8589934592): [50, 51, 17, 10, 72, 67, 61, 43],
}
GOLDEN_BIG = [107779495, 519885182, 639482226, 821814267, 726985941]
