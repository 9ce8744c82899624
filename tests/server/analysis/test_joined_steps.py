"""Rows of many ranks become matrices."""

from __future__ import annotations

import numpy as np
from ddpobs_server.analysis.steps.joined_steps import join, mean_over_ranks, silent_ranks

from ddpobs import wire
from tests.support.analysis.scenario import columns, own_times, select_rows, with_columns


def test_columns_are_the_ranks_and_rows_the_collectives() -> None:
    own = own_times(5, 3, seed=0)
    joined = join(*columns(own))
    assert joined.ranks.tolist() == [0, 1, 2]
    assert joined.collective.tolist() == [0, 1, 2, 3, 4]
    assert (joined.phases_ns == own).all()
    assert (joined.own_ns == own.sum(axis=2)).all()


def test_ranks_are_joined_by_collective_where_their_step_numbers_part() -> None:
    rank, steps = columns(own_times(4, 2, seed=0))
    parted = with_columns(steps, step=steps.step + 7 * (rank == 1))
    joined = join(rank, parted)
    assert joined.collective.tolist() == [0, 1, 2, 3]
    assert (joined.own_ns == join(rank, steps).own_ns).all()


def test_rows_are_joined_in_whatever_order_they_come() -> None:
    rank, steps = columns(own_times(5, 3, seed=0))
    order = np.random.default_rng(0).permutation(15)
    joined, shuffled = join(rank, steps), join(rank[order], steps.select(order))
    assert (shuffled.own_ns == joined.own_ns).all()
    assert (order[shuffled.row] == joined.row).all()


def test_a_step_is_left_out_if_a_rank_has_no_clean_start_or_no_row() -> None:
    rank, steps = columns(own_times(5, 2, seed=0))
    flags = steps.flags.copy()
    flags[2 * 0 + 1] |= wire.NO_ORIGIN
    flags[2 * 1] |= wire.NO_ORIGIN
    own = steps.own_ns.copy()
    own[2 * 2] = wire.UNKNOWN
    rows = np.arange(10) != 2 * 3 + 1
    joined = join(*select_rows(rank, with_columns(steps, flags=flags, own_ns=own), rows))
    assert joined.collective.tolist() == [4]


def test_no_common_collective_is_an_empty_join() -> None:
    rank, steps = columns(own_times(2, 2, seed=0))
    assert len(join(*select_rows(rank, steps, steps.step == rank))) == 0


def test_a_rank_without_a_row_in_the_later_half_is_silent_whatever_its_step_numbers() -> None:
    rank, steps = columns(own_times(100, 3, seed=0))
    steps = with_columns(steps, step=steps.step + 1000 * (rank == 2))
    for last, behind in ((60, []), (40, [2])):
        some = select_rows(rank, steps, (rank != 2) | (steps.collective < last))
        assert silent_ranks(*some).tolist() == behind
    silent = with_columns(steps, collective=np.where(rank == 1, wire.UNKNOWN, steps.collective))
    assert silent_ranks(rank, silent).tolist() == [1]
    nothing = with_columns(steps, collective=np.full(len(rank), wire.UNKNOWN))
    assert silent_ranks(rank, nothing).tolist() == []


def test_the_mean_over_ranks_is_over_the_ranks_that_have_the_step() -> None:
    rank, steps = columns(own_times(3, 4, seed=1))
    rank, steps = select_rows(rank, steps, (steps.step != 1) | (rank != 2))
    means = mean_over_ranks(steps)
    assert means["ranks"].tolist() == [4, 3, 4]
    wall = steps.end_ns - steps.start_ns
    assert means["wall_ns"].tolist() == [int(wall[steps.step == step].mean()) for step in range(3)]
    nothing = mean_over_ranks(select_rows(rank, steps, steps.step < 0)[1])
    assert {len(values) for values in nothing.values()} == {0}
