"""Columns and rows back out of the tables."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

import msgspec
import numpy as np
import zstandard
from sqlalchemy import ColumnElement, Connection, Row, Select, case, func, select

from ddpobs import columns as packing
from ddpobs import wire
from ddpobs_server.store import schema
from ddpobs_server.store.rows import Attempt, BucketRollup, PeerTotal, Rollup, Run, Source

_OLD_FORM = "-1"
"""Ends the kind of chunks that the first schema wrote."""
_PAGE_CHUNKS = 20_000
"""Most chunks that one page is made of."""
_Columns = TypeVar("_Columns", wire.Steps, wire.Spans, wire.Comms)


def columns(
    connection: Connection,
    kind: tuple[str, type[_Columns]],
    run: str,
    attempt: str,
    *,
    ranks: Collection[int] | None,
    first: int | None,
    last: int | None,
) -> tuple[wire.Ints, _Columns]:
    """Rows of the steps [first, last] sorted by step and rank, with the rank of each."""
    name, struct = kind
    c = schema.chunks.c
    lowest, highest = (0 if first is None else first), (2**62 if last is None else last)
    parts = []
    query = select(c.kind, c.rank, c.payload).where(*_overlapping(name, run, attempt, ranks, first, last))
    for chunk in connection.execute(query):
        found = _unpacked(struct, *chunk)
        among = (found["step"] >= lowest) & (found["step"] <= highest)
        if ranks is not None and chunk.rank == wire.UNKNOWN:
            among &= np.isin(found["rank"], list(ranks))
        # A chunk holds a hundred steps where perhaps one is asked for.
        parts.append(found if among.all() else {field: values[among] for field, values in found.items()})
    joined = {
        field: np.concatenate([part[field] for part in parts] or [_NONE])
        for field in ("rank", *struct.__struct_fields__)
    }
    order = np.lexsort((joined["rank"], joined["step"]))
    rank = joined.pop("rank")
    return rank[order], struct(**{field: values[order] for field, values in joined.items()})


def page_end(
    connection: Connection,
    kind: str,
    run: str,
    attempt: str,
    *,
    ranks: Collection[int] | None,
    first: int | None,
    last: int | None,
    rows: int,
) -> int | None:
    """The last of as many steps from `first` on as hold about so many rows, at least one; None where all do.

    A chunk's rows count as spread evenly over its steps: only the index is read, no columns.
    """
    c = schema.chunks.c
    overlapping = _overlapping(kind, run, attempt, ranks, first, last)
    query = select(c.first_step, c.last_step, c.rows, c.rank).where(*overlapping)
    found = connection.execute(query.order_by(c.last_step).limit(_PAGE_CHUNKS)).all()
    if not found:
        return None
    more = len(found) == _PAGE_CHUNKS
    if more:
        reached = found[-1].last_step
        last = reached if last is None else min(last, reached)
        found += connection.execute(query.where(c.last_step > reached, c.first_step <= last)).all()
    begin, final, held, rank = np.array([tuple(row) for row in found], np.int64).T
    if ranks is not None:
        held = np.where(rank == wire.UNKNOWN, np.minimum(held, (final - begin + 1) * len(ranks)), held)
    each = held / (final - begin + 1)
    begin = np.maximum(begin, 0 if first is None else first)
    end = final + 1 if last is None else np.minimum(final, last) + 1
    at = np.concatenate([begin, end])
    order = np.argsort(at, kind="stable")
    at, slope = at[order], np.cumsum(np.concatenate([each, -each])[order])
    before = np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(at))])
    if before[-1] <= rows:
        return last if more else None
    place = int(np.searchsorted(before, rows, "right")) - 1
    return max(int(at[0]), int(at[place] + (rows - before[place]) / slope[place]) - 1)


def _overlapping(
    kind: str, run: str, attempt: str, ranks: Collection[int] | None, first: int | None, last: int | None
) -> list[ColumnElement[bool]]:
    c = schema.chunks.c
    conditions = [c.run_id == run, c.attempt == attempt, c.kind.in_([kind, f"{kind}{_OLD_FORM}"])]
    if ranks is not None:
        conditions.append(c.rank.in_([*ranks, wire.UNKNOWN]))
    if first is not None:
        conditions.append(c.last_step >= first)
    if last is not None:
        conditions.append(c.first_step <= last)
    return conditions


def _unpacked(struct: type[_Columns], kind: str, rank: int, payload: bytes) -> dict[str, wire.Ints]:
    """A chunk's columns, that of its ranks among them."""
    if kind.endswith(_OLD_FORM):
        found: Any = wire.unpack(zstandard.decompress(payload), struct)
    elif kind == "spans":
        found = wire.unpack_spans(payload)
    else:
        return packing.unpack(payload)
    plain = {name: getattr(found, name) for name in struct.__struct_fields__}
    return {"rank": np.full(len(found.step), rank, np.int64), **plain}


def runs_query(workspace: str, last_seen_before: tuple[int, str] | None, limit: int) -> Select[Any]:
    """A workspace's runs, newest first, from the cursor on."""
    c = schema.runs.c
    query = select(c.run_id).where(c.workspace == workspace).order_by(c.last_seen_ns.desc(), c.run_id).limit(limit)
    if last_seen_before is not None:
        at, run = last_seen_before
        column = schema.runs.c.last_seen_ns
        query = query.where((column < at) | ((column == at) & (schema.runs.c.run_id > run)))
    return query


def run(connection: Connection, run_id: str) -> Run | None:
    """One run with the sums over its latest attempt's sources."""
    runs, sources = schema.runs.c, schema.sources.c
    found = connection.execute(select(schema.runs).where(runs.run_id == run_id)).one_or_none()
    if found is None:
        return None
    sums = connection.execute(
        select(
            func.coalesce(func.max(sources.world_size), 0).label("world_size"),
            func.count().label("ranks"),
            func.coalesce(func.max(sources.last_step) + 1, 0).label("steps"),
            func.coalesce(func.sum(sources.emitted), 0).label("emitted"),
            func.coalesce(func.sum(sources.dropped), 0).label("dropped"),
            func.coalesce(func.max(_later(connection, sources)), 0).label("last_step_seen_ns"),
            func.coalesce(func.sum(case((sources.goodbye, 1), else_=0)), 0).label("goodbyes"),
        ).where(sources.run_id == run_id, sources.attempt == found.attempt)
    ).one()
    return Run(
        run=run_id,
        attempt=found.attempt,
        created_ns=found.created_ns,
        last_seen_ns=found.last_seen_ns,
        commits=found.commits,
        **{name: int(value) for name, value in sums._mapping.items()},
    )


def _later(connection: Connection, sources: Any) -> Any:
    """A source that has not stepped yet counts from when it was first seen."""
    greatest = func.max if connection.dialect.name == "sqlite" else func.greatest
    return greatest(sources.last_step_seen_ns, sources.first_seen_ns)


def attempts(connection: Connection, run_id: str) -> list[Attempt]:
    """The run's attempts, oldest first."""
    c = schema.attempts.c
    query = select(c.attempt, c.ordinal, c.first_seen_ns).where(c.run_id == run_id).order_by(c.ordinal)
    return [Attempt(*row) for row in connection.execute(query)]


def sources(connection: Connection, run_id: str, attempt: str) -> list[Source]:
    """The attempt's sources, by rank."""
    c, b = schema.sources.c, schema.batches.c
    query = select(schema.sources).where(c.run_id == run_id, c.attempt == attempt).order_by(c.rank, c.first_seen_ns)
    gaps = {
        row[0]: int(row[1])
        for row in connection.execute(
            select(b.source, func.max(b.seq) + 1 - func.count()).where(b.run_id == run_id).group_by(b.source)
        )
    }
    return [_source(row, gaps.get(row.source, 0)) for row in connection.execute(query)]


def layouts(connection: Connection, run_id: str, attempt: str) -> list[wire.Layout]:
    """Each module's layouts, as the lowest rank that told them told them."""
    c, s = schema.layouts.c, schema.sources.c
    query = (
        select(c.body)
        .join(schema.sources, (s.run_id == c.run_id) & (s.source == c.source))
        .where(c.run_id == run_id, s.run_id == run_id, s.attempt == attempt)
        .order_by(c.module, c.revision, s.rank)
    )
    found: dict[tuple[int, int], wire.Layout] = {}
    for (body,) in connection.execute(query):
        layout = msgspec.json.decode(body, type=wire.Layout)
        found.setdefault((layout.module, layout.revision), layout)
    return list(found.values())


def told(connection: Connection, what: str, run_id: str, attempt: str) -> list[tuple[int, Any]]:
    """(rank, record) of the unused sets or the events of an attempt, in the order in which each rank told them."""
    table, kind = {"unused": (schema.unused, wire.Unused), "events": (schema.events, wire.Event)}[what]
    c, s = table.c, schema.sources.c
    query = (
        select(s.rank, c.body)
        .join(schema.sources, (s.run_id == c.run_id) & (s.source == c.source))
        .where(c.run_id == run_id, s.run_id == run_id, s.attempt == attempt)
        .order_by(s.rank, c.seq, c.position)
    )
    return [(row[0], msgspec.json.decode(row[1], type=kind)) for row in connection.execute(query)]


def rollups(connection: Connection, run_id: str, attempt: str) -> list[Rollup]:
    """Sums by rank."""
    names = [column.name for column in schema.rollups.columns if not column.primary_key]
    rows = connection.execute(_summed(schema.rollups, names, run_id, attempt, ())).all()
    return [
        Rollup(
            rank=row.rank,
            steps=int(row.steps),
            wall_ns=int(row.wall_ns),
            phases_ns={phase: int(getattr(row, f"{phase}_ns")) for phase in wire.PHASES},
            comm_ns=int(row.comm_ns),
            samples=int(row.samples),
            own_ns=int(row.own_ns),
            own_steps=int(row.own_steps),
        )
        for row in rows
    ]


def bucket_rollups(connection: Connection, run_id: str, attempt: str) -> list[BucketRollup]:
    """Sums by rank and bucket."""
    names = ["steps", "compute_ns", "comm_ns", "exposed_ns"]
    rows = connection.execute(_summed(schema.bucket_rollups, names, run_id, attempt, ("module", "revision", "bucket")))
    return [BucketRollup(**{key: int(value) for key, value in row._mapping.items()}) for row in rows]


def peer_totals(connection: Connection, run_id: str, attempt: str) -> list[PeerTotal]:
    """Straggler statistics by rank."""
    p, s = schema.peer_totals.c, schema.sources.c
    names = [column.name for column in schema.peer_totals.columns if not column.primary_key]
    query = (
        select(p.rank, *(func.sum(p[name]).label(name) for name in names))
        .join(schema.sources, (s.run_id == p.run_id) & (s.source == p.source))
        .where(p.run_id == run_id, s.run_id == run_id, s.attempt == attempt)
        .group_by(p.rank)
        .order_by(p.rank)
    )
    return [
        PeerTotal(
            rank=row.rank,
            steps=int(row.steps),
            delay_ns=int(row.delay_ns),
            wait_ns=int(row.wait_ns),
            straggler_steps={phase: int(getattr(row, f"straggler_{phase}")) for phase in wire.OWN_PHASES},
        )
        for row in connection.execute(query)
    ]


def histogram(connection: Connection, run_id: str, attempt: str) -> list[int]:
    """Steps of all ranks under each of `STEP_BOUNDS_S`, not cumulated, and above the last."""
    h, s = schema.step_histogram.c, schema.sources.c
    query = (
        select(h.bound, func.sum(h.steps))
        .join(schema.sources, (s.run_id == h.run_id) & (s.source == h.source))
        .where(h.run_id == run_id, s.run_id == run_id, s.attempt == attempt)
        .group_by(h.bound)
    )
    counts = [0] * (len(schema.STEP_BOUNDS_S) + 1)
    for bound, count in connection.execute(query):
        counts[bound] = int(count)
    return counts


_NONE = np.zeros(0, np.int64)


def _summed(table: Any, names: list[str], run_id: str, attempt: str, by: tuple[str, ...]) -> Select[Any]:
    c, s = table.c, schema.sources.c
    keys = [c[name] for name in by]
    return (
        select(s.rank, *keys, *(func.sum(c[name]).label(name) for name in names))
        .join(schema.sources, (s.run_id == c.run_id) & (s.source == c.source))
        .where(c.run_id == run_id, s.run_id == run_id, s.attempt == attempt)
        .group_by(s.rank, *keys)
        .order_by(s.rank, *keys)
    )


def _source(row: Row[Any], missing: int) -> Source:
    return Source(
        source=row.source,
        attempt=row.attempt,
        rank=row.rank,
        world_size=row.world_size,
        emitted=row.emitted,
        dropped=row.dropped,
        last_seen_ns=row.last_seen_ns,
        last_step_seen_ns=row.last_step_seen_ns,
        last_step=row.last_step,
        anchor=wire.Anchor(wall_ns=row.wall_ns, monotonic_ns=row.monotonic_ns),
        hello=msgspec.json.decode(row.hello, type=wire.Hello) if row.hello else None,
        pulse=msgspec.json.decode(row.pulse, type=wire.Pulse) if row.pulse else None,
        goodbye=row.goodbye,
        missing_batches=missing,
    )
