"""Whether a rank is late again and again, more often than chance."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ddpobs import wire
from ddpobs.shared.delay import median_of_others
from ddpobs_server.analysis.slow_ranks.lateness import BLOCK_STEPS, Lateness, cost_shares
from ddpobs_server.analysis.steps.joined_steps import Floats, JoinedSteps

MIN_COST_SHARE = 0.05
"""Least mean cost of a rank, as a share of the step, that is worth a finding."""
MAX_CHANCE = 0.01
"""Largest p-value of a finding."""
MIN_LEVEL = 0.035
"""Least median excess of a rank that is slow in every step, as a share of the step."""
_MIN_LEVEL_SHARE = 0.55
_MIN_COST_RATIO = 3.0
"""A rank that is late as often as others, by noise, stands out if its cost is this many times the others' median."""
PARTS = 4
"""Equal parts of the judged steps. A slow rank stands out in each, noise in bursts does not."""
_PERMUTATIONS = 400
_MAX_PERMUTED = 2**12
"""Ranks times blocks above which ranks are rotated, not permuted."""


def recurring_ranks(
    joined: JoinedSteps, late: Lateness, min_late_share: float = 0.0, min_cost_share: float = 0.0
) -> list[int]:
    """Return the indices of the ranks that stand out in each quarter of the steps, not in one burst of noise.

    Such a rank is late at least half as often as the rank that is late most, and at least twice as often as the median
    of the others. In each quarter it is late in `min_late_share` of the steps, and costs the larger of `min_cost_share`
    and `MIN_COST_SHARE` of the time.
    """
    stand_out = np.ones(len(joined.ranks), bool)
    for rows in np.array_split(np.arange(len(joined)), PARTS):
        shares = late.late[rows].mean(axis=0)
        stand_out &= (shares >= 0.5 * shares.max()) & (shares >= 2 * median_of_others(shares[None])[0])
        stand_out &= shares >= min_late_share
        stand_out &= cost_shares(joined, late, rows) >= max(MIN_COST_SHARE, min_cost_share)
    return np.flatnonzero(stand_out).tolist()


def costly_ranks(joined: JoinedSteps, late: Lateness) -> list[int]:
    """Return the indices of the ranks that cost far more than the others in each quarter of the steps.

    Such a rank may be late as seldom as the others. A rank that takes long in every tenth step is not late twice as
    often as a rank that noise makes late in every fifth.
    """
    stand_out = np.ones(len(joined.ranks), bool)
    for rows in np.array_split(np.arange(len(joined)), PARTS):
        costs = cost_shares(joined, late, rows)
        stand_out &= (costs >= 0.5 * costs.max()) & (costs >= _MIN_COST_RATIO * median_of_others(costs[None])[0])
        stand_out &= costs >= MIN_COST_SHARE
    return np.flatnonzero(stand_out).tolist()


def steady_levels(joined: JoinedSteps, late: Lateness) -> dict[int, float]:
    """Return the median excess in ns of each rank that is slow in every step, even if by less than a late rank is.

    In each quarter of the steps the median is at least half of that of all steps. The excess is above half of it in
    55 % of the steps, and at least twice as often as for the median of the other ranks.
    """
    step_ns = float(np.median(joined.step_ns))
    levels_ns = np.median(late.excess_ns, axis=0)
    steady: dict[int, float] = {}
    for index in np.flatnonzero(levels_ns >= MIN_LEVEL * step_ns).tolist():
        half = 0.5 * levels_ns[index]
        exceeds = (late.excess_ns > half).mean(axis=0)
        quarters = np.array_split(late.excess_ns[:, index], PARTS)
        is_steady = all(np.median(quarter) >= half for quarter in quarters)
        if is_steady and exceeds[index] >= max(_MIN_LEVEL_SHARE, 2 * median_of_others(exceeds[None])[0, index]):
            steady[index] = float(levels_ns[index])
    return steady


def onset(late: npt.NDArray[np.bool_], share: float) -> int:
    """Return the index of the step at which a rank's present lateness began.

    It is the step from which the excess over half of `share` adds up to most.

    Args:
        late: Whether the rank was late, shape [steps].
        share: Share of the steps in which the rank is late now.
    """
    excess_from_step = np.cumsum(late[::-1] - 0.5 * share)[::-1]
    return int(excess_from_step.argmax())


def beyond_chance(late: npt.NDArray[Any], suspects: list[int]) -> dict[int, float]:
    """Return the p-value of each suspect that is late more often, or costs more, than chance explains.

    Args:
        late: Whether a rank was late, or its cost; shape [steps, ranks].
        suspects: Indices of ranks.
    """
    if not suspects:
        return {}  # Computing chance takes longer than all other steps of the diagnosis.
    chance = chance_of(late)
    return {index: float(chance[index]) for index in suspects if chance[index] <= MAX_CHANCE}


def chance_of(late: npt.NDArray[Any], seed: int = 0) -> Floats:
    """Return how often chance alone makes any rank late as often as each rank was, or as costly.

    Ranks are permuted anew in each block of steps, so that noise in bursts stays in bursts. Many ranks are rotated.

    Args:
        late: Whether a rank was late, or its cost; shape [steps, ranks].
        seed: Seed of the permutations; it is fixed, so that a run always gets the same answer.

    Returns:
        Shape [ranks], a p-value with the usual +1 correction.
    """
    steps, ranks = late.shape
    late = late.astype(np.int8) if late.dtype == bool else _quantise(late)
    blocks = steps // BLOCK_STEPS
    counts = late[: blocks * BLOCK_STEPS].reshape(blocks, BLOCK_STEPS, ranks).sum(axis=1)
    observed = counts.sum(axis=0)
    draw_maxima = _permuted_maxima if counts.size <= _MAX_PERMUTED else _rotated_maxima
    maxima = draw_maxima(counts, np.random.default_rng(seed))
    return np.asarray((1 + (maxima[:, None] >= observed).sum(axis=0)) / (1 + _PERMUTATIONS))


def _quantise(cost: Floats) -> wire.Ints:
    """Round costs to thousandths of the highest cost: sums of integers do not depend on their order."""
    return np.asarray(np.rint(cost * (1000 / max(1.0, float(cost.max(initial=0.0))))), np.int64)


def _permuted_maxima(counts: wire.Ints, random: np.random.Generator) -> wire.Ints:
    """Return the highest count of any rank in each permutation; the ranks of each block are permuted anew."""
    repeated = np.broadcast_to(counts.astype(np.int16), (_PERMUTATIONS, *counts.shape))
    return np.asarray(random.permuted(repeated, axis=2).sum(axis=1, dtype=np.int64).max(axis=1))


def _rotated_maxima(counts: wire.Ints, random: np.random.Generator) -> wire.Ints:
    """Return the same with the ranks of each block rotated by a random number.

    A rotation is as likely for each rank as a permutation, and far quicker.
    """
    blocks, ranks = counts.shape
    block, rank = np.nonzero(counts)
    rotations = random.integers(ranks, size=(_PERMUTATIONS, blocks))
    weights = counts[block, rank]
    maxima = [np.bincount((rank + rotation[block]) % ranks, weights, ranks).max() for rotation in rotations]
    return np.array(maxima, np.int64)
