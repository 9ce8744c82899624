"""Stretches of a run in which one rank is slow: since when, until when, and whether chance explains them.

Stretches begin and end at change points of the share of time that a rank costs. A stretch counts if the rank stands out
in each quarter of it, if no other rank has a stretch of the same length that costs a quarter as much, and if the ranks'
costs, permuted bin by bin, seldom make any stretch as costly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ddpobs.shared.delay import median_of_others
from ddpobs_server.analysis.slow_ranks.lateness_bins import LatenessBins, bins_of
from ddpobs_server.analysis.slow_ranks.recurrence import MIN_COST_SHARE, PARTS
from ddpobs_server.analysis.statistics.change_points import segments
from ddpobs_server.analysis.steps.joined_steps import Floats, JoinedSteps

MIN_STEPS = 28
"""Minimum number of compared steps of a stretch.

A stretch of 30 steps may lose a step at each end, where own times have no origin.
"""
_MIN_LOST_STEPS = 12.8
"""Minimum cost of a stretch, in steps. A short stretch must therefore cost more of each step than a long stretch."""
_MIN_LATE_SHARE = 0.85
_MIN_LESSER_STEPS = 16
"""Minimum number of steps in which a rank that was slow before, or is slow later, is slow by less."""
_SHORT_STEPS = 64
"""Twice as many steps are too few to be permuted in blocks of 4."""
_LONG_STEPS = 256
"""Steps from which a stretch counts although the rank is late in fewer steps than `_MIN_LATE_SHARE`."""
_MIN_CONTRAST, _MIN_RIVAL_CONTRAST = 3.0, 4.0
_RIVALS = 0.8
_MAX_CHANCE = 0.02
_BLOCKS = 10
"""Blocks of bins in a stretch that are permuted as a whole: noise in bursts shorter than a block stays together."""
_REFERENCE_SHARE = MIN_COST_SHARE / 2
"""Cost share between no cost and the least cost that counts: the reference value of a cumulative sum (Page,
Biometrika 41, 1954)."""
_MIN_RIVAL_LEVEL = 1.5
"""Minimum ratio of a stretch's cost per step to that of the costliest quarter as long of another rank.

A stretch of more than half of the run leaves no room for another of its length. Noise in bursts shows in a quarter."""
_SUSPECTS, _PERMUTED_RANKS = 16, 16
_PERMUTATIONS, _MAX_CELLS = 400, 4_000_000
_CELLS_AT_ONCE = 100_000
"""Cells of the permutations that are computed together: more take no less time, and more memory."""
_MAX_BINS = 512


@dataclass(frozen=True)
class Stretch:
    """Bins [begin, end) in which a rank is slow.

    Attributes:
        index: Index of the rank.
        begin: First bin.
        end: Bin after the last.
        chance: How often permuted ranks have any stretch as costly.
    """

    index: int
    begin: int
    end: int
    chance: float

    @property
    def rows(self) -> slice:
        """The bins."""
        return slice(self.begin, self.end)


@dataclass(frozen=True)
class _Costs:
    """Costs of the ranks in bins, each series of shape [bins, ranks]; all candidates are judged by the same."""

    bins: LatenessBins

    @cached_property
    def net_ns(self) -> Floats:
        """Cost above the mean cost of the other ranks."""
        return net_cost_ns(self.bins.cost_ns)

    @cached_property
    def typical_ns(self) -> Floats:
        """Median excess in all steps of the bin."""
        return np.asarray(self.bins.excess_ns * self.bins.steps[:, None])

    @cached_property
    def sums_ns(self) -> tuple[Floats, Floats]:
        """Sums of both over the bins before each, shape [bins + 1, ranks]."""
        return _sums_before(self.net_ns), _sums_before(self.typical_ns)


def bin_width(steps: int) -> int:
    """Return the steps of each bin in which that many joined steps are searched for stretches."""
    return max(3 if steps < 2 * _SHORT_STEPS else 4, -(-steps // _MAX_BINS))


def find_stretches(bins: LatenessBins) -> list[Stretch]:
    """Return the stretches of all ranks that stand out from the run's noise, in order of the ranks and steps.

    A stretch whose rank stays slow by less, before or after it, has these steps too: the slowness is not over.
    """
    if not len(bins) or len(bins.ranks) < 2:
        return []
    costs = _Costs(bins)
    candidates = [
        (index, begin, end)
        for index in _suspects(costs)
        for begin, end in _slow_segments(costs, index)
        if _stands_out(costs, index, begin, end)
    ]
    if not candidates:
        return []
    chances = _chances(costs, candidates)
    result: list[Stretch] = []
    for row in sorted(range(len(candidates)), key=lambda row: -_distinctness(costs, *candidates[row])):
        index, begin, end = candidates[row]
        is_new = all(end <= other.begin or other.end <= begin for other in result if other.index == index)
        if chances[row] <= _MAX_CHANCE and is_new:
            result.append(Stretch(index, *_with_lesser(costs, index, begin, end), float(chances[row])))
    return sorted(result, key=lambda stretch: (stretch.index, stretch.begin))


def _slow_segments(costs: _Costs, index: int) -> list[tuple[int, int]]:
    """Return the segments (begin, end) between change points in which a rank costs `MIN_COST_SHARE` more than others.

    Change points are sought in the medians of the bins, which spikes do not move, and in the costs, which also show
    a rank that is late in some steps only. Both series are times: a share would weigh noise in short steps as much as a
    delay in long steps.
    """
    bins = costs.bins
    candidates_found: set[tuple[int, int]] = set()
    for series_ns in (costs.typical_ns[:, index], costs.net_ns[:, index]):
        for begin, end in segments(series_ns / np.maximum(1, bins.steps)):
            if series_ns[begin:end].sum() >= MIN_COST_SHARE * bins.time_ns[begin:end].sum():
                candidates_found.add(_extended(bins.excess_ns[:, index], begin, end))
    return sorted(candidates_found)


def _extended(levels: Floats, begin: int, end: int) -> tuple[int, int]:
    """Extend a segment as far as what the levels exceed half of its mean level by adds up, across short pauses."""
    half = levels[begin:end].mean() / 2
    if half <= 0:
        return begin, end
    return begin - _reach((levels[:begin] - half)[::-1]), end + _reach(levels[end:] - half)


def _reach(surplus: Floats) -> int:
    """Return how many of the first values have the highest positive sum; 0 if there is none."""
    sums = np.cumsum(surplus)
    return int(sums.argmax()) + 1 if len(sums) and sums.max() > 0 else 0


def _with_lesser(costs: _Costs, index: int, begin: int, end: int) -> tuple[int, int]:
    """Extend a stretch by the steps around it in which the rank is late in most steps and costs `MIN_COST_SHARE`."""
    bins = costs.bins
    surplus_ns = costs.net_ns[:, index] - MIN_COST_SHARE * bins.time_ns

    def is_late(rows: slice) -> bool:
        steps = int(bins.steps[rows].sum())
        return steps >= _MIN_LESSER_STEPS and int(bins.late[rows, index].sum()) >= _MIN_LATE_SHARE * steps

    first, last = begin - _reach(surplus_ns[:begin][::-1]), end + _reach(surplus_ns[end:])
    return first if is_late(slice(first, begin)) else begin, last if is_late(slice(end, last)) else end


def net_cost_ns(cost_ns: Floats) -> Floats:
    """Return each rank's cost above the mean cost of the others: noise that hits all ranks cancels out.

    With four and more ranks the costliest of the others is left out, because it may be slow too.

    Args:
        cost_ns: Shape [..., ranks] with at least two ranks.
    """
    ranks = cost_ns.shape[-1]
    if ranks < 4:
        return np.asarray(cost_ns - (cost_ns.sum(axis=-1, keepdims=True) - cost_ns) / (ranks - 1))
    top = np.partition(cost_ns, ranks - 2, axis=-1)[..., -2:]
    costliest_other = np.where(cost_ns >= top[..., 1:], top[..., :1], top[..., 1:])
    other_ranks = cost_ns.sum(axis=-1, keepdims=True) - cost_ns - costliest_other
    return np.asarray(cost_ns - other_ranks / (ranks - 2))


def _suspects(costs: _Costs) -> list[int]:
    """Return the ranks whose costliest stretch may cost enough, the costliest first."""
    highest = _highest_sums(costs.net_ns - _REFERENCE_SHARE * costs.bins.time_ns[:, None])
    least = _MIN_LOST_STEPS / 2 * _step_ns(costs.bins)
    order = np.argsort(-highest, kind="stable")[:_SUSPECTS]
    return [int(index) for index in order if highest[index] >= least]


def _stands_out(costs: _Costs, index: int, begin: int, end: int) -> bool:
    part = costs.bins.select(slice(begin, end))
    steps, cost_ns = int(part.steps.sum()), float(costs.net_ns[begin:end, index].sum())
    if steps < MIN_STEPS or cost_ns < max(MIN_COST_SHARE, _MIN_LOST_STEPS / steps) * part.time_ns.sum():
        return False
    least_late = _MIN_LATE_SHARE if steps < _LONG_STEPS else 0.0
    for rows in np.array_split(np.arange(len(part)), min(PARTS, len(part))):
        shares = part.late[rows].sum(axis=0) / part.steps[rows].sum()
        cost_shares = part.cost_ns[rows].sum(axis=0) / part.time_ns[rows].sum()
        often = shares[index] >= 2 * median_of_others(shares[None])[0, index]
        costly = cost_shares[index] >= _MIN_CONTRAST * median_of_others(cost_shares[None])[0, index]
        # Change points are seldom exact, so the first and the last quarter may be less late.
        if not (often or costly) or shares[index] < least_late - 0.3 or cost_shares[index] < 0.4 * MIN_COST_SHARE:
            return False
    if part.late[:, index].sum() < least_late * steps:
        return False
    if cost_ns < _MIN_RIVAL_CONTRAST * _highest_elsewhere(costs.sums_ns[0], index, end - begin):
        return False
    quarter = max(1, (end - begin) // PARTS)
    # A spike of another rank moves its costs, but not its medians.
    return any(
        series[begin:end, index].sum() * quarter / (end - begin)
        >= _MIN_RIVAL_LEVEL * _highest_elsewhere(sums, index, quarter)
        for series, sums in zip((costs.net_ns, costs.typical_ns), costs.sums_ns, strict=True)
    )


def _sums_before(series: Floats) -> Floats:
    return np.concatenate([np.zeros((1, series.shape[1])), np.cumsum(series, axis=0)])


def _highest_elsewhere(sums: Floats, index: int, length: int) -> float:
    """Return the highest sum of `length` consecutive bins of another rank.

    A fifth of the other ranks may be slow too, as on one host, and is left out.

    Args:
        sums: As `_Costs.sums_ns`.
        index: Index of the rank.
        length: Number of bins.
    """
    highest = np.delete((sums[length:] - sums[:-length]).max(axis=0), index)
    return float(np.quantile(highest, _RIVALS, method="higher"))


def _distinctness(costs: _Costs, index: int, begin: int, end: int) -> float:
    """Return a stretch's mean cost times the root of its length: its distance from noise, up to a factor.

    Of candidates that overlap, the most distinct has the best ends.
    """
    return float(costs.net_ns[begin:end, index].sum() / np.sqrt(costs.bins.steps[begin:end].sum()))


def _chances(costs: _Costs, candidates: list[tuple[int, int, int]]) -> Floats:
    """Return how often permuted ranks have a stretch as slow, with the usual +1 correction; shape [candidates].

    A stretch is as slow if its costs, or its median excesses, add up to as much: the smaller p-value counts.
    """
    bins = costs.bins
    costliest = np.argsort(-bins.cost_ns.sum(axis=0), kind="stable")[:_PERMUTED_RANKS]
    reference = _REFERENCE_SHARE * bins.time_ns[:, None]
    chances = np.ones(len(candidates))
    typical_ns: Floats = np.maximum(0.0, costs.typical_ns)
    for series, net_ns in ((bins.cost_ns, costs.net_ns), (typical_ns, net_cost_ns(typical_ns))):
        net = net_ns - reference
        highest: dict[int, Floats] = {}
        for row, (index, begin, end) in enumerate(candidates):
            block = max(1, (end - begin) // _BLOCKS)
            if block not in highest:
                highest[block] = _permuted_maxima(series[:, costliest], reference, block)
            exceeding = int((highest[block] >= net[begin:end, index].sum()).sum())
            chances[row] = min(chances[row], (1 + exceeding) / (1 + len(highest[block])))
    return chances


def _permuted_maxima(series: Floats, reference: Floats, block: int) -> Floats:
    """Return the highest score of any stretch in each permutation; the ranks of each block of bins are permuted anew.

    Only the costliest ranks are permuted. More ranks would spread the costs and make any stretch less likely.
    """
    begins = np.arange(0, len(series), block)
    sums, references = (np.add.reduceat(values, begins, axis=0) for values in (series, reference))
    permutations = max(100, min(_PERMUTATIONS, _MAX_CELLS // sums.size))
    random = np.random.default_rng(0)
    together = max(1, _CELLS_AT_ONCE // sums.size)
    maxima = []
    for begin in range(0, permutations, together):
        count = min(together, permutations - begin)
        net = net_cost_ns(random.permuted(np.tile(sums, (count, 1)), axis=1)).reshape(count, *sums.shape)
        maxima.append(_highest_sums(net - references).max(axis=1))
    return np.concatenate(maxima)


def _highest_sums(values: Floats) -> Floats:
    """Return the highest sum of consecutive rows, by column (Kadane's algorithm as cumulative sums).

    Args:
        values: Shape [..., rows, columns].
    """
    sums = np.cumsum(values, axis=-2)
    before = np.concatenate([np.zeros_like(sums[..., :1, :]), sums[..., :-1, :]], axis=-2)
    lowest = np.minimum.accumulate(np.minimum(0.0, before), axis=-2)
    return np.asarray((sums - lowest).max(axis=-2))


def _step_ns(bins: LatenessBins) -> float:
    return float(np.median(bins.time_ns / np.maximum(1, bins.steps)))


def refine(joined: JoinedSteps, index: int, first: int, last: int, width: int) -> tuple[int, int]:
    """Return the steps in which a stretch begins and ends, to the step.

    Args:
        joined: Steps around the stretch's ends.
        index: Index of the rank in `joined`.
        first: First step of the stretch's first bin.
        last: Last step of its last bin.
        width: Steps of a bin.
    """
    begin = _finest_edge(joined, index, int(np.searchsorted(joined.step, first)), width, rises=True)
    end = _finest_edge(joined, index, int(np.searchsorted(joined.step, last, "right")), width, rises=False)
    return int(joined.step[begin]), int(joined.step[max(begin, end - 1)])


def _finest_edge(joined: JoinedSteps, index: int, row: int, width: int, *, rises: bool) -> int:
    begin = max(0, row - 2 * width)
    around = joined.select(slice(begin, row + 2 * width))
    if (row <= 0 and rises) or (row >= len(joined) and not rises):
        return row
    fine = bins_of(around, 1)
    return begin + _edge(fine.cost_ns[:, index] / np.maximum(1.0, fine.time_ns), row - begin, width, rises=rises)


def edge_step(bins: LatenessBins, index: int, step: int, *, rises: bool) -> int:
    """Return the first step of the bin, or the step after all bins, that splits a rank's costs best near `step`."""
    costs = bins.cost_ns[:, index] / np.maximum(1.0, bins.time_ns)
    row = _edge(costs, int(np.searchsorted(bins.first, step)), len(bins), rises=rises)
    return int(bins.first[row]) if row < len(bins) else int(bins.last[-1]) + 1


def _edge(costs: Floats, row: int, width: int, *, rises: bool) -> int:
    """Return the row around `row` that splits the costs best into two means: least sum of squares."""
    begin, end = max(0, row - 2 * width), min(len(costs), row + 2 * width)
    part = np.minimum(costs[begin:end], np.quantile(costs[begin:end], 0.9)) if end > begin else costs[:0]
    if len(part) < 2 or (row <= 0 and rises) or (row >= len(costs) and not rises):
        return int(np.clip(row, 0, len(costs)))
    splits = np.arange(1, len(part))
    sums = np.cumsum(part)
    costs_before, costs_after = sums[:-1] / splits, (sums[-1] - sums[:-1]) / (len(part) - splits)
    gain = splits * (len(part) - splits) * (costs_after - costs_before) ** 2
    right_way = costs_after > costs_before if rises else costs_after < costs_before
    return begin + int(splits[np.where(right_way, gain, -1.0).argmax()]) if right_way.any() else row
