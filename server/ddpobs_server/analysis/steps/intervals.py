"""Intervals of steps: their wall-clock times, and their words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ddpobs import wire
from ddpobs.shared.quantities import time_range
from ddpobs_server.analysis.finding import Finding, Interval

_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class StepClock:
    """When steps began and ended, Unix time.

    Attributes:
        step: Step numbers in rising order, each the first of its row, shape [rows].
        began_ns: Begin of that step, same shape.
        ended_ns: End of the row's last step, same shape.
    """

    step: wire.Ints = field(default_factory=lambda: _NONE)
    began_ns: wire.Ints = field(default_factory=lambda: _NONE)
    ended_ns: wire.Ints = field(default_factory=lambda: _NONE)

    def timed(self, interval: Interval) -> Interval:
        """Return the interval with its times, as exact as the rows are."""
        if not len(self.step) or interval.first > interval.last:
            return interval
        first = max(0, int(np.searchsorted(self.step, interval.first, "right")) - 1)
        last = max(first, int(np.searchsorted(self.step, interval.last, "right")) - 1)
        return replace(interval, began_ns=int(self.began_ns[first]), ended_ns=int(self.ended_ns[last]))

    def timed_finding(self, finding: Finding) -> Finding:
        """Return the finding with the times of its intervals."""
        intervals = finding.intervals or (Interval(*finding.steps),)
        timed = (self.timed(interval) if interval.began_ns is None else interval for interval in intervals)
        return replace(finding, intervals=tuple(timed))


def merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges (first, last) in rising order, with those joined that overlap or touch."""
    result: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if result and first <= result[-1][1] + 1:
            result[-1] = result[-1][0], max(last, result[-1][1])
        else:
            result.append((first, last))
    return result


def format_intervals(intervals: Sequence[Interval]) -> str:
    """Intervals in words: `steps 900 to 1,499, 14:31:05–14:32:11 UTC (66 s)`; several are stretches of the steps."""
    first, last = intervals[0], intervals[-1]
    steps = f"steps {first.first:,} to {last.last:,}"
    words = steps if len(intervals) == 1 else f"{len(intervals)} stretches of the {steps}"
    if first.began_ns is None or last.ended_ns is None:
        return words
    return f"{words}, {time_range(first.began_ns, last.ended_ns)}"
