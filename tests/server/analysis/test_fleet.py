"""Hosts that are slow in different jobs, regressions, and time by week: pure functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ddpobs_server.analysis.account.run_account import Launch, account_of
from ddpobs_server.analysis.fleet import host_shares
from ddpobs_server.analysis.fleet.host_shares import host_excess_ratios
from ddpobs_server.analysis.fleet.regressions import Losses, larger_by_chance, regressions
from ddpobs_server.analysis.fleet.slow_hosts import HostInJob, SlowHost, slow_hosts
from ddpobs_server.analysis.fleet.sums import WEEK_NS, Sum, week_begin_ns, week_of, week_shares
from ddpobs_server.analysis.steps.joined_steps import join

from tests.support.analysis.accounts import phases, process
from tests.support.analysis.accounts import seconds as seconds_of
from tests.support.analysis.scenario import Slow, columns, own_times

HOSTS = [f"node{number}" for number in range(6)]
LEMON = HOSTS[4]
Job = list[HostInJob]


def fleet(seed: int, runs: int = 60, lemon_ratio: float = 0.08) -> list[Job]:
    """Short runs on three to six of the hosts; one host is late, all vary by 2 % of a step."""
    chance = np.random.default_rng(seed)
    jobs = []
    for _ in range(runs):
        chosen = chance.choice(HOSTS, chance.integers(3, 7), replace=False)
        late = [chance.normal(0, 0.02) + (lemon_ratio if host == LEMON else 0) for host in chosen]
        jobs.append([HostInJob(str(host), 2, ratio) for host, ratio in zip(chosen, late, strict=True)])
    return jobs


def permuted(jobs: list[Job], chance: Any) -> list[Job]:
    """The same jobs, with the names of the hosts of each job exchanged."""
    return [
        [HostInJob(str(name), host.ranks, host.excess_ratio) for name, host in zip(names, job, strict=True)]
        for job in jobs
        for names in [chance.permutation([host.host for host in job])]
    ]


def names(found: list[SlowHost]) -> list[str]:
    return [host.host for host in found]


def named_at(jobs: list[Job]) -> dict[str, int]:
    """Number of the first job after which each host is named that ever is; the list is read after each job."""
    found: dict[str, int] = {}
    for count in range(1, len(jobs) + 1):
        for host in names(slow_hosts(jobs[:count])):
            found.setdefault(host, count)
    return found


def test_one_lemon_among_six_hosts_is_named_by_the_tenth_of_sixty_runs_and_no_other_host_ever() -> None:
    found = [named_at(fleet(seed)) for seed in range(40)]
    assert {host for named in found for host in named} == {LEMON}
    assert sum(named[LEMON] <= 10 for named in found) >= 0.95 * len(found)
    assert max(named[LEMON] for named in found) <= 13


def test_a_lemon_is_described_by_its_jobs() -> None:
    jobs = fleet(0)
    (found,) = slow_hosts(jobs)
    assert (found.host, found.jobs) == (LEMON, sum(any(host.host == LEMON for host in job) for job in jobs))
    assert found.slow_jobs > 3 * found.expected_jobs
    assert found.excess_ratio == pytest.approx(0.08, abs=0.02)


def test_a_host_that_becomes_slow_after_sixty_runs_is_named_within_twenty_more() -> None:
    for seed in range(10):
        jobs = fleet(seed, lemon_ratio=0.0) + fleet(seed + 100, runs=20)
        assert named_at(jobs)[LEMON] > 60


def test_a_host_that_was_repaired_after_sixty_slow_runs_is_named_for_a_few_more() -> None:
    slow, alike = [HostInJob("a", 1, 0.1), HostInJob("b", 1, 0), HostInJob("c", 1, 0)], 0.0
    repaired = [
        [HostInJob("a", 1, alike), HostInJob("b", 1, 0.03 * (number % 2)), HostInJob("c", 1, 0.03 * (1 - number % 2))]
        for number in range(12)
    ]
    counts = [len(slow_hosts([slow] * 60 + repaired[:count])) for count in range(13)]
    assert counts[:3] == [1, 1, 1]
    assert counts[6:] == [0] * 7


def test_no_host_of_a_permuted_fleet_is_named_at_any_time_in_95_of_100() -> None:
    chance, jobs = np.random.default_rng(7), fleet(0)
    assert sum(bool(named_at(permuted(jobs, chance))) for _ in range(200)) <= 10


def test_the_shares_of_all_hosts_that_ever_appear_add_up_to_the_bound() -> None:
    """The k-th host is named at a capital of 1 / its share: that of a host which is always the slowest of many."""
    one = [HostInJob("slow", 1, 0.1), HostInJob("many", 10_000, 0.0)]
    others = [[HostInJob(f"n{number:04d}", 1, 0.1), HostInJob("n0000", 1, 0.0)] for number in range(1, 5000)]
    (first,) = slow_hosts([one] * 3)
    assert first.chance == pytest.approx((0.75 * (32 / (1 + 31 / 10_001)) ** 3) ** -1, rel=0.01)
    assert [found.host for found in slow_hosts([*others, *[one] * 3])] == []
    assert [found.host for found in slow_hosts([*others, *[one] * 7])] == ["slow"]


def test_a_host_with_most_ranks_is_the_slowest_most_often_and_is_not_named() -> None:
    chance = np.random.default_rng(3)
    jobs = []
    for _ in range(200):
        slowest = chance.random() < 0.8
        jobs.append([HostInJob("large", 8, 0.1 * slowest), HostInJob("small", 2, 0.1 * (not slowest))])
    assert slow_hosts(jobs) == []
    assert names(slow_hosts([[HostInJob("large", 8, 0), HostInJob("small", 2, 0.1)]] * 4)) == ["small"]


def test_a_small_lateness_and_a_single_host_accuse_none() -> None:
    assert slow_hosts([[HostInJob("a", 1, 0.01), HostInJob("b", 1, 0), HostInJob("c", 1, 0)]] * 50) == []
    assert slow_hosts([[HostInJob("a", 1, 0.5)]] * 50) == []


def losses(*weeks: tuple[int, Any]) -> Losses:
    """Losses of attempts from the shares of each week."""
    shares = np.concatenate([own for _, own in weeks])
    week = np.repeat([number for number, _ in weeks], [len(own) for _, own in weeks])
    return Losses(week, np.full(len(shares), 100.0), 100.0 * shares)


def test_a_group_that_loses_more_than_before_is_a_regression() -> None:
    chance = np.random.default_rng(1)
    before = [(week, chance.uniform(0.05, 0.15, 10)) for week in range(4)]
    worse, same = chance.uniform(0.25, 0.35, 10), chance.uniform(0.05, 0.15, 10)
    groups = {("tag", "nlp"): losses(*before, (4, worse)), ("tag", "vision"): losses(*before, (4, same))}
    (found,) = regressions(groups)
    assert (found.group, found.week, found.runs, found.runs_before) == (("tag", "nlp"), 4, 10, 40)
    assert found.lost_share == pytest.approx(worse.mean())
    assert found.lost_share_before == pytest.approx(0.1, abs=0.02)


def test_too_few_attempts_and_equal_losses_are_no_regression() -> None:
    few = losses((0, [0.1] * 20), (1, [0.9] * 7))
    equal = losses((0, [0.1] * 20), (1, [0.1] * 20))
    assert regressions({("tag", "few"): few, ("tag", "equal"): equal}) == []


def test_the_rank_sum_of_separate_values_is_that_of_the_normal_approximation() -> None:
    # U = 25, mean 12.5, standard deviation sqrt(25 * 11 / 12): z = (25 - 12.5 - 0.5) / 4.787.
    assert larger_by_chance(np.arange(5.0) + 10, np.arange(5.0)) == pytest.approx(0.00609, rel=0.01)
    assert larger_by_chance(np.arange(5.0), np.arange(5.0) + 10) > 0.99


def test_time_is_spread_evenly_over_weeks_that_begin_on_mondays() -> None:
    monday = week_begin_ns(2900)
    assert week_of(monday) == 2900
    assert week_of(monday - 1) == 2899
    begins, lengths = np.array([monday - WEEK_NS // 2, monday, monday - 5]), np.array([2 * WEEK_NS, 0, 5])
    shares = week_shares(begins, lengths, (2899, 2900))
    assert list(zip(*(column.tolist() for column in shares), strict=True)) == [
        (0, 2899, 0.25),
        (0, 2900, 0.5),
        (1, 2900, 1.0),
        (2, 2899, 1.0),
    ]
    assert not len(week_shares(begins, lengths, (2902, 2905)).time)


def test_goodput_leaves_out_what_is_not_known() -> None:
    total = Sum(1, {"forward": 6, "checkpoint": 2, "not_known": 2})
    assert (total.rank_ns, total.lost_ns, total.goodput) == (10, 4, 0.75)


def test_an_attempts_parts_are_those_of_its_ranks_on_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(attempt: str, ordinal: int) -> Launch:
        hosts = ("a", "b", "b")
        done = [replace(process(rank, phases_ns=phases(forward=50)), host=host) for rank, host in enumerate(hosts)]
        return Launch(attempt, ordinal, 4, [*done, replace(process(3), host="unknown")])

    account = account_of([launch("one", 0), launch("two", 1)])
    shares = host_shares.host_shares(account.attempts[0])
    assert {host: (share.ranks, share.has_rank_zero) for host, share in shares.items()} == {
        "a": (1, True),
        "b": (2, False),
        "": (1, False),
    }
    assert sum(sum(share.parts.values()) for share in shares.values()) == account.attempts[0].rank_ns
    assert seconds_of(account.attempts[0])["forward"] == 150
    monkeypatch.setattr(host_shares, "MAX_HOSTS", 1)
    assert set(host_shares.host_shares(account.attempts[0])) == {"b", ""}


def test_the_slow_ranks_host_is_late_by_its_share_of_the_step() -> None:
    joined = join(*columns(own_times(60, 4, seed=1, slow=(Slow(3, "backward", 60),))))
    ratios = host_excess_ratios(joined, {0: "a", 1: "a", 2: "b", 3: "b"})
    assert max(ratios, key=lambda host: ratios[host]) == "b"
    assert ratios["b"] > 0.2
    assert ratios["a"] < 0
    assert host_excess_ratios(joined, dict.fromkeys(range(4), "a")) == {}
    assert host_excess_ratios(joined, {0: "a", 1: "a", 2: "b"}) == {}
    assert host_excess_ratios(joined.latest(20), {0: "a", 1: "a", 2: "b", 3: "b"}) == {}
