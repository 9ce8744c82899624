"""Lateness of each rank in bins of consecutive steps: the form in which a whole run is judged.

Bins come from joined steps, a few steps each, or from the rollups of a long run, 64 steps and more each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.slow_ranks.lateness import lateness, step_weights
from ddpobs_server.analysis.steps.joined_steps import Floats, JoinedSteps

PHASES = len(wire.OWN_PHASES)


_Bins = TypeVar("_Bins", bound="DelayBins")


@dataclass(frozen=True, kw_only=True)
class DelayBins:
    """Sums over the compared steps of each bin, in order of the steps.

    A step with an upload counts for no more than some median steps, as in `step_weights`.

    Attributes:
        first: First step of each bin, shape [bins].
        last: Last step, same shape.
        steps: Compared steps, same shape.
        ranks: Shape [ranks].
        late: Steps in which a rank was late, shape [bins, ranks].
        cost_ns: Excess of the late rank over the others' median, in these steps; same shape.
    """

    first: wire.Ints
    last: wire.Ints
    steps: wire.Ints
    ranks: wire.Ints
    late: Floats
    cost_ns: Floats

    def __len__(self) -> int:
        return len(self.first)

    def select(self, rows: Any) -> Self:
        """Return some bins."""
        columns: dict[str, Any] = vars(self)
        return type(self)(**{name: value if name == "ranks" else value[rows] for name, value in columns.items()})

    def followed_by(self, later: _Bins) -> _Bins:
        """Return these bins and the later bins, with the columns and the ranks of the later bins.

        A rank without bins here was never late in them.
        """
        _, rows, places = np.intersect1d(self.ranks, later.ranks, return_indices=True)
        columns: dict[str, Any] = {"ranks": later.ranks}
        for name in vars(later).keys() - columns.keys():
            earlier, values = getattr(self, name), getattr(later, name)
            if values.ndim > 1:
                of_ranks = np.zeros((len(earlier), *values.shape[1:]))
                of_ranks[:, places] = earlier[:, rows]
                earlier = of_ranks
            columns[name] = np.concatenate([earlier, values])
        return type(later)(**columns)


@dataclass(frozen=True, kw_only=True)
class LatenessBins(DelayBins):
    """The same sums with those that the detectors of slow ranks need.

    Attributes:
        time_ns: Time of the compared steps, shape [bins].
        lost_ns: The rank's share of the time that these steps lost to late ranks, shape [bins, ranks]. See
            `loss_shares`.
        phase_ns: The rank's excess by phase in its late steps, shape [bins, ranks, phases].
        excess_ns: Median of the rank's own time above the others' median, shape [bins, ranks].
    """

    time_ns: Floats
    lost_ns: Floats
    phase_ns: Floats
    excess_ns: Floats


def loss_shares(excess_ns: Floats) -> Floats:
    """Return how much of a step's loss each rank accounts for.

    A step lasts as long as its last rank, so it loses the largest excess. Two equally late ranks account for half of
    it each: ranks share the part of the loss up to their own excess equally with all ranks that are as late.

    Source: the Shapley value of the airport game. S. Littlechild and G. Owen, "A Simple Expression for the Shapley
    Value in a Special Case", Management Science 20(3), 1973.

    Args:
        excess_ns: Time above a rank in time, 0 for a rank in time; shape [steps, ranks].

    Returns:
        Same shape; the sum over the ranks is the largest excess.
    """
    ranks = excess_ns.shape[1]
    order = np.argsort(excess_ns, axis=1)
    in_order = np.take_along_axis(excess_ns, order, axis=1)
    parts = np.diff(in_order, axis=1, prepend=0.0) / np.arange(ranks, 0, -1)
    shares = np.empty_like(excess_ns)
    np.put_along_axis(shares, order, np.cumsum(parts, axis=1), axis=1)
    return shares


def ideal_ns(joined: JoinedSteps) -> Floats:
    """Return the own time of a rank that takes as long as the lower median rank in each phase, shape [steps].

    Source: T_ideal of S = T / T_ideal (arXiv 2505.05713). It is never above the lower median of the ranks' own times.
    """
    middle = (len(joined.ranks) - 1) // 2
    by_phase = joined.lower_median_phases_ns.sum(axis=1)
    return np.asarray(np.minimum(by_phase, np.partition(joined.own_ns, middle, axis=1)[:, middle]))


def lost_ns(joined: JoinedSteps) -> Floats:
    """Return the time that each step lost to ranks slower than an ideal rank, shape [steps]."""
    return np.asarray(joined.own_ns.max(axis=1) - ideal_ns(joined))


def delays_of(joined: JoinedSteps) -> DelayBins:
    """Return a bin for each of some joined steps with at least two ranks."""
    late, weights = lateness(joined), step_weights(joined.window_ns)
    return DelayBins(
        first=joined.step,
        last=joined.step,
        steps=np.ones(len(joined), np.int64),
        ranks=joined.ranks,
        late=late.late.astype(np.float64),
        cost_ns=weights[:, None] * late.cost_ns,
    )


def bins_of(joined: JoinedSteps, width: int) -> LatenessBins:
    """Return the bins of joined steps with at least two ranks; each has `width` steps, the last may have fewer."""
    return bins_from(joined, np.arange(0, len(joined), width))


def bins_from(joined: JoinedSteps, begins: wire.Ints) -> LatenessBins:
    """Return the bins that begin at these rows of joined steps with at least two ranks."""
    late, weights = lateness(joined), step_weights(joined.window_ns)
    middle = (len(joined.ranks) - 1) // 2
    in_time_ns = np.partition(joined.own_ns, middle, axis=1)[:, middle, None]
    shares_ns = loss_shares(np.maximum(0.0, joined.own_ns - in_time_ns))

    def sums(values: Any) -> Floats:
        if not len(begins):
            return np.zeros((0, *values.shape[1:]))
        return np.asarray(np.add.reduceat(values.astype(np.float64, copy=False), begins, axis=0))

    weight = weights[:, None]
    ends = np.append(begins[1:], len(joined))[: len(begins)]
    return LatenessBins(
        first=joined.step[begins],
        last=joined.step[ends - 1],
        steps=ends - begins,
        time_ns=sums(weights * joined.window_ns),
        ranks=joined.ranks,
        late=sums(late.late),
        cost_ns=sums(weight * late.cost_ns),
        lost_ns=sums(weight * np.where(late.late, shares_ns, 0.0)),
        phase_ns=_late_phases_ns(joined, late.late, weights, begins),
        excess_ns=_bin_medians(late.excess_ns, begins, ends),
    )


def _bin_medians(values: Floats, begins: wire.Ints, ends: wire.Ints) -> Floats:
    """Return the median of each bin of rows; bins of equal length at once."""
    medians = np.zeros((len(begins), values.shape[1]))
    lengths = ends - begins
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        medians[rows] = np.median(values[begins[rows, None] + np.arange(length)], axis=1)
    return medians


def _late_phases_ns(joined: JoinedSteps, late: Any, weights: Floats, begins: wire.Ints) -> Floats:
    """Return each rank's excess by phase over the lower median rank in its late steps; shape [bins, ranks, phases]."""
    step, rank = np.nonzero(late)  # Few: most ranks are in time.
    is_pair = len(joined.ranks) == 2
    others_ns = joined.phases_ns[step, 1 - rank] if is_pair else joined.lower_median_phases_ns[step]
    excess_ns = (joined.phases_ns[step, rank] - others_ns) * weights[step, None]
    shape = len(begins), len(joined.ranks)
    cell = (np.searchsorted(begins, step, side="right") - 1) * shape[1] + rank
    sums = [np.bincount(cell, of_phase, shape[0] * shape[1]).reshape(shape) for of_phase in excess_ns.T]
    return np.stack(sums, axis=-1)
