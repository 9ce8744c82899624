"""Which host is named as slow, from rates that are given."""

from __future__ import annotations

import numpy as np
import pytest

from ddpobs.launch.host_check.comparison import compare
from ddpobs.launch.host_check.order import ALL_REDUCE, EXCHANGE, MATRIX, MEASURES, Order
from ddpobs.launch.host_check.partners import MAX_ROUNDS, groups_of, rounds
from ddpobs.launch.host_check.result import Result

LIMIT = 1.2
FOUR_HOSTS = [f"node{rank // 2}" for rank in range(8)]


def rates(ranks: int, repetitions: int = 20, seed: int = 0) -> np.ndarray:
    return 1e9 * np.random.default_rng(seed).normal(1, 0.02, (ranks, repetitions))


def result(changed: np.ndarray, measure: int, hosts: list[str]) -> Result:
    same = np.stack([rates(len(hosts), seed=index) for index in range(len(MEASURES))])
    same[measure] = changed
    return Result(hosts, same, LIMIT, [], "CPUs", 30.0)


def test_a_rank_that_is_slow_throughout_is_named_with_its_ratio() -> None:
    measured = rates(4)
    measured[2] /= 3
    comparison = compare(measured, ["node0"] * 4, LIMIT)
    assert (comparison.slow, comparison.slower.tolist()) == ([2], [0, 0, 20, 0])
    assert comparison.ratios[2] == pytest.approx(3, rel=0.05)


def test_two_slow_ranks_of_a_host_do_not_hide_each_other() -> None:
    measured = rates(4)
    measured[2:] /= 1.5
    assert sorted(compare(measured, ["node0", "node0", "node1", "node1"], LIMIT).slow) == [2, 3]


def test_a_rank_that_is_slow_in_some_repetitions_is_not_named() -> None:
    measured = rates(4)
    measured[2, :15] /= 10
    assert compare(measured, ["node0"] * 4, LIMIT).slow == []
    measured[2, 15] /= 10
    assert compare(measured, ["node0"] * 4, LIMIT).slow == [2]


def test_of_200_fleets_that_are_disturbed_at_random_none_has_a_slow_host() -> None:
    random = np.random.default_rng(1)
    for _ in range(200):
        measured = random.normal(1, 0.05, (16, 20)) / random.choice([1, 2], (16, 20), p=[0.7, 0.3])
        assert compare(measured, [f"node{rank // 4}" for rank in range(16)], LIMIT).slow == []


def test_a_rank_whose_rate_is_not_known_is_neither_slow_nor_compared_with() -> None:
    measured = rates(4)
    measured[1] = np.nan
    comparison = compare(measured, ["node0"] * 4, LIMIT)
    assert comparison.slow == []
    assert np.isnan(comparison.ratios[1])
    assert compare(np.full((2, 5), np.nan), ["a", "b"], LIMIT).slowest is None


@pytest.mark.parametrize("hosts", [["a"] * 3, ["a", "b"], FOUR_HOSTS, [*"abcdefg"], ["a", "a", "b", "c"]])
def test_partners_are_mutual_of_other_hosts_and_new_in_each_round(hosts: list[str]) -> None:
    groups = groups_of(hosts)
    turns = rounds(groups)
    assert len(turns) == min(MAX_ROUNDS, len(set(groups)) - 1 + len(set(groups)) % 2)
    for rank in range(len(hosts)):
        met = [turn[rank] for turn in turns]
        partners = [partner for partner in met if partner is not None]
        assert len(set(partners)) == len(partners)
        for turn, partner in zip(turns, met, strict=True):
            assert partner is None or (turn[partner] == rank and groups[partner] != groups[rank])
    if len(set(groups)) > 2:
        first_of_group = {group: rank for rank, group in reversed(list(enumerate(groups)))}
        assert all(sum(turn[rank] is not None for turn in turns) >= 2 for rank in first_of_group.values())


@pytest.mark.parametrize("hosts", [["a"] * 3, FOUR_HOSTS, [*"abcdefg"]])
def test_a_slow_link_makes_its_own_host_slow_and_not_its_partners(hosts: list[str]) -> None:
    groups = groups_of(hosts)
    link = np.where(np.array(groups) == 1, 1e8, 1e9)
    measured = np.full((len(hosts), 5), np.nan)
    for rank in range(len(hosts)):
        partners = [turn[rank] for turn in rounds(groups)]
        measured[rank] = max(min(link[rank], link[partner]) for partner in partners if partner is not None)
    slow = sorted(compare(measured, hosts, LIMIT).slow)
    assert slow == [rank for rank, group in enumerate(groups) if group == 1]


def test_the_table_names_the_slow_host_the_measure_and_by_how_much() -> None:
    measured = np.full((8, 20), 1e9)
    measured[5] /= 4
    found = result(measured, MATRIX, FOUR_HOSTS)
    assert found.slow_hosts() == ["node2"]
    lines = found.lines()
    assert lines[0] == "ddpobs: checked 8 ranks on 4 hosts in 30 s, on CPUs, with 20 repetitions"
    assert lines[2].split()[:3] == ["matrix", "products", "1"]
    assert "rank 5 on node2" in lines[2]
    assert lines[2].endswith("20 of 20")
    (sentence,) = [line for line in lines if "slow host" in line]
    assert sentence.startswith("ddpobs: slow host node2: matrix products slower by 4.00×")
    assert "rank 5: 0.25 GFLOP/s, others: 1 GFLOP/s; at least 1.2× in 20 of 20 repetitions" in sentence
    assert lines[-1] == "ddpobs: the script was not started: exit status 75"


def test_an_all_reduce_names_no_host() -> None:
    measured = rates(8)
    measured[5] /= 4
    found = result(measured, ALL_REDUCE, FOUR_HOSTS)
    assert found.slow_hosts() == []
    assert "hosts are alike" in found.lines()[-1]


def test_two_hosts_leave_open_which_of_them_delays_the_exchange() -> None:
    lines = result(rates(2), EXCHANGE, ["a", "b"]).lines()
    reason = "which of the 2 hosts delays the exchange: each has the other as its only partner"
    assert lines[-1] == f"ddpobs: not known: {reason}"


def test_an_order_survives_the_environment_and_fits_its_windows_into_its_time() -> None:
    order = Order(30.0, 1.5, "/a folder")
    assert Order.of({"DDPOBS_CHECK_HOSTS": order.text()}) == order
    assert order.repetitions * len(MEASURES) * order.window_s == pytest.approx(30)
    assert [Order(seconds, 1.2, "/").repetitions for seconds in (0.5, 1.0, 30.0)] == [2, 5, 20]
