"""Lateness is split into a rank's samples and its machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ddpobs_server.analysis.evidence import Evidence, Judgement
from ddpobs_server.analysis.finding import Finding, NotJudged
from ddpobs_server.analysis.findings.imbalanced_batches import ImbalancedBatchesFacts, imbalanced_batches
from ddpobs_server.analysis.findings.straggler import straggler
from ddpobs_server.analysis.slow_ranks.facts import SlowRankFacts
from ddpobs_server.analysis.slow_ranks.work import fit_work

from ddpobs import wire
from tests.support.analysis.judged import facts_of, findings_in
from tests.support.analysis.scenario import MS, Floats, columns, evidence_of, flat, with_columns

FIXED_MS, MS_PER_TOKEN, TOKENS = 20.0, 0.05, 800.0


def run(
    ranks: int = 4,
    steps: int = 300,
    seed: int = 0,
    *,
    longer: float = 1.0,
    slower: float = 1.0,
    spread: float = 0.3,
    noise: float = 0.03,
    power: float = 1.0,
    **recorded: Any,
) -> tuple[Evidence, Floats, Floats]:
    """Make a run with lognormal lengths.

    Args:
        ranks: Number of ranks.
        steps: Number of steps.
        seed: Seed of lengths and noise.
        longer: Factor of rank 1's lengths.
        slower: Factor of rank 1's own time: another process takes the rest.
        spread: Standard deviation of the logarithm of the lengths.
        noise: That of own time.
        power: Power of the lengths by which own time grows.
        **recorded: Columns that replace the recorded ones.

    Returns:
        The evidence, and rank 1's excess in ms that its lengths and its machine cause, shape [steps].
    """
    random = np.random.default_rng(seed)
    tokens = np.rint(TOKENS * np.exp(random.normal(0, spread, (steps, ranks))))
    tokens[:, 1] = np.rint(tokens[:, 1] * longer)
    wanted_ms = FIXED_MS + MS_PER_TOKEN * TOKENS * (tokens / TOKENS) ** power
    own_ms = wanted_ms * np.exp(random.normal(0, noise, (steps, ranks)))
    delay_ms = np.zeros_like(own_ms)
    delay_ms[:, 1] = (slower - 1) * own_ms[:, 1]
    own = np.zeros((steps, ranks, len(wire.OWN_PHASES)))
    own[:, :, wire.OWN_PHASES.index("forward")] = 0.3 * (own_ms + delay_ms)
    own[:, :, wire.OWN_PHASES.index("backward")] = 0.7 * (own_ms + delay_ms)
    rank, table = columns((own * MS).astype(np.int64))
    changes = {
        "elements": flat(tokens),
        "longest": flat(tokens),
        "running_ns": flat(own_ms * MS),
        "run_delay_ns": flat(delay_ms * MS),
    } | recorded
    by_lengths = MS_PER_TOKEN * (tokens[:, 1] - np.median(np.delete(tokens, 1, axis=1), axis=1))
    return evidence_of(rank, with_columns(table, **changes)), by_lengths, delay_ms[:, 1]


def late_ns(evidence: Evidence, excess_ms: Floats) -> float:
    """Return the median excess in ns over the steps in which it makes rank 1 late."""
    return float(np.median(MS * excess_ms[MS * excess_ms > wire.STRAGGLER_SHARE * evidence.joined.step_ns]))


def findings(judgement: Judgement) -> list[Finding]:
    assert not any(isinstance(result, NotJudged) for result in judgement)
    return findings_in(judgement)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("spread", [0.1, 0.3, 0.6])
def test_lengths_that_favour_no_rank_name_no_rank(ranks: int, spread: float) -> None:
    for seed in range(10):
        evidence, _, _ = run(ranks, seed=seed, spread=spread)
        assert straggler(evidence) == []
        assert [finding.ranks for finding in findings(imbalanced_batches(evidence))] in ([], [[]])


def test_batches_uneven_by_chance_are_reported_with_the_gain_of_bucketing_and_no_rank() -> None:
    evidence, _, _ = run(4, spread=0.4, noise=0.001)
    (finding,) = findings(imbalanced_batches(evidence))
    assert (finding.ranks, finding.severity) == ([], "info")
    assert finding.gain is not None
    own_ns = evidence.joined.own_ns
    assert finding.gain.step_ns == pytest.approx(own_ns.max(axis=1).mean() - own_ns.mean(), rel=0.1)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("longer", [1.3, 2.0])
def test_a_rank_with_longer_samples_has_imbalanced_batches_and_is_no_straggler(ranks: int, longer: float) -> None:
    for seed in range(5):
        evidence, by_lengths, _ = run(ranks, seed=seed, longer=longer, spread=0.15)
        assert straggler(evidence) == []
        (finding,) = findings(imbalanced_batches(evidence))
        assert finding.ranks == [1]
        assert facts_of(ImbalancedBatchesFacts, finding).excess_ns == pytest.approx(
            late_ns(evidence, by_lengths), rel=0.1
        )
        assert finding.gain is not None
        assert finding.gain.step_ns > 0.5 * MS * np.median(by_lengths) / ranks


@pytest.mark.parametrize("power", [0.7, 0.8, 1.2])
def test_time_that_does_not_grow_as_a_line_names_no_slow_rank(power: float) -> None:
    for seed in range(5):
        evidence, _, _ = run(2, seed=seed, longer=2.0, spread=0.15, power=power)
        assert straggler(evidence) == []
        assert [finding.ranks for finding in findings(imbalanced_batches(evidence))] == [[1]]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_is_slow_for_equal_work_is_a_straggler_with_its_cause(ranks: int) -> None:
    for seed in range(5):
        evidence, _, by_machine = run(ranks, seed=seed, slower=1.4)
        (slow,) = findings(straggler(evidence))
        assert (slow.ranks, facts_of(SlowRankFacts, slow).cause) == ([1], "preempted")
        assert facts_of(SlowRankFacts, slow).excess_ns == pytest.approx(late_ns(evidence, by_machine), rel=0.1)
        assert [finding.ranks for finding in findings(imbalanced_batches(evidence))] in ([], [[]])


@pytest.mark.parametrize("ranks", [2, 4])
def test_longer_samples_and_a_busy_neighbour_are_split_within_a_tenth(ranks: int) -> None:
    for seed in range(10):
        evidence, by_lengths, by_machine = run(ranks, seed=seed, longer=1.8, slower=1.4, spread=0.2)
        (slow,), (imbalanced,) = findings(straggler(evidence)), findings(imbalanced_batches(evidence))
        assert (slow.ranks, imbalanced.ranks) == ([1], [1])
        assert facts_of(SlowRankFacts, slow).cause == "preempted"
        assert facts_of(SlowRankFacts, slow).excess_ns == pytest.approx(late_ns(evidence, by_machine), rel=0.1)
        assert facts_of(ImbalancedBatchesFacts, imbalanced).excess_ns == pytest.approx(
            late_ns(evidence, by_lengths), rel=0.1
        )


def constant(rows: tuple[int, int], short_last: int = 0) -> wire.Ints:
    """Return the rows of 300 batches of two ranks; every 20th is shorter."""
    table = np.tile(np.array(rows), (300, 1))
    table[19::20] -= short_last
    return flat(table)


@pytest.mark.parametrize("short_last", [0, 5])
def test_a_rank_with_twice_the_rows_in_each_batch_is_late_because_of_them(short_last: int) -> None:
    evidence, _, _ = run(2, longer=2.0, spread=0.0, samples=constant((16, 32), short_last))
    (finding,) = findings(imbalanced_batches(evidence))
    assert (finding.ranks, finding.verdict) == ([1], "Rank 1 is late because of its batches")
    assert finding.cause == "its batches always have 2.00 times the rows of the other ranks' batches"
    facts = facts_of(ImbalancedBatchesFacts, finding)
    assert facts.ns_per_unit == pytest.approx(MS_PER_TOKEN * TOKENS / 16 * MS, rel=0.05)
    assert (facts.work, facts.machine_excess_ns) == ({"0": 16, "1": 32}, None)
    assert finding.gain is not None
    assert straggler(evidence) == []


@pytest.mark.parametrize(
    ("case", "rows"),
    [
        pytest.param({"slower": 1.6}, (16, 20), id="preempted, with more rows"),
        pytest.param({"longer": 2.0}, (16, 20), id="far more time than rows"),
        pytest.param({"longer": 2.0}, (20, 16), id="fewer rows than the other"),
    ],
)
def test_a_slow_rank_whose_rows_do_not_explain_it_is_a_straggler(case: dict[str, Any], rows: tuple[int, int]) -> None:
    unknown = flat(np.zeros((300, 2)))
    evidence, _, _ = run(2, spread=0.0, samples=constant(rows), elements=unknown, longest=unknown, **case)
    (not_judged,) = imbalanced_batches(evidence)
    assert isinstance(not_judged, NotJudged)
    assert "always of one size" in not_judged.reason
    assert [finding.ranks for finding in findings(straggler(evidence))] == [[1]]


def test_own_time_that_does_not_follow_work_is_left_alone() -> None:
    random = np.random.default_rng(0)
    evidence, _, _ = run(2, elements=random.integers(1, 1000, 600), longest=random.integers(1, 1000, 600))
    assert fit_work(evidence.joined, evidence.steps) is None
    assert imbalanced_batches(evidence) == []


@pytest.mark.parametrize("value", [0, wire.UNKNOWN])
def test_without_recorded_work_nothing_is_fitted(value: int) -> None:
    evidence, _, _ = run(2, elements=np.full(600, value), longest=np.full(600, value))
    assert fit_work(evidence.joined, evidence.steps) is None


def test_the_measure_that_explains_own_time_best_is_named() -> None:
    evidence, _, _ = run(2, longest=np.random.default_rng(1).integers(1, 100, 600))
    fit = fit_work(evidence.joined, evidence.steps)
    assert fit is not None
    assert fit.measure == "elements"
    assert fit.slope_ns == pytest.approx(MS_PER_TOKEN * MS, rel=0.1)


def test_a_quarter_of_outliers_does_not_change_the_slope() -> None:
    evidence, _, _ = run(2, steps=400)
    joined = evidence.joined
    joined.own_ns[::4] += 300 * MS
    fit = fit_work(joined, evidence.steps)
    assert fit is not None
    assert fit.slope_ns == pytest.approx(MS_PER_TOKEN * MS, rel=0.15)
