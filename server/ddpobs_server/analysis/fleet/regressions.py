"""Groups of runs that lose a larger share of their time in one week than in the weeks before.

Each attempt counts once, with the share of its rank time that is lost. The shares of the week are compared with those
of the weeks before by the one-sided rank-sum test, in its normal approximation with a correction for ties and for
continuity. Holm's procedure bounds the false alarms over all groups, as in `slow_hosts`.

Source: H. Mann and D. Whitney, "On a test of whether one of two random variables is stochastically larger than the
other", Annals of Mathematical Statistics 18 (1947).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import erfc, sqrt
from typing import NamedTuple

import numpy as np

from ddpobs.wire import Ints
from ddpobs_server.analysis.fleet.slow_hosts import FALSE_ALARMS
from ddpobs_server.analysis.steps.joined_steps import Floats

MIN_RUNS = 8
"""Minimum number of attempts on either side."""
MIN_RISE = 0.03
"""Minimum rise of the lost share."""
WEEKS_BEFORE = 4
"""Weeks that a week is compared with."""


class Losses(NamedTuple):
    """Losses of attempts; all arrays have the shape [attempts].

    Attributes:
        week: Week of each attempt.
        rank_ns: Its rank time in ns as far as it is known.
        lost_ns: The part of it that is lost.
    """

    week: Ints
    rank_ns: Floats
    lost_ns: Floats


@dataclass(frozen=True)
class Regression:
    """A rise of the lost share.

    Attributes:
        group: Key of the group.
        week: The week.
        runs: Attempts of that week.
        runs_before: Attempts of the weeks before.
        lost_share: Lost share of the week's rank time.
        lost_share_before: Lost share of the weeks before.
        chance: Probability of such a rise by chance.
    """

    group: tuple[str, str]
    week: int
    runs: int
    runs_before: int
    lost_share: float
    lost_share_before: float
    chance: float


def regressions(losses: Mapping[tuple[str, str], Losses]) -> list[Regression]:
    """Return the groups whose lost share rose in their latest week with enough attempts, the least likely first.

    Args:
        losses: Attempts of each group.
    """
    compared = sorted(filter(None, (_compared(*item) for item in losses.items())), key=lambda found: found.chance)
    found = []
    for index, group in enumerate(compared):
        if group.chance > FALSE_ALARMS / (len(compared) - index):
            break
        if group.lost_share - group.lost_share_before >= MIN_RISE:
            found.append(group)
    return found


def _compared(group: tuple[str, str], losses: Losses) -> Regression | None:
    """Compare a group's latest week with the weeks before; None with too few attempts on a side."""
    known = losses.rank_ns > 0
    if known.sum() < 2 * MIN_RUNS:
        return None
    weeks, rank_ns, lost_ns = (column[known] for column in losses)
    numbers, counts = np.unique(weeks, return_counts=True)
    if not (counts >= MIN_RUNS).any():
        return None
    week = int(numbers[counts >= MIN_RUNS][-1])
    now, before = weeks == week, (weeks < week) & (weeks >= week - WEEKS_BEFORE)
    if before.sum() < MIN_RUNS:
        return None
    shares = lost_ns / rank_ns
    return Regression(
        group=group,
        week=week,
        runs=int(now.sum()),
        runs_before=int(before.sum()),
        lost_share=float(lost_ns[now].sum() / rank_ns[now].sum()),
        lost_share_before=float(lost_ns[before].sum() / rank_ns[before].sum()),
        chance=larger_by_chance(shares[now], shares[before]),
    )


def larger_by_chance(values: Floats, others: Floats) -> float:
    """Return the probability that values are by chance as much larger than others as they are.

    Args:
        values: Shape [values].
        others: Shape [others].
    """
    distinct, index, counts = np.unique(np.concatenate([values, others]), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[index]
    m, n, total = len(values), len(others), len(index)
    u = float(ranks[:m].sum()) - m * (m + 1) / 2
    ties = float((counts.astype(float) ** 3 - counts).sum())
    variance = m * n / 12 * (total + 1 - ties / (total * (total - 1)))
    if variance <= 0 or len(distinct) < 2:
        return 1.0
    return 0.5 * erfc((u - m * n / 2 - 0.5) / sqrt(2 * variance))
