from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot_detector.rules.band import Band
from surefoot_detector.rules.windows import Cusum, Mean, MedianWindow

values = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=60)


@given(values, st.integers(1, 9))
def test_the_median_is_that_of_the_last_values(sequence, size):
    window = MedianWindow(size)
    for value in sequence:
        window.push(value)
    assert window.median == statistics.median_high(sequence[-size:])
    assert len(window) == min(size, len(sequence))


@given(values)
def test_a_mean_is_plain_until_its_span_is_full(sequence):
    mean = Mean(100)
    for value in sequence:
        mean.push(value)
    assert mean.value == pytest.approx(statistics.fmean(sequence), rel=1e-6, abs=1e-3)


def test_a_cusum_tells_when_it_began_to_grow():
    cusum = Cusum()
    for excess in (1.0, -5.0, 0.5, 2.0, -1.0):
        cusum.push(excess)
    assert (cusum.total, cusum.num_points) == (1.5, 3)


@given(st.floats(0.01, 0.2), st.floats(-0.0005, 0.0), st.integers(0, 1000))
def test_the_scale_is_the_noise_whatever_the_trend(noise, trend, seed):
    chance = random.Random(seed)
    band = Band(0.001)
    for i in range(200):
        band.push(trend * i + chance.gauss(0, noise))
    assert noise / 2 < band.scale < noise * 2


def test_one_outlier_moves_neither_level_nor_scale():
    band, same = Band(0.004), Band(0.004)
    for i in range(100):
        band.push(9.0 if i == 80 else i % 2 * 0.01)
        same.push(i % 2 * 0.01)
    assert band.level == pytest.approx(same.level, abs=0.011)
    assert band.scale == pytest.approx(same.scale, abs=0.002)
