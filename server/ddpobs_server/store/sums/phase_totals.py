"""Each rank's steps, communication and phases over a whole attempt, without summing all windows at each scrape.

Windows of long-past steps are added up once and kept in memory. Every batch adds to the histogram of steps, so the
histogram shows when a late batch changed a past window.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import add

from sqlalchemy import Connection, case, select

from ddpobs import wire
from ddpobs.shared.silence import SUMMED_STEPS_SILENCE_NS
from ddpobs_server.store import schema
from ddpobs_server.store.database.sql import float_sum
from ddpobs_server.store.rows import Run
from ddpobs_server.store.selected_sources import SelectedSources

NAMES = ("steps", "comm_ns", *(f"{phase}_ns" for phase in wire.PHASES))
Sums = dict[int, tuple[int, ...]]
"""By rank, in the order of `NAMES`."""
_GROUP_WINDOWS, _MARGIN_WINDOWS = 8, 4
"""The cache grows by groups of 8 windows, and leaves out the last 4 windows before the slowest rank's step."""
LastSeen = Sequence[tuple[str, int, int, int, int]]
"""As `aggregate_queries.last_seen` returns it."""


@dataclass
class _CachedSums:
    """Sums of the windows before `until`."""

    until: int = 0
    sums: Sums = field(default_factory=dict)


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
        last_seen: LastSeen,
        active: list[Run],
    ) -> dict[str, Sums]:
        """Sums of each run's latest attempt, by run.

        Args:
            connection: Sees a single state of the database throughout.
            sources: Sources of the runs.
            runs: The runs.
            steps: Number of steps in all ranks' histograms, by run, in the same state.
            last_seen: Progress of each rank, in the same state.
            active: Runs that stay in the cache, whether they are read now or not.
        """
        with self._lock:
            cached = {run.run: self._cache.get((run.run, run.attempt), _CachedSums()) for run in runs}
            remaining = {(run.run, run.attempt) for run in active}
            self._cache = {key: entry for key, entry in self._cache.items() if key in remaining}
            self._cache |= {(run.run, run.attempt): cached[run.run] for run in runs}
            recent = _window_sums(connection, sources, {run: (entry.until, None) for run, entry in cached.items()})
            totals = {run: _add(entry.sums, recent.get(run, {})) for run, entry in cached.items()}
            # A late batch changes windows that are cached.
            stale = [run for run in totals if sum(row[0] for row in totals[run].values()) != steps.get(run, 0)]
            if stale:
                fresh = _window_sums(connection, sources, dict.fromkeys(stale, (0, None)))
                for run in stale:
                    totals[run], cached[run].until, cached[run].sums = fresh.get(run, {}), 0, {}
            self._grow(connection, sources, _slowest_steps(last_seen), cached)
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
                cached[run].until, cached[run].sums = until[run], _add(cached[run].sums, sums.get(run, {}))


def _slowest_steps(last_seen: LastSeen) -> dict[str, int]:
    """Last step of the slowest rank, by run. With uneven inputs it falls ever further behind the other ranks."""
    newest_ns: dict[str, int] = {}
    for run, _, _, seen_ns, _ in last_seen:
        newest_ns[run] = max(seen_ns, newest_ns.get(run, 0))
    slowest: dict[str, int] = {}
    for run, _, step, seen_ns, _ in last_seen:
        if seen_ns >= newest_ns[run] - SUMMED_STEPS_SILENCE_NS:
            slowest[run] = min(step, slowest.get(run, step))
    return slowest


def _window_sums(
    connection: Connection, sources: SelectedSources, windows: Mapping[str, tuple[int, int | None]]
) -> dict[str, Sums]:
    """Sums over the windows [begin, end) of each run in `windows`."""
    if not windows:
        return {}
    c, run = schema.rollups.c, sources.c.run_id
    begin = case({name: begin for name, (begin, _) in windows.items()}, value=run, else_=2**62)
    query = (
        select(run, sources.c.rank, *(float_sum(c[name]) for name in NAMES))
        .join(*sources.joined(schema.rollups))
        .where(c.step_window >= begin)
        .group_by(run, sources.c.rank)
        .order_by(run, sources.c.rank)
    )
    ends = {name: end for name, (_, end) in windows.items() if end is not None}
    if ends:
        query = query.where(c.step_window < case(ends, value=run, else_=2**62))
    result: dict[str, Sums] = {}
    for name, rank, *row in connection.execute(query).all():
        result.setdefault(name, {})[rank] = tuple(map(int, row))
    return result


def _add(some: Sums, more: Sums) -> Sums:
    zeros = (0,) * len(NAMES)
    ranks = sorted(some.keys() | more.keys())
    return {rank: tuple(map(add, some.get(rank, zeros), more.get(rank, zeros))) for rank in ranks}
