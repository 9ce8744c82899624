"""Keep a run's bins of steps up to date, and read them.

Bins of level 0 are made from columns when every rank has sent their steps; bins of the next level from four of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.lateness_bins import LatenessBins
from ddpobs_server.analysis.step_bins import NAMES, StepBins, bins_of_steps, lateness_of, merged_bins, over_ranks
from ddpobs_server.store import Source, Store
from ddpobs_server.store.step_bins import BIN_STEPS, BLOCK_RANKS, FACTOR, LEVELS, OVER_RANKS, width

_READ_ROWS = 2**16
"""Rows of steps that are read at once."""
_SILENT_NS, _OVER_NS = 60 * 10**9, 120 * 10**9
"""A rank without a step for this long, while others have some, is not waited for. Without any batch a run is over."""
_COLUMN_ROWS = 200_000
"""Rows of steps up to which an answer is computed from columns."""
_CELLS = 300_000
"""Most bins times ranks that are judged."""


def update_step_bins(store: Store, run: str, attempt: str, now_ns: int) -> Iterator[int]:
    """Make the bins of an attempt that are due.

    Yields:
        The number of bins, after each part; the caller may pause there.
    """
    sources = store.sources(run, attempt)
    states = store.step_bin_states(run, attempt)
    end = _due_until(sources, now_ns)
    due = [number for number in range(end) if states.get(number, (True, 0))[0]]
    per_read = max(1, _READ_ROWS // max(1, len(sources)) // BIN_STEPS)
    for part in _consecutive(due, per_read):
        _make(store, run, attempt, part, states)
        yield len(part)
    over = _is_over(sources, now_ns)
    changed = set(due)
    for level in range(1, LEVELS):
        present = store.step_bin_states(run, attempt, level - 1)
        if len(present) <= 1:
            return
        parents = {number // FACTOR for number in changed}
        missing = {number // FACTOR for number in present} - store.step_bin_states(run, attempt, level).keys()
        changed = {number for number in parents | missing if over or _is_complete(number, present)}
        for part in _consecutive(sorted(changed), max(1, _READ_ROWS // max(1, FACTOR * len(sources)))):
            _merge(store, run, attempt, level, part)
            yield len(part)


def _due_until(sources: list[Source], now_ns: int) -> int:
    """Return the bin from which on steps may still arrive in order."""
    stepped = [source for source in sources if source.last_step_seen_ns > 0]
    if not stepped:
        return 0
    if _is_over(sources, now_ns):
        return max(source.last_step for source in stepped) // BIN_STEPS + 1
    newest_ns = max(source.last_step_seen_ns for source in stepped)
    going = [s.last_step for s in stepped if not s.ended and newest_ns - s.last_step_seen_ns < _SILENT_NS]
    return (min(going or [source.last_step for source in stepped]) + 1) // BIN_STEPS


def _is_over(sources: list[Source], now_ns: int) -> bool:
    latest_ns = max((source.last_seen_ns for source in sources), default=0)
    return all(source.ended for source in sources) or now_ns - latest_ns > _OVER_NS


def _consecutive(numbers: list[int], most: int) -> Iterator[list[int]]:
    """Split sorted numbers into parts of consecutive numbers, each of at most `most`."""
    part: list[int] = []
    for number in numbers:
        if part and (number != part[-1] + 1 or len(part) == most):
            yield part
            part = []
        part.append(number)
    if part:
        yield part


def _make(store: Store, run: str, attempt: str, numbers: list[int], states: dict[int, tuple[bool, int]]) -> None:
    """Make the bins of level 0 from columns. A bin whose columns are removed in part stays as it is."""
    first, last = numbers[0] * BIN_STEPS, (numbers[-1] + 1) * BIN_STEPS - 1
    rank, steps = store.steps(run, attempt, None, first, last)
    rows = dict(zip(numbers, np.bincount(steps.step // BIN_STEPS - numbers[0], minlength=len(numbers)), strict=True))
    kept = [number for number in numbers if rows[number] < states.get(number, (True, 0))[1]]
    for number in kept:
        store.keep_step_bin(run, attempt, 0, number)
    made = [number for number in numbers if number not in kept]
    _write(store, run, attempt, 0, made, bins_of_steps(rank, steps, BIN_STEPS), rows)


def _is_complete(number: int, present: dict[int, tuple[bool, int]]) -> bool:
    return all(child in present for child in range(number * FACTOR, (number + 1) * FACTOR))


def _merge(store: Store, run: str, attempt: str, level: int, numbers: list[int]) -> None:
    first, last = numbers[0] * FACTOR, (numbers[-1] + 1) * FACTOR - 1
    children = _read(store, run, attempt, level - 1, first, last, None)
    bins = merged_bins(children, FACTOR)
    rows = {number: int(bins.column("steps")[bins.number == number].sum()) for number in numbers}
    _write(store, run, attempt, level, numbers, bins, rows)


def _write(
    store: Store, run: str, attempt: str, level: int, numbers: list[int], bins: StepBins, rows: dict[int, int]
) -> None:
    summary = over_ranks(bins)
    block = bins.column("rank") // BLOCK_RANKS

    def tables() -> Iterable[tuple[int, int, int, wire.Ints]]:
        for number in numbers:
            yield number, OVER_RANKS, int(rows[number]), summary.table[:, summary.number == number]
            is_here = bins.number == number
            for index in np.unique(block[is_here]).tolist():
                yield number, index, int(rows[number]), bins.table[:, is_here & (block == index)]

    store.write_step_bins(run, attempt, level, tables())


def _read(
    store: Store, run: str, attempt: str, level: int, first: int, last: int, blocks: list[int] | None
) -> StepBins:
    number, table = store.read_step_bins(run, attempt, level, first, last, blocks=blocks)
    return StepBins(number, table) if len(number) else StepBins.concat([])


def read_step_bins(
    store: Store, run: str, attempt: str, bounds: tuple[int, int], points: int, rank: int | None, *, over: bool
) -> StepBins:
    """Return at most `points` bins of each rank for the steps `bounds`, both included, by bin and rank.

    Few steps are read from columns. Of many steps the coarsest bins that suffice are read, then finer bins and columns
    of the latest steps, which are not in bins yet.

    Args:
        store: The store.
        run: The run.
        attempt: Its attempt.
        bounds: First and last step.
        points: Most bins.
        rank: The only rank; None for all.
        over: Whether to return a row over all ranks for each bin.
    """
    first, last = bounds
    steps_per_bin = max(1, -(-(last - first + 1) // points))
    if store.estimate_rows("steps", run, attempt, first, last) <= _COLUMN_ROWS and _has_columns(
        store, run, attempt, first
    ):
        return _from_columns(store, run, attempt, bounds, steps_per_bin, rank, over=over)
    level = 0
    while level + 1 < LEVELS and width(level + 1) <= steps_per_bin:
        level += 1
    parts, begin = [], first
    blocks = [OVER_RANKS] if over else None if rank is None else [rank // BLOCK_RANKS]
    factor = max(1, -(-steps_per_bin // width(level)))
    for finer in range(level, -1, -1):
        bins = _read(store, run, attempt, finer, begin // width(finer), last // width(finer), blocks)
        if rank is not None and not over:
            bins = bins.select(np.flatnonzero(bins.column("rank") == rank))
        if len(bins):
            scale = width(level) * factor // width(finer)
            parts.append(merged_bins(bins, scale) if scale > 1 else bins)
            begin = (int(bins.number.max()) + 1) * width(finer)
        if begin > last:
            break
    if begin <= last and store.estimate_rows("steps", run, attempt, begin, last) <= _COLUMN_ROWS:
        tail = _from_columns(store, run, attempt, (begin, last), width(level) * factor, rank, over=over)
        parts.append(tail)
    # The last bin of a level and the first finer bins after it may be one bin of the answer.
    return merged_bins(StepBins.concat(parts), 1)


def _has_columns(store: Store, run: str, attempt: str, first: int) -> bool:
    """Whether the first steps have columns, which retention removes before bins."""
    return store.estimate_rows("steps", run, attempt, first, first + BIN_STEPS - 1) > 0


def _from_columns(
    store: Store,
    run: str,
    attempt: str,
    bounds: tuple[int, int],
    steps_per_bin: int,
    rank: int | None,
    *,
    over: bool,
) -> StepBins:
    rows = store.steps(run, attempt, None if over else rank, *bounds)
    bins = bins_of_steps(*rows, steps_per_bin, compared=False)
    return over_ranks(bins) if over else bins.in_order()


def read_lateness(store: Store, run: str, attempt: str, bounds: tuple[int, int], ranks: int) -> LatenessBins | None:
    """Return the lateness in the steps `bounds` from bins, as fine as fits into `_CELLS`; None if there is none."""
    steps = bounds[1] - bounds[0] + 1
    level = 0
    while level + 1 < LEVELS and steps // width(level) * ranks > _CELLS:
        level += 1
    bins = _read(store, run, attempt, level, bounds[0] // width(level), bounds[1] // width(level), None)
    return lateness_of(bins) if len(bins) else None


def unix_times(bins: StepBins, sources: list[Source]) -> StepBins:
    """Return the bins with times of day; those over all ranks are on the lowest rank's clock."""
    offsets = {source.rank: source.anchor.wall_ns - source.anchor.monotonic_ns for source in sources}
    if not offsets:
        return bins
    offset = np.array([offsets.get(rank, offsets[min(offsets)]) for rank in bins.column("rank").tolist()], np.int64)
    table = bins.table.copy()
    for name in ("began_ns", "ended_ns"):
        table[NAMES.index(name)] += offset
    return StepBins(bins.number, table)
