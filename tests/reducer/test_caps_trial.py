"""A trial of buckets, simulated: a candidate without a gain is seldom kept, and a faster one mostly."""

from __future__ import annotations

import numpy as np
import pytest

from ddpobs.reducer.caps_trial import LOOKS, Trial, Verdict
from ddpobs.shared.paired_blocks import TimedStep

_TRIALS = 800
_MS = 1e6


def _kept(effect: float) -> float:
    """Share of trials that keep a candidate whose steps take `effect` times as long.

    The noise has memory, a drift, and seldom a step of three times the length.
    """
    random = np.random.default_rng(4)
    kept = 0
    for number in range(_TRIALS):
        trial, verdict = Trial(number), Verdict.GO_ON
        steps = LOOKS[-1] * trial.group_steps
        noise = random.normal(0, 0.03, steps)
        for step in range(1, steps):
            noise[step] += 0.7 * noise[step - 1]
        times = 8 * _MS * (1 + noise + 2.0 * (random.random(steps) < 0.005) + np.linspace(0, 0.1, steps))
        for first in range(0, steps, trial.group_steps):
            group = range(first, first + trial.group_steps)
            verdict = Verdict(
                int(trial.decide((s, TimedStep(0, int(times[s] * effect ** trial.arm(s)))) for s in group).verdict)
            )
            if verdict != Verdict.GO_ON:
                break
        assert verdict != Verdict.GO_ON
        kept += verdict == Verdict.KEEP
    return kept / _TRIALS


def test_a_candidate_without_a_gain_is_kept_in_at_most_2_5_percent_of_trials() -> None:
    """The margin is that of 800 trials. Seven looks at a 95 % interval keep 4.5 %."""
    assert _kept(1.0) <= 0.03


def test_a_candidate_that_saves_5_percent_is_mostly_kept() -> None:
    assert _kept(0.95) > 0.9


@pytest.mark.parametrize(("factor", "verdict"), [(2, Verdict.UNDO), (0.5, Verdict.GO_ON)])
def test_a_candidate_that_is_far_slower_ends_after_one_group(factor: float, verdict: Verdict) -> None:
    trial = Trial(0)
    timed = ((step, TimedStep(0, int(_MS * factor ** trial.arm(step)))) for step in range(trial.group_steps))
    decision = trial.decide(timed)
    assert decision.verdict == verdict
    assert decision.figures == {}, "one pair has no interval"
