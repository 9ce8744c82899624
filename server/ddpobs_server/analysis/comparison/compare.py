"""Two runs compared: step time by phase and bucket, with an interval for each change.

The interval holds the noise inside of the two runs. Two launches of the same training may differ by more: by the hosts
they got, and by other programs there. `docs/compare.md` has measurements.

Long steps are compared apart: a checkpoint in one of a hundred steps would hide any change of the others. A step is
long if it is above the third quartile by more than three times the interquartile range of its run (J. Tukey,
"Exploratory Data Analysis", 1977: the outer fence).

The error of a few dependent steps is underestimated. Where they are fewer than `dependent_mean` needs, the interval is
up to twice as wide, and at least a part of `_WEAK_MARGIN`. It decides a change by a factor of two, and no small one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, exp, hypot, log
from typing import Literal

import numpy as np
import numpy.typing as npt

from ddpobs import wire
from ddpobs_server.analysis.statistics.dependent_mean import MIN_BLOCKS, MIN_VALUES, DependentMean, dependent_mean
from ddpobs_server.analysis.steps.joined_steps import Floats
from ddpobs_server.analysis.steps.waiting import STEP_PARTS

Kind = Literal["step", "long", "phase", "compute", "comm"]
Verdict = Literal["slower", "faster", "same", "too-few"]

CONFIDENCE = 0.95
"""Of the step's interval. The phases together have the same, and the buckets together."""
WARM_UP = 10
"""First steps of a run that are left out: they allocate, compile and load."""
_FENCE = 3.0
_MIN_STEPS = 20
"""Minimum number of typical steps of a run by which it is judged."""
_WEAK_MARGIN = 0.2
"""Minimum half-width of the interval of one independent step: a logarithm of the ratio of both means."""
_MIN_LONG = 10
"""Minimum number of long steps of a run by which their cost is judged."""
_MIN_CHANGE = 0.002
"""Minimum change that is of interest, as a share of the first run's step."""
_MIN_SHARE = 0.1
"""Minimum share of the step of a phase that counts for a limit."""


@dataclass(frozen=True)
class RunTimes:
    """Times of one run, averaged over its ranks.

    Attributes:
        step: Number of each step, in rising order, shape [steps].
        step_ns: Wall time, shape [steps].
        phases_ns: Time by phase, each of shape [steps]. With `waiting`, `exposed_comm` is moving data alone.
        run_delay_ns: Longest time that a rank was ready to run and had no processor, shape [steps].
        bucket_step: Steps of which buckets are known, shape [bucket steps].
        buckets_ns: (time of computation, time of communication) by bucket, each of shape [bucket steps].
    """

    step: wire.Ints
    step_ns: Floats
    phases_ns: Mapping[str, Floats]
    run_delay_ns: Floats
    bucket_step: wire.Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    buckets_ns: Mapping[str, tuple[Floats, Floats]] = field(default_factory=dict)

    def is_typical(self) -> npt.NDArray[np.bool_]:
        """Return which steps are neither long nor the run's first, shape [steps]."""
        warm = self.step >= WARM_UP
        if not warm.any():
            return warm
        low, high = np.quantile(self.step_ns[warm], [0.25, 0.75])
        return np.asarray(warm & (self.step_ns <= high + _FENCE * (high - low)))

    def long_ns(self) -> Floats:
        """Return the time of each step after the first ones that is beyond the mean typical step; zero if typical."""
        typical, warm = self.is_typical(), self.step >= WARM_UP
        mean = self.step_ns[typical].mean() if typical.any() else 0.0
        return np.where(typical, 0.0, self.step_ns - mean)[warm]


@dataclass(frozen=True)
class Change:
    """A change of one time from the first run to the second.

    Attributes:
        name: `step`, a phase or a bucket.
        kind: Kind of time; `long` is the mean cost of long steps per step.
        a_ns: Mean of the first run.
        b_ns: Mean of the second run.
        low_ns: Lower end of the interval of the difference.
        high_ns: Upper end.
        smallest_ns: Least difference that would have been seen in 95 % of such pairs.
        verdict: Whether the time changed.
    """

    name: str
    kind: Kind
    a_ns: float
    b_ns: float
    low_ns: float
    high_ns: float
    smallest_ns: float
    verdict: Verdict

    def ratio(self, ns: float) -> float | None:
        """Return a difference as a share of the first run's time; None if that is zero."""
        return ns / self.a_ns if self.a_ns > 0 else None


@dataclass(frozen=True)
class Comparison:
    """The changes, and the numbers of steps that they rest on.

    Attributes:
        changes: The step, the long steps, each phase, each bucket of both runs.
        steps: Steps of the two runs that were compared.
        long_steps: Steps of the two runs that were long.
        too_few: Sentence on too few steps; empty if there were enough.
        run_delay_ns: Mean time per step in which a rank of each run had no processor.
    """

    changes: list[Change]
    steps: tuple[int, int]
    long_steps: tuple[int, int]
    too_few: str
    run_delay_ns: tuple[float, float] = (0.0, 0.0)

    @property
    def is_divided(self) -> bool:
        """Whether waiting for ranks and moving data are compared apart."""
        return any(change.name == "waiting" for change in self.changes)

    @property
    def is_too_short(self) -> bool:
        """Whether a run has fewer typical steps than any judgement needs."""
        return min(self.steps) < _MIN_STEPS

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs may explain the change: the time without a processor changed by half as much."""
        step, (delay_a, delay_b) = self.changes[0], self.run_delay_ns
        difference_ns = step.b_ns - step.a_ns
        return step.verdict in ("slower", "faster") and 2 * abs(delay_b - delay_a) >= abs(difference_ns)

    def exceeded(self, limit: float) -> list[str]:
        """Return the step and the phases that became slower by more than a share of their time, with confidence.

        A phase counts if it has a tenth of the step, and if the step became slower too: the time that one phase loses
        may be another one's gain.
        """
        step, *others = self.changes
        if step.verdict != "slower":
            return []
        least_ns = _MIN_SHARE * step.a_ns
        judged = [step, *(c for c in others if c.kind == "phase" and c.verdict == "slower" and c.a_ns >= least_ns)]
        return [change.name for change in judged if change.a_ns > 0 and change.low_ns > limit * change.a_ns]

    def is_decided(self, limit: float) -> bool:
        """Whether a step that is slower by more than the limit is either seen or excluded."""
        step = self.changes[0]
        if self.is_too_short or self.is_disturbed:
            return False
        return bool(step.low_ns > limit * step.a_ns or step.high_ns <= limit * step.a_ns)


def compare(a: RunTimes, b: RunTimes) -> Comparison:
    """Compare two runs.

    Args:
        a: The first run, to which changes are relative.
        b: The second run.
    """
    typical = a.is_typical(), b.is_typical()
    counts = int(typical[0].sum()), int(typical[1].sum())
    if not all(counts):
        none = [Change("step", "step", 0.0, 0.0, 0.0, 0.0, 0.0, "too-few")]
        return Comparison(none, counts, (0, 0), _too_few_sentence(counts, 0.0))
    means = dependent_mean(a.step_ns[typical[0]]), dependent_mean(b.step_ns[typical[1]])
    weakness = _weakness(means)
    step = _change("step", "step", means, CONFIDENCE, 0.0)
    least_ns = _MIN_CHANGE * step.a_ns
    phases = _common_phases(a, b)
    confidence = 1 - (1 - CONFIDENCE) / len(phases[0])  # Bonferroni's correction.
    changes = [step, _long_steps(a, b, least_ns)]
    for phase in phases[0]:
        series = (times[phase][mask] for times, mask in zip(phases, typical, strict=True))
        changes.append(_change(phase, "phase", _means(*series), confidence, least_ns, weakness=weakness))
    changes += _buckets(a, b, least_ns, weakness)
    long_steps = [int((run.long_ns() > 0).sum()) for run in (a, b)]
    too_few = ""
    if step.verdict == "too-few":
        too_few = _too_few_sentence(counts, max(mean.block_length for mean in means))
    delays = [float(run.run_delay_ns[mask].mean()) for run, mask in zip((a, b), typical, strict=True)]
    return Comparison(changes, counts, (long_steps[0], long_steps[1]), too_few, (delays[0], delays[1]))


def _common_phases(a: RunTimes, b: RunTimes) -> list[dict[str, Floats]]:
    """Return both runs' phases, with waiting apart if it is known of both."""
    if "waiting" in a.phases_ns and "waiting" in b.phases_ns:
        return [{part: run.phases_ns[part] for part in STEP_PARTS} for run in (a, b)]
    together = [{phase: run.phases_ns[phase] for phase in wire.PHASES} for run in (a, b)]
    for run, phases in zip((a, b), together, strict=True):
        phases["exposed_comm"] = phases["exposed_comm"] + run.phases_ns.get("waiting", 0.0)
    return together


def _means(a: Floats, b: Floats) -> tuple[DependentMean, DependentMean]:
    return dependent_mean(a), dependent_mean(b)


def _weakness(means: tuple[DependentMean, DependentMean]) -> float:
    """Return 0 if there are enough steps, and the nearer to 1 the fewer there are."""
    return max(0.0, *(1 - min(each.count / MIN_VALUES, each.blocks / MIN_BLOCKS) for each in means))


def _change(
    name: str,
    kind: Kind,
    means: tuple[DependentMean, DependentMean],
    confidence: float,
    least_ns: float,
    *,
    weakness: float = 0.0,
) -> Change:
    """Return a change; `weakness` is at least that of the step, whose noise has that of its parts."""
    a, b = means
    weaker = min(means, key=lambda mean: mean.blocks)
    quantile = weaker.quantile(1 - (1 - confidence) / 2)
    difference, weakness = b.mean - a.mean, max(weakness, _weakness(means))
    factor, margin = 1 + weakness, _WEAK_MARGIN * weakness
    if a.mean > 0 and b.mean > 0:  # The ratio's logarithm is closer to a normal distribution.
        error, center = factor * hypot(a.error / a.mean, b.error / b.mean), log(b.mean / a.mean)
        half = max(quantile * error, margin)
        low, high = (a.mean * (exp(center + side * half) - 1) for side in (-1, 1))
        smallest = a.mean * (exp(half + weaker.quantile(CONFIDENCE) * error) - 1)
    else:
        error = factor * hypot(a.error, b.error)
        half = max(quantile * error, margin * max(a.mean, b.mean))
        low, high = difference - half, difference + half
        smallest = half + weaker.quantile(CONFIDENCE) * error
    verdict: Verdict = "same" if weakness == 0 else "too-few"
    if min(a.count, b.count) < _MIN_STEPS:
        verdict = "too-few"
    elif abs(difference) < least_ns and (low > 0 or high < 0):
        verdict = "same"
    elif low > 0 or high < 0:
        verdict = "slower" if low > 0 else "faster"
    return Change(name, kind, a.mean, b.mean, low, high, max(smallest, least_ns), verdict)


def _long_steps(a: RunTimes, b: RunTimes, least_ns: float) -> Change:
    """Return the change of the cost of long steps, per step; it is not judged if there are few of them."""
    costs = a.long_ns(), b.long_ns()
    change = _change("long steps", "long", _means(*costs), CONFIDENCE, least_ns)
    if min((cost > 0).sum() for cost in costs) >= _MIN_LONG:
        return change
    return Change("long steps", "long", change.a_ns, change.b_ns, change.low_ns, change.high_ns, 0.0, "too-few")


def _buckets(a: RunTimes, b: RunTimes, least_ns: float, weakness: float) -> list[Change]:
    """Return the changes of the buckets that both runs have, in typical steps."""
    names = [name for name in a.buckets_ns if name in b.buckets_ns]
    masks = [np.isin(run.bucket_step, run.step[run.is_typical()]) for run in (a, b)]
    if not names or not all(mask.any() for mask in masks):
        return []
    confidence = 1 - (1 - CONFIDENCE) / (2 * len(names))
    kinds: tuple[Kind, Kind] = ("compute", "comm")
    return [
        _change(name, kind, _means(*series), confidence, least_ns, weakness=weakness)
        for name in names
        for i, kind in enumerate(kinds)
        for series in [[run.buckets_ns[name][i][mask] for run, mask in zip((a, b), masks, strict=True)]]
    ]


def _too_few_sentence(counts: tuple[int, int], block_length: float) -> str:
    steps = f"{counts[0]} and {counts[1]} typical steps are too few"
    if min(counts) < _MIN_STEPS:
        return f"{steps}: {_MIN_STEPS} of each run are needed"
    return f"{steps} for this difference: about {max(MIN_VALUES, ceil(MIN_BLOCKS * block_length))} are needed"
