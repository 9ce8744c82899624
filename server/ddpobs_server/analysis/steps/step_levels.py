"""Levels of the step time over a whole run: where all ranks became slower or faster together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.statistics.change_points import segments
from ddpobs_server.analysis.steps.joined_steps import Floats

MIN_SHIFT, MIN_STEPS = 0.05, 30
"""Minimum shift of the mean step time between two levels, and minimum number of steps of a level."""
_MAX_BINS = 512


class StepLevel(NamedTuple):
    """Steps [first, last] with about the same step time."""

    first: int
    last: int
    step_ns: float


def step_levels(first: wire.Ints, last: wire.Ints, step_ns: Floats) -> list[StepLevel]:
    """Split a run where its step time shifts by `MIN_SHIFT` and more, over `MIN_STEPS` and more.

    Args:
        first: First step of each row, in rising order.
        last: Last step.
        step_ns: Median step time of the row.
    """
    if not len(first):
        return []
    width = -(-len(first) // _MAX_BINS)
    begins = np.arange(0, len(first), width)
    ends = np.minimum(begins + width, len(first)) - 1
    whole = len(first) // width * width
    medians = np.median(step_ns[:whole].reshape(-1, width), axis=1)
    if whole < len(first):
        medians = np.append(medians, np.median(step_ns[whole:]))
    counts = last[ends] - first[begins] + 1
    levels: list[tuple[int, int]] = []
    for begin, end in segments(medians):
        if levels and (counts[begin:end].sum() < MIN_STEPS or _is_alike(medians, levels[-1], (begin, end))):
            levels[-1] = levels[-1][0], end
        else:
            levels.append((begin, end))
    return [
        StepLevel(
            int(first[begins[begin]]),
            int(last[ends[end - 1]]),
            float(np.average(medians[begin:end], weights=counts[begin:end])),
        )
        for begin, end in levels
    ]


def _is_alike(medians: Floats, level: tuple[int, int], segment: tuple[int, int]) -> bool:
    before, after = medians[slice(*level)].mean(), medians[slice(*segment)].mean()
    return bool(abs(after - before) < MIN_SHIFT * before)
