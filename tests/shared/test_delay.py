"""The delay of a rank, and that ranks and collector compute the same."""

from __future__ import annotations

import numpy as np
from ddpobs_server.analysis.slow_ranks.lateness import lateness
from ddpobs_server.analysis.steps.joined_steps import join
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ddpobs import wire
from ddpobs.ranks.straggler_exchange import statistics
from ddpobs.shared.delay import excess_of, excesses, median_of_others, moving
from tests.support.analysis.scenario import columns, own_times


def test_two_ranks_have_each_other_as_median() -> None:
    assert median_of_others(np.array([[10.0, 50.0]])).tolist() == [[50.0, 10.0]]


def test_the_median_of_others_leaves_the_rank_itself_out() -> None:
    assert median_of_others(np.array([[1.0, 2.0, 3.0, 100.0]])).tolist() == [[3.0, 3.0, 2.0, 2.0]]


@given(arrays.arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(2, 9)), elements=st.integers(0, 1000)))
def test_only_the_last_rank_of_three_or_more_can_exceed_the_others_median_most(values: np.ndarray) -> None:
    excess = values - median_of_others(values)
    rows = np.arange(len(values))
    assert (excess[rows, values.argmax(axis=1)] == excess.max(axis=1)).all()


@given(arrays.arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(2, 9)), elements=st.integers(0, 9)))
def test_the_median_of_others_is_the_median_of_all_values_but_the_ranks_own(values: np.ndarray) -> None:
    plainly = [np.median(np.delete(values, rank, axis=1), axis=1) for rank in range(values.shape[1])]
    assert (median_of_others(values) == np.stack(plainly, axis=1)).all()


@given(arrays.arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(2, 9)), elements=st.integers(0, 9)))
def test_the_excess_of_one_rank_is_its_column_of_all_excesses(values: np.ndarray) -> None:
    for rank in range(values.shape[1]):
        assert (excess_of(values, rank) == excesses(values)[:, rank]).all()


def test_the_ranks_report_the_delays_and_late_steps_that_the_collector_computes() -> None:
    own = own_times(64, 5, seed=0)
    joined = join(*columns(own))
    late = lateness(joined)
    collective = np.broadcast_to(joined.collective[:, None], joined.wall_ns.shape)
    header = np.stack([collective, joined.wall_ns, joined.exposed_ns], axis=2)
    peers = statistics(np.concatenate([header, own], axis=2).astype(np.int64))
    assert peers.moving_ns.tolist() == [int(moving(joined.exposed_ns).sum())] * 5
    is_last = late.last[:, None] == np.arange(5)
    assert peers.delay_ns.tolist() == (is_last * late.delay_ns[:, None]).sum(axis=0).astype(np.int64).tolist()
    straggles = sum(getattr(peers, f"straggler_{phase}") for phase in wire.OWN_PHASES)
    assert straggles.tolist() == (is_last & late.late).sum(axis=0).tolist()
    assert 0 < straggles.sum() < len(own)
