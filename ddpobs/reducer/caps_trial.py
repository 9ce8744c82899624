"""Whether a candidate's buckets are faster than the present ones, from blocks of steps by turns."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from ddpobs.shared.paired_blocks import PairedRatio, Ratio, TimedStep, Turns, mean_times

BLOCK_STEPS = 8
LOOKS = 6, 9, 12
"""Numbers of groups of four blocks after which the interval is read; the last one ends the trial."""
_DROPPED = 2
"""Steps at a block's begin in no arm: in the first the buckets change, in the second their memory is new."""
_HOPELESS = 1.5
"""Ratio of a first group from which a candidate is undone at once."""


class Verdict(IntEnum):
    """What to do with the candidate."""

    GO_ON = 0
    KEEP = 1
    UNDO = 2


class Decision(NamedTuple):
    """A verdict, and the ratio of the step times that it rests on; NaN where none is known.

    Attributes:
        verdict: A `Verdict`.
        ratio: Time of a step with the candidate's buckets, over that with the present ones.
        low: Lower bound of its interval.
        high: Upper bound.
    """

    verdict: float
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan

    @property
    def figures(self) -> dict[str, float]:
        """The ratio with its bounds; empty if it is not known."""
        return {} if math.isnan(self.ratio) else {"ratio": self.ratio, "low": self.low, "high": self.high}


class Trial:
    """The turns of the present buckets, arm 0, and of a candidate's, arm 1.

    A candidate is kept only if the interval's upper bound is below 1. All looks at the interval together are wrong in
    at most 5 % of trials, so that a candidate without a gain is kept in at most 2.5 %.

    Args:
        seed: The same on all ranks.
    """

    def __init__(self, seed: int) -> None:
        self._turns, self._ratio, self._groups = Turns(BLOCK_STEPS, seed), PairedRatio(), 0

    @property
    def block_steps(self) -> int:
        """Steps of a block."""
        return self._turns.block_steps

    @property
    def group_steps(self) -> int:
        """Steps of a group of blocks, after which `decide` is called."""
        return self._turns.group_steps

    def arm(self, step: int) -> int:
        """Arm of a step, counted from the trial's first one."""
        return self._turns.arm(step)

    def decide(self, timed: Iterable[tuple[int, TimedStep]]) -> Decision:
        """Add a group's steps, and return whether the trial is over.

        Args:
            timed: Each step with its number, counted from the trial's first one.
        """
        group = [step._replace(arm=self.arm(number)) for number, step in timed if number % self.block_steps >= _DROPPED]
        self._groups += 1
        self._ratio.add(group)
        estimate = self._ratio.estimate(looks=len(LOOKS))
        return Decision(self._verdict(group, estimate), *(estimate[:3] if estimate is not None else ()))

    def _verdict(self, group: list[TimedStep], estimate: Ratio | None) -> Verdict:
        if self._groups == 1 and (means := mean_times(group)) is not None and means[1] > _HOPELESS * means[0]:
            return Verdict.UNDO
        if self._groups in LOOKS and estimate is not None and not estimate.low <= 1 <= estimate.high:
            return Verdict.KEEP if estimate.high < 1 else Verdict.UNDO
        return Verdict.UNDO if self._groups >= LOOKS[-1] else Verdict.GO_ON
