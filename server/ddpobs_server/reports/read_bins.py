"""Bins of an attempt's steps: the stored ones, with columns of the steps that are not in bins yet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddpobs_server.analysis.slow_ranks.lateness_bins import LatenessBins
from ddpobs_server.analysis.steps.step_bins import (
    ALL_RANKS,
    COMPARED,
    NAMES,
    StepBins,
    bins_of_steps,
    lateness_of,
    merged_bins,
    over_ranks,
)
from ddpobs_server.store import Source, Store
from ddpobs_server.store.sums.stored_bins import BIN_STEPS, BLOCK_RANKS, FACTOR, LEVELS, OVER_RANKS, width

_COLUMN_ROWS = 200_000
"""Rows of steps up to which a response is computed from columns."""
_CELLS = 300_000
"""Maximum number of bins times ranks that are judged."""


@dataclass(frozen=True)
class Shown:
    """The rows that a response holds: of one rank, of each rank, or over all ranks."""

    rank: int | None = None
    over: bool = False

    @property
    def blocks(self) -> list[int] | None:
        """Blocks of ranks that hold them; None for all."""
        if self.over:
            return [OVER_RANKS]
        return None if self.rank is None else [OVER_RANKS, self.rank // BLOCK_RANKS]


@dataclass(frozen=True)
class AttemptBins:
    """The bins of one attempt in a store."""

    store: Store
    run: str
    attempt: str

    def states(self, level: int) -> dict[int, tuple[bool, int]]:
        """Return whether each bin of a level is stale, and its number of rows."""
        return self.store.step_bin_states(self.run, self.attempt, level)

    def column_rows(self, first: int, last: int) -> int:
        """Estimate the rows of steps that have columns."""
        return self.store.estimate_rows("steps", self.run, self.attempt, first, last)

    def read(self, level: int, numbers: tuple[int, int], shown: Shown) -> StepBins:
        """Return bins of a level, by their first and last number."""
        number, table = self.store.read_step_bins(self.run, self.attempt, level, numbers, blocks=shown.blocks)
        table = np.pad(table, ((0, len(NAMES) - len(table)), (0, 0)))  # Bins of earlier versions have fewer columns.
        bins = StepBins(number, table) if len(number) else StepBins.concat([])
        rank = bins.column("rank")
        if shown.over:
            parts = [bins.select(rank == ALL_RANKS), over_ranks(bins.select(rank != ALL_RANKS))]
            return StepBins.concat(parts).in_order()
        return bins.select(rank != ALL_RANKS if shown.rank is None else rank == shown.rank)


def read_step_bins(attempt: AttemptBins, bounds: tuple[int, int], points: int, shown: Shown) -> StepBins:
    """Return at most `points` bins for the steps `bounds`, both included, by bin and rank.

    Few steps are read from columns, and divided exactly.
    """
    first, last = bounds
    has_columns = attempt.column_rows(first, first + BIN_STEPS - 1) > 0  # Retention removes columns before bins.
    if has_columns and attempt.column_rows(first, last) <= _COLUMN_ROWS:
        return _from_columns(attempt, bounds, max(1, -(-(last - first + 1) // points)), shown)
    return read_stored_bins(attempt, bounds, points, shown)


def read_stored_bins(attempt: AttemptBins, bounds: tuple[int, int], points: int, shown: Shown) -> StepBins:
    """Return at most `points` bins from stored bins.

    The coarsest bins that suffice are read, then finer bins and columns of the latest steps, which are not in bins yet.
    """
    first, last = bounds
    steps_per_bin = max(1, -(-(last - first + 1) // points))
    level, factor = _level_of(steps_per_bin)
    parts, begin = [], first
    for finer in range(level, -1, -1):
        bins = attempt.read(finer, (begin // width(finer), last // width(finer)), shown)
        if len(bins):
            scale = width(level) * factor // width(finer)
            parts.append(merged_bins(bins, scale) if scale > 1 else bins)
            begin = (int(bins.number.max()) + 1) * width(finer)
        if begin > last:
            break
    if begin <= last and attempt.column_rows(begin, last) <= _COLUMN_ROWS:
        parts.append(_from_columns(attempt, (begin, last), width(level) * factor, shown))
    # The last bin of a level and the first finer bins after it may be one bin of the response.
    return merged_bins(StepBins.concat(parts), 1)


def _level_of(steps_per_bin: int) -> tuple[int, int]:
    """Return the level to read, and how many of its bins make a bin of at least that many steps."""
    level = 0
    while level + 1 < LEVELS and width(level) * (FACTOR - 1) < steps_per_bin:
        level += 1
    return level, max(1, -(-steps_per_bin // width(level)))


def _from_columns(attempt: AttemptBins, bounds: tuple[int, int], steps_per_bin: int, shown: Shown) -> StepBins:
    # All ranks are read for one, too: its waiting is known from the others.
    rows = attempt.store.steps(attempt.run, attempt.attempt, None, *bounds)
    bins = bins_of_steps(*rows, steps_per_bin, compared=False)
    if shown.over:
        return over_ranks(bins)
    return (bins if shown.rank is None else bins.select(bins.column("rank") == shown.rank)).in_order()


def read_lateness(
    attempt: AttemptBins, bounds: tuple[int, int], ranks: int, rank: int | None = None
) -> LatenessBins | None:
    """Return the lateness in the steps `bounds` from bins, as fine as fits into `_CELLS`; None if there is none.

    Args:
        attempt: The bins.
        bounds: First and last step.
        ranks: Number of ranks of the attempt.
        rank: The only rank that is read; None for all, of which there must be two.
    """
    steps = bounds[1] - bounds[0] + 1
    level = 0
    while level + 1 < LEVELS and steps // width(level) * ranks > _CELLS:
        level += 1
    numbers, indices = (bounds[0] // width(level), bounds[1] // width(level)), [NAMES.index(name) for name in COMPARED]
    number, table = attempt.store.read_step_bins(
        attempt.run, attempt.attempt, level, numbers, blocks=Shown(rank).blocks, columns=indices
    )
    if not len(number):
        return None
    is_shown = table[0] != ALL_RANKS if rank is None else table[0] == rank
    columns = dict(zip(COMPARED, table[:, is_shown], strict=True))
    return lateness_of(number[is_shown], columns, 2 if rank is None else 1)


def unix_times(bins: StepBins, sources: list[Source]) -> StepBins:
    """Return the bins with times of day; those over all ranks are on the lowest rank's clock."""
    offsets = {source.rank: source.anchor.wall_ns - source.anchor.monotonic_ns for source in sources}
    if not offsets:
        return bins
    of_all = offsets[min(offsets)]
    offset = np.array([offsets.get(rank, of_all) for rank in bins.column("rank").tolist()], np.int64)
    table = bins.table.copy()
    for name in ("began_ns", "ended_ns"):
        table[NAMES.index(name)] += offset
    return StepBins(bins.number, table)
