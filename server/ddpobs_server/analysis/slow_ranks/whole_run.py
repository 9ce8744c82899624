"""The judged part of a run in bins, with the stretches in which its ranks are slow and the steps where these begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.evidence import ColumnReader, ColumnsTooLargeError, Evidence
from ddpobs_server.analysis.finding import Interval
from ddpobs_server.analysis.slow_ranks.lateness_bins import LatenessBins, bins_of
from ddpobs_server.analysis.slow_ranks.stretches import Stretch, bin_width, edge_step, find_stretches, refine
from ddpobs_server.analysis.steps.intervals import StepClock, merged
from ddpobs_server.analysis.steps.joined_steps import JoinedSteps

MAX_FINDINGS = 8
"""Maximum number of reported ranks and phases with slow stretches.

If the run has more stretches, their ends are as coarse as the bins.
"""
_ONGOING_STEPS, _ONGOING_SHARE = 16, 0.05
"""A stretch goes on if fewer steps follow it than this number, or than this share of its own steps."""
_MIN_EDGE_BINS = 4
Bins = Any
"""A boolean array of shape [bins]."""


@dataclass(frozen=True)
class WholeRun:
    """The judged part of a run: its steps in bins, and the stretches in which a rank is slow.

    Attributes:
        joined: The steps whose columns were read.
        own_bins: These steps in bins.
        bins: The same after the rollups of the steps before.
        clock: When steps began and ended.
        columns: Reads around the ends of stretches.
    """

    joined: JoinedSteps
    own_bins: LatenessBins
    bins: LatenessBins
    clock: StepClock
    columns: ColumnReader | None = None

    @classmethod
    def of(cls, evidence: Evidence) -> WholeRun:
        """Return the run of some evidence with at least two ranks."""
        joined = evidence.joined if evidence.whole is None else evidence.whole
        bins = own_bins = bins_of(joined, bin_width(len(joined)))
        earlier = evidence.earlier
        if earlier is not None and len(earlier) and len(bins):
            bins = earlier.select(earlier.last < bins.first[0]).followed_by(bins)
        return cls(joined, own_bins, bins, evidence.clock, evidence.columns)

    def bins_of_columns(self, width: int) -> LatenessBins:
        """Return the steps whose columns were read in bins of so many steps."""
        return self.own_bins if width == bin_width(len(self.joined)) else bins_of(self.joined, width)

    @cached_property
    def stretches(self) -> list[Stretch]:
        """Stretches that chance does not explain."""
        return find_stretches(self.bins)

    def rank(self, stretch: Stretch) -> int:
        """Return the stretch's rank."""
        return int(self.bins.ranks[stretch.index])

    def phase(self, stretch: Stretch) -> str:
        """Return the phase with most of the rank's excess."""
        return wire.OWN_PHASES[int(self.bins.phase_ns[stretch.rows, stretch.index].sum(axis=0).argmax())]

    def range_of(self, stretch: Stretch) -> tuple[int, int]:
        """Return its first and last step: to the step where columns can be read quickly, else to the bin."""
        return self._ranges[stretch]

    @cached_property
    def _ranges(self) -> dict[Stretch, tuple[int, int]]:
        return {stretch: self._find_range(stretch) for stretch in self.stretches}

    def _find_range(self, stretch: Stretch) -> tuple[int, int]:
        first, last = int(self.bins.first[stretch.begin]), int(self.bins.last[stretch.end - 1])
        read_from = int(self.joined.step[0]) if len(self.joined) else last + 1
        begin, end = first, last
        if last >= read_from:
            index = int(np.searchsorted(self.joined.ranks, self.rank(stretch)))
            begin, end = refine(self.joined, index, first, last, bin_width(len(self.joined)))
        rank = self.rank(stretch)
        if len(self.stretches) > MAX_FINDINGS:
            return begin, end
        if first < read_from:
            width = int(self.bins.last[stretch.begin]) - first + 1
            begin = finer_edge(self.columns, rank, first, width, rises=True)
        if last < read_from:
            width = last - int(self.bins.first[stretch.end - 1]) + 1
            end = finer_edge(self.columns, rank, last + 1, width, rises=False) - 1
        return begin, max(begin, end)

    def covered(self, ranges: Sequence[tuple[int, int]]) -> Bins:
        """Return the bins that hold some of these steps."""
        mask = np.zeros(len(self.bins), bool)
        for first, last in ranges:
            mask |= (self.bins.last >= first) & (self.bins.first <= last)
        return mask

    def intervals(self, ranges: Sequence[tuple[int, int]]) -> tuple[Interval, ...]:
        """Return these steps with their times."""
        return tuple(self.clock.timed(Interval(*bounds)) for bounds in merged(ranges))

    def goes_on(self, last: int, steps: int) -> bool:
        """Whether a stretch of so many steps, up to the step `last`, reaches the latest steps."""
        after = int(self.bins.steps[self.bins.first > last].sum())
        return after < max(_ONGOING_STEPS, _ONGOING_SHARE * steps)

    def lost_ns(self, rank: int, rows: Bins) -> float:
        """Return the time that some bins lost to a rank."""
        return float(self.bins.lost_ns[rows, int(np.searchsorted(self.bins.ranks, rank))].sum())

    @property
    def time_ns(self) -> float:
        """Time of all compared steps."""
        return max(1.0, float(self.bins.time_ns.sum()))


def finer_edge(columns: ColumnReader | None, rank: int, step: int, width: int, *, rises: bool) -> int:
    """Return the step at which a rank becomes slow, or is slow no more, from ever finer bins around it.

    Args:
        columns: Reads the bins; None leaves the step as it is.
        rank: The rank.
        step: Where a bin of `width` steps begins.
        width: Steps of a bin.
        rises: Whether the rank becomes slow.
    """
    while columns is not None and width > 1:
        try:
            bins = columns.lateness(rank, max(0, step - width), step + width - 1)
        except ColumnsTooLargeError:
            break
        if bins is None or len(bins) < _MIN_EDGE_BINS or rank not in bins.ranks:
            break
        step = edge_step(bins, int(np.searchsorted(bins.ranks, rank)), step, rises=rises)
        finer = int(np.median(bins.last - bins.first + 1))
        if finer >= width:
            break
        width = finer
    return step
