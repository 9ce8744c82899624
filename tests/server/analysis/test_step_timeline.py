"""One step on one clock: compute, waiting and moving of each bucket; and the delay of each rank in bins."""

from __future__ import annotations

import numpy as np
from ddpobs_server.analysis.slow_ranks.delay_map import delay_map
from ddpobs_server.analysis.slow_ranks.lateness_bins import bins_of
from ddpobs_server.analysis.steps.joined_steps import join
from ddpobs_server.analysis.steps.step_timeline import bucket_spans_of
from ddpobs_server.figures.selection import RankFilter

from tests.support.analysis.scenario import MS, columns, noiseless, spans, steps_of

HOSTS = {0: "node-a", 1: "node-a", 2: "node-b", 11: "Node-C"}


def test_an_early_rank_waits_and_all_ranks_move_for_the_same_time() -> None:
    # Rank 1 is 6 ms late; moving takes 2 ms, and the second bucket waits for the end of the first.
    rows = [(5, 0, 10, 10, 18), (5, 1, 12, 12, 20), (5, 0, 16, 16, 18), (5, 1, 17, 17, 20)]
    steps = steps_of(np.array([0, 1]), np.array([5, 5]), np.array([5, 5]))
    result = bucket_spans_of(steps, spans([0, 0, 1, 1], rows), {0: 0, 1: 100})
    assert (result.done_ns - result.moving_ns).tolist() == [2, 2, 2, 2]
    assert (result.moving_ns - result.begun_ns).tolist() == [6, 0, 0, 0]
    assert result.begun_ns.tolist() == [10, 18, 116, 118]
    assert result.computing_ns.tolist() == [0, 10, 100, 116]
    assert result.late_rows().tolist() == [2, 1, 2, 1]


def test_a_bucket_that_a_step_reduces_twice_is_matched_in_order() -> None:
    rows = [(5, 0, 1, 1, 4), (5, 0, 11, 11, 19), (5, 0, 3, 3, 4), (5, 0, 12, 12, 19)]
    steps = steps_of(np.array([0, 1]), np.array([5, 5]), np.array([5, 5]))
    result = bucket_spans_of(steps, spans([0, 0, 1, 1], rows), {})
    assert (result.done_ns - result.moving_ns).tolist() == [1, 7, 1, 7]
    assert result.late_rows().tolist() == [2, 3, 2, 3]


def test_the_delays_of_bins_are_means_over_their_steps() -> None:
    own = noiseless({2: ("backward", 40.0)}, steps=30)
    own[:10] = noiseless({}, steps=10)
    delays = delay_map(bins_of(join(*columns(own)), 1), 3)
    assert delays.first.tolist() == [0, 10, 20]
    assert delays.last.tolist() == [9, 19, 29]
    assert (delays.delay_ns / MS).tolist() == [[0, 0, 0, 0], [0, 0, 40, 0], [0, 0, 40, 0]]
    assert round(delays.cost_ns[2] / MS, 6) == round(40 * 20 / 30, 6)


def test_ranks_are_selected_by_number_range_and_host() -> None:
    def selected(text: str) -> list[int]:
        return [rank for rank in HOSTS if RankFilter(text, "rank", HOSTS).includes(rank)]

    assert selected("") == [0, 1, 2, 11]
    assert selected("1") == [1]
    assert selected("1-2, 11") == [1, 2, 11]
    assert selected("node-b, -c") == [2, 11]
    assert selected("none") == []
