"""The slow rank is named with its phase, and a balanced run names no rank."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from ddpobs_server.analysis.evidence import Judgement
from ddpobs_server.analysis.finding import Finding, NotJudged
from ddpobs_server.analysis.findings.straggler import straggler
from ddpobs_server.analysis.slow_ranks.facts import SlowRankFacts

from ddpobs import wire
from tests.support.analysis.judged import facts_of, findings_in, only
from tests.support.analysis.scenario import MS, Slow, columns, evidence_of, noiseless, own_times, with_columns

facts = partial(facts_of, SlowRankFacts)

SEEDS = 60
FALSE_ALARMS = 0.05
"""Largest share of `SEEDS` balanced runs in which a rank may be named."""


def judge(rank: wire.Ints, steps: wire.Steps) -> Judgement:
    return straggler(evidence_of(rank, steps, hosts={0: "here", 1: "there"}))


def findings_of(own: wire.Ints) -> list[Finding]:
    judgement = judge(*columns(own))
    assert not any(isinstance(result, NotJudged) for result in judgement)
    return findings_in(judgement)


@pytest.mark.parametrize("collectives", [32, 200])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_balanced_run_names_no_rank(ranks: int, collectives: int) -> None:
    alarms = [findings_of(own_times(collectives, ranks, seed)) for seed in range(SEEDS)]
    assert np.mean([bool(named) for named in alarms]) <= FALSE_ALARMS


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_balanced_run_whose_noise_comes_in_bursts_names_no_rank(ranks: int) -> None:
    alarms = [findings_of(own_times(200, ranks, seed, burst_steps=10)) for seed in range(SEEDS)]
    assert np.mean([bool(named) for named in alarms]) <= FALSE_ALARMS


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("phase", wire.OWN_PHASES)
def test_a_slow_rank_is_named_with_its_phase(phase: str, ranks: int) -> None:
    for slow in range(ranks):
        named = findings_of(own_times(60, ranks, seed=slow, slow=(Slow(slow, phase),)))
        assert [(f.ranks, f.phase) for f in named] == [([slow], phase)]
        assert named[0].verdict == f"Rank {slow} is slow in {phase}"


@pytest.mark.parametrize("ranks", [4, 8])
def test_two_slow_ranks_are_both_named_each_with_its_own_phase(ranks: int) -> None:
    for seed in range(5):
        named = findings_of(own_times(100, ranks, seed, (Slow(1, "backward", 60), Slow(ranks - 1, "data", 45))))
        assert sorted((f.ranks[0], f.phase) for f in named) == [(1, "backward"), (ranks - 1, "data")]


@pytest.mark.parametrize("first", range(7))
def test_a_rank_that_takes_long_in_every_seventh_step_is_named_from_eight_such_steps_on(first: int) -> None:
    own = noiseless({}, steps=60, ranks=2)
    own[first::7, 0, wire.OWN_PHASES.index("forward")] += 120 * MS
    (finding,) = findings_of(own)
    assert (finding.ranks, finding.phase, facts(finding).kind) == ([0], "forward", "intermittent")


def test_a_rank_slow_in_some_steps_is_intermittent_and_its_share_is_reported() -> None:
    (finding,) = findings_of(own_times(200, 4, seed=0, slow=(Slow(2, "data", 80, share=0.25),)))
    assert (finding.ranks, finding.phase, facts(finding).kind) == ([2], "data", "intermittent")
    assert 0.2 < facts(finding).late_share < 0.4


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_very_slow_in_every_tenth_step_is_named_although_noise_makes_all_late_as_often(ranks: int) -> None:
    measured = []
    for seed in range(10):
        own = own_times(300, ranks, seed)
        own[5::10, 1, wire.OWN_PHASES.index("forward")] += 300 * MS
        (finding,) = findings_of(own)
        assert (finding.ranks, finding.phase, facts(finding).kind) == ([1], "forward", "intermittent")
        measured.append((facts(finding).late_share, facts(finding).excess_ns))
    late_share, excess_ns = np.median(measured, axis=0)
    assert late_share == pytest.approx(0.1, abs=0.02)
    assert excess_ns == pytest.approx(300 * MS, rel=0.05)


def test_a_difference_below_a_thirtieth_of_the_step_is_no_finding() -> None:
    assert findings_of(noiseless({1: ("backward", 2.5)})) == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_small_delay_of_every_step_is_named_as_information(ranks: int) -> None:
    quiet = noiseless({1: ("forward", 5.0)}, ranks=ranks, steps=100)
    noise = np.random.default_rng(0).normal(0, 0.7 * MS, quiet.shape).astype(np.int64)
    (finding,) = findings_of(quiet + noise)
    assert (finding.ranks, finding.phase, finding.severity) == ([1], "forward", "info")
    assert facts(finding).excess_ns == pytest.approx(5 * MS, rel=0.15)
    assert facts(finding).lost_ns == pytest.approx(500 * MS, rel=0.3)


def test_a_delay_of_a_tenth_of_the_step_is_stated_without_bias() -> None:
    """Half of the steps exceed a tenth by noise: their median alone would state more."""
    quiet = noiseless({1: ("forward", 8.0)}, ranks=2, steps=200)
    noise = np.random.default_rng(0).normal(0, 2 * MS, quiet.shape).astype(np.int64)
    (finding,) = findings_of(quiet + noise)
    assert facts(finding).excess_ns == pytest.approx(8 * MS, rel=0.05)


def test_a_recurring_delay_below_a_twentieth_of_the_step_is_no_finding() -> None:
    # 12 ms in every fourth step of 78 ms: not chance, but only 3 ms per step.
    own = noiseless({}, steps=80)
    own[::4, 1, wire.OWN_PHASES.index("backward")] += 12 * MS
    assert findings_of(own) == []
    own[::4, 1, wire.OWN_PHASES.index("backward")] += 12 * MS
    assert [f.ranks for f in findings_of(own)] == [[1]]


def test_two_phases_are_both_named_when_neither_explains_four_fifths() -> None:
    own = noiseless({1: ("backward", 24)})
    own[:, 1, wire.OWN_PHASES.index("forward")] += 16 * MS
    (finding,) = findings_of(own)
    assert finding.phase == "backward"
    assert facts(finding).phase_excess_ns == {"backward": 24 * MS, "forward": 16 * MS}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_delay_gain_and_severity_follow_from_the_times(ranks: int) -> None:
    # Own times 75 ms; rank 1 has 40 ms more; 3 ms move: a step of 118 ms that would last 78.
    (finding,) = findings_of(noiseless({1: ("backward", 40)}, ranks=ranks))
    assert finding.gain is not None
    assert finding.gain.step_ns == facts(finding).excess_ns == 40 * MS
    assert finding.gain.ratio == pytest.approx(40 / 118, abs=1e-4)
    assert finding.gain.error_ratio == 0
    assert finding.severity == "critical"
    assert finding.steps == (0, 39)
    assert facts(finding).host == "there"


def test_each_of_two_equally_slow_ranks_is_as_severe_as_one_alone() -> None:
    two = findings_of(noiseless({1: ("backward", 40), 2: ("backward", 40)}, ranks=8))
    (alone,) = findings_of(noiseless({1: ("backward", 40)}, ranks=8))
    assert [(f.ranks, f.severity) for f in two] == [([1], alone.severity), ([2], alone.severity)]
    assert alone.severity == "critical"
    assert all("Other ranks are late" in f.remedy for f in two)
    assert "Other ranks are late" not in alone.remedy


def test_clocks_that_differ_by_hours_change_nothing() -> None:
    # `columns` sets the clocks an hour apart; the finding uses durations only.
    assert [f.ranks for f in findings_of(noiseless({3: ("optimizer", 20)}))] == [[3]]


def test_too_few_steps_and_too_few_ranks_are_not_judged() -> None:
    (few,) = judge(*columns(own_times(12, 2, 0)))
    (alone,) = judge(*columns(own_times(60, 1, 0)))
    assert isinstance(few, NotJudged)
    assert "12 of 32" in str(few)
    assert isinstance(alone, NotJudged)
    assert "two ranks" in str(alone)


def test_ranks_of_separate_groups_are_not_judged() -> None:
    rank, steps = columns(own_times(60, 2, 0, (Slow(1, "backward"),)))
    assert straggler(evidence_of(rank, steps, separate_groups_reason="why")) == [NotJudged("straggler", "why")]


def test_the_same_run_gets_the_same_answer() -> None:
    own = own_times(100, 4, seed=3, slow=(Slow(0, "forward", 15),))
    assert findings_of(own) == findings_of(own)


def test_a_slow_rank_among_a_thousand_is_named_alone() -> None:
    own = own_times(40, 1000, seed=2, slow=(Slow(700, "data", 60),))
    assert [(f.ranks, f.phase) for f in findings_of(own)] == [([700], "data")]


def with_tail(own: wire.Ints, tail_s: float) -> tuple[wire.Ints, wire.Steps]:
    """Return steps of which the last is longer on every rank by `tail_s`, as before an upload."""
    rank, steps = columns(own)
    return rank, with_columns(steps, end_ns=steps.end_ns + np.where(steps.step == len(own) - 1, round(tail_s * 1e9), 0))


def test_between_averages_of_the_replicas_the_delay_is_of_several_steps() -> None:
    rank, steps = columns(noiseless({1: ("backward", 40)}, steps=60))
    averaged = wire.Event(kind="exchanged", at_ns=0, detail={"module": 0, "every": 4})
    finding = only(straggler(evidence_of(rank, steps, events=[(0, averaged)])))
    assert finding.measure.startswith("+40 ms between two averages, 100 % of the times; ")


@pytest.mark.parametrize("steps", [32, 200])
@pytest.mark.parametrize("tail_s", [12, 600])
def test_one_long_step_does_not_change_the_finding_of_a_slow_rank(steps: int, tail_s: float) -> None:
    own = noiseless({1: ("backward", 40)}, steps=steps)
    (plain,), finding = findings_of(own), only(judge(*with_tail(own, tail_s)))
    assert plain.gain is not None
    assert finding.gain is not None
    assert (finding.ranks, finding.severity) == ([1], plain.severity)
    assert finding.measure.startswith("+40 ms a step, 34 % of it; ")
    assert facts(finding).step_ns == 118 * MS
    assert facts(finding).lost_share == pytest.approx(facts(plain).lost_share, rel=0.15)
    assert finding.gain.ratio == pytest.approx(plain.gain.ratio, rel=0.15)


def test_a_checkpoint_of_one_rank_every_hundred_steps_is_no_straggler() -> None:
    own = noiseless({}, steps=1000)
    own[50::100, 0, wire.OWN_PHASES.index("other")] += 10_000 * MS
    assert findings_of(own) == []


@pytest.mark.parametrize("since", [70, 100, 256, 500, 700])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_becomes_slow_is_named_with_the_step_of_its_onset(ranks: int, since: int) -> None:
    own = own_times(1500 + since, ranks, seed=since)
    own[1500:, 1, wire.OWN_PHASES.index("backward")] += 40 * MS
    (finding,) = findings_of(own)
    assert (finding.ranks, finding.phase, facts(finding).kind) == ([1], "backward", "persistent")
    assert finding.steps[0] == pytest.approx(1500, abs=5)
    assert finding.steps[1] == 1499 + since
    assert facts(finding).since_step == finding.steps[0]
    assert finding.verdict == f"Rank 1 is slow in backward since step {finding.steps[0]}"


@pytest.mark.parametrize("steps", [20_000, 60_000])
def test_a_rank_that_becomes_slow_late_in_a_long_run_is_named_within_a_hundred_steps(steps: int) -> None:
    """The bins of such a run are too wide for a stretch."""
    own = own_times(steps, 2, seed=0)
    own[-100:, 1, wire.OWN_PHASES.index("backward")] += 40 * MS
    (finding,) = findings_of(own)
    assert (finding.ranks, finding.phase) == ([1], "backward")
    assert facts(finding).since_step == pytest.approx(steps - 100, abs=5)


def test_a_rank_that_is_always_slow_is_named_once_without_an_onset() -> None:
    (finding,) = findings_of(own_times(600, 4, seed=0, slow=(Slow(2, "backward"),)))
    assert (finding.steps, facts(finding).since_step) == ((0, 599), None)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("burst_steps", [0, 10, 20, 50])
def test_noise_in_bursts_is_not_a_recent_slowdown(ranks: int, burst_steps: float) -> None:
    alarms = [findings_of(own_times(200, ranks, seed, burst_steps=burst_steps)) for seed in range(SEEDS)]
    assert np.mean([any(facts(f).since_step is not None for f in named) for named in alarms]) <= FALSE_ALARMS


def test_a_rank_that_naps_before_a_barrier_costs_less_than_the_whole_step() -> None:
    """The others wait in the step before, which is long; the step after is as short as any."""
    own = noiseless({}, steps=160)
    own[::4, 1, wire.OWN_PHASES.index("other")] += 1200 * MS
    (finding,) = judge(*columns(own, barrier=True))
    assert isinstance(finding, Finding)
    assert finding.ranks == [1]
    assert finding.gain is not None
    assert 0.2 < finding.gain.ratio < 0.8
    assert 0.2 < facts(finding).lost_share < 0.8
