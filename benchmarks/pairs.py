"""Ratios of two variants that ran in turns: paired by round, with intervals that know of rounds and of launches.

A *launch* is one set of processes; which addresses they got can make one variant faster by a hair for as long as they
live. A *round* is one turn of every variant, in an order drawn anew. Launches are resampled, and rounds within each, so
that an interval tells of both. Nothing is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 2000
Seconds = Sequence[Sequence[float]]
"""Seconds a step, by launch and round."""


@dataclass(frozen=True)
class Ratio:
    """One variant's time over another's.

    Attributes:
        total: Ratio of all rounds' totals, which a rare burst counts in with its true weight.
        low: Lower end of the 95 % interval of `total`.
        high: Upper end.
        median: Median of the rounds' ratios, which a rare burst does not move.
    """

    total: float
    low: float
    high: float
    median: float

    @property
    def half_width(self) -> float:
        """Half of the interval's width."""
        return (self.high - self.low) / 2

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
    random = np.random.default_rng(0)
    totals = np.zeros((DRAWS, 2))
    for draw in range(DRAWS):
        for launch in random.integers(len(pairs), size=len(pairs)):
            rounds = pairs[launch].shape[1]
            totals[draw] += pairs[launch][:, random.integers(rounds, size=rounds)].sum(axis=1)
    low, high = np.percentile(totals[:, 0] / totals[:, 1], [2.5, 97.5])
    every = np.concatenate(pairs, axis=1)
    total = every.sum(axis=1)
    return Ratio(float(total[0] / total[1]), float(low), float(high), float(np.median(every[0] / every[1])))
