"""Split of a rank's own time into its work, which its samples set, and its machine.

Own time is regressed on work within each rank, so that a slow machine does not look like more work. The slope comes
from Theil's incomplete method: sort the steps by work, pair step i with step i + n/2, and take the median slope of the
pairs. Up to a quarter of the steps may be outliers. It takes n/2 pairs, where the complete method takes n²/2, and they
lie far apart.

Source: H. Theil, "A rank-invariant method of linear and polynomial regression analysis", Proc. Kon. Ned. Akad. v.
Wetensch. A 53 (1950); the complete method is P. K. Sen's, Journal of the American Statistical Association 63 (1968).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ddpobs import wire
from ddpobs.shared.delay import excesses
from ddpobs_server.analysis.steps.joined_steps import Floats, JoinedSteps

MIN_PAIRS = 16
"""Minimum number of pairs of steps with different work that give a rank's slope."""
_RISING_SHARE = 0.75
"""Share of the pairs in which more work takes longer, from which on own time follows work."""
_MIN_EFFECT = 0.02
"""Minimum effect that counts: time for the spread of work, as a share of own time."""
_CLEARLY_LESS = 0.7
"""A measure replaces a simpler one if it leaves less than this share of the spread that the simpler one leaves."""
_ERROR_SHARE = 0.25
"""Error of the time for unequal work, as a share of that time.

In three trainings on a quiet machine, with 1.97 times the elements on one rank, it was 10, 16 and 24 %."""
_CONSTANT_SHARE = 0.9
"""Minimum share of the steps with a rank's usual work, from which on its work is constant."""
_FITTED_RANKS, _FITTED_STEPS = 16, 1024
"""Ranks, spread over the world, and latest steps from which the slope is taken."""


@dataclass(frozen=True)
class WorkFit:
    """Own time as a line over work.

    Attributes:
        measure: Name of the measure of work that explains own time best.
        work: Work of each step and rank, shape [steps, ranks].
        slope_ns: Own time for one more unit of work. If ranks differ, the lower median of their slopes: of two ranks
            the slower one's machine may have raised its slope.
        phase_shares: Share of the slope in each of `wire.OWN_PHASES`; they add up to 1.
    """

    measure: str
    work: Floats
    slope_ns: float
    phase_shares: Floats

    @cached_property
    def extra_ns(self) -> Floats:
        """Time for the work above the median rank's, shape [steps, ranks]; negative for less work."""
        return np.asarray(self.slope_ns * (self.work - np.median(self.work, axis=1, keepdims=True)))

    @cached_property
    def error_ns(self) -> Floats:
        """Delay of each rank at equal work that may be an error of the fit, shape [ranks]."""
        difference_ns = np.median(excesses(self.extra_ns), axis=0)
        return np.asarray(_ERROR_SHARE * np.abs(difference_ns))

    def latest(self, count: int) -> WorkFit:
        """Return the fit for the last `count` steps."""
        return replace(self, work=self.work[-count:])


@dataclass(frozen=True)
class ConstantWork:
    """Work of ranks whose batches have one size each.

    Attributes:
        measure: Name of the measure of work.
        work: Work of each rank, shape [ranks].
    """

    measure: str
    work: Floats

    def ratio(self, index: int) -> float:
        """Return a rank's work over the median of the other ranks'."""
        return float(self.work[index] / np.median(np.delete(self.work, index)))


def fit_work(joined: JoinedSteps, steps: wire.Steps) -> WorkFit | None:
    """Fit own time over the measure of work that explains it best.

    Args:
        joined: The compared steps.
        steps: The columns that `joined.row` refers to.

    Returns:
        None if work is not recorded, does not vary within the ranks, or own time does not follow it.
    """
    count = len(joined.ranks)
    if not joined.row.size:
        return None
    chosen = np.unique(np.linspace(0, count - 1, min(count, _FITTED_RANKS)).round().astype(np.int64))
    row = joined.row[-_FITTED_STEPS:, chosen]
    own_ns, usual_run_delay = without_run_delay(joined.own_ns[-_FITTED_STEPS:, chosen], row, steps)
    phases_ns = joined.phases_ns[-_FITTED_STEPS:, chosen]
    best: tuple[float, str, float] | None = None
    for measure, work in _measures(row, steps):
        fitted = _fit(work, own_ns)
        if fitted is not None and (best is None or fitted[0] < _CLEARLY_LESS * best[0]):
            best = fitted[0], measure, fitted[1]
            shares = _phase_shares(work, phases_ns)
    if best is None:
        return None
    _, measure, slope_ns = best
    for name, work in _measures(joined.row, steps):  # All ranks must have recorded the measure.
        if name == measure:
            return WorkFit(measure, work, (1 + usual_run_delay) * slope_ns, shares)
    return None


def without_run_delay(own_ns: Floats, row: wire.Ints, steps: wire.Steps) -> tuple[Floats, float]:
    """Return own time without the time that the training thread waited for a processor, and that time's usual share.

    Other processes disturb own time, and so the slope. More work on a busy host also waits longer for a processor: the
    share is the lower median over ranks of time in the run queue over time on a processor. Where the training thread
    computes for less than half of own time, as with a device, own time stays as it is.
    """
    running_ns, run_delay_ns = steps.running_ns[row], steps.run_delay_ns[row]
    is_recorded = running_ns.min() > 0 and run_delay_ns.min() >= 0
    if not is_recorded or 2 * np.median(running_ns + run_delay_ns) < np.median(own_ns):
        return own_ns, 0.0
    shares = np.sort(run_delay_ns.sum(axis=0) / running_ns.sum(axis=0))
    return np.maximum(0.0, own_ns - run_delay_ns), float(shares[(len(shares) - 1) // 2])


def at_equal_work(joined: JoinedSteps, fit: WorkFit) -> JoinedSteps:
    """Return the steps as if each rank had the median rank's work: the remaining lateness is of its machine."""
    extra_ns = fit.extra_ns
    return replace(
        joined,
        own_ns=np.maximum(0.0, joined.own_ns - extra_ns),
        phases_ns=joined.phases_ns - extra_ns[:, :, None] * fit.phase_shares,
    )


def at_equal_machines(joined: JoinedSteps, fit: WorkFit) -> JoinedSteps:
    """Return the steps with own times as if only the work of the ranks differed: lateness is of their samples."""
    common_ns = np.median(joined.own_ns - fit.extra_ns, axis=1, keepdims=True)
    return replace(joined, own_ns=np.maximum(0.0, common_ns + fit.extra_ns))


def uneven_constant_work(joined: JoinedSteps, steps: wire.Steps, at_least: float) -> ConstantWork | None:
    """Return the work of each rank if ranks differ in it by this share, but each rank's own work hardly ever varies.

    Then a slow machine and more work look the same. The last batch of an epoch may be smaller. Rows, which a script
    sets, come before other measures.
    """
    for measure, work in sorted(_measures(joined.row, steps), key=lambda measured: measured[0] != "rows"):
        usual = np.median(work, axis=0)
        is_constant = (work == usual).mean(axis=0).min() >= _CONSTANT_SHARE
        if is_constant and usual.max() > (1 + at_least) * usual.min():
            return ConstantWork(measure, usual)
    return None


def _measures(row: wire.Ints, steps: wire.Steps) -> Iterator[tuple[str, Floats]]:
    """Yield each measure that is recorded in all rows and differs at all, the simplest first, in the shape of `row`.

    The last one is the work of attention, which grows with the square of the length.
    """
    elements, longest = steps.elements[row], steps.longest[row]
    for name, work in (
        ("elements", elements),
        ("rows", steps.samples[row]),
        ("longest dimension", longest),
        ("elements times longest dimension", elements * longest * ((elements > 0) & (longest > 0))),
    ):
        if work.size and work.min() > 0 and work.min() < work.max():
            yield name, np.asarray(work, np.float64)


def _fit(work: Floats, own_ns: Floats) -> tuple[float, float] | None:
    """Return the share of own time's spread that the line leaves, and its slope; None if own time does not follow work.

    Args:
        work: Shape [steps, ranks].
        own_ns: Same shape.
    """
    by_rank = [_line(work[:, index], own_ns[:, index]) for index in range(work.shape[1])]
    lines = [line for line in by_rank if line is not None]
    rising = sorted(slope for slope, _ in lines if slope > 0)
    if not lines or 2 * len(rising) < len(lines):
        return None
    slope_ns = rising[(len(rising) - 1) // 2]
    spread_ns = slope_ns * float(np.median(np.quantile(work, 0.9, axis=0) - np.quantile(work, 0.1, axis=0)))
    if spread_ns < _MIN_EFFECT * float(np.median(own_ns)):
        return None
    return float(np.median([unexplained for _, unexplained in lines])), slope_ns


def _line(work: Floats, own_ns: Floats) -> tuple[float, float] | None:
    """Return a rank's slope, 0 if own time does not follow work, and the share of own time's spread that it leaves.

    None if its work does not vary enough.
    """
    slopes = _pair_slopes(work, own_ns)
    if len(slopes) < MIN_PAIRS:
        return None
    slope = float(np.median(slopes)) if (slopes > 0).mean() >= _RISING_SHARE else 0.0
    return slope, _spread(own_ns - slope * work) / max(1.0, _spread(own_ns))


def _pair_slopes(work: Floats, own_ns: Floats) -> Floats:
    """Return the slopes of the pairs of steps with different work, by Theil's incomplete method."""
    order = np.argsort(work, kind="stable")
    half = len(work) // 2
    low, high = order[:half], order[len(order) - half :]
    differ = work[high] > work[low]
    return np.asarray((own_ns[high] - own_ns[low])[differ] / (work[high] - work[low])[differ])


def _phase_shares(work: Floats, phases_ns: Floats) -> Floats:
    """Return the share of each own phase in the slope; all in backward if no phase follows work by itself.

    Args:
        work: Shape [steps, ranks].
        phases_ns: Shape [steps, ranks, phases].
    """
    slopes = np.zeros(len(wire.OWN_PHASES))
    for phase in range(len(slopes)):
        by_rank = [_pair_slopes(work[:, rank], phases_ns[:, rank, phase]) for rank in range(work.shape[1])]
        medians = [float(np.median(pairs)) for pairs in by_rank if len(pairs) and (pairs > 0).mean() >= _RISING_SHARE]
        slopes[phase] = np.median(medians) if medians else 0.0
    if not slopes.any():
        slopes[wire.OWN_PHASES.index("backward")] = 1.0
    return np.asarray(slopes / slopes.sum())


def _spread(values: Floats) -> float:
    """Return the median distance from the median."""
    return float(np.median(np.abs(values - np.median(values))))
