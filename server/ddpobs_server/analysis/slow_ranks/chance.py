"""How often chance alone makes a rank late as often as it was, or as costly."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt

from ddpobs import wire
from ddpobs_server.analysis.slow_ranks.lateness import BLOCK_STEPS
from ddpobs_server.analysis.statistics.dependent_mean import memory
from ddpobs_server.analysis.steps.joined_steps import Floats

MAX_CHANCE = 0.01
"""Maximum p-value of a finding."""
_COST_UNITS = 2**13
"""Costs are whole numbers of such parts of the highest sum that one rank could have."""
_MIN_CHANCE = 1e-12
"""Minimum p-value: smaller ones are lost among the rounding errors of a Fourier transform."""


def beyond_chance(late: npt.NDArray[Any], suspects: list[int], excess_ns: Floats) -> dict[int, float]:
    """Return the p-value of each suspect that is late more often, or costs more, than chance explains.

    Args:
        late: Whether a rank was late, or its cost; shape [steps, ranks].
        suspects: Indices of ranks.
        excess_ns: The ranks' excess, of the same shape, whose bursts a block has to hold.
    """
    lengths = {index: block_steps(excess_ns[:, index]) for index in suspects}
    chances = {length: chance_of(late, length) for length in set(lengths.values())}  # Of many ranks, few lengths.
    by_suspect = {index: float(chances[length][index]) for index, length in lengths.items()}
    return {index: chance for index, chance in by_suspect.items() if chance <= MAX_CHANCE}


def block_steps(excess_ns: Floats) -> int:
    """Return how many steps hold a burst of a rank's noise, so that its order within them means nothing; at least 4.

    It is the number of steps that are worth one independent step: (1 + r) / (1 - r), with the correlation r of
    neighbours. A running median of three steps leaves out single spikes. A rank that is late in single steps, or by as
    much in every step, has blocks of about 4 steps.

    Args:
        excess_ns: The rank's excess, shape [steps].
    """
    smooth_ns = np.median(np.lib.stride_tricks.sliding_window_view(np.pad(excess_ns, 1, mode="edge"), 3), axis=1)
    return max(BLOCK_STEPS, min(len(excess_ns), ceil(memory(smooth_ns))))


def chance_of(late: npt.NDArray[Any], length: int = BLOCK_STEPS) -> Floats:
    """Return how often chance alone makes any rank late as often as each rank was, or as costly.

    By chance each block of steps has its ranks in any order, so that noise in bursts stays in bursts. One rank then has
    a sum of one random rank of each block. The distribution of this sum is exact. Any of the ranks exceeds a value at
    most as often as one rank does, times the number of ranks (Bonferroni); of two ranks, just as often.

    Args:
        late: Whether a rank was late, or its cost; shape [steps, ranks].
        length: Number of steps of a block.

    Returns:
        Shape [ranks], p-values.
    """
    steps, ranks = late.shape
    blocks = steps // length
    sums = late[: blocks * length].reshape(blocks, length, ranks).sum(axis=1)
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
