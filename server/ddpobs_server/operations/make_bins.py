"""Keeps a run's bins of steps up to date.

Bins of level 0 are made from columns when every rank has sent their steps; bins of the next level from up to four of
them, once no rank can add to them in order. A gap in the numbers of steps has no bins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ddpobs.shared.silence import SUMMED_STEPS_SILENCE_NS
from ddpobs_server.analysis.steps.step_bins import StepBins, bins_of_steps, merged_bins, over_ranks
from ddpobs_server.reports.read_bins import AttemptBins, Shown
from ddpobs_server.store import Source
from ddpobs_server.store.sums.stored_bins import BIN_STEPS, BLOCK_RANKS, FACTOR, LEVELS, OVER_RANKS, packed

_READ_ROWS = 2**16
"""Rows of steps that are read at once."""
_OVER_NS = 120 * 10**9
"""A run without any batch for this long is over."""


def update_step_bins(attempt: AttemptBins, now_ns: int) -> Iterator[int]:
    """Make the bins that are due.

    Yields:
        The number of bins, after each part; the caller may pause there.
    """
    sources, states = attempt.store.sources(attempt.run, attempt.attempt), attempt.states(0)
    until, stored = _due_until(sources, now_ns), attempt.store.bins_with_columns(attempt.run, attempt.attempt).tolist()
    for part in _parts(_stale(stored, states, until), stored, _READ_ROWS // max(1, len(sources)) // BIN_STEPS):
        _make(attempt, part, states)
        yield len(part)
    for level in range(1, LEVELS):
        children = attempt.states(level - 1)
        if len(children) <= 1:
            return
        stored = sorted({number // FACTOR for number in children})
        due_until = until // FACTOR**level + is_over(sources, now_ns)
        due = _stale(stored, attempt.states(level), due_until)
        for part in _parts(due, stored, _READ_ROWS // max(1, FACTOR * len(sources))):
            _merge(attempt, level, part)
            yield len(part)


def _stale(stored: list[int], states: dict[int, tuple[bool, int]], until: int) -> list[int]:
    """Return the bins below `until` that are missing or stale."""
    return [number for number in stored if number < until and states.get(number, (True, 0))[0]]


def _parts(due: list[int], stored: list[int], most: int) -> Iterator[list[int]]:
    """Split sorted bins into parts of at most `most`, with no other stored bin in between.

    The range of a part is read at once. Steps may be far apart: a client chooses their numbers.
    """
    place = {number: index for index, number in enumerate(stored)}
    part: list[int] = []
    for number in due:
        if part and (place[number] != place[part[-1]] + 1 or len(part) >= max(1, most)):
            yield part
            part = []
        part.append(number)
    if part:
        yield part


def _due_until(sources: list[Source], now_ns: int) -> int:
    """Return the bin from which on steps may still arrive in order."""
    stepped = [source for source in sources if source.last_step_seen_ns > 0]
    if not stepped:
        return 0
    if is_over(sources, now_ns):
        return max(source.last_step for source in stepped) // BIN_STEPS + 1
    newest_ns = max(source.last_step_seen_ns for source in stepped)
    going = [s.last_step for s in stepped if not s.ended and newest_ns - s.last_step_seen_ns < SUMMED_STEPS_SILENCE_NS]
    return (min(going or [source.last_step for source in stepped]) + 1) // BIN_STEPS


def is_over(sources: list[Source], now_ns: int) -> bool:
    """Return whether an attempt sends no more steps: all its processes have ended, or none sends any more."""
    latest_ns = max((source.last_seen_ns for source in sources), default=0)
    return all(source.ended for source in sources) or now_ns - latest_ns > _OVER_NS


def _make(attempt: AttemptBins, numbers: list[int], states: dict[int, tuple[bool, int]]) -> None:
    """Make the bins of level 0 from columns. A bin whose columns are removed in part stays as it is."""
    bounds = numbers[0] * BIN_STEPS, (numbers[-1] + 1) * BIN_STEPS - 1
    rank, steps = attempt.store.steps(attempt.run, attempt.attempt, None, *bounds)
    counts = np.bincount(np.searchsorted(numbers, steps.step // BIN_STEPS), minlength=len(numbers)).tolist()
    rows = dict(zip(numbers, counts, strict=True))
    removed_in_part = [number for number in numbers if rows[number] < states.get(number, (True, 0))[1]]
    for number in removed_in_part:
        attempt.store.keep_step_bin(attempt.run, attempt.attempt, number)
    whole_bins = [number for number in numbers if number not in removed_in_part]
    write_bins(attempt, 0, whole_bins, bins_of_steps(rank, steps, BIN_STEPS), rows)


def _merge(attempt: AttemptBins, level: int, numbers: list[int]) -> None:
    children = attempt.read(level - 1, (numbers[0] * FACTOR, (numbers[-1] + 1) * FACTOR - 1), Shown())
    bins = merged_bins(children, FACTOR)
    rows = {number: int(bins.column("steps")[bins.number == number].sum()) for number in numbers}
    write_bins(attempt, level, numbers, bins, rows)


def write_bins(attempt: AttemptBins, level: int, numbers: list[int], bins: StepBins, rows: dict[int, int]) -> None:
    """Replace bins of a level. Few ranks are stored in the block over all ranks, instead of a row over them.

    They are packed before the transaction, which batches wait for.
    """
    block = bins.column("rank") // BLOCK_RANKS

    def rows_of_bins() -> Iterator[dict[str, Any]]:
        for number in numbers:
            own_bins, own_block = bins.select(bins.number == number), block[bins.number == number]
            blocks = np.unique(own_block).tolist()
            summary = over_ranks(own_bins) if len(blocks) > 1 else own_bins
            yield packed(number, OVER_RANKS, int(rows[number]), summary.table)
            for index in blocks if len(blocks) > 1 else ():
                yield packed(number, index, int(rows[number]), own_bins.table[:, own_block == index])

    attempt.store.write_step_bins(attempt.run, attempt.attempt, level, [*rows_of_bins()])
