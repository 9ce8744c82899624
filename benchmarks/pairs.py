"""Ratios of two variants that ran in turns, with intervals that account for differences between launches.

A *launch* is one set of processes. Its memory addresses can make one variant slightly faster for as long as they live.
A *round* is a turn, or a few, of every variant, in a new random order.

A launch's ratio is that of its totals, in which a rare burst counts with its true weight. Or it is the median of its
rounds' ratios, which such a burst does not move, whether the machine or the variant caused it.

Launches are independent of each other, rounds are not. The interval is therefore Student's t over the launches: of the
logarithms of their ratios, each weighted by its rounds. It covers the variation of rounds and launches, whatever the
dependence between rounds. With a single launch, its rounds take the place of launches, and the interval does not cover
differences between launches. The median of a single launch has no interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""The 97.5 % quantile for 1 to 10 degrees of freedom."""
Seconds = Sequence[Sequence[float]]
"""Seconds a step, by launch and round."""


@dataclass(frozen=True)
class Ratio:
    """One variant's time over another's.

    Attributes:
        middle: Geometric mean of the launches' ratios, weighted by rounds.
        low: Lower end of its 95 % interval.
        high: Upper end.
    """

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{self.middle:.3f} (one launch)"
        return f"{self.middle:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def verdict(self, limit: float) -> str:
        """Return "holds" or "fails" if the whole interval is at most or above `limit`, otherwise "open"."""
        return "holds" if self.high <= limit else "fails" if self.low > limit else "open"


def ratio(numerator: Seconds, denominator: Seconds, *, medians: bool = False) -> Ratio:
    """Return the ratio of two variants that took turns.

    Args:
        numerator: Times of one variant.
        denominator: Times of the other, with as many launches and rounds.
        medians: A launch's ratio is the median of its rounds', not that of its totals.

    Raises:
        ValueError: The rounds do not pair up, or there are none.
    """
    pairs = [np.array(pair, dtype=float) for pair in zip(numerator, denominator, strict=True)]
    pairs = [pair for pair in pairs if pair.shape[1]]
    if not pairs:
        raise ValueError("a ratio needs at least one round of both variants")
    rounds = [pair.shape[1] for pair in pairs]
    if medians:
        logs = np.array([np.median(np.log(above / below)) for above, below in pairs])
    elif len(pairs) > 1:
        logs = np.array([np.log(above.sum() / below.sum()) for above, below in pairs])
    else:
        logs, rounds = np.log(pairs[0][0] / pairs[0][1]), [1] * rounds[0]
    weights = np.array(rounds) / sum(rounds)
    mean = float(weights @ logs)
    if len(logs) == 1:
        return Ratio(math.exp(mean), 0.0, math.inf)
    freedom = len(logs) - 1
    error = math.sqrt(float(weights**2 @ (logs - mean) ** 2) * len(logs) / freedom)
    half = student(freedom) * error
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def student(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's distribution, from eleven degrees of freedom on by its expansion."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    return 1.95996 + 2.3723 / freedom + 2.8225 / freedom**2
