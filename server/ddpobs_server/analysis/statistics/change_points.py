"""Change points of the mean of a series, by PELT.

Source: R. Killick, P. Fearnhead and I. A. Eckley, "Optimal detection of changepoints with a linear computational cost",
Journal of the American Statistical Association 107 (2012), with the cost of a change in mean and the penalty of the
Bayesian information criterion (Yao, Statistics & Probability Letters 6, 1988).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.steps.joined_steps import Floats

_PENALTY = 3.0
"""Penalty of a segment in units of the noise's variance times log(n): a segment has a mean and a place.

Yao's penalty is 2. Step times are autocorrelated, so that a higher penalty gives fewer spurious changes."""
_MAD_TO_SIGMA = 1.4826
_LOW, _HIGH = 0.01, 0.99


def segments(values: Floats, min_length: int = 2) -> list[tuple[int, int]]:
    """Split a series where its mean changes.

    Values outside of the 1st and 99th percentile are clipped, so that a single spike makes no segment.

    Args:
        values: Shape [n].
        min_length: Fewest values of a segment.

    Returns:
        (begin, end) of each segment, the end excluded.
    """
    count = len(values)
    if count < 2 * min_length:
        return [(0, count)] if count else []
    clipped = np.clip(values, *np.quantile(values, (_LOW, _HIGH)))
    noise = _noise(clipped)
    if noise == 0.0:
        noise = 1e-6 * max(1e-300, float(np.abs(clipped).max()))
    return _pelt(clipped, _PENALTY * noise**2 * np.log(count), min_length)


def _noise(values: Floats) -> float:
    """Return the standard deviation around a mean that changes seldom, from the differences of neighbours."""
    differences = np.abs(np.diff(values))
    robust = _MAD_TO_SIGMA * float(np.median(differences)) / np.sqrt(2)
    # If most differences are zero, as with rare values, the median shows no noise.
    return robust or float(np.sqrt(np.mean(differences**2) / 2)) / 3


def _pelt(values: Floats, penalty: float, min_length: int) -> list[tuple[int, int]]:
    count = len(values)
    sums, squares = (np.concatenate([[0.0], np.cumsum(v)]) for v in (values, values**2))
    best = np.full(count + 1, np.inf)
    best[0] = -penalty
    previous = np.zeros(count + 1, np.int64)
    candidates: wire.Ints = np.zeros(1, np.int64)
    for end in range(min_length, count + 1):
        lengths = end - candidates
        costs = squares[end] - squares[candidates] - (sums[end] - sums[candidates]) ** 2 / lengths
        totals = best[candidates] + costs
        index = int(totals.argmin())
        best[end], previous[end] = totals[index] + penalty, candidates[index]
        last_changes = candidates[totals <= best[end]]
        candidates = (
            np.append(last_changes, end - min_length + 1) if end - min_length + 1 >= min_length else last_changes
        )
    ends = [count]
    while ends[-1] > 0:
        ends.append(int(previous[ends[-1]]))
    ends.reverse()
    return list(pairwise(ends))
