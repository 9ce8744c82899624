"""Read the latest steps of each rank: a bounded number of rows, even if the ranks' step numbers have parted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ddpobs import wire
from ddpobs.shared.silence import COMPARED_STEPS_SILENCE_NS
from ddpobs_server.analysis.steps.joined_steps import index_ranks, silent_ranks
from ddpobs_server.store import Source, Store

STEPS, _MIN_STEPS, _ROWS = 2048, 512, 500_000
"""Latest steps of a rank that are read: fewer if they make more than `_ROWS` rows, but at least `_MIN_STEPS`."""
_MAX_ROWS = 1_000_000
"""Rows above which even fewer than `_MIN_STEPS` are read."""
_MAX_READS = 16
"""Ranks with step numbers far apart are read separately, in at most this many reads."""


def read_recent_steps(store: Store, run: str, attempt: str, sources: list[Source]) -> tuple[wire.Ints, wire.Steps]:
    """Read the latest steps of each rank, counted back from the rank's own last step.

    With uneven inputs the ranks' step numbers part.

    Returns:
        Rank of each row, and columns, sorted by step and rank.

    Raises:
        TooManyRowsError: One step has too many rows.
    """
    by_last_step = sorted(sources, key=lambda source: source.last_step)
    last = {source.rank: source.last_step for source in by_last_step} or {0: 0}
    window = max(_MIN_STEPS, min(STEPS, _ROWS // max(1, len(sources))))
    while window > 1 and (rows := _count_rows(store, run, attempt, last, window)) > _MAX_ROWS:
        window = max(1, int(0.9 * window * _MAX_ROWS / rows))
    rank, steps = _read_windows(store, run, attempt, last, window)
    ranks, index = index_ranks(rank)
    first = np.array([last.get(number, 0) - window for number in ranks.tolist()], np.int64)
    return kept_rows(rank, steps, steps.step > first[index])


def kept_rows(rank: wire.Ints, steps: wire.Steps, is_kept: npt.NDArray[np.bool_]) -> tuple[wire.Ints, wire.Steps]:
    """Return some rows in the memory of all, which the caller no longer uses: a copy would take as much again."""
    if is_kept.all():
        return rank, steps
    count = int(np.count_nonzero(is_kept))
    for column in (rank, *steps.table):
        column[:count] = column[is_kept]
    return rank[:count], wire.Steps.from_table(steps.table[:, :count])


def _read_windows(
    store: Store, run: str, attempt: str, last: dict[int, int], window: int
) -> tuple[wire.Ints, wire.Steps]:
    """Read the windows of all ranks at once if the range over all has few rows, else in groups of close ranks."""
    groups = _group_by_last_step(last, window)
    whole = min(first for _, first, _ in groups), groups[0][2]
    few = min(_MAX_ROWS, 2 * _count_rows(store, run, attempt, last, window))
    if len(groups) == 1 or store.estimate_rows("steps", run, attempt, *whole) <= few:
        return store.steps(run, attempt, None, *whole)
    parts = [store.steps(run, attempt, *group) for group in groups]
    rank, steps = np.concatenate([ranks for ranks, _ in parts]), wire.Steps.concat([rows for _, rows in parts])
    order = np.lexsort((rank, steps.step))
    return rank[order], steps.select(order)


def _count_rows(store: Store, run: str, attempt: str, last: dict[int, int], window: int) -> int:
    """Estimate the rows of the window, as if each rank had equally many in the same steps."""
    return sum(
        store.estimate_rows("steps", run, attempt, first, final) * len(ranks) // len(last)
        for ranks, first, final in _group_by_last_step(last, window)
    )


def _group_by_last_step(last: dict[int, int], window: int) -> list[tuple[list[int], int, int]]:
    """Group ranks by last step, close ones together.

    Args:
        last: Last step of each rank, by the rank's own numbers.
        window: Steps of each rank that are read.

    Returns:
        Ranks, first step and last step of each group, so that the range holds the windows of all its ranks; the latest
        group first.
    """
    groups: list[tuple[list[int], int, int]] = []
    for rank, step in sorted(last.items(), key=lambda item: -item[1]):
        if not groups or step < groups[-1][2] - window // 4:
            groups.append(([], 0, step))
        ranks, _, final = groups[-1]
        ranks.append(rank)
        groups[-1] = ranks, max(0, step - window + 1), final
    return groups[:_MAX_READS]


def drop_silent_ranks(rank: wire.Ints, steps: wire.Steps, sources: list[Source]) -> tuple[wire.Ints, wire.Steps]:
    """Remove the rows of silent ranks: with them no recent step could be compared."""
    newest_ns = max((source.last_step_seen_ns for source in sources), default=0)
    late_arrivals = {
        source.rank for source in sources if newest_ns - source.last_step_seen_ns > COMPARED_STEPS_SILENCE_NS
    }
    if not late_arrivals:
        return rank, steps
    silent = [number for number in silent_ranks(rank, steps).tolist() if number in late_arrivals]
    rows = ~np.isin(rank, silent) if silent else np.ones(len(rank), np.bool_)
    return (rank, steps) if rows.all() else (rank[rows], steps.select(rows))
