"""Comparison of two arms inside one run: blocks of steps by turns, and the ratio of their times with its interval.

Which arm a step belongs to follows from a seed and the step's number alone, so that ranks which count the same steps
agree without a message.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from random import Random
from statistics import NormalDist, fmean, median
from typing import NamedTuple

MIN_PAIRS = 6
"""Fewest pairs for an interval: below that Student's distribution is wider than any effect worth knowing."""
_MAX_MEDIANS = 2
_SHARE = 32
"""One step in so many rests."""


class TimedStep(NamedTuple):
    """A step of one of the two arms.

    Attributes:
        arm: 0 or 1.
        took_ns: Its time.
        kind: What it consists of, such as its number of micro-steps. Only the most frequent kind is compared.
        disturbed: It holds an evaluation, a checkpoint or a compilation, and is not compared.
    """

    arm: int
    took_ns: int
    kind: int = 0
    disturbed: bool = False


class Ratio(NamedTuple):
    """A ratio of times, and the bounds of its 95 % interval.

    Attributes:
        ratio: Time of a step of arm 1, over the time of a step of arm 0.
        low: Lower bound.
        high: Upper bound.
        pairs: Number of pairs of blocks.
    """

    ratio: float
    low: float
    high: float
    pairs: int


class Turns:
    """Turns of two arms: `ABBA` or `BAAB`, drawn for each group of four blocks, so that a steady drift cancels.

    Args:
        block_steps: Steps of a block.
        seed: The same on all ranks.
    """

    def __init__(self, block_steps: int, seed: int) -> None:
        self.block_steps, self._seed = block_steps, seed

    @property
    def group_steps(self) -> int:
        """Steps of a group of four blocks, which is one pair."""
        return 4 * self.block_steps

    def arm(self, step: int) -> int:
        """Arm of a step, counted from the comparison's first one."""
        group, place = divmod(step // self.block_steps, 4)
        return int(place in {1, 2}) ^ Random(f"{self._seed} {group}").getrandbits(1)


class Rests:
    """Blocks of steps in which something rests: one in each cycle, at a drawn place, and none in the first cycle.

    Each block is compared with the other steps of its cycle. It lies in the cycle's middle half, so that a drift adds
    to both sides alike.

    Args:
        cycle_steps: Steps of a cycle; one in 32 rests.
    """

    def __init__(self, cycle_steps: int) -> None:
        self.cycle_steps, self._length = cycle_steps, cycle_steps // _SHARE
        self._drawn: tuple[int, int] = (-1, 0)

    def begin(self, cycle: int) -> int:
        """First step of a cycle that rests."""
        if self._drawn[0] != cycle:
            quarter = self.cycle_steps // 4
            offset = Random(cycle).randrange(quarter, 3 * quarter - self._length)
            self._drawn = cycle, cycle * self.cycle_steps + offset
        return self._drawn[1]

    def rests(self, step: int) -> bool:
        """Whether the step rests."""
        cycle = step // self.cycle_steps
        return cycle > 0 and 0 <= step - self.begin(cycle) < self._length


class PairedRatio:
    """The ratio of the arms' step times, from pairs of blocks as they come. Its size does not grow.

    The interval is Student's, of the mean of the pairs' logarithms.
    """

    def __init__(self) -> None:
        self.pairs = 0
        self._mean = self._squares = 0.0

    def add(self, steps: Iterable[TimedStep]) -> bool:
        """Add one pair of blocks; False, and nothing is added, without comparable steps in both arms."""
        means = mean_times(steps)
        if means is None:
            return False
        self.pairs += 1
        ratio = math.log(means[1] / means[0])
        shift = ratio - self._mean
        self._mean += shift / self.pairs
        self._squares += shift * (ratio - self._mean)
        return True

    def estimate(self, looks: int = 1) -> Ratio | None:
        """Return the ratio; None with fewer than `MIN_PAIRS` pairs.

        Args:
            looks: How often one comparison reads its interval, so as to end when it excludes 1. All of these intervals
                hold in 95 % of comparisons: by Bonferroni's inequality, each misses in 5 % / `looks`.
        """
        if self.pairs < MIN_PAIRS:
            return None
        quantile = _student(self.pairs - 1, 1 - 0.05 / 2 / looks)
        half = quantile * math.sqrt(self._squares / (self.pairs - 1) / self.pairs)
        return Ratio(math.exp(self._mean), math.exp(self._mean - half), math.exp(self._mean + half), self.pairs)


def mean_times(steps: Iterable[TimedStep]) -> tuple[float, float] | None:
    """Mean step time of each arm in ns; None if an arm has no step of the most frequent kind.

    A step of more than twice its arm's median is left out: one stall would outweigh a whole block.
    """
    usable = [step for step in steps if not step.disturbed and step.took_ns > 0]
    if not usable:
        return None
    kind = Counter(step.kind for step in usable).most_common(1)[0][0]
    times = [[step.took_ns for step in usable if step.kind == kind and step.arm == arm] for arm in (0, 1)]
    return (_usual_mean(times[0]), _usual_mean(times[1])) if all(times) else None


def _usual_mean(times_ns: list[int]) -> float:
    most_ns = _MAX_MEDIANS * median(times_ns)
    return fmean(time_ns for time_ns in times_ns if time_ns <= most_ns)


def _student(freedom: int, level: float) -> float:
    """Return a quantile of Student's distribution, to 0.1 % from five degrees of freedom on.

    Source: the expansion in M. Abramowitz and I. Stegun, "Handbook of Mathematical Functions", 26.7.5.

    Args:
        freedom: Degrees of freedom.
        level: Probability of the values below the quantile, from 0.9 to 0.995.
    """
    z = NormalDist().inv_cdf(level)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))
