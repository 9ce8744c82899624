"""Sums and rows of many runs' sources, each read in a single statement, however many runs and ranks there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import CTE, ColumnElement, Connection, Double, and_, case, cast, func, select

from ddpobs import wire
from ddpobs_server.store import schema
from ddpobs_server.store.rows import PeerTotal, Rollup

_r, _s = schema.runs.c, schema.sources.c
_SOURCE = (_s.run_id, _s.source, _s.rank)
_EVENTS = 10_000
"""Most events in a diagnosis. A limit is needed because clients choose the kinds."""
_ENDS = ("failed", "died", "terminated")
"""Kinds of events that are read first if there are too many."""
_REPEATED, _REPEATS = ("stuck", "not_reduced"), 64
"""Kinds of events of which a diagnosis reads the first of each source, and how many."""
UNUSED_JUDGED = 8
"""Latest unused sets with names, and latest empty sets, that a diagnosis reads of each source and module. A module's
latest sets are always among them."""
_UNUSED_NAMES = 200_000
"""Most names in the sets before the latest sets. If sets change in every step, ranks times names would fill memory."""


def float_sum(column: Any) -> Any:
    """A sum in floating point, which absurd values cannot overflow: SQLite raises if a sum of integers overflows."""
    return func.sum(cast(column, Double))


def sources_of_attempt(run: str, attempt: str) -> CTE:
    """Sources of an attempt of a run."""
    return _materialized(select(*_SOURCE).where(_s.run_id == run, _s.attempt == attempt))


def sources_of_latest(conditions: Sequence[ColumnElement[bool]]) -> CTE:
    """Sources of the latest attempts of the runs that meet the conditions."""
    latest = (_r.run_id == _s.run_id) & (_r.attempt == _s.attempt)
    return _materialized(select(*_SOURCE).join(schema.runs, latest).where(*conditions))


def _materialized(sources: Any) -> CTE:
    """Read the sources first, then their rows by key. Otherwise SQLite looks up the source of every row."""
    cte: CTE = sources.cte("reporting").prefix_with("MATERIALIZED")
    return cte


def rollups(connection: Connection, sources: CTE) -> list[tuple[str, Rollup]]:
    """(run, sums) by rank."""
    phases = [f"{phase}_ns" for phase in wire.PHASES]
    names = ("steps", "wall_ns", "comm_ns", "samples", "own_ns", "own_steps")
    result = []
    for run, rank, *row in _sums(connection, schema.rollups, (*names, *phases), sources, rank=True):
        values = [int(value) for value in row]
        plain = dict(zip(names, values, strict=False))
        by_phase = dict(zip(wire.PHASES, values[len(names) :], strict=True))
        result.append((run, Rollup(rank=rank, phases_ns=by_phase, **plain)))
    return result


def peer_totals(connection: Connection, sources: CTE) -> list[tuple[str, PeerTotal]]:
    """(run, straggler statistics) by the rank that they describe."""
    names = ("steps", "delay_ns", "wait_ns")
    columns = (*names, *(f"straggler_{phase}" for phase in wire.OWN_PHASES))
    result = []
    for run, rank, *row in _sums(connection, schema.peer_totals, columns, sources, rank=False, key=("rank",)):
        values = [int(value) for value in row]
        plain = dict(zip(names, values, strict=False))
        by_phase = dict(zip(wire.OWN_PHASES, values[len(names) :], strict=True))
        result.append((run, PeerTotal(rank=rank, straggler_steps=by_phase, **plain)))
    return result


def histograms(connection: Connection, sources: CTE) -> dict[str, list[int]]:
    """Steps of all ranks in each bin of `schema.STEP_BOUNDS_S` and above the last, not cumulated, by run."""
    counts: dict[str, list[int]] = {}
    for run, bound, steps in _sums(connection, schema.step_histogram, ("steps",), sources, rank=False, key=("bound",)):
        counts.setdefault(run, [0] * (len(schema.STEP_BOUNDS_S) + 1))[bound] = int(steps)
    return counts


def last_seen(connection: Connection, sources: CTE) -> list[tuple[str, int, int, int, int]]:
    """(run, rank, last step, its arrival, records dropped) of each rank; step and arrival are 0 without a step."""
    keys = (sources.c.run_id, sources.c.rank)
    query = (
        select(*keys, func.max(_s.last_step), func.max(_s.last_step_seen_ns), float_sum(_s.dropped))
        .join(*_by_source(schema.sources, sources))
        .group_by(*keys)
    )
    rows = connection.execute(query)
    return [(run, rank, step, seen_ns, int(dropped)) for run, rank, step, seen_ns, dropped in rows]


def hellos(connection: Connection, sources: CTE) -> dict[str, wire.Hello]:
    """Hello of the lowest rank that sent a hello, by run."""
    numbered = (
        select(_s.run_id, _s.source, _number(_s.run_id, order_by=sources.c.rank))
        .join(sources, (sources.c.run_id == _s.run_id) & (sources.c.source == _s.source))
        .where(_s.hello.is_not(None))
        .subquery()
    )
    n = numbered.c
    query = select(_s.run_id, _s.hello).join(
        numbered, (n.run_id == _s.run_id) & (n.source == _s.source) & (n.number == 1)
    )
    return {run: msgspec.json.decode(hello, type=wire.Hello) for run, hello in connection.execute(query)}


def layouts(connection: Connection, sources: CTE) -> list[tuple[str, wire.Layout]]:
    """(run, layout) by module and revision, from the lowest rank that sent it."""
    c = schema.layouts.c
    numbered = (
        select(
            c.run_id, c.source, c.module, c.revision, _number(c.run_id, c.module, c.revision, order_by=sources.c.rank)
        )
        .join(sources, (sources.c.run_id == c.run_id) & (sources.c.source == c.source))
        .subquery()
    )
    n = numbered.c
    same = [n[name] == c[name] for name in ("run_id", "source", "module", "revision")]
    query = select(c.run_id, c.body).join(numbered, and_(*same, n.number == 1))
    rows = connection.execute(query.order_by(c.run_id, c.module, c.revision))
    return [(run, msgspec.json.decode(body, type=wire.Layout)) for run, body in rows]


def unused(
    connection: Connection, sources: CTE, *, module: int | None = None, limit: int | None = None, latest: int = 1
) -> list[tuple[str, int, wire.Unused]]:
    """(run, rank, unused set) in the order in which each rank sent them.

    Args:
        connection: To the database.
        sources: The sources.
        module: Index of the only module to read; None for all.
        limit: If given, return the latest `limit` sets of all ranks and ignore `latest`.
        latest: Largest `unused_number` of the sets. Sets after the first are read until they hold
            `_UNUSED_NAMES` names.
    """
    c = schema.unused.c
    numbered = (
        select(sources.c.rank, c.run_id, c.source, c.seq, c.position, c.names, unused_number())
        .join(*_by_source(schema.unused, sources))
        .where(*([] if module is None else [c.module == module]))
        .subquery()
    )
    n = numbered.c
    if limit is not None:
        selected = select(numbered).order_by(n.number, n.rank).limit(limit).subquery()
    elif latest == 1:
        selected = select(numbered).where(n.number == 1).subquery()
    else:
        order = (n.number, n.rank, n.source)
        so_far = func.sum(n.names).over(partition_by=n.run_id, order_by=order).label("so_far")
        latest_sets = select(numbered, so_far).where(n.number <= latest).subquery()
        allowed = (latest_sets.c.number == 1) | (latest_sets.c.so_far <= _UNUSED_NAMES)
        selected = select(latest_sets).where(allowed).subquery()
    same = [selected.c[name] == c[name] for name in ("run_id", "source", "seq", "position")]
    query = select(c.run_id, selected.c.rank, c.body).join(selected, and_(*same))
    query = query.order_by(c.run_id, selected.c.rank, c.seq, c.position)
    decode = cache(msgspec.json.Decoder(wire.Unused).decode)  # Most ranks send the same sets.
    return [(run, rank, decode(body)) for run, rank, body in connection.execute(query)]


def unused_number() -> Any:
    """Number of an unused set, 1 for the latest. Sets with names and empty sets of a source and module count apart."""
    c = schema.unused.c
    kind, latest = (c.run_id, c.source, c.module, c.names > 0), (c.seq.desc(), c.position.desc())
    return func.row_number().over(partition_by=kind, order_by=latest).label("number")


def events(connection: Connection, sources: CTE) -> list[tuple[str, int, wire.Event]]:
    """(run, rank, event): the first of each source and kind, of some kinds a few, in the order of sending.

    The rank of an event `died` is the one that it reports.
    """
    c = schema.events.c
    numbered = (
        select(sources.c.run_id, sources.c.rank, c.seq, c.position, c.kind, c.body, event_number())
        .join(*_by_source(schema.events, sources))
        .subquery()
    )
    n = numbered.c
    is_end = case((n.kind.in_(_ENDS) | n.kind.startswith("died:"), 0), else_=1)
    query = select(n.run_id, n.rank, n.seq, n.position, n.body).where(is_read(n.kind, n.number))
    query = query.order_by(is_end, n.number, n.run_id, n.rank, n.seq, n.position).limit(_EVENTS)
    result = []
    for run, rank, *_, body in sorted(connection.execute(query).all()):
        event = msgspec.json.decode(body, type=wire.Event)
        result.append((run, rank_of(event, rank), event))
    return result


def rank_of(event: wire.Event, sender: int) -> int:
    """Rank that an event is about: the sender's, or the rank whose death it reports."""
    rank = event.detail.get("rank")
    return rank if event.kind == "died" and type(rank) is int else sender


def is_read(kind: Any, number: Any) -> Any:
    """SQL: whether a diagnosis reads an event of this kind and `event_number`."""
    return number <= case((kind.in_(_REPEATED), _REPEATS), else_=1)


def event_number() -> Any:
    """Number of an event among those of its source and kind, 1 for the first."""
    c = schema.events.c
    first = (c.seq, c.position)
    return func.row_number().over(partition_by=(c.run_id, c.source, c.kind), order_by=first).label("number")


def _number(*columns: Any, order_by: Any) -> Any:
    return func.row_number().over(partition_by=columns, order_by=order_by).label("number")


def _sums(
    connection: Connection, table: Any, names: Iterable[str], sources: CTE, *, rank: bool, key: tuple[str, ...] = ()
) -> Iterable[Any]:
    keys = [sources.c.run_id, *([sources.c.rank] if rank else []), *(table.c[name] for name in key)]
    query = (
        select(*keys, *(float_sum(table.c[name]) for name in names))
        .join(*_by_source(table, sources))
        .group_by(*reversed(keys))  # SQLite sorts faster by a number than by a run.
        .order_by(*keys)
    )
    return connection.execute(query)


def _by_source(table: Any, sources: CTE) -> tuple[Any, ColumnElement[bool]]:
    """Target and condition of the join of a table with its sources."""
    return table, (table.c.run_id == sources.c.run_id) & (table.c.source == sources.c.source)
