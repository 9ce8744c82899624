"""Steps in bins: the least, the median and the most of each rank's times, and the rank's lateness.

Bins of a few steps come from columns. Bins of four bins come from those: the median of medians is the remedian.

Source of the remedian: P. Rousseeuw and G. Bassett, "The Remedian: A Robust Averaging Method for Large Data Sets",
Journal of the American Statistical Association 85 (1990).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.slow_ranks.lateness_bins import LatenessBins, bins_from
from ddpobs_server.analysis.steps.joined_steps import Floats, in_order, index_ranks, join
from ddpobs_server.analysis.steps.waiting import waiting_ns

TIMES = ("wall", *wire.PHASES)
_MIN, _MEDIAN, _MAX = (tuple(f"{name}_{kind}_ns" for name in TIMES) for kind in ("min", "median", "max"))
_LATENESS = ("compared", "time_ns", "late", "cost_ns", "lost_ns", *(f"late_{phase}_ns" for phase in wire.OWN_PHASES))
_WAITING = "waiting_median_ns"
NAMES = (
    *("rank", "first", "last", "steps", "began_ns", "ended_ns"),
    *(*_MIN, *_MEDIAN, *_MAX, *_LATENESS, "excess_ns"),
    _WAITING,
)
"""Columns of a bin: `first`, `last`, `steps`, `began_ns` and `ended_ns` of the rank's own steps, on its own clock.

`compared` to `excess_ns` are about the steps in which all ranks were compared, as in `LatenessBins`. The waiting is the
part of `exposed_comm` in which the rank waits for later ranks. Bins from before this column existed have 0 in it."""
SHOWN = (*NAMES[: NAMES.index("compared")], _WAITING)
COMPARED = ("rank", "first", "last", *_LATENESS, "excess_ns")
"""The columns that `lateness_of` reads."""
ALL_RANKS = -1
"""The rank of a row over all ranks: the least, the mean of the ranks' medians, and the most of any rank.

Of three ranks two may wait for the third: with a median over ranks, waiting would be as long as theirs."""
_INDEX = {name: row for row, name in enumerate(NAMES)}
_EARLIEST, _LATEST = [_INDEX["first"], *(_INDEX[n] for n in _MIN)], [_INDEX["last"], *(_INDEX[n] for n in _MAX)]
_AVERAGED = [_INDEX[name] for name in (*_MEDIAN, _WAITING)]
_TYPICAL = [_INDEX[name] for name in (*_MEDIAN, "excess_ns", _WAITING)]
_SUMMED = [_INDEX["steps"], *(_INDEX[name] for name in _LATENESS)]


@dataclass(frozen=True)
class StepBins:
    """Rows of bins, by bin and rank.

    Attributes:
        number: Number of each row's bin: its first possible step over the width; shape [rows].
        table: Columns in the order of `NAMES`, shape [columns, rows].
    """

    number: wire.Ints
    table: wire.Ints

    def __len__(self) -> int:
        return len(self.number)

    def column(self, name: str) -> wire.Ints:
        """Return a column."""
        return np.asarray(self.table[_INDEX[name]])

    def select(self, rows: wire.Ints | slice) -> StepBins:
        """Return some rows."""
        return StepBins(self.number[rows], self.table[:, rows])

    @classmethod
    def concat(cls, parts: Sequence[StepBins]) -> StepBins:
        """Join the rows of all parts."""
        if not parts:
            return cls(np.zeros(0, np.int64), np.zeros((len(NAMES), 0), np.int64))
        return cls(np.concatenate([p.number for p in parts]), np.concatenate([p.table for p in parts], axis=1))

    def in_order(self) -> StepBins:
        """Return the rows sorted by bin and rank."""
        return self.select(np.lexsort((self.column("rank"), self.number)))


def bins_of_steps(rank: wire.Ints, steps: wire.Steps, width: int, *, compared: bool = True) -> StepBins:
    """Return the bins of `width` steps each, of each rank.

    Args:
        rank: Rank of each row.
        steps: Columns.
        width: Steps of a bin.
        compared: Whether to compare the ranks; the columns after `SHOWN` are 0 otherwise.
    """
    if not len(rank):
        return StepBins.concat([])
    ranks, index = index_ranks(rank)
    number = steps.step // width
    group = (number - number.min()) * len(ranks) + index
    order = np.lexsort((steps.step, group))
    begins = np.flatnonzero(np.diff(group[order], prepend=-1))
    counts = np.diff(begins, append=len(order))
    table = np.zeros((len(NAMES), len(begins)), np.int64)
    times = [steps.end_ns - steps.start_ns, *(getattr(steps, f"{phase}_ns") for phase in wire.PHASES)]
    for row, values in enumerate(times):
        kinds = (_MIN, _MEDIAN, _MAX)
        for kind, column in zip(kinds, _order_statistics(values[order], begins, counts), strict=True):
            table[_INDEX[kind[row]]] = column
    table[_INDEX[_WAITING]] = _order_statistics(waiting_ns(steps)[order], begins, counts)[1]
    firsts, lasts = order[begins], order[begins + counts - 1]
    own = {
        "rank": rank[firsts],
        "first": steps.step[firsts],
        "last": steps.step[lasts],
        "steps": counts,
        "began_ns": steps.start_ns[firsts],
        "ended_ns": steps.end_ns[lasts],
    }
    for name, values in own.items():
        table[_INDEX[name]] = values
    bins = StepBins(number[firsts], table)
    if compared and len(ranks) > 1:
        _add_lateness(bins, rank, steps, width)
    return bins


def _order_statistics(
    values: wire.Ints, begins: wire.Ints, counts: wire.Ints
) -> tuple[wire.Ints, wire.Ints, wire.Ints]:
    """Return the least, the median and the most of each group of consecutive values."""
    if (counts == counts[0]).all():
        grid = np.sort(values.reshape(len(begins), -1), axis=1)
        middle = int(counts[0])
        return grid[:, 0], (grid[:, (middle - 1) // 2] + grid[:, middle // 2]) // 2, grid[:, -1]
    in_order = values[np.lexsort((values, np.repeat(np.arange(len(begins)), counts)))]
    low, high = in_order[begins + (counts - 1) // 2], in_order[begins + counts // 2]
    return in_order[begins], (low + high) // 2, in_order[begins + counts - 1]


def _add_lateness(bins: StepBins, rank: wire.Ints, steps: wire.Steps, width: int) -> None:
    joined = join(rank, steps)
    if len(joined) < 2:
        return
    number = joined.step // width
    late = bins_from(joined, np.flatnonzero(np.diff(number, prepend=-1)))
    places = {int(first) // width: row for row, first in enumerate(late.first)}
    has_place = np.isin(bins.number, list(places)) & np.isin(bins.column("rank"), late.ranks)
    rows = np.flatnonzero(has_place)
    source = np.array([places[int(value)] for value in bins.number[rows]], np.int64)
    column = np.searchsorted(late.ranks, bins.column("rank")[rows])
    by_name = {
        "compared": late.steps[source],
        "time_ns": late.time_ns[source],
        **{name: getattr(late, name)[source, column] for name in ("late", "cost_ns", "lost_ns", "excess_ns")},
        **{f"late_{phase}_ns": late.phase_ns[source, column, number] for number, phase in enumerate(wire.OWN_PHASES)},
    }
    for name, values in by_name.items():
        bins.table[_INDEX[name], rows] = np.rint(values).astype(np.int64)


def merged_bins(bins: StepBins, factor: int) -> StepBins:
    """Return bins that are `factor` times as wide."""
    if not len(bins):
        return bins
    number, rank = bins.number // factor, bins.column("rank")
    order = np.lexsort((bins.number, rank, number))
    is_first = np.diff(number[order], prepend=-1) != 0
    is_first |= np.diff(rank[order], prepend=rank[order[0]] - 1) != 0
    return _reduced(bins.select(order), np.flatnonzero(is_first), number[order][is_first])


def over_ranks(bins: StepBins) -> StepBins:
    """Return one row for each bin, over all its ranks."""
    if not len(bins):
        return bins
    ordered = bins.in_order()
    begins = np.flatnonzero(np.diff(ordered.number, prepend=ordered.number[0] - 1))
    result = _reduced(ordered, begins, ordered.number[begins])
    result.table[_INDEX["rank"]] = ALL_RANKS
    counts = np.diff(begins, append=len(ordered))
    result.table[_AVERAGED] = np.add.reduceat(ordered.table[_AVERAGED], begins, axis=1) // counts
    # The lowest rank's clock dates the bin; sums over ranks of equal times would exceed the time.
    for name in ("began_ns", "ended_ns", "time_ns", "compared"):
        result.table[_INDEX[name]] = ordered.column(name)[begins]
    return result


def _reduced(bins: StepBins, begins: wire.Ints, number: wire.Ints) -> StepBins:
    """Reduce each group of consecutive rows to a row."""
    table = np.empty((len(NAMES), len(begins)), np.int64)
    counts = np.diff(begins, append=len(bins))
    table[_EARLIEST] = np.minimum.reduceat(bins.table[_EARLIEST], begins, axis=1)
    table[_LATEST] = np.maximum.reduceat(bins.table[_LATEST], begins, axis=1)
    table[_SUMMED] = np.add.reduceat(bins.table[_SUMMED], begins, axis=1)
    for row in _TYPICAL:
        table[row] = _order_statistics(bins.table[row], begins, counts)[1]
    table[_INDEX["rank"]], table[_INDEX["began_ns"]] = bins.column("rank")[begins], bins.column("began_ns")[begins]
    table[_INDEX["ended_ns"]] = bins.column("ended_ns")[begins + counts - 1]
    return StepBins(number, table)


def lateness_of(number: wire.Ints, columns: Mapping[str, wire.Ints], min_ranks: int) -> LatenessBins | None:
    """Return the lateness in bins, of the ranks that are in every bin; None if there are fewer than `min_ranks`.

    Args:
        number: Bin of each row.
        columns: The columns `COMPARED` by name.
        min_ranks: Minimum number of ranks.
    """
    rank = columns["rank"]
    rows = in_order(np.flatnonzero(columns["compared"] > 0), number, rank)
    numbers = np.unique(number[rows])
    ranks, counts = np.unique(rank[rows], return_counts=True)
    ranks = ranks[counts == len(numbers)]
    if len(ranks) < min_ranks:
        return None
    grid = rows[np.isin(rank[rows], ranks)].reshape(len(numbers), len(ranks))

    def matrix(name: str) -> Floats:
        return columns[name][grid].astype(np.float64)

    return LatenessBins(
        first=columns["first"][grid[:, 0]],
        last=columns["last"][grid[:, 0]],
        steps=columns["compared"][grid[:, 0]],
        time_ns=matrix("time_ns")[:, 0],
        ranks=ranks,
        late=matrix("late"),
        cost_ns=matrix("cost_ns"),
        lost_ns=matrix("lost_ns"),
        phase_ns=np.stack([matrix(f"late_{phase}_ns") for phase in wire.OWN_PHASES], axis=-1),
        excess_ns=matrix("excess_ns"),
    )
