"""Finding `utilisation-swings`: periodic and lasting swings of the step time, and noise that is none."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from ddpobs_server.analysis.finding import Finding, NotJudged
from ddpobs_server.analysis.findings.utilisation_swings import (
    UtilisationSwingsFacts,
    autocorrelation,
    utilisation_swings,
)

from ddpobs import wire
from tests.support.analysis.judged import facts_of, only
from tests.support.analysis.link_scenario import Run
from tests.support.analysis.scenario import MS, Floats, columns, evidence_of, own_times

facts = partial(facts_of, UtilisationSwingsFacts)


def run(gap_ms: Floats) -> Run:
    return Run([1000], [5.0], steps=len(gap_ms), gap_ms=gap_ms)


def square(steps: int, half: int, low: float, high: float) -> Floats:
    return np.where(np.arange(steps) // half % 2, high, low)


def noisy(gap_ms: Floats, seed: int = 0, share: float = 0.1) -> Floats:
    return np.asarray(gap_ms * np.exp(np.random.default_rng(seed).normal(0, share, len(gap_ms))))


@pytest.mark.parametrize("half", [1, 3, 10, 25])
@pytest.mark.parametrize("seed", range(3))
def test_a_periodic_swing_is_named_with_its_period_phase_and_size(half: int, seed: int) -> None:
    finding = only(utilisation_swings(run(noisy(square(200, half, 20.0, 40.0), seed)).evidence()))
    assert (facts(finding).period_steps, finding.phase) == (2 * half, "data")
    # Steps of 35 and 55 ms.
    assert facts(finding).swing == pytest.approx(20 / 45, rel=0.25)
    assert finding.severity == "warning"
    assert finding.gain is not None
    assert finding.gain.step_ns == pytest.approx(10e6, rel=0.35)


def test_lasting_levels_without_a_period_are_a_swing_without_a_gain() -> None:
    gap = np.full(400, 20.0)
    for first, end in ((30, 60), (110, 200), (230, 250), (320, 390)):
        gap[first:end] = 45.0
    finding = only(utilisation_swings(run(noisy(gap, share=0.05)).evidence()))
    assert (facts(finding).period_steps, finding.severity, finding.gain) == (None, "info", None)
    assert "without a period" in finding.title


def test_ranks_that_are_slow_in_turn_are_no_swing() -> None:
    own = own_times(200, 2, seed=0)
    own[::2, 0, wire.OWN_PHASES.index("data")] += 40 * MS
    own[::2, 1, wire.OWN_PHASES.index("optimizer")] += 40 * MS
    assert utilisation_swings(evidence_of(*columns(own))) == []


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("steps", [60, 200, 1000])
def test_independent_noise_is_no_swing(steps: int, seed: int) -> None:
    assert utilisation_swings(evidence_of(*columns(own_times(steps, 2, seed)))) == []


@pytest.mark.parametrize("seed", range(20))
def test_bursts_of_noise_have_no_period(seed: int) -> None:
    judgement = utilisation_swings(evidence_of(*columns(own_times(400, 2, seed, burst_steps=10))))
    assert [result.severity for result in judgement if isinstance(result, Finding)] in ([], ["info"])


def test_one_change_that_lasts_is_no_swing() -> None:
    gap = np.full(200, 20.0)
    gap[100:] = 60.0
    assert utilisation_swings(run(noisy(gap)).evidence()) == []


def test_a_long_step_now_and_then_is_no_swing() -> None:
    gap = np.full(200, 20.0)
    gap[::25] = 500.0
    assert utilisation_swings(run(noisy(gap)).evidence()) == []


def test_a_small_swing_is_no_finding() -> None:
    assert utilisation_swings(run(noisy(square(200, 10, 20.0, 25.0), share=0.02)).evidence()) == []


def test_few_steps_are_not_judged() -> None:
    (result,) = utilisation_swings(run(square(59, 5, 20.0, 40.0)).evidence())
    assert isinstance(result, NotJudged)


def test_the_autocorrelation_of_a_period_is_one_at_its_multiples() -> None:
    correlation = autocorrelation(square(200, 10, 0.0, 1.0))
    assert correlation[[20, 40]] == pytest.approx([1.0, 1.0], abs=0.01)
    assert correlation[10] == pytest.approx(-1.0, abs=0.01)
    assert not autocorrelation(np.full(10, 3.0)).any()
