"""Whether a rank is late again and again, in each part of the steps."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ddpobs.shared.delay import median_of_others
from ddpobs_server.analysis.slow_ranks.lateness import Lateness, cost_shares
from ddpobs_server.analysis.steps.joined_steps import JoinedSteps

MIN_COST_SHARE = 0.05
"""Minimum mean cost of a rank, as a share of the step, that is worth a finding."""
MIN_LEVEL = 0.035
"""Minimum median excess of a rank that is slow in every step, as a share of the step."""
_MIN_LEVEL_SHARE = 0.55
_MIN_COST_RATIO = 3.0
"""A rank that is late as often as others, by noise, stands out if its cost is this many times the others' median."""
PARTS = 4
"""Equal parts of the judged steps. A slow rank stands out in each, noise in bursts does not."""


def recurring_ranks(
    joined: JoinedSteps, late: Lateness, min_late_share: float = 0.0, min_cost_share: float = 0.0
) -> list[int]:
    """Return the indices of the ranks that stand out in each quarter of the steps, not in one burst of noise.

    Such a rank is late at least half as often as the rank that is late most, and at least twice as often as the median
    of the others. In each quarter it is late in `min_late_share` of the steps, and costs the larger of `min_cost_share`
    and `MIN_COST_SHARE` of the time.
    """
    stand_out = np.ones(len(joined.ranks), bool)
    for rows in np.array_split(np.arange(len(joined)), PARTS):
        shares = late.late[rows].mean(axis=0)
        stand_out &= (shares >= 0.5 * shares.max()) & (shares >= 2 * median_of_others(shares[None])[0])
        stand_out &= shares >= min_late_share
        stand_out &= cost_shares(joined, late, rows) >= max(MIN_COST_SHARE, min_cost_share)
    return np.flatnonzero(stand_out).tolist()


def costly_ranks(joined: JoinedSteps, late: Lateness) -> list[int]:
    """Return the indices of the ranks that cost far more than the others in each quarter of the steps.

    Such a rank may be late as seldom as the others. A rank that takes long in every tenth step is not late twice as
    often as a rank that noise makes late in every fifth.
    """
    stand_out = np.ones(len(joined.ranks), bool)
    for rows in np.array_split(np.arange(len(joined)), PARTS):
        costs = cost_shares(joined, late, rows)
        stand_out &= (costs >= 0.5 * costs.max()) & (costs >= _MIN_COST_RATIO * median_of_others(costs[None])[0])
        stand_out &= costs >= MIN_COST_SHARE
    return np.flatnonzero(stand_out).tolist()


def steady_levels(joined: JoinedSteps, late: Lateness) -> dict[int, float]:
    """Return the median excess in ns of each rank that is slow in every step, even if by less than a late rank is.

    In each quarter of the steps the median is at least half of that of all steps. The excess is above half of it in
    55 % of the steps, and at least twice as often as for the median of the other ranks.
    """
    step_ns = float(np.median(joined.step_ns))
    levels_ns = late.usual_excess_ns
    steady: dict[int, float] = {}
    for index in np.flatnonzero(levels_ns >= MIN_LEVEL * step_ns).tolist():
        half = 0.5 * levels_ns[index]
        exceeds = (late.excess_ns > half).mean(axis=0)
        quarters = np.array_split(late.excess_ns[:, index], PARTS)
        is_steady = all(np.median(quarter) >= half for quarter in quarters)
        if is_steady and exceeds[index] >= max(_MIN_LEVEL_SHARE, 2 * median_of_others(exceeds[None])[0, index]):
            steady[index] = float(levels_ns[index])
    return steady


def onset(late: npt.NDArray[np.bool_], share: float) -> int:
    """Return the index of the step at which a rank's present lateness began.

    It is the step from which the excess over half of `share` adds up to most.

    Args:
        late: Whether the rank was late, shape [steps].
        share: Share of the steps in which the rank is late now.
    """
    excess_from_step = np.cumsum(late[::-1] - 0.5 * share)[::-1]
    return int(excess_from_step.argmax())
