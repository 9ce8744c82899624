"""What slow ranks cost, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ddpobs.whatif.repair import shared_work_ns, slowdown
from tests.support.whatif import MS


def own_times(*ranks: tuple[float, float]) -> np.ndarray[tuple[int, int, int], np.dtype[np.float64]]:
    """Ten steps with these times of two phases by rank, in ms."""
    return np.tile(np.array(ranks, np.float64) * MS, (10, 1, 1))


def test_the_slowdown_is_the_steps_time_over_that_of_median_ranks() -> None:
    own_ns = own_times((10, 30), (10, 30), (10, 70))
    cost = slowdown(np.full(10, 100 * MS), own_ns)
    assert cost.total == pytest.approx(100 / 60)
    assert cost.lost_share == pytest.approx(0.4)
    assert cost.by_rank == pytest.approx([1, 1, 100 / 60])
    assert cost.by_phase == pytest.approx([1, 100 / 60])


def test_ranks_that_are_slow_in_turn_cost_together_what_each_costs_in_its_steps() -> None:
    own_ns = own_times((10, 30), (10, 30), (10, 30))
    for step in range(10):
        own_ns[step, step % 2, 0] += 20 * MS
    cost = slowdown(np.full(10, 80 * MS), own_ns)
    assert cost.total == pytest.approx(80 / 60)
    assert cost.by_rank == pytest.approx([70 / 60, 70 / 60, 1])


def test_equal_ranks_cost_nothing() -> None:
    assert slowdown(np.full(10, 50 * MS), own_times((10, 30), (10, 30))).total == pytest.approx(1)


def test_equal_work_saves_the_time_of_the_largest_batch() -> None:
    own_ns = np.array([[40.0, 60.0]])
    assert shared_work_ns(own_ns, np.array([[-10.0, 10.0]])).tolist() == [10]
