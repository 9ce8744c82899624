"""A run is divided where its step time shifts, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
from ddpobs_server.analysis.statistics.change_points import segments
from ddpobs_server.analysis.steps.step_levels import step_levels


def noisy(
    *levels: tuple[int, float], noise: float = 0.1, seed: int = 0
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    means = np.concatenate([np.full(count, mean) for count, mean in levels])
    return np.asarray(means * np.exp(np.random.default_rng(seed).normal(0, noise, len(means))))


@pytest.mark.parametrize("seed", range(5))
def test_a_shift_of_the_mean_is_found_where_it_is(seed: int) -> None:
    (begin, end), (later, last) = segments(noisy((300, 1.0), (300, 1.3), seed=seed))
    assert (begin, last) == (0, 600)
    assert end == later == pytest.approx(300, abs=5)


@pytest.mark.parametrize("seed", range(20))
def test_noise_around_one_mean_is_one_segment(seed: int) -> None:
    assert segments(noisy((500, 1.0), seed=seed)) == [(0, 500)]


def test_few_spikes_are_no_segment() -> None:
    values = noisy((500, 1.0))
    values[[100, 101, 300]] = 50.0
    assert segments(values) == [(0, 500)]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_few_values_are_one_segment(count: int) -> None:
    assert segments(np.ones(count)) == ([(0, count)] if count else [])


def test_a_constant_series_with_one_shift_has_two_segments() -> None:
    assert segments(np.repeat([1.0, 2.0], 20)) == [(0, 20), (20, 40)]


def test_the_step_time_of_a_run_has_a_level_for_each_shift() -> None:
    values = noisy((1000, 100.0), (500, 150.0), (1000, 100.0))
    step = np.arange(len(values))
    levels = step_levels(step, step, values)
    assert [round(level.first, -1) for level in levels] == [0, 1000, 1500]
    assert [level.step_ns for level in levels] == pytest.approx([100, 150, 100], rel=0.03)
    assert levels[-1].last == 2499


def test_a_shift_below_a_twentieth_or_of_few_steps_is_no_level() -> None:
    values = noisy((1000, 100.0), (1000, 103.0), noise=0.01)
    values[500:520] = 200.0
    step = np.arange(len(values))
    assert len(step_levels(step, step, values)) == 1


def test_without_steps_there_is_no_level() -> None:
    none = np.zeros(0, np.int64)
    assert step_levels(none, none, none.astype(float)) == []
