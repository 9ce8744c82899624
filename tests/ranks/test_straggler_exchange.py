"""Straggler statistics over ranks, and their exchange through a real store."""

from __future__ import annotations

import numpy as np
import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore

from ddpobs import wire
from ddpobs.ranks.straggler_exchange import COLUMNS, Exchange, join, statistics
from tests.support.columns import make_steps

QUIET = {"data": 10, "forward": 20, "backward": 40, "optimizer": 5, "other": 1}


def row(collective: int, wall: int = 100, exposed: int = 30, **slow: int) -> list[int]:
    return [collective, wall, exposed, *[(QUIET | slow)[name] for name in wire.OWN_PHASES]]


def steps(collectives: int, backward: int = 40, backwards: int = 1) -> wire.Steps:
    """Each of so many synchronised backwards, and with the number of the last one."""
    own = {f"own_{name}_ns": ns for name, ns in (QUIET | {"backward": backward}).items()}
    return make_steps(collective=np.arange(collectives) * backwards + backwards - 1, end_ns=100, own_ns=1, **own)


def test_the_last_rank_has_the_delay_and_the_others_wait() -> None:
    joined = np.array([[row(7), row(7, backward=70), row(7)], [row(8), row(8, backward=70), row(8)]])
    peers = statistics(joined)
    assert (peers.first_collective, peers.last_collective, peers.steps) == (7, 8, 2)
    assert peers.delay_ns.tolist() == [0, 60, 0]
    assert peers.wait_ns.tolist() == [60, 0, 60]
    assert peers.straggler_backward.tolist() == [0, 2, 0]
    assert peers.straggler_data.tolist() == [0, 0, 0]
    assert peers.own_backward_ns.tolist() == [80, 140, 80]


def test_data_moves_for_as_long_as_communication_is_exposed_on_the_last_rank() -> None:
    first, second = [row(7, exposed=70), row(7, exposed=10, backward=100)], [row(8, exposed=5), row(8, exposed=6)]
    assert statistics(np.array([first, second])).moving_ns.tolist() == [15, 15]


def test_of_two_ranks_the_whole_delay_is_reported_and_not_half_of_it() -> None:
    peers = statistics(np.array([[row(0), row(0, data=50)]]))
    assert peers.delay_ns.tolist() == [0, 40]
    assert peers.straggler_data.tolist() == [0, 1]


def test_a_delay_below_the_share_of_the_step_is_no_straggler() -> None:
    peers = statistics(np.array([[row(0), row(0, backward=49)]]))
    assert peers.straggler_backward.tolist() == [0, 0]


def test_ranks_are_joined_by_the_collective_and_not_by_their_row() -> None:
    first = np.array([row(c, data=c) for c in (3, 4, 5)])
    second = np.array([row(c, data=c) for c in (4, 5, 6)])
    joined = join([first, second])
    assert joined[:, :, 0].tolist() == [[4, 4], [5, 5]]


def test_ranks_exchange_through_the_store_without_waiting_for_a_missing_rank() -> None:
    store = HashStore()
    exchanges = [Exchange(PrefixStore("a", store), rank, range(2), 4) for rank in range(2)]
    exchanges[0].add(steps(4))
    exchanges[0].publish()
    assert exchanges[0].gather() is None
    exchanges[1].add(steps(4, backward=90))
    exchanges[1].publish()
    peers = exchanges[0].gather()
    assert peers is not None
    assert peers.straggler_backward.tolist() == [0, 4]
    assert exchanges[0].gather() is None, "the same steps are reported once"
    assert exchanges[1].gather() is None, "only rank 0 reports"


def test_statistics_over_a_sample_report_its_number_of_steps() -> None:
    store = HashStore()
    exchanges = [Exchange(PrefixStore("many", store), rank, range(2), 4) for rank in range(2)]
    for exchange, backward in zip(exchanges, (40, 90), strict=True):
        exchange.add(steps(5000, backward))
        exchange.publish()
    peers = exchanges[0].gather()
    assert peers is not None
    assert (peers.steps, peers.delay_ns.tolist()) == (2500, [0, 2500 * 50])


@pytest.mark.parametrize(("world_size", "every"), [(2, 5000), (512, 33), (1024, 16)])
def test_an_exchange_happens_with_any_number_of_required_steps(world_size: int, every: int) -> None:
    store = HashStore()
    exchanges = [Exchange(PrefixStore("rare", store), rank, range(world_size), every) for rank in (0, 1)]
    for exchange in exchanges:
        exchange._ranks = range(2)
        for first in range(0, 6000, 3):
            exchange.add(steps(first + 3).select(slice(-3, None)))
        exchange.publish()
    assert exchanges[0].gather() is not None


@pytest.mark.parametrize("backwards", [1, 2, 4])
@pytest.mark.parametrize(("ranks", "per_s", "share"), [(2, 100, 1), (2, 1000, 2), (64, 20, 2), (256, 10, 4)])
def test_ranks_that_cut_their_batches_at_different_times_share_steps(
    ranks: int, per_s: int, share: int, backwards: int
) -> None:
    """If the tables cannot hold all steps, all ranks share a half, a quarter or an eighth of them."""
    store = HashStore()
    exchanges = [Exchange(PrefixStore("fast", store), rank, range(ranks), 4) for rank in range(ranks)]
    whole, sizes, compared = steps(24 * per_s, backwards=backwards), [0] * ranks, 0
    for second in range(24):
        for rank, exchange in enumerate(exchanges):
            if second % 4 == rank % 4:
                until = per_s * (second + 1)
                exchange.add(wire.Steps(**{name: getattr(whole, name)[sizes[rank] : until] for name in whole.names}))
                sizes[rank] = until
                exchange.publish()
        peers = exchanges[0].gather()
        compared += peers.steps if peers is not None else 0
    assert compared >= 0.8 * min(sizes) / share


def test_a_row_is_as_wide_as_its_columns() -> None:
    assert len(row(0)) == COLUMNS
