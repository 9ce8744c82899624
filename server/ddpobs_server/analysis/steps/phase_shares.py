"""Share of each phase in the steps of each rank."""

from __future__ import annotations

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.steps.joined_steps import Floats, index_ranks

_PARTS = 5


def phase_shares(rank: wire.Ints, steps: wire.Steps) -> Floats:
    """Return the share of each phase in each rank's steps: the median over fifths of the rank's steps.

    One slow fetch, such as the first, changes only one fifth. Workers that deliver in bursts count in all
    fifths, although the median step does not wait.

    Returns:
        Shape [ranks, phases].
    """
    ranks, index = index_ranks(rank)
    counts = np.bincount(index, minlength=len(ranks))
    order, in_order = np.argsort(index, kind="stable"), np.repeat(np.arange(len(ranks)), counts)
    number = np.arange(len(rank)) - np.repeat(np.cumsum(counts) - counts, counts)
    part = np.empty_like(index)
    part[order] = in_order * _PARTS + number * _PARTS // np.repeat(counts, counts)
    times = [getattr(steps, f"{phase}_ns") for phase in wire.PHASES]
    sums = np.stack([np.bincount(part, ns, len(ranks) * _PARTS) for ns in times], axis=1)
    shares = sums / np.maximum(1.0, sums.sum(axis=1, keepdims=True))
    return np.asarray(np.median(shares.reshape(len(ranks), _PARTS, -1), axis=1))


def mean_step_ns(rank: wire.Ints, steps: wire.Steps) -> float:
    """Return the median over fifths of the mean step, on the median rank."""
    _, index = index_ranks(rank)
    wall_ns = (steps.end_ns - steps.start_ns)[np.argsort(index, kind="stable")]
    of_ranks = np.split(wall_ns, np.cumsum(np.bincount(index))[:-1])
    means = [np.median([part.mean() for part in np.array_split(own, _PARTS) if len(part)]) for own in of_ranks]
    return float(np.median(means))
