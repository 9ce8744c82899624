"""Which columns of steps have their successor, the bins of steps. Others may be the last trace of their steps."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, and_, not_, select

from ddpobs_server.store import chunks, schema
from ddpobs_server.store.queries import column_queries
from ddpobs_server.store.sums import stored_bins
from ddpobs_server.store.sums.stored_bins import BIN_STEPS

_MAX_RANGES = 100
"""Ranges of steps without bins that a statement names; later ones count as one."""
_c = schema.chunks.c


def are_binned(connection: Connection, run: str) -> list[Any]:
    """SQL conditions for a run's chunks that are not of steps, or whose steps are all in current bins."""
    attempts = select(_c.attempt).where(_c.run_id == run, _is_of_steps()).distinct()
    return [
        not_(and_(_is_of_steps(), _c.attempt == attempt, _c.first_step <= last, _c.last_step >= first))
        for attempt in connection.execute(attempts).scalars()
        for first, last in _without_bins(connection, run, attempt)
    ]


def _is_of_steps() -> Any:
    return _c.kind.in_(chunks.kinds("steps"))


def _without_bins(connection: Connection, run: str, attempt: str) -> list[tuple[int, int]]:
    """Ranges of steps that have columns and no current bin."""
    states = stored_bins.step_bin_states(connection, run, attempt)
    numbers = column_queries.bins_with_columns(connection, run, attempt).tolist()
    ranges = list(stored_bins.ranges(n for n in numbers if states.get(n, (True, 0))[0]))
    if len(ranges) > _MAX_RANGES:
        ranges[_MAX_RANGES - 1 :] = [(ranges[_MAX_RANGES - 1][0], ranges[-1][1])]
    return [(first * BIN_STEPS, (last + 1) * BIN_STEPS - 1) for first, last in ranges]
