"""Facts of many runs for a list: step times and hellos. The statements do not grow with the runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec
from sqlalchemy import ColumnElement, Connection, Subquery, func, select

from ddpobs import wire
from ddpobs_server.store import schema
from ddpobs_server.store.database.sql import float_sum
from ddpobs_server.store.schema import ROLLUP_STEPS

PARTS = 32
"""Maximum number of parts into which a run's steps are divided."""
_r, _s, _t = schema.runs.c, schema.sources.c, schema.rollups.c


def step_parts(connection: Connection, runs: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
    """Steps and wall time in ns of consecutive parts of each run's latest attempt, of its lowest rank."""
    lowest = _lowest_ranks(runs)
    width = _s.last_step // (ROLLUP_STEPS * PARTS) + 1
    part = _t.step_window // width
    query = (
        select(_t.run_id, part, func.sum(_t.steps), float_sum(_t.wall_ns))
        .select_from(schema.rollups)
        .join(schema.sources, (_s.run_id == _t.run_id) & (_s.source == _t.source))
        .join(lowest, _is_lowest(lowest))
        .where(_t.run_id.in_(runs))
        .group_by(_t.run_id, part)
        .order_by(_t.run_id, part)
    )
    parts: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for run, _, steps, wall_ns in connection.execute(query):
        parts[run].append((int(steps), float(wall_ns)))
    return parts


def hellos(connection: Connection, runs: Sequence[str]) -> dict[str, wire.Hello]:
    """The hello of the lowest rank of each run's latest attempt."""
    lowest = _lowest_ranks(runs)
    query = select(_s.run_id, _s.hello).join(lowest, _is_lowest(lowest)).where(_s.run_id.in_(runs))
    rows = connection.execute(query.where(_s.hello.is_not(None)))
    return {run: msgspec.json.decode(text, type=wire.Hello) for run, text in rows}


def _lowest_ranks(runs: Sequence[str]) -> Subquery:
    return (
        select(_s.run_id, _s.attempt, func.min(_s.rank).label("rank"))
        .join(schema.runs, (_r.run_id == _s.run_id) & (_r.attempt == _s.attempt))
        .where(_s.run_id.in_(runs))
        .group_by(_s.run_id, _s.attempt)
        .subquery()
    )


def _is_lowest(lowest: Subquery) -> ColumnElement[bool]:
    return (_s.run_id == lowest.c.run_id) & (_s.attempt == lowest.c.attempt) & (_s.rank == lowest.c.rank)
