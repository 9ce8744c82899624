"""Steps of all ranks that become longer, and runs that only look so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ddpobs_server.analysis.evidence import Evidence
from ddpobs_server.analysis.findings.growing_steps import GrowingStepsFacts, growing_steps

from ddpobs import wire
from tests.support.analysis.judged import facts_of, only
from tests.support.analysis.scenario import MS, columns, evidence_of, flat, noiseless, own_times, with_columns

STEPS = 700


def run(extra_ms: Any, phase: str = "other", ranks: tuple[int, ...] = (0, 1), **recorded: Any) -> Evidence:
    """A run of two ranks, 75 ms a step with the noise of shared cores, and extra time in one phase."""
    own = own_times(STEPS, 2, seed=0)
    own[:, list(ranks), wire.OWN_PHASES.index(phase)] += np.asarray(extra_ms * MS, np.int64)[:, None]
    rank, steps = columns(own)
    return evidence_of(rank, with_columns(steps, **recorded))


def at(ms: Callable[[Any], Any]) -> Any:
    """Return extra time by step; the argument goes from 0 to 1 over the run."""
    return ms(np.linspace(0, 1, STEPS))


@pytest.mark.parametrize("phase", wire.OWN_PHASES)
@pytest.mark.parametrize("shape", [lambda x: 60 * x, lambda x: 90 * x**2, lambda x: 60 * np.sqrt(x)])
def test_steps_that_grow_are_found_with_their_phase_and_gain(phase: str, shape: Callable[[Any], Any]) -> None:
    extra_ms = at(shape)
    finding = only(growing_steps(run(extra_ms, phase)))
    assert (finding.verdict, finding.phase) == ("The steps of all ranks become longer", phase)
    levels_ns = facts_of(GrowingStepsFacts, finding).levels_ns
    assert levels_ns[-1] - levels_ns[0] == pytest.approx(
        MS * (np.median(extra_ms[-STEPS // 8 :]) - np.median(extra_ms[: STEPS // 8])), rel=0.15
    )
    assert finding.gain is not None
    assert finding.gain.step_ns == pytest.approx(
        MS * (extra_ms.mean() - np.median(extra_ms[: STEPS // 8])), rel=0.25, abs=6 * MS
    )


def test_the_line_with_most_of_the_time_is_named() -> None:
    code = [wire.CodePlace(phase="other", place="a.py:3", calls="append", looks=40)]
    pulse = wire.Pulse(at_ns=0, phase="other", step=STEPS, code=code, looks=40)
    finding = only(growing_steps(replace(run(at(lambda x: 60 * x)), pulses={0: pulse})))
    assert finding.cause == "a.py:3 (append) takes 100 % of the time in other"
    assert only(growing_steps(run(at(lambda x: 60 * x)))).cause.startswith("not known")


def test_batches_that_grow_explain_it() -> None:
    elements = flat(np.tile(np.linspace(1000, 2000, STEPS)[:, None], 2))
    finding = only(growing_steps(run(at(lambda x: 60 * x), "forward", elements=elements)))
    assert (finding.severity, finding.gain) == ("info", None)
    assert finding.cause.startswith("the batches grow too: 1.")


@pytest.mark.parametrize(
    "extra_ms",
    [
        pytest.param(at(lambda x: 0 * x), id="steady"),
        pytest.param(at(lambda x: 60.0 * (x > 0.5)), id="one change"),
        pytest.param(at(lambda x: 60.0 * (x > 0.4) + 60.0 * (x > 0.8)), id="two changes"),
        pytest.param(at(lambda x: 60 * np.exp(-5 * x)), id="a warm-up"),
        pytest.param(at(lambda x: 30 + 30 * np.sin(20 * x)), id="swings"),
        pytest.param(at(lambda x: 10 * x), id="a little"),
    ],
)
def test_other_shapes_are_no_growth(extra_ms: Any) -> None:
    assert growing_steps(run(extra_ms)) == []


def test_one_rank_that_becomes_slower_is_no_growth_of_all() -> None:
    assert growing_steps(run(at(lambda x: 60 * x), ranks=(1,))) == []


def test_few_steps_show_no_growth() -> None:
    own = noiseless({}, 40, 2)
    own[:, :, 0] += (np.arange(40) * MS)[:, None]
    assert growing_steps(evidence_of(*columns(own))) == []


def test_balanced_runs_with_noise_in_bursts_do_not_grow() -> None:
    for seed in range(20):
        for steps in (64, 200, 1000):
            assert growing_steps(evidence_of(*columns(own_times(steps, 2, seed, burst_steps=50)))) == []
