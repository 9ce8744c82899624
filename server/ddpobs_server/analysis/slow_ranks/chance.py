"""How often chance alone makes a rank late as often as it was, or as costly."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ddpobs import wire
from ddpobs_server.analysis.slow_ranks.lateness import BLOCK_STEPS
from ddpobs_server.analysis.steps.joined_steps import Floats

MAX_CHANCE = 0.01
"""Maximum p-value of a finding."""
_COST_UNITS = 2**13
"""Costs are whole numbers of such parts of the highest sum that one rank could have."""
_MIN_CHANCE = 1e-12
"""Minimum p-value: smaller ones are lost among the rounding errors of a Fourier transform."""


def beyond_chance(late: npt.NDArray[Any], suspects: list[int]) -> dict[int, float]:
    """Return the p-value of each suspect that is late more often, or costs more, than chance explains.

    Args:
        late: Whether a rank was late, or its cost; shape [steps, ranks].
        suspects: Indices of ranks.
    """
    if not suspects:
        return {}
    chance = chance_of(late)
    return {index: float(chance[index]) for index in suspects if chance[index] <= MAX_CHANCE}


def chance_of(late: npt.NDArray[Any]) -> Floats:
    """Return how often chance alone makes any rank late as often as each rank was, or as costly.

    By chance each block of steps has its ranks in any order, so that noise in bursts stays in bursts. One rank then has
    a sum of one random rank of each block. The distribution of this sum is exact. Any of the ranks exceeds a value at
    most as often as one rank does, times the number of ranks (Bonferroni); of two ranks, just as often.

    Args:
        late: Whether a rank was late, or its cost; shape [steps, ranks].

    Returns:
        Shape [ranks], p-values.
    """
    steps, ranks = late.shape
    blocks = steps // BLOCK_STEPS
    sums = late[: blocks * BLOCK_STEPS].reshape(blocks, BLOCK_STEPS, ranks).sum(axis=1)
    counts = sums if late.dtype == bool else _whole_numbers(sums)
    return np.asarray(np.clip(ranks * _exceeded(counts)[counts.sum(axis=0)], _MIN_CHANCE, 1.0))


def _whole_numbers(costs: Floats) -> wire.Ints:
    highest_sum = max(1.0, float(costs.max(axis=1, initial=0.0).sum()))
    return np.asarray(np.rint(costs * (_COST_UNITS / highest_sum)), np.int64)


def _exceeded(counts: wire.Ints) -> Floats:
    """Return how often the sum of one random rank of each block is at least 0, 1, 2 and so on.

    Args:
        counts: Shape [blocks, ranks].

    Returns:
        Shape [sums], up to the highest possible sum at least.
    """
    size = 1 << int(counts.max(axis=1, initial=0).sum()).bit_length()
    spectrum = np.ones(size // 2 + 1, complex)
    for block in counts[counts.any(axis=1)]:
        spectrum *= np.fft.rfft(np.bincount(block, minlength=size) / len(block))
    shares = np.fft.irfft(spectrum, size)
    return np.asarray(shares[::-1].cumsum()[::-1])
