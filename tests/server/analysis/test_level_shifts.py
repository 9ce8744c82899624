"""Intervals of constant level in a noisy series."""

from __future__ import annotations

import numpy as np
import pytest
from ddpobs_server.analysis.statistics.level_shifts import level_segments


@pytest.mark.parametrize("seed", range(20))
def test_noise_without_a_shift_is_one_segment(seed: int) -> None:
    values = 100 * np.exp(np.random.default_rng(seed).normal(0, 0.2, 400))
    assert level_segments(values) == [(0, 400)]


@pytest.mark.parametrize("seed", range(10))
def test_an_interval_of_a_higher_level_is_found_within_a_block(seed: int) -> None:
    values = 100 * np.exp(np.random.default_rng(seed).normal(0, 0.1, 400))
    values[160:240] *= 1.5
    (first, second, third) = level_segments(values)
    assert (first[0], third[1]) == (0, 400)
    assert abs(second[0] - 160) <= 8
    assert abs(second[1] - 240) <= 8


def test_single_long_steps_are_no_shift() -> None:
    values = np.full(400, 100.0)
    values[::9] = 1000.0
    assert len(level_segments(values)) == 1


def test_a_short_series_is_one_segment() -> None:
    assert level_segments(np.ones(9)) == [(0, 9)]


def test_a_long_series_is_judged_in_a_bounded_number_of_blocks() -> None:
    values = np.ones(100_000)
    values[50_000:] = 2.0
    (first, second) = level_segments(values)
    assert abs(first[1] - 50_000) <= 400
    assert second[1] == 100_000
