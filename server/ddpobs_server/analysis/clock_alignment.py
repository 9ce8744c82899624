"""One timeline over ranks, from the ends of the collectives that they shared."""

from __future__ import annotations

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.joined_steps import Floats, ranks_of

_MOST_STEPS = 2**40
_SHARED_STEPS = 4
"""So many steps that ranks share are enough to align their clocks by."""


def offsets_ns(steps: tuple[wire.Ints, wire.Steps], spans: tuple[wire.Ints, wire.Spans]) -> tuple[dict[int, int], int]:
    """What to add to each rank's times to put them on the lowest rank's clock, and the noise of doing so.

    All ranks end an all-reduce together: offset_r = median_i(done_{0,i} - done_{r,i}). Ranks number their steps each by
    itself, and with uneven inputs the numbers part: it is the collective's number that is the same on all of them.

    Where no collective is shared by all ranks, the first ends of each are set side by side: the offsets are then wrong
    by as much time as lies between these. `steps_missing` says how many steps to add, lest that happens.

    Args:
        steps: Ranks and columns of shape [steps]; they tell which collective a step's spans belong to.
        spans: Ranks and columns of shape [rows]; those of a step that is not among `steps` count for nothing.

    Returns:
        Offsets by rank, and the median spread of the aligned ends over ranks, both in ns.
    """
    rank, columns = spans
    ranks, place = ranks_of(rank)
    if not len(ranks):
        return {}, 0
    # Relative to the first end: a float holds 53 bits, a clock in ns more.
    base = columns.done_ns[np.unique(place, return_index=True)[1]]
    apart = dict(zip(ranks.tolist(), (base[0] - base).tolist(), strict=True))
    collective = _collectives(steps, rank, columns.step)
    joins = collective >= 0
    key = np.stack([collective, columns.module, columns.revision, columns.bucket])[:, joins]
    table = _shared(_numbered(key), place[joins], (columns.done_ns - base[place])[joins], len(ranks))
    if not len(table):
        return apart, 0
    shift = np.median(table[:, :1] - table, axis=0)
    aligned = table + shift
    spread = round(float(np.median(aligned.max(axis=1) - aligned.min(axis=1))))
    return {r: by + round(ns) for (r, by), ns in zip(apart.items(), shift.tolist(), strict=True)}, spread


def _shared(identity: wire.Ints, place: wire.Ints, ends_ns: wire.Ints, ranks: int) -> Floats:
    """When each rank ended what all of them have, shape [identities, ranks]; of what one has twice, the last.

    The others are left out first: clients may tell of as many as they like, each on one rank alone.
    """
    there = np.bincount(np.unique(identity * ranks + place) // ranks)
    whole = there == ranks
    rows = whole[identity]
    table = np.empty((int(whole.sum()), ranks))
    table[(np.cumsum(whole) - 1)[identity[rows]], place[rows]] = ends_ns[rows]
    return table


def steps_missing(steps: tuple[wire.Ints, wire.Steps]) -> int:
    """How many steps to either side have to come to these, so that the ranks share enough collectives.

    Args:
        steps: Ranks and columns of shape [steps], sorted by step.

    Returns:
        Zero where numbers have not parted, or by little beside the number of steps.
    """
    known = steps[1].collective != wire.UNKNOWN
    step, collective = steps[1].step[known], steps[1].collective[known]
    begins = np.flatnonzero(np.diff(step, prepend=wire.UNKNOWN))
    if not len(begins):
        return 0
    apart = int((np.maximum.reduceat(collective, begins) - np.minimum.reduceat(collective, begins)).max())
    return apart + _SHARED_STEPS if apart and len(begins) < apart + _SHARED_STEPS else 0


def _numbered(key: wire.Ints) -> wire.Ints:
    """A number for each different column of the key, shape [columns]."""
    order = np.lexsort(key)
    numbers = np.zeros(key.shape[1], np.int64)
    numbers[order[1:]] = np.cumsum((key[:, order[1:]] != key[:, order[:-1]]).any(axis=0))
    return numbers


def _collectives(steps: tuple[wire.Ints, wire.Steps], rank: wire.Ints, step: wire.Ints) -> wire.Ints:
    """The collective of each (rank, step), shape [rows]; unknown where no such step is there."""
    known_rank, known = steps
    if not len(known_rank):
        return np.full_like(step, wire.UNKNOWN)
    keys, wanted = known_rank * _MOST_STEPS + known.step, rank * _MOST_STEPS + step
    order = np.argsort(keys)
    place = order[np.searchsorted(keys, wanted, sorter=order).clip(max=len(keys) - 1)]
    return np.where(keys[place] == wanted, known.collective[place], wire.UNKNOWN)


def aligned(rank: wire.Ints, offsets: dict[int, int], times_ns: wire.Ints) -> wire.Ints:
    """Times of many ranks on the lowest rank's clock; unknown ones stay unknown."""
    ranks, place = ranks_of(rank)
    shift = np.array([offsets.get(r, 0) for r in ranks.tolist()], np.int64)[place]
    return np.where(times_ns == wire.UNKNOWN, times_ns, times_ns + shift)
