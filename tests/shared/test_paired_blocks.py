"""Blocks of steps by turns, and the ratio of two arms with its interval."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ddpobs.shared.paired_blocks import MIN_PAIRS, PairedRatio, Rests, TimedStep, Turns, mean_times

_RUNS = 1000


def _noisy_ns(steps: int, seed: int) -> np.ndarray:
    """Step times of many runs with autocorrelated noise, a drift, and seldom a step of three times the length.

    Shape [runs, steps].
    """
    random = np.random.default_rng(seed)
    noise = random.normal(0, 0.03, (_RUNS, steps))
    for step in range(1, steps):
        noise[:, step] += 0.7 * noise[:, step - 1]
    spikes = 2.0 * (random.random((_RUNS, steps)) < 0.005)
    return 8e6 * (1 + noise + spikes + np.linspace(0, 0.1, steps))


@pytest.mark.parametrize("effect", [1.0, 1.05])
def test_the_interval_of_turns_covers_the_ratio_in_95_percent_of_runs(effect: float) -> None:
    """With an effect of 1.0 both arms are the same."""
    covered, groups, steps = 0, 10, 4 * 8
    for run, times in enumerate(_noisy_ns(groups * steps, seed=1)):
        turns, ratio = Turns(8, seed=run), PairedRatio()
        arms = [turns.arm(step) for step in range(groups * steps)]
        timed = [TimedStep(arm, int(ns * effect**arm)) for arm, ns in zip(arms, times, strict=True)]
        for group in range(groups):
            ratio.add(timed[group * steps : (group + 1) * steps])
        estimate = ratio.estimate()
        assert estimate is not None
        covered += estimate.low <= effect <= estimate.high
    assert 0.93 <= covered / _RUNS <= 0.97


def test_the_interval_of_rests_covers_one_in_95_percent_of_runs() -> None:
    covered, cycles, rests = 0, 9, Rests(128)
    arms = [int(not rests.rests(step)) for step in range(cycles * 128)]
    for times in _noisy_ns(cycles * 128, seed=2):
        ratio = PairedRatio()
        timed = [TimedStep(arm, int(ns)) for arm, ns in zip(arms, times, strict=True)]
        for cycle in range(1, cycles):
            ratio.add(timed[cycle * 128 : (cycle + 1) * 128])
        estimate = ratio.estimate()
        assert estimate is not None
        covered += estimate.low <= 1 <= estimate.high
    assert 0.93 <= covered / _RUNS <= 0.97


def test_turns_are_abba_or_baab_and_both_occur() -> None:
    turns = Turns(2, seed=3)
    groups = {tuple(turns.arm(step) for step in range(8 * group, 8 * group + 8)) for group in range(40)}
    assert groups == {(0, 0, 1, 1, 1, 1, 0, 0), (1, 1, 0, 0, 0, 0, 1, 1)}


def test_one_step_in_32_rests_after_the_first_cycle_and_never_at_a_cycles_edge() -> None:
    rests = Rests(256)
    resting = [step for step in range(256 * 20) if rests.rests(step)]
    assert len(resting) == 19 * 8
    assert resting[0] >= 256
    assert all(64 <= step % 256 < 192 for step in resting)
    assert len({step % 256 for step in resting[::8]}) > 10, "the place is drawn"


def test_only_undisturbed_steps_of_the_most_frequent_kind_are_compared() -> None:
    alike = [TimedStep(0, 100, kind=4), TimedStep(1, 110, kind=4)]
    others = [TimedStep(1, 400, kind=4, disturbed=True), TimedStep(0, 30, kind=1), TimedStep(1, 0, kind=4)]
    assert mean_times([*alike, *alike, *others]) == pytest.approx((100, 110))
    assert mean_times([alike[0], others[0]]) is None
    assert mean_times([]) is None


def test_too_few_pairs_give_no_ratio() -> None:
    ratio = PairedRatio()
    pair = [TimedStep(0, 100), TimedStep(1, 101)]
    assert not ratio.add(pair[:1])
    for _ in range(MIN_PAIRS - 1):
        assert ratio.add(pair)
    assert ratio.estimate() is None
    ratio.add(pair)
    assert ratio.estimate() == pytest.approx((1.01, 1.01, 1.01, MIN_PAIRS))


@pytest.mark.parametrize(
    ("looks", "pairs", "quantile"), [(1, 6, 2.5706), (1, 12, 2.2010), (3, 6, 3.5341), (3, 9, 3.0158), (3, 12, 2.8200)]
)
def test_the_interval_is_students_also_for_several_looks(looks: int, pairs: int, quantile: float) -> None:
    """The quantiles are those of tables: 97.5 % for one look, 99.17 % for each of three."""
    logs, ratio = np.linspace(-0.01, 0.01, pairs), PairedRatio()
    for each in logs:
        ratio.add([TimedStep(0, 10**9), TimedStep(1, round(10**9 * math.exp(each)))])
    estimate = ratio.estimate(looks)
    assert estimate is not None
    half = math.log(estimate.high / estimate.ratio)
    assert half / (logs.std(ddof=1) / math.sqrt(pairs)) == pytest.approx(quantile, rel=1e-3)
