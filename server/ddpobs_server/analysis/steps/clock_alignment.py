"""Put the times of all ranks on one clock, by the ends of the collectives that the ranks share."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ddpobs import wire
from ddpobs_server.analysis.steps.joined_steps import Floats, index_ranks

_SHARED_STEPS = 4
"""Number of shared steps that suffice to align the ranks' clocks."""


def offsets_ns(steps: tuple[wire.Ints, wire.Steps], spans: tuple[wire.Ints, wire.Spans]) -> tuple[dict[int, int], int]:
    """Return the offset of each rank's clock from the lowest rank's clock, and the noise of the alignment.

    All ranks end an all-reduce together: offset_r = median_i(done_{0,i} - done_{r,i}). Each rank numbers its steps by
    itself, and with uneven inputs the numbers part. Only the number of the collective is the same on all ranks.

    If no collective is shared by all ranks, the first ends of all ranks are taken as equal. The offsets are then wrong
    by the time between these ends. `steps_to_add` returns how many more steps to read to avoid this.

    Args:
        steps: Ranks and columns of shape [steps]; they map a step of a span to its collective.
        spans: Ranks and columns of shape [rows]; spans of steps that are not in `steps` are ignored.

    Returns:
        Offsets to add to the times of each rank, and the median spread of the aligned ends over ranks, both in ns.
    """
    rank, columns = spans
    ranks, index = index_ranks(rank)
    if not len(ranks):
        return {}, 0
    # Ends are relative to the first end: a float holds 53 bits, and a clock in ns needs more.
    base = columns.done_ns[np.unique(index, return_index=True)[1]]
    base_offsets = dict(zip(ranks.tolist(), (base[0] - base).tolist(), strict=True))
    collective = collectives_of(steps, rank, columns.step)
    joinable = collective >= 0
    key = [column[joinable] for column in (collective, columns.module, columns.revision, columns.bucket)]
    table = _common_ends(number_rows(*key), index[joinable], (columns.done_ns - base[index])[joinable], len(ranks))
    if not len(table):
        return base_offsets, 0
    shift = np.median(table[:, :1] - table, axis=0)
    ends = table + shift
    spread = round(float(np.median(ends.max(axis=1) - ends.min(axis=1))))
    return {r: base + round(ns) for (r, base), ns in zip(base_offsets.items(), shift.tolist(), strict=True)}, spread


def _common_ends(identity: wire.Ints, index: wire.Ints, ends_ns: wire.Ints, ranks: int) -> Floats:
    """Return the end of each all-reduce that every rank has, shape [identities, ranks]; of duplicates the last.

    Incomplete identities are removed before the table is made: a client may send any number of them on one rank.
    """
    counts = np.bincount(np.unique(identity * ranks + index) // ranks)
    complete = counts == ranks
    rows = complete[identity]
    table = np.empty((int(complete.sum()), ranks))
    table[(np.cumsum(complete) - 1)[identity[rows]], index[rows]] = ends_ns[rows]
    return table


def steps_to_add(steps: tuple[wire.Ints, wire.Steps]) -> int:
    """Return how many steps to add on either side, so that the ranks share enough collectives.

    Args:
        steps: Ranks and columns of shape [steps], sorted by step.

    Returns:
        Zero if the ranks' numbers have not parted, or by little compared with the number of steps.
    """
    numbered = steps[1].collective != wire.UNKNOWN
    step, collective = steps[1].step[numbered], steps[1].collective[numbered]
    begins = np.flatnonzero(np.diff(step, prepend=wire.UNKNOWN))
    if not len(begins):
        return 0
    gap = int((np.maximum.reduceat(collective, begins) - np.minimum.reduceat(collective, begins)).max())
    return gap + _SHARED_STEPS if gap and len(begins) < gap + _SHARED_STEPS else 0


def number_rows(*key: wire.Ints) -> wire.Ints:
    """Number the distinct rows of these columns from zero; returns the number of each row, shape [rows]."""
    order = np.lexsort(key)
    numbers = np.zeros(len(order), np.int64)
    numbers[order[1:]] = np.cumsum(~is_repeated(order, *key))
    return numbers


def is_repeated(order: wire.Ints, *key: wire.Ints) -> npt.NDArray[np.bool_]:
    """Return whether each row but the first equals the one before it in this order, shape [rows - 1].

    A column is sorted at a time: those of a million rows together would take three times the memory.
    """
    result = np.ones(max(0, len(order) - 1), np.bool_)
    for column in key:
        ordered = column[order]
        result &= ordered[1:] == ordered[:-1]
    return result


def collectives_of(steps: tuple[wire.Ints, wire.Steps], rank: wire.Ints, step: wire.Ints) -> wire.Ints:
    """Return the collective of each (rank, step), shape [rows]; `wire.UNKNOWN` if there is no such step."""
    return np.append(steps[1].collective, wire.UNKNOWN)[step_rows(steps, rank, step)]


def step_rows(steps: tuple[wire.Ints, wire.Steps], rank: wire.Ints, step: wire.Ints) -> wire.Ints:
    """Return the row in `steps` of each (rank, step), shape [rows]; -1 if there is no such step."""
    step_rank, columns = steps
    if not len(step_rank):
        return np.full_like(step, -1)
    keys, row_keys = step_rank * (wire.MAX_STEP + 1) + columns.step, rank * (wire.MAX_STEP + 1) + step
    order = np.argsort(keys)
    row = order[np.searchsorted(keys, row_keys, sorter=order).clip(max=len(keys) - 1)]
    return np.where(keys[row] == row_keys, row, -1)


def align(rank: wire.Ints, offsets: dict[int, int], times_ns: wire.Ints) -> wire.Ints:
    """Put times of several ranks on the lowest rank's clock; unknown times stay unknown."""
    ranks, index = index_ranks(rank)
    shift = np.array([offsets.get(r, 0) for r in ranks.tolist()], np.int64)[index]
    return np.where(times_ns == wire.UNKNOWN, times_ns, times_ns + shift)
