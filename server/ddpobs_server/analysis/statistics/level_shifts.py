"""Intervals of a noisy series in which its level is constant.

Method: optimal partitioning of block medians, least squares with a penalty for each segment (Jackson et al. 2005,
https://doi.org/10.1109/LSP.2001.838216; the exact search that PELT speeds up, Killick et al. 2012,
https://doi.org/10.1080/01621459.2012.737745). Block medians remove single long steps.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ddpobs_server.analysis.steps.joined_steps import Floats

BLOCK = 8
_MAX_BLOCKS = 256
_PENALTY = 5.0
"""Times the usual penalty of 2 sigma^2 log(n): noise in bursts is not independent from block to block."""
_MIN_NOISE = 0.02
"""Minimum noise of a block, as a share of the median: smaller shifts are of no interest."""


def level_segments(values: Floats) -> list[tuple[int, int]]:
    """Return [first, end) of each segment of constant level, in order; a single one if the level never shifts."""
    block = max(BLOCK, -(-len(values) // _MAX_BLOCKS))
    count = len(values) // block
    if count < 2:
        return [(0, len(values))]
    medians = np.median(values[: count * block].reshape(count, block), axis=1)
    noise = np.median(np.abs(np.diff(medians))) / 0.954  # Median of |x - y| of two normal values.
    noise = max(float(noise), _MIN_NOISE * abs(float(np.median(medians))), 1e-9)
    ends = _partition(medians, 2 * _PENALTY * noise**2 * float(np.log(count)))
    bounds = [0, *(end * block for end in ends[:-1]), len(values)]
    return list(pairwise(bounds))


def _partition(values: Floats, penalty: float) -> list[int]:
    """Return the ends of the segments with the least sum of squares plus penalties."""
    count = len(values)
    sums, squares = np.append(0.0, np.cumsum(values)), np.append(0.0, np.cumsum(values**2))
    best, previous = np.zeros(count + 1), np.zeros(count + 1, np.int64)
    for end in range(1, count + 1):
        begin = np.arange(end)
        total = sums[end] - sums[begin]
        cost = best[begin] + squares[end] - squares[begin] - total**2 / (end - begin) + penalty
        previous[end] = int(cost.argmin())
        best[end] = cost[previous[end]]
    ends = [count]
    while previous[ends[-1]] > 0:
        ends.append(int(previous[ends[-1]]))
    return ends[::-1]
