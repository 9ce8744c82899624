"""Which ranks are slow, from the rates that all ranks measured at the same times."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddpobs.launch.host_check.partners import groups_of

Floats = npt.NDArray[np.float64]
CONSISTENT = 0.8
"""Share of the repetitions in which a slow rank is slower by the limit: a disturbance of some of them names nobody."""


@dataclass(frozen=True)
class Comparison:
    """One measure on all ranks.

    Attributes:
        rates: Median rate of each rank, shape [ranks]; NaN where it is not known.
        others: Median rate of the ranks that it is compared with, shape [ranks].
        ratios: Median over the repetitions of how many times slower it was than they, shape [ranks].
        slower: Repetitions in which it was slower by the limit, shape [ranks].
        slow: The slow ranks, the slowest first.
        slowest: Rank with the largest ratio; None if none is known.
    """

    rates: Floats
    others: Floats
    ratios: Floats
    slower: npt.NDArray[np.int64]
    slow: list[int]
    slowest: int | None


def compare(rates: Floats, hosts: Sequence[str], limit: float) -> Comparison:
    """Compare each rank with the ranks of other hosts; on a single host, with all other ranks.

    A rank is slow if, in at least 80 % of the repetitions, the median of the others' rates is at least `limit` times
    its own. Each repetition is compared by itself, because all ranks measure it at the same time.

    Args:
        rates: Rate of each repetition, shape [ranks, repetitions], in any unit; NaN where it is not known.
        hosts: Host of each rank.
        limit: Ratio from which on a rank is slower, above 1.
    """
    groups, ratios, others = np.array(groups_of(hosts)), np.full_like(rates, np.nan), np.full(len(rates), np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # A median of rates that are all unknown is unknown.
        for group in np.unique(groups):
            members = groups == group
            reference = np.nanmedian(rates[~members], axis=0)
            ratios[members] = reference / rates[members]
            others[members] = np.nanmedian(reference)
        middle, own = np.nanmedian(ratios, axis=1), np.nanmedian(rates, axis=1)
    slower = (ratios >= limit).sum(axis=1)
    order = [int(rank) for rank in np.argsort(-middle, kind="stable") if not np.isnan(middle[rank])]
    slow = [rank for rank in order if slower[rank] >= CONSISTENT * rates.shape[1]]
    return Comparison(own, others, middle, slower, slow, order[0] if order else None)
