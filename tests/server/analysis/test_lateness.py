"""Lateness, its cost, and the predicted gain of a remedy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ddpobs_server.analysis.slow_ranks.lateness import cost_shares, gain, lateness, step_weights
from ddpobs_server.analysis.steps.joined_steps import join

from ddpobs import wire
from tests.support.analysis.scenario import MS, columns, noiseless


@pytest.mark.parametrize(
    ("window_ns", "weights"),
    [
        ([10, 10, 80, 20, 10], [1, 1, 0.5, 1, 1]),
        ([0, 0, 0, 0, 10, 10, 80], [1, 1, 1, 1, 1, 1, 0.5]),
        ([0, 0, 0], [1, 1, 1]),
        ([], []),
    ],
)
def test_no_step_counts_for_more_than_four_median_steps_that_took_time(
    window_ns: list[int], weights: list[float]
) -> None:
    assert step_weights(np.array(window_ns, np.float64)).tolist() == weights


def test_steps_that_took_no_time_cost_nothing() -> None:
    joined = join(*columns(np.zeros((40, 2, len(wire.OWN_PHASES)), np.int64)))
    no_time = replace(joined, wall_ns=np.zeros_like(joined.wall_ns))
    assert cost_shares(no_time, lateness(no_time), np.arange(40)).tolist() == [0, 0]


def test_the_delay_of_two_ranks_is_the_whole_difference() -> None:
    late = lateness(join(*columns(noiseless({0: ("data", 10)}, ranks=2))))
    assert set(late.delay_ns.tolist()) == {10.0 * MS}
    assert set(late.last.tolist()) == {0}


def test_the_gain_of_one_of_two_equally_slow_ranks_is_zero_while_the_other_stays() -> None:
    joined = join(*columns(noiseless({1: ("backward", 40), 2: ("backward", 40)})))
    assert gain(joined, 1).step_ns == 0


def test_a_long_stall_of_one_step_is_no_gain() -> None:
    own = noiseless({1: ("backward", 40)}, steps=200)
    own[77, 1, wire.OWN_PHASES.index("other")] += 60_000 * MS
    joined = join(*columns(own))
    assert gain(joined, 1).step_ns == pytest.approx(40 * MS, rel=0.06)


def test_a_wait_at_a_barrier_is_counted_in_one_window_only() -> None:
    own = noiseless({}, steps=160)
    own[::4, 1, wire.OWN_PHASES.index("other")] += 1200 * MS
    joined = join(*columns(own, barrier=True))
    assert joined.window_ns.sum() == pytest.approx(joined.step_ns.sum(), rel=0.05)
