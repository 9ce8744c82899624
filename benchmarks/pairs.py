"""Ratios of two variants that ran in turns, with intervals that know of launches.

A *launch* is one set of processes; which addresses they got can make one variant faster by a hair for as long as they
live. A *round* is a turn, or a few, of every variant, in an order drawn anew. A launch's ratio is that of its totals:
nothing is left out, a rare burst counts with its true weight. Launches are independent of each other, which rounds are
not, so that the interval is Student's over the launches (of their logarithms, each weighted by its rounds): it holds
what rounds and launches vary by, whatever rounds have to do with each other. A single launch has its rounds stand for
launches, and its interval does not know of these.
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
        total: Geometric mean of the launches' ratios of totals, weighted by rounds.
        low: Lower end of the 95 % interval of `total`.
        high: Upper end.
        median: Median of the rounds' ratios, which a rare burst does not move.
    """

    total: float
    low: float
    high: float
    median: float

    def __str__(self) -> str:
        return f"{self.total:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def verdict(self, limit: float) -> str:
        """Whether the ratio is at most `limit`: "holds" or "fails" where the whole interval says so, else "open"."""
        return "holds" if self.high <= limit else "fails" if self.low > limit else "open"


def ratio(of: Seconds, to: Seconds) -> Ratio:
    """The ratio of two variants that took turns.

    Args:
        of: The one.
        to: The other, of as many launches and rounds.

    Raises:
        ValueError: The rounds do not pair up, or there are none.
    """
    pairs = [np.array([one, other], dtype=float) for one, other in zip(of, to, strict=True)]
    if not any(pair.shape[1] for pair in pairs):
        raise ValueError("a ratio needs at least one round of both variants")
    units = [pair.sum(axis=1) for pair in pairs if pair.shape[1]] if len(pairs) > 1 else list(pairs[0].T)
    rounds = [pair.shape[1] for pair in pairs if pair.shape[1]] if len(pairs) > 1 else [1] * len(units)
    logs = np.log([one[0] / one[1] for one in units])
    weights = np.array(rounds) / sum(rounds)
    mean = float(weights @ logs)
    every = np.concatenate(pairs, axis=1)
    median = float(np.median(every[0] / every[1]))
    if len(logs) == 1:
        return Ratio(math.exp(mean), 0.0, math.inf, median)
    freedom = len(logs) - 1
    error = math.sqrt(float(weights**2 @ (logs - mean) ** 2) * len(logs) / freedom)
    half = student(freedom) * error
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), median)


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's distribution; from eleven degrees of freedom on by its expansion."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    return 1.95996 + 2.3723 / freedom + 2.8225 / freedom**2
