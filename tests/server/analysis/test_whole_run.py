"""Slowness of any part of a run is found, with the steps in which it held; a balanced run stays silent."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from ddpobs_server.analysis.finding import Finding
from ddpobs_server.analysis.findings.straggler import straggler
from ddpobs_server.analysis.slow_ranks.facts import MovingFacts, SlowRankFacts, TakingTurnsFacts
from ddpobs_server.analysis.slow_ranks.lateness_bins import bins_of, delays_of, ideal_ns, loss_shares, lost_ns
from ddpobs_server.analysis.steps.intervals import StepClock
from ddpobs_server.analysis.steps.joined_steps import join
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpobs import wire
from tests.support.analysis.judged import facts_of, findings_in
from tests.support.analysis.scenario import BASE_MS, MS, Slow, columns, evidence_of, own_times

BACKWARD, DATA, OPTIMIZER = (wire.OWN_PHASES.index(name) for name in ("backward", "data", "optimizer"))
START_NS = 1_700_000_000 * 10**9


def findings_of(own: wire.Ints, **facts: Any) -> list[Finding]:
    return findings_in(straggler(evidence_of(*columns(own), **facts)))


def slow_between(steps: int, first: int, last: int, ms: float, **noise: Any) -> wire.Ints:
    """Own times of two ranks, of which rank 1 is slow in backward in the steps from `first` to `last`."""
    own = own_times(steps, noise.pop("ranks", 2), seed=noise.pop("seed", 0), **noise)
    own[first : last + 1, 1, BACKWARD] += int(ms * MS)
    return own


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    ("steps", "first", "last", "ms"), [(2600, 900, 1499, 75), (60, 30, 59, 75), (1000, 800, 999, 40)]
)
def test_a_slow_part_of_a_run_is_named_with_its_steps(steps: int, first: int, last: int, ms: float, ranks: int) -> None:
    for seed in range(3):
        (finding,) = findings_of(slow_between(steps, first, last, ms, ranks=ranks, seed=seed))
        (interval,) = finding.intervals
        assert (finding.ranks, finding.phase) == ([1], "backward")
        assert interval.first == pytest.approx(first, abs=4)
        assert interval.last == pytest.approx(last, abs=4)
        is_over = last < steps - 1
        words = f"steps {interval.first:,} to {interval.last:,}" if is_over else f"since step {interval.first}"
        assert words in (finding.when if is_over else finding.verdict)
        # Of eight ranks some other rank is late as well in most steps, and accounts for a part of the loss.
        assert 0.7 <= facts_of(SlowRankFacts, finding).lost_ns / ((last - first + 1) * ms * MS) <= 1.15


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_part_is_named_although_the_machine_is_noisy(seed: int) -> None:
    (finding,) = findings_of(slow_between(1000, 800, 999, 60, seed=seed, burst_steps=10))
    assert (finding.ranks, finding.phase) == ([1], "backward")
    assert finding.intervals[0].first == pytest.approx(800, abs=10)


@pytest.mark.parametrize(("steps", "change"), [(80, 40), (80, 60), (1000, 500)])
@pytest.mark.parametrize(("before_ms", "after_ms"), [(150, 40), (40, 150)])
def test_a_rank_that_becomes_less_slow_is_slow_still(steps: int, change: int, before_ms: int, after_ms: int) -> None:
    for seed in range(3):
        own = slow_between(steps, 0, change - 1, before_ms, seed=seed, burst_steps=10)
        own[change:, 1, BACKWARD] += after_ms * MS
        (finding,) = findings_of(own)
        assert (finding.verdict, finding.ranks) == ("Rank 1 is slow in backward", [1])
        assert [(part.first, part.last) for part in finding.intervals] == [(0, steps - 1)]


@pytest.mark.parametrize("after_ms", [0, 3])
def test_a_slowness_of_which_nothing_costly_is_left_is_over(after_ms: int) -> None:
    own = slow_between(1000, 0, 499, 150, burst_steps=10)
    own[500:, 1, BACKWARD] += after_ms * MS
    (finding,) = [finding for finding in findings_of(own) if finding.severity != "info"]
    assert finding.verdict == "Rank 1 was slow in backward"
    assert finding.intervals[0].last == pytest.approx(499, abs=8)


def test_a_slowness_that_is_over_is_told_in_the_past_and_rated_by_its_share_of_the_run() -> None:
    (over,) = findings_of(slow_between(2600, 900, 1499, 75))
    assert (over.verdict, over.when[:6]) == ("Rank 1 was slow in backward", "steps ")
    assert over.severity == "warning"
    assert facts_of(SlowRankFacts, over).run_share == pytest.approx(600 * 75 / (2600 * 78 + 600 * 75), abs=0.03)
    (ongoing,) = findings_of(slow_between(1500, 900, 1499, 75))
    assert ongoing.verdict.startswith("Rank 1 is slow in backward since step ")
    assert ongoing.severity == "critical"


def test_a_rank_that_is_slow_twice_has_an_interval_for_each() -> None:
    own = slow_between(3000, 400, 799, 75)
    own[1600:2000, 1, BACKWARD] += 75 * MS
    (finding,) = findings_of(own)
    assert [(round(i.first, -1), round(i.last, -1)) for i in finding.intervals] == [(400, 800), (1600, 2000)]
    assert finding.when.startswith("2 stretches of the steps ")


def test_a_slow_stretch_has_the_kind_and_the_phases_of_its_late_steps() -> None:
    own = slow_between(3000, 900, 1499, 0)
    often = np.random.default_rng(0).random(600) < 0.4
    own[900:1500][often, 1, BACKWARD] += 120 * MS
    own[900:1500][often, 1, DATA] += 80 * MS
    (finding,) = findings_of(own)
    facts = facts_of(SlowRankFacts, finding)
    assert (facts.kind, list(facts.phase_excess_ns)) == ("intermittent", ["backward", "data"])


def test_an_interval_has_its_times_of_day() -> None:
    own = slow_between(2600, 900, 1499, 75)
    rank, steps = columns(own)
    rows = rank == 0
    clock = StepClock(steps.step[rows], START_NS + steps.start_ns[rows], START_NS + steps.end_ns[rows])
    (finding,) = findings_of(own, clock=clock)
    (interval,) = clock.timed_finding(finding).intervals
    assert interval.began_ns == START_NS + int(steps.start_ns[rows][interval.first])
    assert interval.ended_ns == START_NS + int(steps.end_ns[rows][interval.last])
    assert finding.when.endswith(", 22:14:39–22:16:12 UTC (93.5 s)")


def test_a_drifting_mean_of_seven_percent_over_many_steps_is_a_change_point() -> None:
    own = own_times(2000, 4, seed=0)
    own[1000:, 1] = own[1000:, 1] * 1.25
    (finding,) = findings_of(own)
    assert finding.intervals[0].first == pytest.approx(1000, abs=8)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("every", [8, 20, 50])
def test_a_slowness_that_moves_from_rank_to_rank_is_one_finding(every: int, ranks: int) -> None:
    own = own_times(800, ranks, seed=1)
    own[np.arange(800), np.arange(800) // every % ranks, BACKWARD] += 75 * MS
    (finding,) = findings_of(own)
    facts = facts_of(MovingFacts, finding)
    assert (facts.kind, finding.phase, finding.ranks) == ("moving", "backward", list(range(ranks)))
    assert finding.severity == "critical"
    assert finding.verdict == "A slowness in backward moves from rank to rank"
    assert sum(facts.shares.values()) == pytest.approx(1, abs=0.01)
    assert all(share == pytest.approx(1 / ranks, abs=0.1) for share in facts.shares.values())
    assert facts.lost_ns == pytest.approx(800 * 75 * MS, rel=0.2)


@pytest.mark.parametrize("together", [False, True])
def test_ranks_that_are_slow_in_turn_in_different_phases_are_one_finding(together: bool) -> None:
    """A slow optimizer of an odd step and a slow loader of the next even step are in the same window."""
    own = own_times(600, 2, seed=2)
    own[::2, 0, DATA] += 75 * MS
    own[0 if together else 1 :: 2, 1, OPTIMIZER] += 75 * MS
    (finding,) = findings_of(own)
    facts = facts_of(TakingTurnsFacts, finding)
    turns = [(turn.rank, turn.phase) for turn in facts.turns]
    assert (facts.kind, turns) == ("taking turns", [(0, "data"), (1, "optimizer")])
    assert finding.verdict == "Ranks 0 and 1 are slow in turn"
    assert re.match(r"rank 0: \+7[\d.]+ ms in data in \d+ % of the steps, rank 1: \+7[\d.]+ ms in opt", finding.measure)
    assert all(turn.share == pytest.approx(0.5, abs=0.1) for turn in facts.turns)
    assert facts.lost_ns == pytest.approx((300 if together else 600) * 75 * MS, rel=0.3)


def test_ranks_that_are_slow_in_turn_in_the_same_phase_are_one_finding() -> None:
    own = own_times(600, 2, seed=3)
    own[::2, 0, BACKWARD] += 75 * MS
    own[1::2, 1, BACKWARD] += 75 * MS
    (finding,) = findings_of(own)
    assert (facts_of(TakingTurnsFacts, finding).kind, finding.ranks) == ("taking turns", [0, 1])
    assert finding.verdict == "Ranks 0 and 1 are slow in turn in backward"


@pytest.mark.parametrize("burst_steps", [0, 10])
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_long_balanced_run_has_no_warning(ranks: int, burst_steps: float) -> None:
    for seed in range(8):
        named = findings_of(own_times(2600, ranks, seed, burst_steps=burst_steps))
        assert [f.title for f in named if f.severity != "info"] == []


@pytest.mark.parametrize("seed", range(3))
def test_the_recorded_noise_of_a_loaded_machine_raises_no_warning(seed: int) -> None:
    """Shuffled in whole blocks between the ranks, recorded noise has no slow rank but all of its bursts."""
    own = recorded_noise(seed)
    assert [f.title for f in findings_of(own) if f.severity != "info"] == []


@pytest.mark.parametrize("seed", range(3))
def test_a_slow_part_is_named_within_recorded_noise(seed: int) -> None:
    own = recorded_noise(seed)
    own[600:1000, 1, BACKWARD] += 12 * MS
    named = [f for f in findings_of(own) if f.severity != "info"]
    assert [(f.ranks, f.phase) for f in named] == [([1], "backward")]
    assert named[0].intervals[0].first == pytest.approx(600, abs=40)


def recorded_noise(seed: int) -> wire.Ints:
    """Own times of two balanced ranks on two cores beside other jobs; each 64 steps' ranks are swapped at random."""
    own: wire.Ints = np.load("tests/server/analysis/noise.npy").astype(np.int64) * 1000
    swap = np.repeat(np.random.default_rng(seed).random(-(-len(own) // 64)) < 0.5, 64)[: len(own)]
    own[swap] = own[swap][:, ::-1]
    return own


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    ranks=st.integers(2, 5),
    kind=st.sampled_from(["none", "part", "two", "moving", "turns", "all"]),
    ms=st.sampled_from([10, 40, 75]),
)
def test_findings_never_claim_more_than_was_lost(seed: int, ranks: int, kind: str, ms: int) -> None:
    steps = 320
    own = own_times(steps, ranks, seed, burst_steps=10 if seed % 2 else 0)
    if kind in ("part", "two", "all"):
        own[60:200, 1, BACKWARD] += ms * MS
    if kind in ("two", "all"):
        own[:, ranks - 1, DATA] += ms * MS
    if kind in ("moving", "all"):
        own[np.arange(steps), np.arange(steps) // 20 % ranks, BACKWARD] += ms * MS
    if kind in ("turns", "all"):
        own[::2, 0, DATA] += ms * MS
        own[1::2, 1, OPTIMIZER] += ms * MS
    joined = join(*columns(own))
    facts: list[Any] = [finding.evidence for finding in findings_of(own)]
    claimed = sum(each.lost_ns for each in facts)
    assert claimed <= lost_ns(joined).sum() * (1 + 1e-9) + 1


def test_two_equally_late_ranks_account_for_half_of_the_loss_each() -> None:
    shares = loss_shares(np.array([[0.0, 40.0, 40.0, 0.0], [0.0, 10.0, 40.0, 0.0]]))
    assert shares.tolist() == [[0, 20, 20, 0], [0, 5, 35, 0]]


@given(st.integers(0, 2**16), st.integers(2, 9))
def test_the_shares_of_a_loss_add_up_to_it(seed: int, ranks: int) -> None:
    excess = np.maximum(0, np.random.default_rng(seed).normal(0, 10, (20, ranks)))
    shares = loss_shares(excess)
    assert (shares >= 0).all()
    np.testing.assert_allclose(shares.sum(axis=1), excess.max(axis=1))


def test_an_ideal_step_takes_the_lower_median_of_each_phase() -> None:
    own = np.tile(np.array([BASE_MS[phase] for phase in wire.OWN_PHASES]) * MS, (4, 2, 1)).astype(np.int64)
    own[:, 0, DATA] += 10 * MS
    own[:, 1, OPTIMIZER] += 10 * MS
    joined = join(*columns(own))
    assert ideal_ns(joined).tolist() == [sum(BASE_MS.values()) * MS] * 4
    assert lost_ns(joined).tolist() == [10 * MS] * 4


def test_bins_hold_the_sums_of_their_steps() -> None:
    joined = join(*columns(own_times(50, 3, seed=0, slow=(Slow(1, "data"),))))
    whole, parts = bins_of(joined, 50), bins_of(joined, 7)
    for name in ("steps", "time_ns", "late", "cost_ns", "lost_ns", "phase_ns"):
        np.testing.assert_allclose(getattr(parts, name).sum(axis=0), getattr(whole, name).sum(axis=0))
    assert (parts.first[0], parts.last[-1], len(parts)) == (joined.step[0], joined.step[-1], 8)
    for name, values in vars(delays_of(joined)).items():
        np.testing.assert_array_equal(values, getattr(bins_of(joined, 1), name))


def test_bins_after_others_keep_their_ranks_and_an_absent_rank_was_never_late() -> None:
    early = bins_of(join(*columns(own_times(40, 2, seed=0))), 10)
    late = bins_of(join(*columns(own_times(40, 3, seed=1, slow=(Slow(2, "data"),)))), 10)
    both = early.followed_by(late)
    assert (len(both), both.ranks.tolist()) == (8, [0, 1, 2])
    assert both.late[:, 2].tolist() == [0] * 4 + late.late[:, 2].tolist()
    np.testing.assert_array_equal(both.cost_ns[:4, :2], early.cost_ns)
