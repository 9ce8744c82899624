"""Each rank's steps, communication and phases over a whole attempt, without summing all windows at each scrape.

Windows of long-past steps are added up once and kept in memory. Every batch adds to the histogram of steps, so the
histogram shows when a late batch changed a past window.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import add
from typing import Any

from sqlalchemy import BigInteger, Connection, Select, String, bindparam, case, select

from ddpobs.shared.silence import SUMMED_STEPS_SILENCE_NS
from ddpobs_server.store import schema
from ddpobs_server.store.aggregate_rows import LastSeen, PhaseSums
from ddpobs_server.store.database.sql import columns_by_run, float_sum, padded
from ddpobs_server.store.rows import Run
from ddpobs_server.store.selected_sources import SelectedSources

_NO_WINDOW = 2**62
_GROUP_WINDOWS, _MARGIN_WINDOWS = 8, 4
"""The cache grows by groups of 8 windows, and leaves out the last 4 windows before the slowest rank's step."""


@dataclass
class _CachedSums:
    """Sums of the windows before `until`."""

    until: int = 0
    sums: PhaseSums = field(default_factory=PhaseSums)


class PhaseTotals:
    """Adds recent windows to cached sums of older windows; reads all windows if the histogram of steps disagrees."""

    def __init__(self) -> None:
        self._cache: dict[tuple[str, str], _CachedSums] = {}
        self._lock = threading.Lock()

    def read(
        self,
        connection: Connection,
        sources: SelectedSources,
        runs: list[Run],
        *,
        steps: dict[str, int],
        last_seen: Mapping[str, LastSeen],
        active: list[Run],
    ) -> dict[str, PhaseSums]:
        """Sums of each run's latest attempt, by run.

        Args:
            connection: Sees a single state of the database throughout.
            sources: Sources of the runs.
            runs: The runs.
            steps: Number of steps in all ranks' histograms, by run, in the same state.
            last_seen: Progress of the ranks, by run, in the same state.
            active: Runs that stay in the cache, whether they are read now or not.
        """
        with self._lock:
            cached = {run.run: self._cache.get((run.run, run.attempt), _CachedSums()) for run in runs}
            remaining = {(run.run, run.attempt) for run in active}
            self._cache = {key: entry for key, entry in self._cache.items() if key in remaining}
            self._cache |= {(run.run, run.attempt): cached[run.run] for run in runs}
            recent = _window_sums(connection, sources, {run: (entry.until, None) for run, entry in cached.items()})
            totals = {run: _add(entry.sums, recent.get(run, PhaseSums())) for run, entry in cached.items()}
            # A late batch changes windows that are cached.
            stale = [run for run in totals if sum(totals[run].steps) != steps.get(run, 0)]
            if stale:
                fresh = _window_sums(connection, sources, dict.fromkeys(stale, (0, None)))
                for run in stale:
                    totals[run] = fresh.get(run, PhaseSums())
                    cached[run].until, cached[run].sums = 0, PhaseSums()
            self._grow(connection, sources, {run: _slowest_step(seen) for run, seen in last_seen.items()}, cached)
            return totals

    def _grow(
        self, connection: Connection, sources: SelectedSources, slowest: dict[str, int], cached: dict[str, _CachedSums]
    ) -> None:
        """Add the windows to the cache that all ranks have completed."""
        until = {
            run: (step // schema.ROLLUP_STEPS - _MARGIN_WINDOWS) // _GROUP_WINDOWS * _GROUP_WINDOWS
            for run, step in slowest.items()
        }
        growing = {run: (entry.until, until[run]) for run, entry in cached.items() if until.get(run, 0) > entry.until}
        if growing:
            sums = _window_sums(connection, sources, growing)
            for run in growing:
                cached[run].until, cached[run].sums = until[run], _add(cached[run].sums, sums.get(run, PhaseSums()))


def _slowest_step(seen: LastSeen) -> int:
    """Last step of the slowest rank. With uneven inputs it falls ever further behind the other ranks."""
    recent_ns = max(seen.seen_ns) - SUMMED_STEPS_SILENCE_NS
    return min(step for step, seen_ns in zip(seen.step, seen.seen_ns, strict=True) if seen_ns >= recent_ns)


def _window_sums(
    connection: Connection, sources: SelectedSources, windows: Mapping[str, tuple[int, int | None]]
) -> dict[str, PhaseSums]:
    """Sums over the windows [begin, end) of each run in `windows`."""
    if not windows:
        return {}
    is_open = all(end is None for _, end in windows.values())
    count, values = padded(((run, *ends) for run, ends in windows.items()), "run", "begin", "end")
    columns = columns_by_run(sources.execute(connection, _sums_of_windows, count, is_open, **values))
    return {run: PhaseSums(*sums) for run, sums in columns}


def _sums_of_windows(sources: SelectedSources, count: int, is_open: bool) -> Select[Any]:
    """Sums over the windows from `begin_INDEX`, and up to `end_INDEX` unless `is_open`, of the run `run_INDEX`."""
    c, keys = schema.rollups.c, (sources.c.run_id, sources.c.rank)
    runs = [bindparam(f"run_{index}", type_=String) for index in range(count)]
    begin, end = (
        case(
            *((run, bindparam(f"{name}_{index}", type_=BigInteger)) for index, run in enumerate(runs)),
            value=keys[0],
            else_=_NO_WINDOW,
        )
        for name in ("begin", "end")
    )
    query = (
        select(*keys, *(float_sum(c[name]) for name in PhaseSums._fields[1:]))
        .join(*sources.joined(schema.rollups))
        .where(c.step_window >= begin)
        .group_by(*keys)
        .order_by(*keys)
    )
    return query if is_open else query.where(c.step_window < end)


def _add(some: PhaseSums, more: PhaseSums) -> PhaseSums:
    if not some.rank or not more.rank:
        return some if some.rank else more
    if some.rank == more.rank:
        return PhaseSums(some.rank, *(tuple(map(add, *columns)) for columns in zip(some[1:], more[1:], strict=True)))
    sums: dict[int, list[float]] = {rank: values for rank, *values in zip(*some, strict=True)}
    for rank, *values in zip(*more, strict=True):
        sums[rank] = list(map(add, sums[rank], values)) if rank in sums else values
    return PhaseSums(*zip(*((rank, *values) for rank, values in sorted(sums.items())), strict=True))
