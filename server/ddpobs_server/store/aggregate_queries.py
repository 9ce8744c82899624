"""Runs and their sums: one statement each, however many runs and ranks there are."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import CTE, ColumnElement, Connection, Double, and_, case, cast, func, select

from ddpobs import wire
from ddpobs_server.store import schema
from ddpobs_server.store.rows import PeerTotal, Rollup, Run

_r, _s = schema.runs.c, schema.sources.c
_SOURCE = (_s.run_id, _s.source, _s.rank)
_EVENTS = 10_000
"""Most events that a diagnosis looks at: their kinds are the client's."""
UNUSED_JUDGED = 8
"""A diagnosis reads so many of each source's latest unused sets of a module, of those that name parameters and those
that name none: its latest are among them, whichever they are."""
_UNUSED_NAMES = 200_000
"""In the sets before the latest ones: where sets change all the time, ranks times names would fill the memory."""
Conditions = list[ColumnElement[bool]]


def added(column: Any) -> Any:
    """A sum that absurd values do not overflow: SQLite raises where one of integers does."""
    return func.sum(cast(column, Double))


def where_run(run_id: str) -> Conditions:
    """That run."""
    return [_r.run_id == run_id]


def active(workspace: str, since_ns: int, until_ns: int) -> Conditions:
    """A workspace's runs last heard of in that time."""
    return [_r.workspace == workspace, _r.last_seen_ns.between(since_ns, until_ns)]


def where_page(workspace: str, cursor: tuple[int, str] | None) -> Conditions:
    """A workspace's runs, from the cursor on: (created_ns, run) of the last one had."""
    if cursor is None:
        return [_r.workspace == workspace]
    at, run = cursor
    return [_r.workspace == workspace, (_r.created_ns < at) | ((_r.created_ns == at) & (_r.run_id > run))]


def runs(connection: Connection, which: Conditions, limit: int | None = None) -> list[Run]:
    """Runs, newest first, each with the sums over its latest attempt's sources."""
    p = select(schema.runs).where(*which).order_by(_r.created_ns.desc(), _r.run_id).limit(limit).subquery().c
    stepped = _s.last_step_seen_ns > 0
    # A source that has not stepped yet counts from when it was first seen.
    active_ns = case((stepped, _s.last_step_seen_ns), else_=_s.first_seen_ns)
    plain = (p.run_id, p.attempt, p.created_ns, p.last_seen_ns, p.commits)
    query = (
        select(
            *plain,
            func.coalesce(func.max(_s.world_size), 0),
            func.count(_s.source),
            func.coalesce(func.max(case((stepped, _s.last_step + 1), else_=0)), 0),
            func.coalesce(added(_s.emitted), 0),
            func.coalesce(added(_s.dropped), 0),
            func.coalesce(func.max(active_ns), 0),
            func.coalesce(func.sum(case((_s.goodbye, 1), else_=0)), 0),
        )
        .outerjoin(schema.sources, (_s.run_id == p.run_id) & (_s.attempt == p.attempt))
        .group_by(*plain)
        .order_by(p.created_ns.desc(), p.run_id)
    )
    return [Run(*row[:2], *map(int, row[2:])) for row in connection.execute(query)]


def sources_of_attempt(run_id: str, attempt: str) -> CTE:
    """The sources of an attempt of one run."""
    return _materialized(select(*_SOURCE).where(_s.run_id == run_id, _s.attempt == attempt))


def sources_of_latest(which: Conditions) -> CTE:
    """The sources of the latest attempts of some runs."""
    latest = (_r.run_id == _s.run_id) & (_r.attempt == _s.attempt)
    return _materialized(select(*_SOURCE).join(schema.runs, latest).where(*which))


def _materialized(sources: Any) -> CTE:
    """First the sources, then their rows by key: SQLite would look the source of each row up."""
    found: CTE = sources.cte("reporting").prefix_with("MATERIALIZED")
    return found


def rollups(connection: Connection, of: CTE) -> list[tuple[str, Rollup]]:
    """(run, sums) by rank."""
    phases = [f"{phase}_ns" for phase in wire.PHASES]
    names = ("steps", "wall_ns", "comm_ns", "samples", "own_ns", "own_steps")
    found = []
    for run, rank, *row in _summed(connection, schema.rollups, (*names, *phases), of, rank=True):
        values = [int(value) for value in row]
        plain = dict(zip(names, values, strict=False))
        by_phase = dict(zip(wire.PHASES, values[len(names) :], strict=True))
        found.append((run, Rollup(rank=rank, phases_ns=by_phase, **plain)))
    return found


def peer_totals(connection: Connection, of: CTE) -> list[tuple[str, PeerTotal]]:
    """(run, straggler statistics) by the rank that they are about."""
    names = ("steps", "delay_ns", "wait_ns")
    columns = (*names, *(f"straggler_{phase}" for phase in wire.OWN_PHASES))
    found = []
    for run, rank, *row in _summed(connection, schema.peer_totals, columns, of, rank=False, by=("rank",)):
        values = [int(value) for value in row]
        plain = dict(zip(names, values, strict=False))
        by_phase = dict(zip(wire.OWN_PHASES, values[len(names) :], strict=True))
        found.append((run, PeerTotal(rank=rank, straggler_steps=by_phase, **plain)))
    return found


def histograms(connection: Connection, of: CTE) -> dict[str, list[int]]:
    """By run: steps of all ranks under each of `schema.STEP_BOUNDS_S`, not cumulated, and above the last."""
    counts: dict[str, list[int]] = {}
    for run, bound, steps in _summed(connection, schema.step_histogram, ("steps",), of, rank=False, by=("bound",)):
        counts.setdefault(run, [0] * (len(schema.STEP_BOUNDS_S) + 1))[bound] = int(steps)
    return counts


def last_seen(connection: Connection, of: CTE) -> list[tuple[str, int, int, int, int]]:
    """(run, rank, last step, when it was seen, records dropped) of each rank; both zero where it has no step yet."""
    keys = (of.c.run_id, of.c.rank)
    query = (
        select(*keys, func.max(_s.last_step), func.max(_s.last_step_seen_ns), added(_s.dropped))
        .join(*_joined(schema.sources, of))
        .group_by(*keys)
    )
    return [(run, rank, step, at, int(dropped)) for run, rank, step, at, dropped in connection.execute(query)]


def hellos(connection: Connection, of: CTE) -> dict[str, wire.Hello]:
    """By run: what its lowest rank that said hello said."""
    told = (
        select(_s.run_id, _s.source, _number(_s.run_id, by=of.c.rank))
        .join(of, (of.c.run_id == _s.run_id) & (of.c.source == _s.source))
        .where(_s.hello.is_not(None))
        .subquery()
        .c
    )
    query = select(_s.run_id, _s.hello).join(
        told.source.table, (told.run_id == _s.run_id) & (told.source == _s.source) & (told.number == 1)
    )
    return {run: msgspec.json.decode(hello, type=wire.Hello) for run, hello in connection.execute(query)}


def layouts(connection: Connection, of: CTE) -> list[tuple[str, wire.Layout]]:
    """(run, layout) by module and revision, each as the lowest rank that told it told it."""
    c = schema.layouts.c
    told = (
        select(c.run_id, c.source, c.module, c.revision, _number(c.run_id, c.module, c.revision, by=of.c.rank))
        .join(of, (of.c.run_id == c.run_id) & (of.c.source == c.source))
        .subquery()
        .c
    )
    query = (
        select(c.run_id, c.body)
        .join(
            told.source.table,
            (told.run_id == c.run_id)
            & (told.source == c.source)
            & (told.module == c.module)
            & (told.revision == c.revision)
            & (told.number == 1),
        )
        .order_by(c.run_id, c.module, c.revision)
    )
    return [(run, msgspec.json.decode(body, type=wire.Layout)) for run, body in connection.execute(query)]


def unused(
    connection: Connection, of: CTE, *, module: int | None = None, limit: int | None = None, latest: int = 1
) -> list[tuple[str, int, wire.Unused]]:
    """(run, rank, unused set) in the order in which each rank told them.

    Those that `unused_number` counts up to `latest`, and of what comes after the first as many as hold
    `_UNUSED_NAMES`; or, with a limit, so many of the latest of all ranks.
    """
    c = schema.unused.c
    numbered = (
        select(of.c.rank, c.run_id, c.source, c.seq, c.position, c.names, unused_number())
        .join(*_joined(schema.unused, of))
        .where(*([] if module is None else [c.module == module]))
        .subquery()
    )
    n = numbered.c
    if limit is not None:
        told = select(numbered).order_by(n.number, n.rank).limit(limit).subquery().c
    elif latest == 1:
        told = select(numbered).where(n.number == 1).subquery().c
    else:
        in_turn = (n.number, n.rank, n.source)
        so_far = func.sum(n.names).over(partition_by=n.run_id, order_by=in_turn).label("so_far")
        some = select(numbered, so_far).where(n.number <= latest).subquery()
        told = select(some).where((some.c.number == 1) | (some.c.so_far <= _UNUSED_NAMES)).subquery().c
    same = [told[name] == c[name] for name in ("run_id", "source", "seq", "position")]
    query = select(c.run_id, told.rank, c.body).join(told.run_id.table, and_(*same))
    query = query.order_by(c.run_id, told.rank, c.seq, c.position)
    decode = cache(msgspec.json.Decoder(wire.Unused).decode)  # Most ranks tell the same.
    return [(run, rank, decode(body)) for run, rank, body in connection.execute(query)]


def unused_number() -> Any:
    """From 1 for the latest on: each source's sets of a module that name parameters, and those that name none."""
    c = schema.unused.c
    kind, latest = (c.run_id, c.source, c.module, c.names > 0), (c.seq.desc(), c.position.desc())
    return func.row_number().over(partition_by=kind, order_by=latest).label("number")


def events(connection: Connection, of: CTE) -> list[tuple[str, int, wire.Event]]:
    """(run, rank, event) of those that `event_number` counts as 1, in the order in which each rank told them."""
    c = schema.events.c
    numbered = (
        select(of.c.run_id, of.c.rank, c.seq, c.position, c.body, event_number())
        .join(*_joined(schema.events, of))
        .subquery()
    )
    n = numbered.c
    query = select(n.run_id, n.rank, n.body).where(n.number == 1)
    query = query.order_by(n.run_id, n.rank, n.seq, n.position).limit(_EVENTS)
    return [(run, rank, msgspec.json.decode(body, type=wire.Event)) for run, rank, body in connection.execute(query)]


def event_number() -> Any:
    """From 1 for the first on: each source's events of a kind."""
    c = schema.events.c
    first = (c.seq, c.position)
    return func.row_number().over(partition_by=(c.run_id, c.source, c.kind), order_by=first).label("number")


def _number(*within: Any, by: Any) -> Any:
    return func.row_number().over(partition_by=within, order_by=by).label("number")


def _summed(
    connection: Connection, table: Any, names: Iterable[str], of: CTE, *, rank: bool, by: tuple[str, ...] = ()
) -> Iterable[Any]:
    keys = [of.c.run_id, *([of.c.rank] if rank else []), *(table.c[name] for name in by)]
    query = (
        select(*keys, *(added(table.c[name]) for name in names))
        .join(*_joined(table, of))
        .group_by(*reversed(keys))  # SQLite sorts faster by a number than by a run.
        .order_by(*keys)
    )
    return connection.execute(query)


def _joined(table: Any, of: CTE) -> tuple[Any, ColumnElement[bool]]:
    return table, (table.c.run_id == of.c.run_id) & (table.c.source == of.c.source)
