"""Ratios of two variants that ran in turns, with intervals that know of launches.

A *launch* is one set of processes; which addresses they got can make one variant faster by a hair for as long as they
live. A *round* is a turn, or a few, of every variant, in an order drawn anew. A launch's ratio is that of its totals:
nothing is left out, a rare burst counts with its true weight; or the median of its rounds' ratios, which such a burst
does not move, be it the machine's or what is measured. Launches are independent of each other, which rounds are
not, so that the interval is Student's over the launches (of their logarithms, each weighted by its rounds): it holds
what rounds and launches vary by, whatever rounds have to do with each other. A single launch has its rounds stand for
launches, and its interval does not know of these; that of a median has none then.
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
        return f"{self.middle:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def verdict(self, limit: float) -> str:
        """Whether the ratio is at most `limit`: "holds" or "fails" where the whole interval says so, else "open"."""
        return "holds" if self.high <= limit else "fails" if self.low > limit else "open"


def ratio(of: Seconds, to: Seconds, *, medians: bool = False) -> Ratio:
    """The ratio of two variants that took turns.

    Args:
        of: The one.
        to: The other, of as many launches and rounds.
        medians: A launch's ratio is the median of its rounds', and not that of its totals.

    Raises:
        ValueError: The rounds do not pair up, or there are none.
    """
    pairs = [np.array(pair, dtype=float) for pair in zip(of, to, strict=True)]
    pairs = [pair for pair in pairs if pair.shape[1]]
    if not pairs:
        raise ValueError("a ratio needs at least one round of both variants")
    rounds = [pair.shape[1] for pair in pairs]
    if medians:
        logs = np.array([np.median(np.log(one / other)) for one, other in pairs])
    elif len(pairs) > 1:
        logs = np.array([np.log(one.sum() / other.sum()) for one, other in pairs])
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
    """The 97.5 % quantile of Student's distribution; from eleven degrees of freedom on by its expansion."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    return 1.95996 + 2.3723 / freedom + 2.8225 / freedom**2
